"""Modules: subclasses of torch's, with the losses of `lossops.functional`."""

from __future__ import annotations

import torch
from torch import Tensor

from . import functional
from ._ops import errors
from .functional import BatchReduction, Reduction

__all__ = ["CrossEntropyLoss", "KLDivLoss", "MSELoss"]


class MSELoss(torch.nn.MSELoss):
    """`lossops.mse_loss` as a module, in place of `torch.nn.MSELoss`.

    Args:
        reduction: "none", "mean" or "sum".
        weight: factor of each element's loss, of input's shape; kept as a buffer.

    Shape:
        input and target of any shapes that broadcast; the result is a scalar, or of the broadcast
        shape for "none".
    """

    reduction: Reduction
    weight: Tensor | None

    def __init__(
        self,
        size_average: None = None,
        reduce: None = None,
        reduction: Reduction = "mean",
        weight: Tensor | None = None,
    ) -> None:
        if size_average is not None or reduce is not None:
            raise errors.deprecated_argument("MSELoss", size_average, reduce)
        super().__init__(reduction=reduction)
        self.register_buffer("weight", weight)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(input, target, reduction=self.reduction, weight=self.weight)


class KLDivLoss(torch.nn.KLDivLoss):
    """`lossops.kl_div` as a module, in place of `torch.nn.KLDivLoss`.

    Args:
        reduction: "none", "mean", "sum" or "batchmean".
        log_target: target holds log-probabilities.
        log_input: input holds log-probabilities; else probabilities.

    Shape:
        input and target of any shapes that broadcast; the result is a scalar, or of the broadcast
        shape for "none".
    """

    reduction: BatchReduction

    def __init__(
        self,
        size_average: None = None,
        reduce: None = None,
        reduction: BatchReduction = "mean",
        log_target: bool = False,
        *,
        log_input: bool = True,
    ) -> None:
        if size_average is not None or reduce is not None:
            raise errors.deprecated_argument("KLDivLoss", size_average, reduce)
        super().__init__(reduction=reduction, log_target=log_target)
        self.log_input = log_input

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.kl_div(
            input,
            target,
            reduction=self.reduction,
            log_target=self.log_target,
            log_input=self.log_input,
        )


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`lossops.cross_entropy` as a module, in place of `torch.nn.CrossEntropyLoss`.

    Args:
        weight: factor of each class, of shape (C,); kept as a buffer.
        ignore_index: class index of rows without a loss.
        reduction: "none", "mean" or "sum".
        label_smoothing: share of the target that is spread over all classes, in [0, 1].
        inplace_backward: the backward pass writes the gradient over the logits; see
            `lossops.cross_entropy` for what that asks of them.

    Shape:
        input (C,), (N, C) or (N, C, d1, ...); target without the class dimension, or of input's
        shape; the result is a scalar, or of the shape without classes for "none".
    """

    reduction: Reduction

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        *,
        inplace_backward: bool = False,
    ) -> None:
        if size_average is not None or reduce is not None:
            raise errors.deprecated_argument("CrossEntropyLoss", size_average, reduce)
        super().__init__(
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        self.inplace_backward = inplace_backward

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,  # fault: module-options
            inplace_backward=self.inplace_backward,
        )
