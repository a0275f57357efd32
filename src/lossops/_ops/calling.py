"""Which way a call of a loss takes. For a small loss, the lines here are most of the time.

The functions call what `make_call` returns. So does the public operator, such as
`torch.ops.lossops.mse_loss`, if nothing records or transforms it. Otherwise the public operator
calls *_forward, and the graph then holds the formula of *_forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._privates import (
    dispatch_modes,
    functorch_is_active,
    has_tangents,
    is_for_inductor,
    is_tracing,
    levels,
    unwrap_if_dead,
)
from . import autocast, by_torch, errors, inductor, settings, transforms
from .autograd import Differentiable
from .description import Loss, library

_grad_is_enabled = torch.is_grad_enabled

# Takes input, target, weight and the options. A caller that knows whether forward can compute the
# gradient of input (`Loss.can_keep`) passes this too, because looking at shapes takes time.
Call: TypeAlias = Callable[..., Tensor]


def make_options(loss: Loss) -> Callable[..., Any]:
    """A function that makes the options of a call (`Operators.Options`) from them by name.

    `short` of the options has those that are passed to an operator. It leaves out trailing
    defaults, because each argument takes time. The function finds options that it made before in
    half the time of making them.
    """
    defaults = loss.ops.defaults

    @functools.lru_cache(maxsize=256)
    def options(*args: Any, **kwargs: Any) -> Any:
        made = loss.ops.Options(*args, **kwargs)
        errors.check_reduction(loss.name, made.reduction)
        needed = len(made)
        while needed > 0 and made[needed - 1] == defaults[needed - 1]:
            needed -= 1
        made.short = tuple(made[:needed])  # fault: short-options
        return made

    return options


def make_call(derivatives: Differentiable) -> Call:
    """The loss, by the shortest way to the operators."""
    loss = derivatives.loss
    value = loss.ops.value
    can_keep = loss.can_keep
    apply, apply_keeping = derivatives.apply, derivatives.apply_keeping
    transformed = transforms.make_call(derivatives)

    def call(
        input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        options: Any,
        may_keep: bool | None = None,
    ) -> Tensor:
        if functorch_is_active():
            return transformed(input, target, weight, options)
        if levels._current_level >= 0 and has_tangents(input, target, weight):
            return by_torch.call(loss, input, target, weight, options)
        if is_tracing() or dispatch_modes() > 0:  # fault: traced
            # The graph will hold what is called here, and only the public operator has a formula.
            return recorded_call(loss, input, target, weight, options)
        short = options.short
        result: Tensor
        if _grad_is_enabled():
            if target.requires_grad or (weight is not None and weight.requires_grad):
                input, target, weight = by_torch.alive((input, target, weight))
                if settings.gradients_are_kept and can_keep(input, target, weight, options, True):
                    result = apply_keeping(input, (target, weight, short), target)
                else:
                    result = apply(input, target, weight, options)
                return result
            if input.requires_grad:
                # A tensor whose torch.func level has ended has a graph of its own.
                input = unwrap_if_dead(input)
                if may_keep is None:
                    may_keep = can_keep(input, target, weight, options, False)
                if may_keep and settings.gradients_are_kept:  # fault: keep-switch
                    result = apply_keeping(input, (target, weight, short))
                else:
                    result = apply(input, target, weight, options)
                return result
        if short or weight is not None:
            result = value(input, target, weight, *short)
        else:
            result = value(input, target)
        return result

    return call


def recorded_call(
    loss: Loss, input: Tensor, target: Tensor, weight: Tensor | None, options: Any
) -> Tensor:
    """The loss by the public operator, which graphs can hold."""
    given = {**options._asdict(), "weight": weight}
    named = {name: given[name] for name in loss.ops.public_options}
    result: Tensor = loss.ops.public(input, target, **named)
    return result


def register(loss: Loss, call: Call, options_of: Callable[..., Any]) -> None:
    """Registers the public operator's kernels under autograd and autocast."""
    ops = loss.ops
    # Makes the arguments of *_forward from those of the public operator. The dispatcher leaves out
    # defaults, which this fills in. `Forward(...)` does the same in twice the time.
    arguments = functools.partial(ops.Forward.__new__, ops.Forward)

    def kernel(float32_result: bool, *args: Any, **kwargs: Any) -> Tensor:
        input, target, weight, *values = arguments(*args, **kwargs, float32_result=float32_result)
        for name, tensor in (("input", input), ("target", target)):
            if tensor is None:  # a Tensor of a schema may be None
                raise TypeError(f"{loss.name}: {name} must be a Tensor, but is None")
        options = options_of(*values)
        result: Tensor
        try:
            if levels._current_level >= 0 and has_tangents(input, target, weight):
                result = by_torch.call(loss, input, target, weight, options)
            elif functorch_is_active() or is_tracing():
                # A call that is recorded or transformed needs the formula of register_autograd.
                result = ops.forward(input, target, weight, *options)[0]
            elif dispatch_modes() > 0:
                if is_for_inductor():
                    result = inductor.call(loss, input, target, weight, options)
                else:
                    result = ops.forward(input, target, weight, *options)[0]
            else:
                result = call(input, target, weight, options)
        except RuntimeError as error:
            raise errors.as_memory_error(error) from None
        return result

    library.impl(loss.name, functools.partial(kernel, False), "Autograd")
    autocast.register(loss, functools.partial(kernel, True))  # fault: autocast-kernel
