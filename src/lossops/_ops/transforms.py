"""The losses under torch.func: grad, vjp and jacrev, vmap, functionalize.

torch.func wants a Function of another form (`setup_context`), which costs 10 us a call. It ignores
the formula of register_autograd. Forward mode and functionalize use torch's losses (`by_torch.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._privates import below_autograd, has_tangents, is_functionalized, levels, name_nodes
from . import by_torch
from .autograd import Differentiable


def register(derivatives: Differentiable) -> None:
    """Registers vmap of the operators."""
    for op in (derivatives.loss.ops.forward, derivatives.loss.ops.backward):
        torch.library.register_vmap(op, functools.partial(_call_for_each, op))


def make_call(derivatives: Differentiable) -> Callable[..., Tensor]:
    """The loss for calls while a transform is on. It takes input, target, weight and options."""
    loss = derivatives.loss
    forward_op = below_autograd(loss.ops.forward)

    class TransformableFunction(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            return forward_op(*args)

        setup_context = staticmethod(derivatives.setup_context)
        backward = staticmethod(derivatives.backward)

    name_nodes(TransformableFunction, f"lossops_{loss.name}")

    def call(input: Tensor, target: Tensor, weight: Tensor | None, options: Any) -> Tensor:
        wants_tangents = levels._current_level >= 0 and has_tangents(input, target, weight)
        if wants_tangents or is_functionalized():
            return by_torch.call(loss, input, target, weight, options)
        if torch.is_grad_enabled():
            # requires_grad shows only this level; a tensor may need a gradient at another one.
            result: Tensor = TransformableFunction.apply(input, target, weight, *options)[0]
        else:
            result = forward_op(input, target, weight, *options)[0]
        return result

    return call


def _call_for_each(op: Any, info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
    """vmap as one call for each sample: right for every layout and reduction, but not fused."""

    def sample(arg: Any, dim: int | None, index: int) -> Any:
        if not isinstance(dim, int):
            return arg
        if info.batch_size == 0:
            return arg.new_zeros(arg.shape[:dim] + arg.shape[dim + 1 :])
        return arg.select(dim, index)  # fault: vmap-dimension

    # An empty batch still needs one call, to learn the shapes and dtypes of its results.
    results = [
        op(*(sample(arg, dim, i) for arg, dim in zip(args, in_dims, strict=True)), **kwargs)
        for i in range(max(info.batch_size, 1))
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results)[: info.batch_size], 0
    stacked = [torch.stack(parts)[: info.batch_size] for parts in zip(*results, strict=True)]
    return type(results[0])(stacked), type(results[0])([0] * len(stacked))
