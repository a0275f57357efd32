"""Losses with the names, arguments and results of `torch.nn.functional`.

Every function takes float64, float32, float16 and bfloat16 tensors on the CPU and on CUDA, of any
strides, and is differentiable once by fused kernels and again by torch. Half-precision arithmetic
is done in float32. Under autocast the inputs are read as they are and the result is float32. The
same input gives the same bits on every run.
"""

from __future__ import annotations

import functools
import numbers
import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import ops

__all__ = ["check_targets", "cross_entropy", "kl_div", "mse_loss"]

# torch's own, whatever is in their place later: see patching.py.
TORCH_LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse_loss": F.mse_loss,
    "kl_div": F.kl_div,
    "cross_entropy": F.cross_entropy,
}


def _mse_loss_by_torch(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: str
) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of shapes that broadcast: forward has warned
        return TORCH_LOSSES["mse_loss"](input, target, reduction=reduction, weight=weight)


def _mse_loss_refused_by_torch(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: str
) -> None:
    for each in (None, weight):  # torch may take neither operand, whatever the weight
        _mse_loss_by_torch(input, target, each, reduction)


def _kl_div_by_torch(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    log_target: bool,
    log_input: bool,
) -> Tensor:
    log_probabilities = input if log_input else input.log()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of reduction="mean"
        return TORCH_LOSSES["kl_div"](
            log_probabilities, target, reduction=reduction, log_target=log_target
        )


def _without_invalid(input: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Logits of NaN and another class index where one is out of range: torch ends the process."""
    class_dim = 0 if input.dim() == 1 else 1
    rows = input.shape[:class_dim] + input.shape[class_dim + 1 :]
    if input.dim() == 0 or (target.shape != rows and (target.shape, rows) != ((1,), ())):
        return input, target  # torch says so
    is_valid = (target >= 0) & (target < input.size(class_dim)) | (target == ignore_index)
    nothing = torch.where(is_valid, 0.0, torch.nan).to(input.dtype)
    return input + nothing.reshape(rows).unsqueeze(class_dim), target.where(is_valid, 0)


def _cross_entropy_by_torch(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    if not target.is_floating_point():
        target = target.long()
        if target.is_cuda:
            input, target = _without_invalid(input, target, ignore_index)
    return TORCH_LOSSES["cross_entropy"](
        input,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def _mse_loss_derivative(input: Tensor, target: Tensor) -> Tensor:
    return 2 * (input - target)


def _kl_div_derivative(input: Tensor, target: Tensor, log_target: bool, log_input: bool) -> Tensor:
    probability = target.exp() if log_target else target
    if log_input:
        return -probability
    zero = torch.where(input.isnan(), input, 0.0)
    return torch.where(probability == 0, zero, -probability / input)


_mse_loss = ops.ElementwiseLoss(
    "mse_loss", _mse_loss_by_torch, takes_integers=True, derivative=_mse_loss_derivative
).call
_kl_div = ops.ElementwiseLoss(
    "kl_div",
    _kl_div_by_torch,
    expands_first=False,
    target_first=True,
    derivative=_kl_div_derivative,
).call
_cross_entropy_loss = ops.CrossEntropyLoss("cross_entropy", _cross_entropy_by_torch)
_cross_entropy = _cross_entropy_loss.call

_is_compiling = torch.compiler.is_compiling
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled

_targets_are_checked = ops.environment_flag("LOSSOPS_CHECK_TARGETS", False)


# Elements of the largest call that is repeated to learn the type of an error.
_SMALL = 1 << 24


def check_targets(enabled: bool) -> None:
    """Whether `cross_entropy` looks for out-of-range class indices on CUDA.

    Off by default, because the answer must come back from the device: with it every call
    synchronises, and raises IndexError with the first offending row and value. Without it such a
    row's loss and gradient are NaN. On the CPU the error is always raised. The environment
    variable LOSSOPS_CHECK_TARGETS=1 switches it on at import. Compiled code and
    `torch.ops.lossops.cross_entropy` do not wait for the device and never look.

    Args:
        enabled: check from now on, or no longer.
    """
    global _targets_are_checked
    _targets_are_checked = bool(enabled)


def mse_loss(
    input: Tensor, target: Tensor, *, reduction: str = "mean", weight: Tensor | None = None
) -> Tensor:
    """Squared error `(input - target) ** 2`, as `torch.nn.functional.mse_loss`.

    Args:
        input: any shape. One of input and target may be integral or bool.
        target: a shape that broadcasts with input's; another shape than input's warns.
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
    """
    if _is_compiling():
        # Spelt out here and below: torch.compile guards on all that it reads of ops.py's objects,
        # which are 30 guards and some 5 us a call.
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
        options = (reduction, _is_any_autocast_enabled() and _is_autocast(input))
        may_keep = same_shape and weight is None and reduction != "none"
        return _mse_loss(input, target, weight, options, may_keep)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise _as_torch_raises(
            error,
            {"input": input, "target": target, "weight": weight},
            reduction,
            functools.partial(_mse_loss_refused_by_torch, reduction=reduction),
        ) from None


def kl_div(
    input: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    log_target: bool = False,
    log_input: bool = True,
) -> Tensor:
    """Kullback-Leibler divergence KL(target || input), as `torch.nn.functional.kl_div`.

    Each element is `target * (log(target) - input)`: input holds log-probabilities. With
    `log_input=False` it holds probabilities, and `kl_div(p, t, log_input=False)` equals
    `torch.nn.functional.kl_div(p.log(), t)` without the logarithm's tensor.

    Args:
        input: any shape.
        target: a shape that broadcasts with input's. Probabilities, or their logarithms.
        reduction: "none", "mean", "sum" or "batchmean", which divides the sum by `input.size(0)`.
        log_target: target holds log-probabilities.
        log_input: input holds log-probabilities.

    Returns:
        The loss: a scalar, or of the broadcast shape for "none", in the promoted dtype.
        Differentiable with respect to input and target. A target probability of zero contributes
        zero, also where input is -inf.

    Raises:
        ValueError: unknown reduction.
        RuntimeError: input or target is not floating point, shapes that do not broadcast, or
            different devices.
    """
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
        is_autocast = _is_any_autocast_enabled() and _is_autocast(input)
        options = (reduction, is_autocast, log_target, log_input)  # fault: kl-options
        return _kl_div(input, target, None, options)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise _as_torch_raises(
            error,
            {"input": input, "target": target},
            reduction,
            functools.partial(
                _kl_div_by_torch,
                weight=None,
                reduction=reduction,
                log_target=log_target,
                log_input=log_input,
            ),
        ) from None


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    inplace_backward: bool = False,
) -> Tensor:
    """Cross entropy between logits and targets, as `torch.nn.functional.cross_entropy`.

    `-sum_c q_c log_softmax(input)_c`, with q the target's distribution, smoothed and weighted. The
    softmax is computed online in one pass (Milakov and Gimelshein, arXiv:1805.02867).

    Args:
        input: logits of shape (C,), (N, C) or (N, C, d1, ...); C classes along dimension 1.
        target: class indices in [0, C), of shape (), (N,) or (N, d1, ...) and dtype int64, int32
            or uint8; or class probabilities of input's shape in a floating dtype.
        weight: factor of each class, of shape (C,). In input's dtype where target holds indices.
        ignore_index: rows with this class index have no loss and a gradient of exactly zero. It
            may lie outside [0, C). Indices only.
        reduction: "none", "mean" or "sum". The mean divides by the sum of `weight[target]` over
            the rows that are not ignored, or by the number of rows for probabilities.
        label_smoothing: share of the target that is spread evenly over all classes, in [0, 1].
        inplace_backward: the backward pass writes the gradient over the logits, so that a step
            needs no second tensor of that size. Read nothing from input after it: it holds the
            gradient. What autograd needs of the logits must come before; an operation whose own
            backward pass reads them afterwards, a second backward pass, create_graph and
            torch.func raise RuntimeError. input must not be a leaf, nor a view of one, nor share
            memory with another argument. Without a gradient for input, and in compiled code, it
            changes nothing.

    Returns:
        The loss: a scalar, or of the target's shape without classes for "none".
        Differentiable with respect to input, and for probabilities to target and weight.

    Raises:
        IndexError: a class index is out of range, on the CPU (on CUDA see `check_targets`).
        NotImplementedError: input is not floating point.
        ValueError: unknown reduction, label_smoothing negative or NaN, batch sizes that differ, or
            an input that inplace_backward cannot overwrite.
        RuntimeError: other shapes or dtypes that do not fit, label_smoothing above 1,
            ignore_index >= 0 with probabilities, or weight requires grad with indices.
    """
    if type(ignore_index) is not int:
        ignore_index = _index(ignore_index)
    if type(inplace_backward) is not bool:
        raise TypeError(
            f"cross_entropy: inplace_backward must be a bool, but is {inplace_backward!r}"
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
        if _targets_are_checked and target.is_cuda and not target.is_floating_point():
            _raise_first_invalid(input, target, ignore_index)
        is_autocast = _is_any_autocast_enabled() and _is_autocast(input)
        options = (ignore_index, reduction, label_smoothing, is_autocast)
        if inplace_backward:
            return _cross_entropy_loss.call_overwriting(input, target, weight, options)
        return _cross_entropy(input, target, weight, options)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise _as_torch_raises(
            error,
            {"input": input, "target": target, "weight": weight},
            reduction,
            functools.partial(
                _cross_entropy_by_torch,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=label_smoothing,
            ),
            functools.partial(
                _refused_number, ignore_index=ignore_index, label_smoothing=label_smoothing
            ),
        ) from None


def _index(value: Any) -> int:
    """An ignore_index that is no int: integers of NumPy and torch, as torch takes them."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"cross_entropy: ignore_index must be an integer, but is {value!r}")


def _is_autocast(input: Tensor) -> bool:
    device_type = input.device.type
    return device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type)


def _raise_first_invalid(input: Tensor, target: Tensor, ignore_index: int) -> None:
    if input.dim() == 0 or torch.cuda.is_current_stream_capturing():
        return
    num_classes = input.size(0 if input.dim() == 1 else 1)
    row = int(torch.ops.lossops.first_invalid_target(target, num_classes, ignore_index).item())
    if row >= 0:
        value = int(target.flatten()[row].item())
        raise IndexError(
            f"cross_entropy: target {value} at row {row} (target of shape {tuple(target.shape)}) "
            f"is out of range for {num_classes} classes"
        )


def _refused(error: Exception, tensors: dict[str, Any]) -> Exception | None:
    """The error of an argument that no loss takes, whatever the others are."""
    for name, tensor in tensors.items():
        if name == "weight" and tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            return TypeError(f"{name} must be a Tensor, but is {kind}: {error}")
        if tensor.is_nested or tensor.is_quantized:
            kind = "nested" if tensor.is_nested else "quantized"
            return NotImplementedError(f"{name} must be a plain tensor, but is {kind}")
        if tensor.layout is not torch.strided:
            return NotImplementedError(
                f"{name} must be dense (torch.strided), but has the layout {tensor.layout}"
            )
    return None


def _refused_number(message: str, ignore_index: int, label_smoothing: object) -> Exception | None:
    """The error of a number that cross_entropy takes with no tensors."""
    if not isinstance(label_smoothing, (numbers.Real, Tensor)):
        kind = type(label_smoothing).__name__
        return TypeError(f"label_smoothing must be a number, but is {kind}: {message}")
    try:
        is_negative_or_nan = not float(label_smoothing) >= 0
    except (OverflowError, ValueError, RuntimeError):  # too large, or more than one number
        return TypeError(f"label_smoothing must be a number between 0 and 1: {message}")
    if is_negative_or_nan:
        return ValueError(message)
    if not -(2**63) <= ignore_index < 2**63:
        return ValueError(
            f"cross_entropy: ignore_index must be a 64-bit integer, but is {ignore_index}"
        )
    return None


def _as_torch_raises(
    error: Exception,
    tensors: dict[str, Any],
    reduction: object,
    reference: Callable[..., Any],
    refused_number: Callable[[str], Exception | None] = lambda message: None,
) -> Exception:
    """The error with the type that torch.nn.functional raises for the same call.

    The extension can raise RuntimeError only. torch itself is asked: by the same call on zeros of
    the same shapes and dtypes, without data where that would take long.
    """
    if type(error).__module__ != "builtins":
        return error  # of somebody's hook, or what torch has said itself
    refused = _refused(error, tensors)
    if refused is not None:
        return refused
    # The message of a C++ exception ends at a NUL.
    if not isinstance(reduction, str) or "\0" in reduction:
        return ValueError(f"reduction must be a string like 'mean', but is {reduction!r}")
    refused = refused_number(str(error))
    if refused is not None:
        return refused
    if isinstance(error := ops.as_memory_error(error), torch.OutOfMemoryError):
        return error
    message = str(error)
    if "reduction must be one of" in message:
        return ValueError(message)
    if isinstance(error, TypeError):
        return error
    small = sum(x.numel() for x in tensors.values() if x is not None) <= _SMALL
    device = "cpu" if small else "meta"
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reference(
                **{
                    name: None if x is None else torch.zeros_like(x, device=device)
                    for name, x in tensors.items()
                }
            )
    except (IndexError, NotImplementedError, TypeError, ValueError) as torch_error:
        return type(torch_error)(message)  # fault: type-of-error
    except Exception:
        pass
    return type(error)(message)
