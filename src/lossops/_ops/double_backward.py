"""Second derivatives, by torch's own losses: exact, but neither fused nor fast.

Two things differentiate a gradient. `GradientFunction` does it for the functions of lossops under
create_graph=True. `register` gives the operator *_backward a formula, for graphs that hold it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._privates import below_autograd, functorch_is_active, name_nodes
from . import by_torch
from .description import Loss


def register(loss: Loss) -> None:
    torch.library.register_autograd(
        f"lossops::{loss.name}_backward",
        functools.partial(_double_backward, loss),
        setup_context=functools.partial(_setup_context, loss),
    )


def gradient_function(loss: Loss) -> type[torch.autograd.Function]:
    """*_backward as a Function: torch.func ignores the formula of register_autograd."""
    backward_op = below_autograd(loss.ops.backward)

    class GradientFunction(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            return tuple(backward_op(*args))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            _setup_context(loss, ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return _double_backward(loss, ctx, grads)

    name_nodes(GradientFunction, f"lossops_{loss.name}")
    return GradientFunction


def _setup_context(loss: Loss, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    arguments = loss.ops.Backward(*inputs)
    ctx.save_for_backward(
        arguments.grad_output, arguments.input, arguments.target, arguments.weight
    )
    ctx.formula = loss.ops.formula(arguments)
    ctx.mask = arguments.output_mask
    ctx.beyond = (None,) * (len(inputs) - 4)  # for the arguments that have no gradient


def _double_backward(loss: Loss, ctx: Any, grads: Sequence[Tensor | None]) -> Any:
    """Gradients of grad_output, input, target and weight; grads: those of *_backward's results."""
    if functorch_is_active():
        return _under_functorch(loss, ctx, grads)
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        needed = map(operator.or_, ctx.needs_input_grad[:4], (False, *ctx.mask))
        aliases = list(map(by_torch.differentiable, ctx.saved_tensors, needed))
        grad_output, *operands = aliases
        value = by_torch.loss_of_gradient(loss, grad_output, operands, ctx.formula)
        wanted = [x for x, is_wanted in zip(operands, ctx.mask, strict=True) if is_wanted]
        # fault: second-grad-output
        first = torch.autograd.grad(value, wanted, grad_output, create_graph=True)
        roots = [
            (value, grad)
            for value, grad in zip(first, grads, strict=True)
            if grad is not None and value.requires_grad
        ]
        sources = [
            (position, alias)
            for position, alias in enumerate(aliases)
            if alias is not None and ctx.needs_input_grad[position]
        ]
        second: Sequence[Tensor | None] = [None] * len(sources)
        if roots and sources:
            second = torch.autograd.grad(
                [value for value, _ in roots],
                [alias for _, alias in sources],
                [grad for _, grad in roots],
                allow_unused=True,
                create_graph=create_graph,
            )
    positions = [position for position, _ in sources]
    return *by_torch.replaced([None] * 4, positions, second), *ctx.beyond


def _under_functorch(loss: Loss, ctx: Any, grads: Sequence[Tensor | None]) -> Any:
    """`_double_backward` by torch.func.vjp: torch.autograd.grad does not see its levels."""
    tensors = by_torch.alive(ctx.saved_tensors)  # grad_output, input, target, weight
    sources = [position for position in range(4) if ctx.needs_input_grad[position]]

    def gradients(*values: Tensor) -> Any:
        grad_output, *operands = by_torch.replaced(tensors, sources, values)
        return by_torch.gradients_under_functorch(
            loss, ctx.mask, grad_output, operands, ctx.formula
        )

    first, pull_back = torch.func.vjp(gradients, *(tensors[position] for position in sources))
    second = pull_back(
        tuple(
            torch.zeros_like(value) if grad is None else grad
            for value, grad in zip(first, grads, strict=True)
        )
    )
    return *by_torch.replaced([None] * 4, sources, second), *ctx.beyond
