"""The arguments of linear_cross_entropy: checked, and brought into one form for all passes."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._ops import autocast, cross_entropy_by_rows, errors
from .._ops.cross_entropy import CLASS_INDICES
from .._ops.cross_entropy_by_rows import Keywords
from .._ops.description import HALF_DTYPES
from .._ops.losses import CROSS_ENTROPY
from .passes import Operands, Options
from .token_passes import NAME as TOKENS_NAME
from .token_passes import TokenOperands

_NAME = "linear_cross_entropy"
_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# More than any memory has: what an operator's integer can be.
_MOST_BYTES = 1 << 62
# torch's options of its own function, which torch has from 2.13 on.
TorchOptions: Any = getattr(torch.nn, "LinearCrossEntropyOptions", None)


class CallOptions(NamedTuple):
    """The arguments of linear_cross_entropy that are neither tensors nor `Keywords`."""

    reduction: str
    ignore_index: int | None
    label_smoothing: float
    options: Any
    accum_dtype: torch.dtype
    logits_dtype: torch.dtype | None
    max_workspace_bytes: int | None


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


def dtypes(
    operands: Sequence[Tensor | None], accum_dtype: torch.dtype, name: str = _NAME
) -> tuple[torch.dtype, torch.dtype, bool]:
    """The dtypes of logits and of sums, and whether autocast asks for a float32 result.

    Raises RuntimeError for dtypes that do not go together, ValueError for accum_dtype.
    """
    given = dict(zip(Operands._fields, operands[:3], strict=False))
    input, linear_weight = operands[:2]
    assert input is not None and linear_weight is not None
    for key, tensor in given.items():
        if tensor is None:
            continue
        if tensor.dtype not in _FLOATING:
            raise NotImplementedError(
                f"{name}: {key} must be floating point, but is {tensor.dtype}"
            )
        if tensor.device != input.device:
            raise RuntimeError(
                f"{name}: {key} is on {tensor.device} but input is on {input.device}"
            )
    is_autocast = autocast.may_be_on() and autocast.is_on(input)
    found = {}
    for key, tensor in given.items():
        if tensor is not None:
            is_cast = is_autocast and tensor.dtype != torch.float64
            device = input.device.type
            found[key] = torch.get_autocast_dtype(device) if is_cast else tensor.dtype
    compute = found["input"]
    for key, dtype in found.items():
        if dtype != compute:
            raise RuntimeError(f"{name}: {key} must have input's dtype {compute}, but is {dtype}")
    if accum_dtype not in (torch.float32, linear_weight.dtype, compute):
        raise ValueError(
            f"{name}: accum_dtype must be torch.float32 or the dtype of linear_weight, "
            f"{linear_weight.dtype}, but is {accum_dtype}"
        )
    # Sums have at least the precision of the products.
    return compute, accum_dtype if compute in HALF_DTYPES else compute, is_autocast


def check_logits_dtype(given: Any) -> None:
    """Raises TypeError for what is no dtype."""
    if given is not None and not isinstance(given, torch.dtype):
        raise TypeError(f"{_NAME}: logits_dtype must be a torch.dtype or None, but is {given!r}")


def logits_dtype(given: torch.dtype | None, compute: torch.dtype) -> torch.dtype:
    """The dtype of the logits of products in `compute`. Raises ValueError for another one."""
    if given is None or given == compute:
        return compute
    if compute in HALF_DTYPES and given == torch.float32:
        return given
    more = "torch.float32 or " if compute in HALF_DTYPES else ""
    raise ValueError(
        f"{_NAME}: logits_dtype must be None, {more}the dtype of the products, {compute}, but is "
        f"{given}"
    )


def sizes(
    options: Any,
    accum_dtype: torch.dtype,
    max_workspace_bytes: int | None,
    name: str = _NAME,
) -> tuple[torch.dtype, int | None, int | None]:
    """accum_dtype, max_workspace_bytes and batch_chunk_size, with those of torch's options.

    Raises TypeError for arguments of another type, ValueError for values that contradict.
    """
    if not isinstance(accum_dtype, torch.dtype):
        raise TypeError(f"{name}: accum_dtype must be a torch.dtype, but is {accum_dtype!r}")
    if max_workspace_bytes is not None:
        try:
            if isinstance(max_workspace_bytes, bool):
                raise TypeError
            max_workspace_bytes = operator.index(max_workspace_bytes)
        except TypeError:
            raise TypeError(
                f"{name}: max_workspace_bytes must be an integer or None, but is "
                f"{max_workspace_bytes!r}"
            ) from None
        if max_workspace_bytes <= 0:
            raise ValueError(
                f"{name}: max_workspace_bytes must be positive, but is {max_workspace_bytes}"
            )
        max_workspace_bytes = min(max_workspace_bytes, _MOST_BYTES)
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


def of_tokens(given: TokenOperands) -> tuple[TokenOperands, Tensor | None]:
    """The operands of linear_selective_log_softmax as its passes take them, and single values that
    are masked.

    Raises RuntimeError for shapes, dtypes or devices that do not fit.
    """
    name, (input, linear_weight, linear_bias, index, row_mask) = TOKENS_NAME, given
    if input.dim() < 1:
        raise RuntimeError(f"{name}: input must have at least 1 dimension, (..., H), but is 0-d")
    rows, features = input.shape[:-1], input.shape[-1]
    if linear_weight.dim() != 2 or linear_weight.shape[1] != features:
        raise RuntimeError(
            f"{name}: linear_weight must have shape (C, {features}), as input has {features} "
            f"features, but has {tuple(linear_weight.shape)}"
        )
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:1]:
        raise RuntimeError(
            f"{name}: linear_bias must have shape {tuple(linear_weight.shape[:1])}, but has "
            f"{tuple(linear_bias.shape)}"
        )
    if index.dtype not in CLASS_INDICES:
        raise RuntimeError(f"{name}: index must be int64, int32 or uint8, but is {index.dtype}")
    is_one = index.shape == rows
    if not is_one and index.shape[:-1] != rows:
        raise RuntimeError(
            f"{name}: index must have the shape of the rows, {tuple(rows)}, and one more "
            f"dimension for several classes a row, but has {tuple(index.shape)}"
        )
    for key, tensor in (("index", index), ("row_mask", row_mask)):
        if tensor is not None and tensor.device != input.device:
            raise RuntimeError(
                f"{name}: {key} is on {tensor.device} but input is on {input.device}"
            )
    mask = None
    if row_mask is not None and row_mask.shape != rows:
        if is_one or row_mask.shape != index.shape:
            raise RuntimeError(
                f"{name}: row_mask must have the shape of the rows, {tuple(rows)}, or of index, "
                f"{tuple(index.shape)}, but has {tuple(row_mask.shape)}"
            )
        mask, row_mask = row_mask == 0, (row_mask != 0).any(-1)
        index = index.masked_fill(mask, 0)  # what is masked need not be a class
    num_rows = math.prod(rows)
    found = TokenOperands(
        input.reshape(num_rows, features),
        linear_weight,
        linear_bias,
        index.reshape(num_rows, 1 if is_one else index.shape[-1]),
        None if row_mask is None else row_mask.reshape(num_rows),
    )
    return found, mask


def keywords(given: Keywords) -> Keywords | None:
    """The keywords of cross_entropy that are checked there. None: all of them are the defaults."""
    try:
        return cross_entropy_by_rows.checked(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise renamed(error) from None


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
        # It goes with any device, whatever torch's default is.
        num_items = torch.tensor(num_items, dtype=torch.float64, device="cpu")
    return keywords._replace(token_weight=weight, num_items_in_batch=num_items)


def renamed(error: Exception) -> Exception:
    """An error of cross_entropy as one of this function."""
    message = str(error)
    if type(error).__module__ == "builtins" and message.startswith("cross_entropy: "):
        return type(error)(f"linear_{message}")
    return error


def has_dtensor(*values: Any) -> bool:
    """Whether one of the values is a DTensor. It imports nothing of torch.distributed."""
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and any(isinstance(value, dtensor) for value in values)


def tensors(operands: NamedTuple, name: str = _NAME) -> dict[str, Tensor]:
    """The operands that are given, by the names of the arguments. Raises TypeError for others."""
    found = {}
    for key, tensor in operands._asdict().items():
        if tensor is None and key in ("linear_bias", "weight", "row_mask"):
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {key} must be a Tensor, but is {type(tensor).__name__}")
        found[key] = tensor
    return found


def check_plain(operands: NamedTuple, name: str = _NAME) -> None:
    """Raises for tensors that the passes cannot take, by the name of the argument."""
    for key, tensor in tensors(operands, name).items():
        check_plain_tensor(key, tensor, name)


def check_plain_tensor(key: str, tensor: Tensor, name: str = _NAME) -> None:
    """Raises for a tensor that the passes cannot take."""
    if hasattr(type(tensor), "__tensor_flatten__"):  # a tensor that wraps tensors
        raise NotImplementedError(
            f"{name}: {key} must be a plain tensor or a DTensor, but is a {type(tensor).__name__}; "
            "use a function of the logits, or pass a plain tensor"
        )
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"{name}: {key} must be a dense, plain tensor, but has layout {tensor.layout}"
        )
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(
            f"{name}: {key} must be on the CPU or on CUDA, but is on {tensor.device}"
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
    return renamed(found)
