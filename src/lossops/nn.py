"""Modules: subclasses of torch's, with the losses of `lossops.functional`."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from . import functional, heads
from ._heads import arguments
from ._ops import errors
from ._ops.cross_entropy_by_rows import Keywords
from .functional import BatchReduction, Reduction

__all__ = ["CrossEntropyLoss", "KLDivLoss", "LinearCrossEntropyLoss", "MSELoss"]


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
        logit_scale, softcap, temperature, lse_square_scale: as for `lossops.cross_entropy`.
        return_lse, return_entropy, return_z_loss, return_token_accuracy, return_predicted_tokens:
            as for `lossops.cross_entropy`.
        token_weight, num_items_in_batch: as for `lossops.cross_entropy`. They mostly belong to one
            batch, so a call takes them by name too, in place of these; token_weight is kept as a
            buffer.

    Shape:
        input (C,), (N, C) or (N, C, d1, ...); target without the class dimension, or of input's
        shape; the result is a scalar, or of the shape without classes for "none". If a `return_*`
        is set, a `CrossEntropyOutput`.
    """

    reduction: Reduction
    token_weight: Tensor | None

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
        logit_scale: float = 1.0,
        softcap: float | None = None,
        temperature: float = 1.0,
        lse_square_scale: float = 0.0,
        token_weight: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
        return_lse: bool = False,
        return_entropy: bool = False,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
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
        self.logit_scale = logit_scale
        self.softcap = softcap
        self.temperature = temperature
        self.lse_square_scale = lse_square_scale
        self.register_buffer("token_weight", token_weight)
        self.num_items_in_batch = num_items_in_batch
        self.return_lse = return_lse
        self.return_entropy = return_entropy
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        token_weight: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> Any:
        if token_weight is None:
            token_weight = self.token_weight
        if num_items_in_batch is None:
            num_items_in_batch = self.num_items_in_batch
        return functional.cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,  # fault: module-options
            inplace_backward=self.inplace_backward,
            logit_scale=self.logit_scale,
            softcap=self.softcap,
            temperature=self.temperature,
            lse_square_scale=self.lse_square_scale,
            token_weight=token_weight,
            num_items_in_batch=num_items_in_batch,
            return_lse=self.return_lse,
            return_entropy=self.return_entropy,
            return_z_loss=self.return_z_loss,
            return_token_accuracy=self.return_token_accuracy,
            return_predicted_tokens=self.return_predicted_tokens,
        )


class _LinearCrossEntropyLoss(torch.nn.Module):
    """torch.nn.LinearCrossEntropyLoss for a torch before 2.13: the same arguments and state."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: Any = None,
    ) -> None:
        if weight is not None and weight.shape != (num_classes,):
            raise RuntimeError(
                f"LinearCrossEntropyLoss: weight must have shape {(num_classes,)}, but has "
                f"{tuple(weight.shape)}"
            )
        if not 0 <= label_smoothing <= 1:
            raise RuntimeError(
                "LinearCrossEntropyLoss: label_smoothing must be between 0 and 1, but is "
                f"{label_smoothing}"
            )
        super().__init__()
        self.register_buffer("weight", weight)
        self.reduction = reduction
        self.num_classes = num_classes
        self.out_features = out_features
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        outputs = math.prod(out_features, start=num_classes)
        self.linear = torch.nn.Linear(in_features, outputs, bias=bias, device=device, dtype=dtype)
        self.options = options


_TorchLinearCrossEntropyLoss: Any = getattr(
    torch.nn, "LinearCrossEntropyLoss", _LinearCrossEntropyLoss
)


_IN_EVERY_REPR = ("in_features", "num_classes", "out_features", "bias", "reduction")


class LinearCrossEntropyLoss(_TorchLinearCrossEntropyLoss):
    """`lossops.linear_cross_entropy` as a module that owns the weight of its linear layer.

    It takes the place of `torch.nn.LinearCrossEntropyLoss`, which torch has from 2.13 on, and is a
    subclass of it there. `linear` is the layer; its weight has the shape
    (num_classes * d1 * ..., in_features). Its parameters may be DTensors, and input and target then
    are DTensors on the same mesh.

    Args:
        in_features: size of the hidden states.
        num_classes: the number of classes, C.
        out_features: further dimensions (d1, ..., dK) of the loss.
        bias: whether the layer has a bias.
        device, dtype: of the layer's parameters.
        reduction: "none", "mean" or "sum".
        weight: factor of each class, of shape (C,); kept as a buffer.
        ignore_index: class index of rows without a loss; None is -100.
        label_smoothing: share of the target that is spread over all classes, in [0, 1].
        options, logit_scale, softcap, temperature, lse_square_scale: see
            `lossops.linear_cross_entropy`.
        token_weight, num_items_in_batch: see `lossops.linear_cross_entropy`. Both can also be given
            with each call; token_weight is kept as a buffer.
        return_lse, return_entropy, return_z_loss, return_token_accuracy, return_predicted_tokens:
            see `lossops.linear_cross_entropy`.
        accum_dtype, logits_dtype, max_workspace_bytes: see `lossops.linear_cross_entropy`.

    Raises:
        RuntimeError: weight is not of shape (C,), or label_smoothing is not in [0, 1].
        TypeError, ValueError: an argument from options on is not as `lossops.linear_cross_entropy`
            takes it.

    Shape:
        input (H,) or (..., H); target as of `lossops.linear_cross_entropy`; the result is a scalar,
        or of the target's shape without classes for "none"; a `CrossEntropyOutput` if a `return_*`
        is set.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        reduction: Reduction = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: Any = None,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        temperature: float = 1.0,
        lse_square_scale: float = 0.0,
        token_weight: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
        return_lse: bool = False,
        return_entropy: bool = False,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        accum_dtype: torch.dtype = torch.float32,
        logits_dtype: torch.dtype | None = None,
        max_workspace_bytes: int | None = None,
    ) -> None:
        arguments.keywords(
            Keywords(
                logit_scale,
                softcap,
                temperature,
                lse_square_scale,
                token_weight,
                num_items_in_batch,
                return_lse,
                return_entropy,
                return_z_loss,
                return_token_accuracy,
                return_predicted_tokens,
            )
        )
        arguments.check_logits_dtype(logits_dtype)
        arguments.sizes(options, accum_dtype, max_workspace_bytes)
        super().__init__(
            in_features,
            num_classes,
            out_features=out_features,
            bias=bias,
            device=device,
            dtype=dtype,
            reduction=reduction,
            weight=weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            options=options,
        )
        self.logit_scale = logit_scale
        self.softcap = softcap
        self.temperature = temperature
        self.lse_square_scale = lse_square_scale
        self.register_buffer("token_weight", token_weight)
        self.num_items_in_batch = num_items_in_batch
        self.return_lse = return_lse
        self.return_entropy = return_entropy
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens
        self.accum_dtype = accum_dtype
        self.logits_dtype = logits_dtype
        self.max_workspace_bytes = max_workspace_bytes

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        token_weight: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> Any:
        if token_weight is None:
            token_weight = self.token_weight
        if num_items_in_batch is None:
            num_items_in_batch = self.num_items_in_batch
        classes = (self.num_classes, *self.out_features)
        bias = self.linear.bias
        return heads.linear_cross_entropy(
            input,
            self.linear.weight.reshape(*classes, self.linear.in_features),
            target,
            linear_bias=None if bias is None else bias.reshape(classes),
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            options=self.options,
            logit_scale=self.logit_scale,
            softcap=self.softcap,
            temperature=self.temperature,
            lse_square_scale=self.lse_square_scale,
            token_weight=token_weight,
            num_items_in_batch=num_items_in_batch,
            return_lse=self.return_lse,
            return_entropy=self.return_entropy,
            return_z_loss=self.return_z_loss,
            return_token_accuracy=self.return_token_accuracy,
            return_predicted_tokens=self.return_predicted_tokens,
            accum_dtype=self.accum_dtype,
            logits_dtype=self.logits_dtype,
            max_workspace_bytes=self.max_workspace_bytes,
        )

    def extra_repr(self) -> str:
        """The sizes, and what is not the default."""
        parts = [
            f"in_features={self.linear.in_features}, num_classes={self.num_classes}, "
            f"out_features={self.out_features}, bias={self.linear.bias is not None}, "
            f"reduction={self.reduction}"
        ]
        for name, parameter in inspect.signature(LinearCrossEntropyLoss).parameters.items():
            value = getattr(self, name, parameter.default)
            if name in _IN_EVERY_REPR or value is parameter.default or value == parameter.default:
                continue
            is_tensor = isinstance(value, Tensor)
            parts.append(f"{name}={f'Tensor{tuple(value.shape)}' if is_tensor else value}")
        return ", ".join(parts)
