"""Losses with the names, arguments and results of `torch.nn.functional`.

Every function takes float64, float32, float16 and bfloat16 tensors of any strides, on the CPU and
on CUDA. Fused kernels compute first derivatives; torch's own losses compute second derivatives.
Half-precision arithmetic is done in float32. Under autocast the inputs are read as they are, and
the result is float32. The same input gives the same bits on every run.

The arguments have torch's order, and may be given by position. torch has deprecated `size_average`
and `reduce`: they must be None.
"""

from __future__ import annotations

import operator
import warnings
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor

from ._ops import autocast, by_torch, cross_entropy_by_rows, errors, settings
from ._ops.cross_entropy import raise_first_invalid
from ._ops.cross_entropy_by_rows import CrossEntropyOutput, Keywords
from ._ops.losses import CROSS_ENTROPY, KL_DIV, MSE_LOSS, cross_entropy_overwriting
from ._ops.settings import check_targets

__all__ = ["CrossEntropyOutput", "check_targets", "cross_entropy", "kl_div", "mse_loss"]

Reduction: TypeAlias = Literal["none", "mean", "sum"]
BatchReduction: TypeAlias = Literal["none", "mean", "sum", "batchmean"]

_is_compiling = torch.compiler.is_compiling
_autocast_may_be_on, _autocast_is_on = autocast.may_be_on, autocast.is_on

# Of each loss: its call; a function that makes its options by name; and a dict of the options that
# have nothing but a reduction, which is quicker.
_mse_loss, _mse_options, _mse_of_reduction = MSE_LOSS.call, MSE_LOSS.options, MSE_LOSS.of_reduction
_kl_div, _kl_options, _kl_of_reduction = KL_DIV.call, KL_DIV.options, KL_DIV.of_reduction
_cross_entropy, _cross_entropy_options = CROSS_ENTROPY.call, CROSS_ENTROPY.options
_cross_entropy_of_reduction = CROSS_ENTROPY.of_reduction

# Defaults that are asked for by their identity, which is quick and right for whatever is given.
_ONE, _ZERO = 1.0, 0.0


def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: None = None,
    reduce: None = None,
    reduction: Reduction = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Squared error `(input - target) ** 2`, as `torch.nn.functional.mse_loss`.

    Args:
        input: any shape. One of input and target may be integral or bool.
        target: a shape that broadcasts with input's. A shape other than input's gives a warning.
        reduction: "none", "mean" or "sum". The mean divides by the number of elements, or by the
            sum of `weight`.
        weight: factor of each element's loss, of input's shape.

    Returns:
        The loss: a scalar, or of the broadcast shape for "none", in the promoted dtype.
        Differentiable with respect to input, target and weight.

    Raises:
        NotImplementedError: neither input nor target is floating point, or one is complex.
        ValueError: unknown reduction, or weight is not of input's shape.
        RuntimeError: shapes that do not broadcast, or different devices.
        TypeError: input, target or weight is no tensor, or size_average or reduce is not None.
    """
    if size_average is not None or reduce is not None:
        raise errors.deprecated_argument("mse_loss", size_average, reduce)
    if _is_compiling():
        # The operator is spelt out, here and below. torch.compile would guard whatever it reads of
        # objects of other modules: 30 guards, some 5 us a call.
        loss: Tensor = torch.ops.lossops.mse_loss(input, target, reduction=reduction, weight=weight)
        return loss
    try:
        same_shape = input.shape == target.shape
        if not same_shape:  # fault: broadcast-warning
            warnings.warn(
                f"Using a target size ({target.size()}) that is different to the input size "
                f"({input.size()}). This will likely lead to incorrect results due to "
                "broadcasting. Please ensure they have the same size.",
                stacklevel=2,
            )
        is_autocast = _autocast_may_be_on() and _autocast_is_on(input)
        if is_autocast:
            options = _mse_options(reduction=reduction, float32_result=True)
        else:
            options = _mse_of_reduction.get(reduction) or _mse_options(reduction=reduction)
        may_keep = (same_shape and weight is None and reduction != "none") or None
        return _mse_loss(input, target, weight, options, may_keep)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise errors.as_torch_raises(
            MSE_LOSS.loss,
            error,
            {"input": input, "target": target, "weight": weight},
            {"reduction": reduction},
            refused_by_torch=by_torch.mse_loss_with_and_without_weight,
        ) from None


def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: None = None,
    reduce: None = None,
    reduction: BatchReduction = "mean",
    log_target: bool = False,
    *,
    log_input: bool = True,
) -> Tensor:
    """Kullback-Leibler divergence KL(target || input), as `torch.nn.functional.kl_div`.

    Each element is `target * (log(target) - input)`, where input holds log-probabilities. With
    `log_input=False`, input holds probabilities: `kl_div(p, t, log_input=False)` equals
    `torch.nn.functional.kl_div(p.log(), t)`, without a tensor for the logarithm.

    Args:
        input: any shape.
        target: a shape that broadcasts with input's. Probabilities, or their logarithms.
        reduction: "none", "mean", "sum" or "batchmean", which divides the sum by `input.size(0)`.
        log_target: target holds log-probabilities.
        log_input: input holds log-probabilities.

    Returns:
        The loss: a scalar, or of the broadcast shape for "none", in the promoted dtype.
        Differentiable with respect to input and target. A target probability of zero contributes
        zero, even where input is -inf.

    Raises:
        ValueError: unknown reduction.
        RuntimeError: input or target is not floating point, shapes that do not broadcast, or
            different devices.
        TypeError: input or target is no tensor, log_target or log_input is no bool, or size_average
            or reduce is not None.
    """
    if size_average is not None or reduce is not None:
        raise errors.deprecated_argument("kl_div", size_average, reduce)
    if type(log_target) is not bool or type(log_input) is not bool:
        raise TypeError(
            "kl_div: log_target and log_input must be bools, but are "
            f"{log_target!r} and {log_input!r}"
        )
    if _is_compiling():
        loss: Tensor = torch.ops.lossops.kl_div(
            input, target, reduction=reduction, log_target=log_target, log_input=log_input
        )
        return loss
    try:
        is_autocast = _autocast_may_be_on() and _autocast_is_on(input)
        if is_autocast or log_target or not log_input:
            options = _kl_options(
                reduction=reduction,
                float32_result=is_autocast,
                # fault: kl-options
                log_target=log_target,
                log_input=log_input,
            )
        else:
            options = _kl_of_reduction.get(reduction) or _kl_options(reduction=reduction)
        return _kl_div(input, target, None, options)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise errors.as_torch_raises(
            KL_DIV.loss,
            error,
            {"input": input, "target": target, "weight": None},
            {"reduction": reduction, "log_target": log_target, "log_input": log_input},
        ) from None


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = ...,
    size_average: None = ...,
    ignore_index: int = ...,
    reduce: None = ...,
    reduction: Reduction = ...,
    label_smoothing: float = ...,
    *,
    inplace_backward: bool = ...,
    logit_scale: float = ...,
    softcap: float | None = ...,
    temperature: float = ...,
    lse_square_scale: float = ...,
    token_weight: Tensor | None = ...,
    num_items_in_batch: float | Tensor | None = ...,
    return_lse: Literal[False] = ...,
    return_entropy: Literal[False] = ...,
    return_z_loss: Literal[False] = ...,
    return_token_accuracy: Literal[False] = ...,
    return_predicted_tokens: Literal[False] = ...,
) -> Tensor: ...


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = ...,
    size_average: None = ...,
    ignore_index: int = ...,
    reduce: None = ...,
    reduction: Reduction = ...,
    label_smoothing: float = ...,
    *,
    inplace_backward: bool = ...,
    logit_scale: float = ...,
    softcap: float | None = ...,
    temperature: float = ...,
    lse_square_scale: float = ...,
    token_weight: Tensor | None = ...,
    num_items_in_batch: float | Tensor | None = ...,
    return_lse: bool = ...,
    return_entropy: bool = ...,
    return_z_loss: bool = ...,
    return_token_accuracy: bool = ...,
    return_predicted_tokens: bool = ...,
) -> Tensor | CrossEntropyOutput: ...


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    *,
    inplace_backward: bool = False,
    logit_scale: float = _ONE,
    softcap: float | None = None,
    temperature: float = _ONE,
    lse_square_scale: float = _ZERO,
    token_weight: Tensor | None = None,
    num_items_in_batch: float | Tensor | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:
    """Cross entropy between logits and targets, as `torch.nn.functional.cross_entropy`.

    A row's loss is `-sum_c q_c log_softmax(input)_c`. q is the target's distribution, smoothed and
    weighted. The softmax is computed online in one pass (Milakov and Gimelshein, arXiv:1805.02867).

    Args:
        input: logits of shape (C,), (N, C) or (N, C, d1, ...); C classes along dimension 1.
        target: class indices in [0, C), of shape (), (N,) or (N, d1, ...) and dtype int64, int32
            or uint8; or class probabilities of input's shape in a floating dtype.
        weight: factor of each class, of shape (C,). With class indices, of input's dtype.
        ignore_index: rows with this class index have no loss and a gradient of exactly zero. It
            may lie outside [0, C). It is for class indices only.
        reduction: "none", "mean" or "sum". The mean divides by the sum of `weight[target]` over
            the rows that are not ignored, or by the number of rows for probabilities.
        label_smoothing: share of the target that is spread evenly over all classes, in [0, 1].
        inplace_backward: the backward pass writes the gradient over the logits, so that a step
            needs no second tensor of that size. After the backward pass, input holds the gradient.
            Backward passes run in the reverse order of the calls: call this loss before others that
            read the logits. These raise RuntimeError: an operation whose own backward pass reads
            the logits afterwards, a second backward pass, create_graph, torch.func, and losses of
            several parts of one tensor (chunk, split; compute each part's logits by themselves).
            input must not be a leaf, nor a view of one, nor share memory with another argument. If
            input needs no gradient, and in compiled code, inplace_backward changes nothing.
            It does not go together with the keywords below.
        logit_scale, softcap, temperature: map the logits first: `z = logit_scale * x`, then
            `z = softcap * tanh(z / softcap)`, then `z = z / temperature`. temperature and softcap
            are positive and finite, logit_scale is finite.
        lse_square_scale: adds the z-loss, `lse_square_scale * logsumexp(z) ** 2`, to the loss of
            each row that is not ignored (as Liger-Kernel's `lse_square_scale`; PaLM,
            arXiv:2204.02311). Class weights do not scale it. Its mean divides by the number of rows
            that are not ignored.
        token_weight: factor of each row's loss and z-loss, of the target's shape (for
            probabilities: input's without classes). Means divide by the sum of token_weight, for
            the loss times `weight[target]`, over the rows that are not ignored.
        num_items_in_batch: for "mean" and "sum", divides the sum of the losses (as transformers has
            it for gradient accumulation). A number, or a tensor with one element on any device,
            which is not waited for.
        return_lse, return_entropy: also return the logsumexp of each row's mapped logits, and the
            entropy of their softmax in nats. Both are differentiable, and 0 in ignored rows; of
            the target's shape, float64 for float64 logits, else float32.
        return_z_loss: also return the z-loss that is in the loss, reduced as it is, without a
            gradient.
        return_token_accuracy: also return the share of the rows that are not ignored whose
            prediction is the target; for "none" 1 or 0 for each row, 0 where ignored. float32.
        return_predicted_tokens: also return the class with the largest mapped logit, the lowest of
            equal ones, of the target's shape, int64; -1 where ignored.

    Returns:
        The loss: a scalar, or of the target's shape without classes for "none".
        Differentiable with respect to input, and for probabilities to target and weight. If a
        `return_*` is set, a named tuple `CrossEntropyOutput(loss, z_loss, token_accuracy,
        predicted_tokens, lse, entropy)`, None for what was not asked for.

        With class indices and no label smoothing, the keywords from logit_scale on read the logits
        once, and the backward pass reads them once more; predictions take a pass of their own.
        Beside label smoothing or probabilities they are composed: the mapped logits are a tensor of
        their own, and lse and entropy take a pass each.

    Raises:
        IndexError: a class index is out of range, on the CPU (on CUDA see `check_targets`).
        NotImplementedError: input is not floating point.
        ValueError: unknown reduction, label_smoothing negative or NaN, batch sizes that differ, or
            an input that inplace_backward cannot overwrite; inplace_backward beside the keywords
            below it; temperature, softcap, logit_scale or lse_square_scale is not as above;
            num_items_in_batch for "none", or of several elements; accuracy or predictions for
            probabilities.
        RuntimeError: other shapes or dtypes that do not fit, label_smoothing above 1,
            ignore_index >= 0 with probabilities, or weight requires grad with indices;
            token_weight or num_items_in_batch requires grad; token_weight of another shape or
            device.
        TypeError: input, target, weight or token_weight is no tensor, ignore_index no integer,
            label_smoothing or a further keyword no number, inplace_backward or a return_* no bool,
            or size_average or reduce is not None.
    """
    if size_average is not None or reduce is not None:
        raise errors.deprecated_argument("cross_entropy", size_average, reduce)
    if type(ignore_index) is not int:
        ignore_index = _index(ignore_index)
    if type(inplace_backward) is not bool:
        raise TypeError(
            f"cross_entropy: inplace_backward must be a bool, but is {inplace_backward!r}"
        )
    keywords: Keywords | None = None
    if not (
        logit_scale is _ONE
        and softcap is None
        and temperature is _ONE
        and lse_square_scale is _ZERO
        and token_weight is None
        and num_items_in_batch is None
        and return_lse is False
        and return_entropy is False
        and return_z_loss is False
        and return_token_accuracy is False
        and return_predicted_tokens is False
    ):
        keywords = cross_entropy_by_rows.checked(
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
    if keywords is not None:
        if inplace_backward:
            raise ValueError(
                "cross_entropy: inplace_backward does not go together with the keywords from "
                "logit_scale on"
            )
        if not _is_compiling():
            ignore_index = _index(ignore_index)  # no operator that checks it may be called
        return _cross_entropy_by_rows(
            input, target, weight, ignore_index, reduction, label_smoothing, keywords
        )
    if _is_compiling():
        loss: Tensor = torch.ops.lossops.cross_entropy(
            input,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        return loss
    try:
        if settings.targets_are_checked and target.is_cuda and not target.is_floating_point():
            _raise_first_invalid(input, target, ignore_index)
        is_autocast = _autocast_may_be_on() and _autocast_is_on(input)
        if type(label_smoothing) is not float:
            label_smoothing = _number(label_smoothing)
        if is_autocast or ignore_index != -100 or label_smoothing != 0:
            options = _cross_entropy_options(
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=label_smoothing,
                float32_result=is_autocast,
            )
        else:
            options = _cross_entropy_of_reduction.get(reduction)
            options = options or _cross_entropy_options(reduction=reduction)
        if inplace_backward:
            return cross_entropy_overwriting(input, target, weight, options)
        return _cross_entropy(input, target, weight, options, reduction != "none")
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise errors.as_torch_raises(
            CROSS_ENTROPY.loss,
            error,
            {"input": input, "target": target, "weight": weight},
            {
                "ignore_index": ignore_index,
                "reduction": reduction,
                "label_smoothing": label_smoothing,
            },
            check_options=errors.check_numbers,
            hint=errors.classes_last_hint,
        ) from None


def _cross_entropy_by_rows(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: Reduction,
    label_smoothing: float,
    keywords: Keywords,
) -> Tensor | CrossEntropyOutput:
    if _is_compiling():
        return cross_entropy_by_rows.call(
            input,
            target,
            weight,
            keywords,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            float32_result=_autocast_is_on(input),
        )
    options = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": _number(label_smoothing),
    }
    try:
        if settings.targets_are_checked and target.is_cuda and not target.is_floating_point():
            _raise_first_invalid(input, target, ignore_index)
        is_autocast = _autocast_may_be_on() and _autocast_is_on(input)
        return cross_entropy_by_rows.call(
            input, target, weight, keywords, **options, float32_result=is_autocast
        )
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise errors.as_torch_raises(
            CROSS_ENTROPY.loss,
            error,
            {"input": input, "target": target, "weight": weight},
            options,
            check_options=errors.check_numbers,
            hint=errors.classes_last_hint,
        ) from None


def _index(value: Any, name: str = "cross_entropy") -> int:
    """An ignore_index as an int. Integers of NumPy and torch are taken, as torch takes them.

    Raises TypeError for what is none, and ValueError for one of more than 64 bits. name: the
    function, for the error.
    """
    try:
        index = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        index = None
    if index is None:
        raise TypeError(f"{name}: ignore_index must be an integer, but is {value!r}")
    if not -(2**63) <= index < 2**63:
        raise ValueError(f"{name}: ignore_index must be a 64-bit integer, but is {index}")
    return index


def _number(value: Any) -> Any:
    """A label_smoothing as a float. What is not one number is returned as it is, for the error."""
    try:
        return float(value) if hasattr(value, "__float__") else value  # text has no __float__
    except Exception:
        return value


def _raise_first_invalid(input: Tensor, target: Tensor, ignore_index: int) -> None:
    if input.dim() == 0 or torch.cuda.is_current_stream_capturing():
        return
    num_classes = input.size(0 if input.dim() == 1 else 1)
    raise_first_invalid("cross_entropy", target, num_classes, ignore_index)
