"""Log-probabilities, entropies and lse of tokens: formulas by torch, and the public operators.

The public operators are compositions of `token_values_forward`, whose index is always (..., K). So
each transform of torch sees that operator, or this module's formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import errors
from .description import library
from .fakes import DTYPES, FLOATING, check_devices, check_dtype
from .logit_map import mapped, without_zero
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
    has_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and lse in float32 or float64."""
    z = logits if logits.dtype == torch.float64 else logits.float()
    is_masked = None if row_mask is None else row_mask == 0
    if is_masked is not None:
        z = torch.where(is_masked.unsqueeze(-1), 0.0, z)
    z = mapped(z, temperature, logit_scale, softcap)
    lse = z.logsumexp(-1)  # -inf of a row of -inf only
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
        lse = lse.masked_fill(is_masked, 0.0)
        log_probs = log_probs.masked_fill(is_masked.unsqueeze(-1), 0.0)
    nothing = log_softmax[..., :0]
    return log_probs, entropy if has_entropy else nothing, lse if has_lse else nothing


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
    has_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    check_devices(_NAME, logits, index=index, row_mask=row_mask)
    check_dtype(_NAME, "logits", logits, FLOATING)
    check_dtype(_NAME, "index", index, _INDICES)
    check_dtype(_NAME, "row_mask", row_mask, DTYPES)
    if logits.dim() == 0:
        raise RuntimeError(
            f"{_NAME}: logits must have at least 1 dimension, (..., classes), but is 0-d"
        )
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
    entropy, lse = (
        logits.new_empty(rows if wanted else (*rows, 0), dtype=dtype)
        for wanted in (has_entropy, has_lse)
    )
    return log_probs, entropy, lse


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
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    has_entropy: bool,
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
        index = index.masked_fill(mask, 0)  # what is masked need not be a class
    try:
        logits, *options = without_zero(logits, temperature, logit_scale, softcap)
        log_probs, entropy, _ = TOKEN_VALUES(
            logits,
            index.unsqueeze(-1) if index is not None and is_one else index,
            row_mask,
            *options,
            has_entropy,
            False,  # no lse
        )
    except (IndexError, RuntimeError) as error:
        raise renamed(name, error) from None
    if mask is not None:
        log_probs = log_probs.masked_fill(mask, 0.0)
    return log_probs.squeeze(-1) if is_one else log_probs, entropy


def renamed(name: str, error: Exception, index: str = "index") -> Exception:
    """The error of the kernel as one of a public function, which calls its indices `index`."""
    message = str(error)
    if type(error) in (IndexError, RuntimeError) and message.startswith(f"{_NAME}: "):
        message = message.removeprefix(_NAME).replace(": index ", f": {index} ", 1)
        return type(error)(name + message)
    return errors.as_memory_error(error)


def _check_given(name: str, **tensors: Tensor | None) -> None:
    for key, tensor in tensors.items():
        if tensor is None:  # a Tensor of a schema may be None
            raise TypeError(f"{name}: {key} must be a Tensor, but is None")


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
    _check_given(name, logits=logits, index=index)
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
    _check_given(name, logits=logits)
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
    _check_given(name, logits=logits, index=index)
    log_probs, entropy = _values(
        name, logits, index, row_mask, temperature, logit_scale, softcap, True
    )
    return log_probs, entropy if entropy_requires_grad else entropy.detach()


for _operator in (selective_log_softmax, entropy_from_logits, selective_log_softmax_and_entropy):
    library.impl(_operator.__name__, _operator, "CompositeImplicitAutograd")
