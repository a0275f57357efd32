"""The head as torch's own linear and cross entropy, which torch differentiates in every mode.

It makes all logits. It serves forward mode, torch.func, second derivatives and is_grads_batched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._ops import by_torch
from .._ops import cross_entropy_by_rows as by_rows
from .._ops.cross_entropy_by_rows import CrossEntropyOutput, Keywords
from .._ops.description import widened
from .._ops.losses import CROSS_ENTROPY
from .._privates import functorch_is_active
from .passes import Operands, Options

# Of this module, because a program may put another function in its place.
_linear = F.linear


def logits(operands: Operands, dtype: torch.dtype) -> Tensor:
    """All logits, in a dtype."""
    input, linear_weight, linear_bias = operands[:3]
    classes = linear_weight.shape[:-1]
    matrix = linear_weight.to(dtype).flatten(0, -2)
    bias = None if linear_bias is None else linear_bias.to(dtype).reshape(-1)
    return _linear(input.to(dtype), matrix, bias).unflatten(-1, classes)


def output(operands: Operands, options: Options, keywords: Keywords) -> CrossEntropyOutput:
    """What the call returns with further keywords, by operations that torch can differentiate."""
    row, target, weight = options.row, operands.target, operands.weight
    x = logits(operands, options.compute_dtype)
    if row.float32_result and weight is not None and not target.is_floating_point():
        weight = weight.to(x.dtype)  # as autocast has it
    found = by_rows.call(
        x,
        target,
        weight,
        keywords,
        ignore_index=row.ignore_index,
        reduction=row.reduction,
        label_smoothing=row.label_smoothing,
        float32_result=row.float32_result,
    )
    return CrossEntropyOutput(found) if isinstance(found, Tensor) else found


def _widened(x: Tensor) -> Tensor:
    return x.to(widened(x.dtype, True))


def loss(operands: Operands, options: Options) -> Tensor:
    """The loss, by operations that torch can differentiate."""
    target, weight = operands.target, operands.weight
    x = logits(operands, options.compute_dtype)
    if options.row.float32_result:
        x, target, weight = (
            each if each is None or not each.is_floating_point() else _widened(each)
            for each in (x, target, weight)
        )
    formula = CROSS_ENTROPY.loss.ops.formula(options.row)
    return CROSS_ENTROPY.loss.reference(x, target, weight, **formula)


def gradients(
    operands: Operands, options: Options, needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """The gradients of the operands that need one, which can be differentiated again."""
    return _gradients(lambda *given: (loss(Operands(*given), options),), operands, needed, (grad,))


def output_gradients(
    operands: Operands,
    options: Options,
    keywords: Keywords,
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """As `gradients`, of a call with further keywords: from those of loss, entropies and lse."""

    def values(*given: Any) -> tuple[Tensor | None, ...]:
        found = output(Operands(*given), options, keywords)
        return found.loss, found.entropy, found.lse

    return _gradients(values, operands, needed, grads)


def _gradients(
    function: Callable[..., tuple[Tensor | None, ...]],
    operands: Operands,
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    if functorch_is_active():
        raise NotImplementedError(
            "linear_cross_entropy: torch.func cannot transform the backward pass of a loss that "
            "was computed outside of the transform; call the loss inside of it"
        )
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases: list[Any] = list(map(by_torch.differentiable, operands, needed))
        wanted = [x for x, needs in zip(aliases, needed, strict=True) if needs]
        pairs = zip(function(*aliases), grads, strict=True)
        values, given = zip(*(pair for pair in pairs if pair[1] is not None), strict=True)
        found = iter(
            torch.autograd.grad(
                values, wanted, given, create_graph=create_graph, materialize_grads=True
            )
        )
    return [next(found) if needs else None for needs in needed]
