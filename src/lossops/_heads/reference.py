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
from .passes import Operands, Options, loss_dtype

# Of this module, because a program may put another function in its place.
_linear = F.linear


def logits(
    operands: Operands, dtype: torch.dtype, logits_dtype: torch.dtype | None = None
) -> Tensor:
    """All logits, of products in a dtype. logits_dtype: if the logits have another one."""
    input, linear_weight, linear_bias = operands[:3]
    classes = linear_weight.shape[:-1]
    matrix = linear_weight.to(dtype).flatten(0, -2)
    bias = None if linear_bias is None else linear_bias.to(dtype).reshape(-1)
    input = input.to(dtype)
    if logits_dtype is None or logits_dtype == dtype:
        return _linear(input, matrix, bias).unflatten(-1, classes)
    bias = None if bias is None else bias.to(logits_dtype)
    with torch.autocast(input.device.type, enabled=False):  # which would round the factors again
        found = _linear(input.to(logits_dtype), matrix.to(logits_dtype), bias)
    return found.unflatten(-1, classes)


def output(operands: Operands, options: Options, keywords: Keywords) -> CrossEntropyOutput:
    """What the call returns with further keywords, by operations that torch can differentiate."""
    row, target, weight = options.row, operands.target, operands.weight
    x = logits(operands, options.compute_dtype, options.logits_dtype)
    is_wide = row.float32_result or options.has_wide_logits
    if is_wide and weight is not None and not target.is_floating_point():
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
    found = CrossEntropyOutput(found) if isinstance(found, Tensor) else found
    dtype = loss_dtype(operands, options)
    z_loss = None if found.z_loss is None else found.z_loss.to(dtype)
    return found._replace(loss=found.loss.to(dtype), z_loss=z_loss)


def _widened(x: Tensor) -> Tensor:
    return x.to(widened(x.dtype, True))


def loss(operands: Operands, options: Options) -> Tensor:
    """The loss, by operations that torch can differentiate."""
    target, weight = operands.target, operands.weight
    x = logits(operands, options.compute_dtype, options.logits_dtype)
    if options.row.float32_result or options.has_wide_logits:
        x, target, weight = (
            each if each is None or not each.is_floating_point() else _widened(each)
            for each in (x, target, weight)
        )
    formula = CROSS_ENTROPY.loss.ops.formula(options.row)
    found: Tensor = CROSS_ENTROPY.loss.reference(x, target, weight, **formula)
    return found.to(loss_dtype(operands, options))


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
        pairs = [
            (value, grad)
            for value, grad in zip(function(*aliases), grads, strict=True)
            if value is not None and grad is not None and value.requires_grad
        ]
        values, given = zip(*pairs, strict=True) if pairs else ((), ())
        found = iter(
            torch.autograd.grad(
                values, wanted, given, create_graph=create_graph, materialize_grads=True
            )
            if pairs
            else map(torch.zeros_like, wanted)
        )
    return [next(found) if needs else None for needs in needed]
