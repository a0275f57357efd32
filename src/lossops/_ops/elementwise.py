"""What the operators of an elementwise loss (csrc/losses/elementwise/registry.h) return and keep.

`Traits` has the traits of the loss in C++. *_forward returns the loss and, for a weighted mean, its
denominator and its value before rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .description import Operators, widened
from .fakes import DTYPES, FLOATING, check_devices, check_dtype, naming_arguments


@dataclass(frozen=True)
class Traits:
    # One of input and target may be integral or bool.
    takes_integers: bool = False
    # A 0-d operand counts for the result's dtype like any other, unlike in torch.result_type.
    expands_first: bool = True
    # If the layouts of input and target differ, a result of "none" has that of target.
    target_first: bool = False

    def fake_forward(self, name: str, arguments: Any) -> tuple[Tensor, ...]:
        input, target, weight = arguments.input, arguments.target, arguments.weight
        check_devices(name, input, target=target, weight=weight)
        allowed = DTYPES if self.takes_integers else FLOATING
        for key, tensor in (("input", input), ("target", target), ("weight", weight)):
            check_dtype(name, key, tensor, allowed)
        if not (input.is_floating_point() or target.is_floating_point()):
            check_dtype(name, "input or target", input, FLOATING)
        with naming_arguments(name, input, target):
            dtype = self._result_dtype(input, target, weight, arguments.reduction)
            dtype = widened(dtype, arguments.float32_result)  # fault: fake-dtype
            if arguments.reduction == "none":
                # TensorIterator's layout of a binary operator, which the kernel copies.
                # fault: fake-strides
                pair = (target, input) if self.target_first else (input, target)
                loss = torch.empty_like(torch.ne(*pair), dtype=dtype)
            else:
                torch.broadcast_shapes(input.shape, target.shape)
                loss = input.new_empty((), dtype=dtype)
        weighted_mean = weight is not None and arguments.reduction == "mean"
        return loss, input.new_empty((2 if weighted_mean else 0,), dtype=torch.float64)

    def _result_dtype(
        self, input: Tensor, target: Tensor, weight: Tensor | None, reduction: str
    ) -> torch.dtype:
        if self.expands_first:
            dtype = torch.promote_types(input.dtype, target.dtype)
        else:
            dtype = torch.result_type(input, target)
        if weight is not None:
            keeps = weight.dim() == 0 and max(input.dim(), target.dim()) > 0
            if not keeps or reduction == "mean":
                dtype = torch.promote_types(dtype, weight.dtype)
        return dtype


def can_keep(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: Any,
    more_than_input: bool,
) -> bool:
    """Whether a loss without a weight is reduced, by kernels that compute its gradients beside it.

    On the CPU the gradient of a broadcast operand takes a pass of its own, which can wait for
    grad_output. That of an empty shape may be NaN (`target_has_factor`), which backward knows.
    """
    if options.reduction == "none" or weight is not None:
        return False
    if input.shape == target.shape:
        return True
    if input.is_cuda:
        return input.numel() > 0 and target.numel() > 0
    input_is_needed = input.requires_grad or not more_than_input
    return (not input_is_needed or _broadcasts(target.shape, input.shape)) and (
        not more_than_input or _broadcasts(input.shape, target.shape)
    )


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    missing = len(to) - len(shape)
    return missing >= 0 and all(
        size in (1, wanted) for size, wanted in zip(shape, to[missing:], strict=True)
    )


def fake_saved(forward: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return ()


def restored_terms(ops: Operators, saved: Any) -> Sequence[Tensor | None]:
    """Without a weight there is no denominator to keep."""
    return (None,)
