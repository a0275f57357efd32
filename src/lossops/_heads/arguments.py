"""The arguments of linear_cross_entropy: checked, and brought into one form for all passes."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from .._ops import autocast, cross_entropy_by_rows, errors
from .._ops.cross_entropy_by_rows import Keywords
from .._ops.description import HALF_DTYPES
from .._ops.losses import CROSS_ENTROPY
from .passes import Operands, Options

_NAME = "linear_cross_entropy"
_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# torch's options of its own function, which torch has from 2.13 on.
TorchOptions: Any = getattr(torch.nn, "LinearCrossEntropyOptions", None)


def shaped(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int | None,
) -> tuple[Operands, torch.Size, int]:
    """The operands as the passes take them, the shape of the loss by rows, and the ignored index.

    Raises RuntimeError for shapes that do not fit, or ValueError for batch sizes, as torch does.
    """
    if input.dim() < 1:
        raise RuntimeError(f"{_NAME}: input must have at least 1 dimension, (..., H), but is 0-d")
    if linear_weight.dim() < 2:
        raise RuntimeError(
            f"{_NAME}: linear_weight must have at least 2 dimensions, (C, H) or (C, d1, ..., H), "
            f"but has {linear_weight.dim()}"
        )
    batch, features = input.shape[:-1], input.shape[-1]
    classes = linear_weight.shape[:-1]
    if features != linear_weight.shape[-1]:
        raise RuntimeError(
            f"{_NAME}: input and linear_weight must have equal last dimensions, but have "
            f"{features} and {linear_weight.shape[-1]}"
        )
    if linear_bias is not None and linear_bias.shape != classes:
        raise RuntimeError(
            f"{_NAME}: linear_bias must have shape {tuple(classes)}, but has "
            f"{tuple(linear_bias.shape)}"
        )
    if len(classes) > 1 and len(batch) != 1:
        raise RuntimeError(
            f"{_NAME}: linear_weight of shape {tuple(linear_weight.shape)} needs input of shape "
            f"(N, {features}), but input has shape {tuple(input.shape)}"
        )
    logits_shape, rows_shape = batch + classes, batch + classes[1:]
    num_rows = math.prod(batch)
    if target.shape == logits_shape:
        if ignore_index is not None:
            raise RuntimeError(
                f"{_NAME}: ignore_index is for class indices, but target holds probabilities"
            )
        target_shape = (num_rows, *classes)
    elif target.shape == rows_shape or (len(batch) == 0 and target.shape == (1,)):
        target_shape = (num_rows, *classes[1:])
    else:
        raise _shape_error(
            input.new_zeros(()).expand(logits_shape),
            target,
            f"{_NAME}: logits of shape {tuple(logits_shape)} need class indices of shape "
            f"{tuple(rows_shape)} or probabilities of shape {tuple(logits_shape)}, but target has "
            f"shape {tuple(target.shape)}",
        )
    if len(batch) != 1:
        input, target = input.reshape(num_rows, features), target.reshape(target_shape)
    operands = Operands(input, linear_weight, linear_bias, target, weight)
    return operands, rows_shape, -100 if ignore_index is None else ignore_index


def _shape_error(logits: Tensor, target: Tensor, message: str) -> Exception:
    """The error of a target that does not fit, with the type that torch raises for it."""
    error = RuntimeError(message)
    if torch.compiler.is_compiling():
        return error
    loss = CROSS_ENTROPY.loss
    tensors = {"input": logits.detach(), "target": target, "weight": None}
    return errors.as_torch_raises(loss, error, tensors, loss.ops.formula(loss.ops.Options()))


def dtypes(operands: Operands, accum_dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype, bool]:
    """The dtypes of logits and of sums, and whether autocast asks for a float32 result.

    Raises RuntimeError for dtypes that do not go together, ValueError for accum_dtype.
    """
    input, linear_weight, linear_bias = operands[:3]
    for name, tensor in zip(Operands._fields, (input, linear_weight, linear_bias), strict=False):
        if tensor is None:
            continue
        if tensor.dtype not in _FLOATING:
            raise NotImplementedError(
                f"{_NAME}: {name} must be floating point, but is {tensor.dtype}"
            )
        if tensor.device != input.device:
            raise RuntimeError(
                f"{_NAME}: {name} is on {tensor.device} but input is on {input.device}"
            )
    is_autocast = autocast.may_be_on() and autocast.is_on(input)
    found = {}
    for name, tensor in zip(Operands._fields, (input, linear_weight, linear_bias), strict=False):
        if tensor is not None:
            is_cast = is_autocast and tensor.dtype != torch.float64
            device = input.device.type
            found[name] = torch.get_autocast_dtype(device) if is_cast else tensor.dtype
    compute = found["input"]
    for name, dtype in found.items():
        if dtype != compute:
            raise RuntimeError(f"{_NAME}: {name} must have input's dtype {compute}, but is {dtype}")
    if accum_dtype not in (torch.float32, linear_weight.dtype, compute):
        raise ValueError(
            f"{_NAME}: accum_dtype must be torch.float32 or the dtype of linear_weight, "
            f"{linear_weight.dtype}, but is {accum_dtype}"
        )
    # Sums have at least the precision of the products.
    return compute, accum_dtype if compute in HALF_DTYPES else compute, is_autocast


def sizes(
    options: Any, accum_dtype: torch.dtype, max_workspace_bytes: int | None
) -> tuple[torch.dtype, int | None, int | None]:
    """accum_dtype, max_workspace_bytes and batch_chunk_size, with those of torch's options.

    Raises TypeError for arguments of another type, ValueError for values that contradict.
    """
    if not isinstance(accum_dtype, torch.dtype):
        raise TypeError(f"{_NAME}: accum_dtype must be a torch.dtype, but is {accum_dtype!r}")
    if max_workspace_bytes is not None:
        try:
            if isinstance(max_workspace_bytes, bool):
                raise TypeError
            max_workspace_bytes = operator.index(max_workspace_bytes)
        except TypeError:
            raise TypeError(
                f"{_NAME}: max_workspace_bytes must be an integer or None, but is "
                f"{max_workspace_bytes!r}"
            ) from None
        if max_workspace_bytes <= 0:
            raise ValueError(
                f"{_NAME}: max_workspace_bytes must be positive, but is {max_workspace_bytes}"
            )
    if options is None:
        return accum_dtype, max_workspace_bytes, None
    if TorchOptions is None or not isinstance(options, TorchOptions):
        raise TypeError(
            f"{_NAME}: options must be None or a torch.nn.LinearCrossEntropyOptions, which torch "
            f"has from 2.13 on, but is {options!r}"
        )
    if options.acc_dtype is not None and options.acc_dtype != accum_dtype:
        if accum_dtype != torch.float32:
            raise ValueError(
                f"{_NAME}: accum_dtype is {accum_dtype}, but acc_dtype of options is "
                f"{options.acc_dtype}; give one of them"
            )
        accum_dtype = options.acc_dtype
    return accum_dtype, max_workspace_bytes, options.batch_chunk_size


def keywords(given: Keywords) -> Keywords | None:
    """The keywords of cross_entropy that are checked there. None: all of them are the defaults."""
    try:
        return cross_entropy_by_rows.checked(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _renamed(error) from None


def by_rows(keywords: Keywords, operands: Operands, rows: torch.Size) -> Keywords:
    """The keywords with token_weight in the rows of the operands, and numbers as tensors.

    Raises RuntimeError for a token_weight that does not fit.
    """
    weight, num_items, device = *keywords[4:6], operands.input.device
    if weight is not None:
        is_one = weight.numel() == 1 and len(rows) == 0
        if not (weight.shape == rows or is_one) or weight.device != device:
            raise RuntimeError(
                f"{_NAME}: token_weight must have the shape of the rows, {tuple(rows)}, on "
                f"{device}, but has {tuple(weight.shape)} on {weight.device}"
            )
        check_plain_tensor("token_weight", weight)
        weight = weight.reshape(operands.input.shape[0], *operands.linear_weight.shape[1:-1])
    if num_items is not None and not isinstance(num_items, Tensor):
        num_items = torch.tensor(num_items, dtype=torch.float64)  # it goes with any device
    return keywords._replace(token_weight=weight, num_items_in_batch=num_items)


def _renamed(error: Exception) -> Exception:
    """An error of cross_entropy as one of this function."""
    message = str(error)
    if type(error).__module__ == "builtins" and message.startswith("cross_entropy: "):
        return type(error)(f"linear_{message}")
    return error


def check_plain(operands: Operands) -> None:
    """Raises for tensors that the passes cannot take, by the name of the argument."""
    for name, tensor in operands._asdict().items():
        if tensor is None and name in ("linear_bias", "weight"):
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{_NAME}: {name} must be a Tensor, but is {type(tensor).__name__}")
        check_plain_tensor(name, tensor)


def check_plain_tensor(name: str, tensor: Tensor) -> None:
    """Raises for a tensor that the passes cannot take."""
    if hasattr(type(tensor), "__tensor_flatten__"):  # a wrapper, such as DTensor
        raise NotImplementedError(
            f"{_NAME}: {name} must be a plain tensor, but is a {type(tensor).__name__}; use "
            f"cross_entropy of the logits, or pass a local tensor"
        )
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"{_NAME}: {name} must be a dense, plain tensor, but has layout {tensor.layout}"
        )
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(
            f"{_NAME}: {name} must be on the CPU or on CUDA, but is on {tensor.device}"
        )


def as_torch_raises(
    error: Exception, operands: Operands, compute: torch.dtype, options: Options
) -> Exception:
    """The error of the row operators, with the type that torch raises for it."""
    classes = operands.linear_weight.shape[:-1]
    shape = (operands.input.shape[0], *classes)
    logits = operands.input.detach().new_zeros((), dtype=compute).expand(shape)  # no memory
    found = errors.as_torch_raises(
        CROSS_ENTROPY.loss,
        error,
        {"input": logits, "target": operands.target, "weight": operands.weight},
        CROSS_ENTROPY.loss.ops.formula(options.row),
        check_options=errors.check_numbers,
    )
    return _renamed(found)
