"""What the operators of cross entropy return and keep.

`cross_entropy_forward` returns the loss, row_stats and mean_terms. row_stats has for each row the
maximum, the sum of exp(x - max) less 1, and with smoothing or probabilities the sum of the
coefficients. On CUDA rows of half types may have the logit at their class index in the place of the
maximum, and that sum negated. mean_terms has the denominator of a mean, and the mean before
rounding. `cross_entropy_forward_gradient` packs both into one float64 tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _privates
from .description import Operators, library, widened
from .fakes import DTYPES, FLOATING, check_devices, check_dtype

CLASS_INDICES = (torch.int64, torch.int32, torch.uint8)
# csrc/ packs this many doubles, mean_terms, before row_stats.
_MEAN_TERMS = 2
# Gradients of rows of at most this many bytes are never padded: csrc/bindings/rows.h.
_SHORT_BYTES = 2000


def rows_of(input: Tensor) -> list[int]:
    """The shape without the class dimension."""
    class_dim = 0 if input.dim() == 1 else 1
    return [size for dim, size in enumerate(input.shape) if dim != class_dim]


def _is_probability(input: Tensor, target: Tensor) -> bool:
    return target.dim() == input.dim() and target.is_floating_point()


def _row_stats_of(arguments: Any) -> tuple[tuple[int, int], torch.dtype]:
    """Shape and dtype of row_stats."""
    input, target, weight = arguments.input, arguments.target, arguments.weight
    is_probability = _is_probability(input, target)
    operands = [input, target, weight] if is_probability else [input, weight]
    acc_double = any(x is not None and x.dtype == torch.float64 for x in operands)
    num_rows = 1
    for size in rows_of(input):
        num_rows = num_rows * size
    shape = (3 if is_probability or arguments.label_smoothing > 0 else 2, num_rows)
    return shape, torch.float64 if acc_double else torch.float32  # fault: fake-row-stats


def fake_forward(name: str, arguments: Any) -> tuple[Tensor, ...]:
    input, target, weight = arguments.input, arguments.target, arguments.weight
    check_devices(name, input, target=target, weight=weight)
    check_dtype(name, "input", input, FLOATING)
    dtype = input.dtype
    if not _is_probability(input, target):
        what = "int64, int32 or uint8 for class indices"
        check_dtype(name, "target", target, CLASS_INDICES, what)
        check_dtype(name, "weight", weight, FLOATING)
    else:
        check_dtype(name, "target", target, FLOATING)
        check_dtype(name, "weight", weight, DTYPES)
        dtype = torch.promote_types(dtype, target.dtype)
        if weight is not None:
            dtype = torch.promote_types(dtype, weight.dtype)
    shape = rows_of(input) if arguments.reduction == "none" else ()
    loss = input.new_empty(shape, dtype=widened(dtype, arguments.float32_result))
    stats_shape, stats_dtype = _row_stats_of(arguments)
    row_stats = input.new_empty(stats_shape, dtype=stats_dtype)
    is_mean = arguments.reduction == "mean"
    mean_terms = input.new_empty((2 if is_mean else 0,), dtype=torch.float64)
    return loss, row_stats, mean_terms


def make_forward_inplace() -> Callable[..., Tensor]:
    """The operator that writes the gradient over the logits, in the pass that computes the loss."""
    name = "cross_entropy_forward_inplace"

    @torch.library.register_fake(f"lossops::{name}")
    def _(input: Tensor, *_: Any) -> Tensor:
        return input.new_empty((), dtype=widened(input.dtype, True))

    op = _privates.without_autograd(library, name)
    _privates.count_versions(library, name)
    return op


def can_keep(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: Any,
    more_than_input: bool,
) -> bool:
    is_reduced: bool = options.reduction != "none"
    return is_reduced and not more_than_input


def fake_saved(forward: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The packed tensor. Kernels may add scratch memory behind row_stats, or leave them out."""
    _, row_stats, _ = forward
    doubles = _MEAN_TERMS + (row_stats.numel() * row_stats.element_size() + 7) // 8
    return (row_stats.new_empty((doubles,), dtype=torch.float64),)


def fake_gradient(operand: Tensor) -> Tensor:
    """A gradient in the layout of csrc/bindings/rows.h, empty_gradient(): padded as rows may be."""
    if operand.dim() == 2 and operand.is_floating_point() and operand.stride(1) == 1:
        classes = operand.size(1)
        element_bytes = operand.element_size()
        padding = (operand.stride(0) - classes) % (16 // element_bytes)
        if operand.stride(0) > classes and padding > 0 and classes * element_bytes > _SHORT_BYTES:
            strides = (classes + padding, 1)
            return torch.empty_strided(
                operand.shape, strides, dtype=operand.dtype, device=operand.device
            )
    return torch.empty_like(operand)


def restored_terms(ops: Operators, saved: Any) -> Sequence[Tensor | None]:
    packed = saved.saved
    shape, dtype = _row_stats_of(saved)
    numel = shape[0] * shape[1]
    row_stats = packed[_MEAN_TERMS:].view(dtype)[:numel]
    if row_stats.numel() == numel:
        row_stats = row_stats.view(shape)
    else:  # the kernel that computed the gradient left row_stats out
        with torch.no_grad():
            row_stats = ops.forward(saved.input, saved.target, saved.weight, *ops.options(saved))[1]
    mean_terms = packed[:_MEAN_TERMS] if saved.reduction == "mean" else None
    return row_stats, mean_terms


def check_differentiable(
    target: Tensor, weight: Tensor | None, name: str = "cross_entropy"
) -> None:
    # fault: weight-needs-grad
    if weight is not None and weight.requires_grad and not target.is_floating_point():
        raise RuntimeError(
            f"{name}: weight requires grad, but is not differentiable where target holds "
            "class indices"
        )


def raise_first_invalid(name: str, target: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raises IndexError if a class index is out of range. It waits for the device."""
    row = int(torch.ops.lossops.first_invalid_target(target, num_classes, ignore_index).item())
    if row >= 0:
        value = int(target.flatten()[row].item())
        raise IndexError(
            f"{name}: target {value} at row {row} (target of shape {tuple(target.shape)}) "
            f"is out of range for {num_classes} classes"
        )


@torch.library.register_fake("lossops::first_invalid_target")
def _fake_first_invalid_target(target: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    return target.new_empty((), dtype=torch.int64)
