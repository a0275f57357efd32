"""Log-probabilities and entropies of tokens: their formulas by torch, and the public operators.

The public operators are compositions of `token_values_forward`, whose index is always (..., K). So
each transform of torch sees that operator, or this module's formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import errors
from .description import library
from .fakes import DTYPES, FLOATING, check_devices, check_dtype
from .row_values import RowValues

_NAME = "token_values"
_INDICES = (torch.int64, torch.int32, torch.uint8)


def _reference(
    logits: Tensor,
    index: Tensor | None,
    row_mask: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    has_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies in float32 or float64."""
    z = logits if logits.dtype == torch.float64 else logits.float()
    is_masked = None if row_mask is None else row_mask == 0
    if is_masked is not None:
        z = torch.where(is_masked.unsqueeze(-1), 0.0, z)
    if logit_scale != 1:
        z = logit_scale * z
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if temperature != 1:
        z = z / temperature
    log_softmax = z.log_softmax(-1)
    # A logit of -inf adds 0.
    finite = log_softmax.masked_fill(z == -torch.inf, 0.0)
    entropy = -(log_softmax.exp() * finite).sum(-1)
    if index is None:
        log_probs = log_softmax[..., :0]
    else:
        log_probs = _gather(log_softmax, index.long(), is_masked)
    if is_masked is not None:
        entropy = entropy.masked_fill(is_masked, 0.0)
        log_probs = log_probs.masked_fill(is_masked.unsqueeze(-1), 0.0)
    return log_probs, entropy if has_entropy else log_softmax[..., :0]


def _gather(log_softmax: Tensor, index: Tensor, is_masked: Tensor | None) -> Tensor:
    """Of masked rows the index does not count. Out of range it gives NaN on CUDA, without an
    assertion on the device."""
    if is_masked is not None:
        index = index.masked_fill(is_masked.unsqueeze(-1), 0)
    if not index.is_cuda:
        return log_softmax.gather(-1, index)
    is_class = (index >= 0) & (index < log_softmax.size(-1))
    if log_softmax.size(-1) == 0:
        return log_softmax.new_full(index.shape, torch.nan)
    return log_softmax.gather(-1, index.where(is_class, 0)).where(is_class, torch.nan)


def _fake(
    logits: Tensor,
    index: Tensor | None,
    row_mask: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    has_entropy: bool,
) -> tuple[Tensor, Tensor]:
    check_devices(_NAME, logits, index=index, row_mask=row_mask)
    check_dtype(_NAME, "logits", logits, FLOATING)
    check_dtype(_NAME, "index", index, _INDICES)
    check_dtype(_NAME, "row_mask", row_mask, DTYPES)
    rows = logits.shape[:-1]
    if index is not None and index.shape[:-1] != rows:
        raise RuntimeError(
            f"{_NAME}: index must have the shape of the rows, {tuple(rows)}, and one more "
            f"dimension for several classes a row, but has {tuple(index.shape)}"
        )
    if row_mask is not None and row_mask.shape != rows:
        raise RuntimeError(
            f"{_NAME}: row_mask must have the shape of the rows, {tuple(rows)}, but has "
            f"{tuple(row_mask.shape)}"
        )
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_probs = logits.new_empty((*rows, 0) if index is None else index.shape, dtype=dtype)
    return log_probs, logits.new_empty(rows if has_entropy else (*rows, 0), dtype=dtype)


TOKEN_VALUES = RowValues(
    _NAME,
    logits=("logits",),
    others=("index", "row_mask"),
    reference=_reference,
    fake=_fake,
)


# ---------------------------------------------------------------- the public operators


def _values(
    name: str,
    logits: Tensor,
    index: Tensor | None,
    row_mask: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """log_probs of index's shape, and entropies; `name` is what errors call the operator."""
    is_one = index is not None and index.dim() == logits.dim() - 1
    mask = None
    if index is not None and row_mask is not None and not is_one and row_mask.dim() == index.dim():
        # As TRL has it: a mask of single values. Rows without any are not read.
        if row_mask.shape != index.shape:
            raise RuntimeError(
                f"{name}: row_mask must have the shape of the rows or of index, "
                f"{tuple(index.shape)}, but has {tuple(row_mask.shape)}"
            )
        mask, row_mask = row_mask == 0, (row_mask != 0).any(-1)
    try:
        log_probs, entropy = TOKEN_VALUES(
            logits,
            index.unsqueeze(-1) if index is not None and is_one else index,
            row_mask,
            *options,
        )
    except (IndexError, RuntimeError) as error:
        raise _renamed(name, error) from None
    if mask is not None:
        log_probs = log_probs.masked_fill(mask, 0.0)
    return log_probs.squeeze(-1) if is_one else log_probs, entropy


def _renamed(name: str, error: Exception) -> Exception:
    """The error of the kernel as one of the public operator."""
    message = str(error)
    if type(error) in (IndexError, RuntimeError) and message.startswith(f"{_NAME}: "):
        return type(error)(name + message.removeprefix(_NAME))
    return errors.as_memory_error(error)


def selective_log_softmax(
    logits: Tensor,
    index: Tensor,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    name = "selective_log_softmax"
    return _values(name, logits, index, row_mask, temperature, logit_scale, softcap, False)[0]


def entropy_from_logits(
    logits: Tensor,
    chunk_size: int | None = None,
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    name = "entropy_from_logits"
    return _values(name, logits, None, None, temperature, logit_scale, softcap, True)[1]


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    name = "selective_log_softmax_and_entropy"
    log_probs, entropy = _values(
        name, logits, index, row_mask, temperature, logit_scale, softcap, True
    )
    return log_probs, entropy if entropy_requires_grad else entropy.detach()


for _operator in (selective_log_softmax, entropy_from_logits, selective_log_softmax_and_entropy):
    library.impl(_operator.__name__, _operator, "CompositeImplicitAutograd")
