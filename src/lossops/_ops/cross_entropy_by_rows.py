"""cross_entropy put together from values of rows: logit maps, z-losses, weights of tokens.

`call` takes the keywords that the kernels of cross entropy do not have. With class indices, one
pass over the logits gives the log-probability of each row's class, its lse and its entropy
(`tokens.py`), and one backward pass computes the gradient of all three. The rest is a few
operations on vectors of rows, with sums in float64.

Label smoothing and probabilities are not fused: the mapped logits are a tensor of float32 or
float64, which cross entropy's own kernels read, and lse and entropy take a pass of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._privates import functorch_is_active
from . import logit_map
from .cross_entropy import CLASS_INDICES, check_differentiable, rows_of
from .description import widened
from .fakes import FLOATING
from .losses import CROSS_ENTROPY
from .tokens import TOKEN_VALUES, renamed

__all__ = ["CrossEntropyOutput", "Keywords", "call", "checked"]

_NAME = "cross_entropy"
# Elements of mapped logits that are in memory at a time where predictions are looked for.
_MAPPED_AT_ONCE = 1 << 24
# torch splits a sum of this many elements among the threads of the CPU.
_SPLIT_AMONG_THREADS = 1 << 15


class CrossEntropyOutput(NamedTuple):
    """What `cross_entropy` returns if one of its `return_*` is set. None: not asked for."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None


class Keywords(NamedTuple):
    """The keywords of `cross_entropy` that this module is for, checked."""

    logit_scale: float
    softcap: float | None
    temperature: float
    lse_square_scale: float
    token_weight: Tensor | None
    num_items_in_batch: float | Tensor | None
    return_lse: bool
    return_entropy: bool
    return_z_loss: bool
    return_token_accuracy: bool
    return_predicted_tokens: bool

    def map(self) -> tuple[float, float, float | None]:
        return self.temperature, self.logit_scale, self.softcap

    def returns_more(self) -> bool:
        return any(self[6:])


_DEFAULTS = (1.0, None, 1.0, 0.0, None, None, False, False, False, False, False)


def checked(given: Keywords) -> Keywords | None:
    """The keywords with numbers as floats. None: all of them are the defaults."""
    temperature, logit_scale, softcap = logit_map.checked(_NAME, *given.map())
    scale = logit_map.finite(_NAME, "lse_square_scale", given.lse_square_scale)
    for key, value in zip(Keywords._fields[6:], given[6:], strict=True):
        if type(value) is not bool:
            raise TypeError(f"{_NAME}: {key} must be a bool, but is {value!r}")
    token_weight, num_items = given.token_weight, given.num_items_in_batch
    if token_weight is not None:
        if not isinstance(token_weight, Tensor):
            kind = type(token_weight).__name__
            raise TypeError(f"{_NAME}: token_weight must be a Tensor, but is {kind}")
        if token_weight.requires_grad:
            raise RuntimeError(f"{_NAME}: token_weight requires grad, but is not differentiable")
        if token_weight.is_complex():
            raise RuntimeError(f"{_NAME}: token_weight must be real, but is {token_weight.dtype}")
    if isinstance(num_items, Tensor):
        if num_items.requires_grad:
            raise RuntimeError(
                f"{_NAME}: num_items_in_batch requires grad, but is not differentiable"
            )
        is_dense = num_items.layout is torch.strided and not num_items.is_nested
        if not is_dense or num_items.numel() != 1 or num_items.is_complex():
            shape = tuple(num_items.shape) if is_dense else num_items.layout
            raise ValueError(
                f"{_NAME}: num_items_in_batch must be one real number, but is a tensor of shape "
                f"{shape} and {num_items.dtype}"
            )
    elif num_items is not None:
        num_items = logit_map.number(_NAME, "num_items_in_batch", num_items)
    found = given._replace(
        logit_scale=logit_scale,
        softcap=softcap,
        temperature=temperature,
        lse_square_scale=scale,
        num_items_in_batch=num_items,
    )
    is_default = token_weight is None and num_items is None and tuple(found) == _DEFAULTS
    return None if is_default else found


class Rows(NamedTuple):
    """What is known of each row, in the shape of logits without classes."""

    loss: Tensor  # without the z-loss; 0 where ignored
    share: Tensor  # what the row adds to the divisor of a mean; 0 where ignored
    kept: Tensor  # bool: not ignored
    lse: Tensor
    entropy: Tensor


def check(keywords: Keywords, reduction: str, is_probability: bool) -> None:
    """Raises ValueError for arguments that do not go together."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(
            f"{_NAME}: reduction must be one of 'none', 'mean', 'sum', but is {reduction!r}"
        )
    if keywords.num_items_in_batch is not None and reduction == "none":
        raise ValueError(f"{_NAME}: num_items_in_batch needs reduction 'mean' or 'sum'")
    if is_probability and (keywords.return_token_accuracy or keywords.return_predicted_tokens):
        raise ValueError(
            f"{_NAME}: return_token_accuracy and return_predicted_tokens are for class "
            "indices, but target holds probabilities"
        )


def call(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    keywords: Keywords,
    *,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    float32_result: bool,
) -> Tensor | CrossEntropyOutput:
    """`cross_entropy` with keywords that `checked` has returned."""
    is_probability = target.is_floating_point()
    check(keywords, reduction, is_probability)
    by_kernels = (ignore_index, label_smoothing)
    if not is_probability:
        check_differentiable(target, weight)
    if input.dtype not in FLOATING or not (is_probability or _fit(input, target, weight)):
        _loss_by_kernels(input, target, weight, by_kernels)  # says what is wrong
        raise RuntimeError(f"{_NAME}: input, target and weight do not go together")
    if is_probability:
        rows = _of_probabilities(input, target, weight, keywords, by_kernels)
    else:
        target = target.reshape(rows_of(input))  # from (1,) for logits of shape (C,)
        rows = _of_indices(input, target, weight, keywords, by_kernels)

    dtype = input.dtype
    for other in (target, weight) if is_probability else ():
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    predicted = None
    if keywords.return_token_accuracy or keywords.return_predicted_tokens:
        predicted = predictions(_classes_last(input), keywords)
    found = results(rows, target, predicted, keywords, reduction, widened(dtype, float32_result))
    return found if keywords.returns_more() else found.loss


def results(
    rows: Rows,
    target: Tensor,
    predicted: Tensor | None,
    keywords: Keywords,
    reduction: str,
    dtype: torch.dtype,
) -> CrossEntropyOutput:
    """What a call returns, from values of rows. predicted: `predictions`, if they are wanted."""
    reduced = Reduction(rows, keywords, reduction)
    loss = reduced(rows.loss, rows.share)
    z_loss = None
    if keywords.lse_square_scale != 0 or keywords.return_z_loss:
        scale = keywords.lse_square_scale
        z_losses = scale * rows.lse.square() if scale != 0 else torch.zeros_like(rows.lse)
        # fault: z-loss-share
        z_loss = reduced(z_losses, rows.kept)
        if scale != 0:
            loss = loss + z_loss
    loss = loss.to(dtype)
    accuracy = None
    if predicted is not None:
        predicted = predicted.masked_fill(~rows.kept, -1)
    if predicted is not None and keywords.return_token_accuracy:
        is_right = ((predicted == target) & rows.kept).float()
        is_none = reduction == "none"
        accuracy = is_right if is_none else (is_right.sum() / rows.kept.sum())
    return CrossEntropyOutput(
        loss,
        z_loss.detach().to(dtype) if z_loss is not None and keywords.return_z_loss else None,
        accuracy,
        predicted if keywords.return_predicted_tokens else None,
        rows.lse if keywords.return_lse else None,
        rows.entropy if keywords.return_entropy else None,
    )


# ---------------------------------------------------------------- values of rows


def _fit(input: Tensor, target: Tensor, weight: Tensor | None) -> bool:
    """Whether input, class indices and weight go together."""
    if input.dim() == 0 or target.dtype not in CLASS_INDICES:
        return False
    shape, rows = tuple(target.shape), tuple(rows_of(input))
    if shape != rows and (shape, rows) != ((1,), ()):
        return False
    if weight is not None and (
        weight.shape != (_num_classes(input),)
        or weight.dtype != input.dtype
        or weight.device != input.device
    ):
        return False
    return target.device == input.device


def _num_classes(input: Tensor) -> int:
    return input.size(0 if input.dim() == 1 else 1)


def _wide(logits: Tensor) -> Tensor:
    """Logits of float32 or float64. The gradients of several values add up before they round."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _classes_last(input: Tensor) -> Tensor:
    return input if input.dim() == 1 else input.movedim(1, -1)


def _of_indices(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    keywords: Keywords,
    by_kernels: tuple[int, float],
) -> Rows:
    ignore_index, label_smoothing = by_kernels
    kept = kept_rows(target, ignore_index)
    if label_smoothing == 0:
        log_probs, entropy, lse = _token_values(
            _classes_last(input), target.unsqueeze(-1), kept, keywords
        )
        loss = 0.0 - log_probs.squeeze(-1)  # not -0 in ignored rows
    else:
        wide = z = _wide(input)
        if keywords.map() != (1.0, 1.0, None):
            # The map's own gradient would make a NaN of an ignored row's 0.
            z = torch.where(kept.unsqueeze(0 if input.dim() == 1 else 1), wide, 0.0)
            z = logit_map.mapped(z, *keywords.map())
        wide_weight = None if weight is None else weight.to(z.dtype)
        loss = _loss_by_kernels(z, target, wide_weight, by_kernels)
        _, entropy, lse = _token_values(_classes_last(wide), None, kept, keywords)
    share = shares(target, kept, weight, loss.dtype)
    if label_smoothing == 0 and share is not kept:
        loss = loss * share  # fault: by-rows-weight
    return Rows(loss, share, kept, lse, entropy)


def kept_rows(target: Tensor, ignore_index: int) -> Tensor:
    """Which rows of class indices are not ignored."""
    limits = torch.iinfo(target.dtype)
    if limits.min <= ignore_index <= limits.max:
        return target != ignore_index
    return torch.ones_like(target, dtype=torch.bool)


def shares(target: Tensor, kept: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The class weight of each row, 0 where ignored. Without class weights `kept` itself."""
    if weight is None or weight.numel() == 0:
        return kept
    # A class index out of range has a loss of NaN already.
    at = target.long().clamp(0, weight.numel() - 1)
    return weight.detach()[at].to(dtype).masked_fill(~kept, 0.0)


def _of_probabilities(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    keywords: Keywords,
    by_kernels: tuple[int, float],
) -> Rows:
    wide = _wide(input)
    loss = _loss_by_kernels(logit_map.mapped(wide, *keywords.map()), target, weight, by_kernels)
    _, entropy, lse = _token_values(_classes_last(wide), None, None, keywords)
    kept = torch.ones_like(loss, dtype=torch.bool)
    return Rows(loss, shares_of_probabilities(kept, _num_classes(input)), kept, lse, entropy)


def shares_of_probabilities(kept: Tensor, num_classes: int) -> Tensor:
    """What each row of probabilities adds to the divisor of a mean: 1, or 0 without classes.

    So the mean of rows without classes is NaN.
    """
    return kept if num_classes > 0 else torch.zeros_like(kept)


def _loss_by_kernels(
    z: Tensor, target: Tensor, weight: Tensor | None, by_kernels: tuple[int, float]
) -> Tensor:
    """The loss of each row, of mapped logits."""
    ignore_index, label_smoothing = by_kernels
    if not torch.compiler.is_compiling() and functorch_is_active():
        # torch.func cannot differentiate the operator: its Function has no setup_context.
        options = CROSS_ENTROPY.options(
            ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        )
        return CROSS_ENTROPY.call(z, target, weight, options)
    loss: Tensor = torch.ops.lossops.cross_entropy(
        z,
        target,
        weight,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return loss


def _token_values(
    logits: Tensor, index: Tensor | None, kept: Tensor | None, keywords: Keywords
) -> tuple[Tensor, ...]:
    """Log-probabilities, entropies and lse; those that nobody asks for have no elements."""
    has_lse = keywords.return_lse or keywords.return_z_loss or keywords.lse_square_scale != 0
    logits, *map_options = logit_map.without_zero(logits, *keywords.map())
    options = (*map_options, keywords.return_entropy, has_lse)
    if torch.compiler.is_compiling():
        keeps_stats = torch.is_grad_enabled() and logits.requires_grad
        values: tuple[Tensor, ...] = torch.ops.lossops.token_values_forward(
            logits, index, kept, *options, keeps_stats
        )
        return values[:3]
    try:
        return TOKEN_VALUES(logits, index, kept, *options)
    except (IndexError, RuntimeError) as error:
        raise renamed(_NAME, error, index="target") from None


def predictions(logits: Tensor, keywords: Keywords) -> Tensor:
    """The lowest of the classes with the largest mapped logit."""
    logits = logits.detach()
    if logits.size(-1) == 0 or logits.numel() == 0:
        return logits.new_full(logits.shape[:-1], -1, dtype=torch.int64)

    def of(x: Tensor) -> Tensor:
        if keywords.map() != (1.0, 1.0, None):
            x = logit_map.mapped(_wide(x), *keywords.map())
        return x.argmax(-1)

    if logits.dim() == 1 or torch.compiler.is_compiling():  # Inductor keeps no mapped logits
        return of(logits)
    at_once = max(_MAPPED_AT_ONCE * logits.size(0) // logits.numel(), 1)
    return torch.cat([of(part) for part in logits.split(at_once)])


# ---------------------------------------------------------------- reductions


def number_beside(num_items: Tensor, like: Tensor) -> Tensor:
    """num_items_in_batch as operations with `like` take it, a scalar."""
    if num_items.is_meta and not like.is_meta:
        raise RuntimeError(f"{_NAME}: num_items_in_batch has no value: it is on meta")
    num_items = num_items.reshape(())
    if num_items.device.type == "cpu":  # a number on the CPU goes with any device
        return num_items
    return num_items.to(like.device, non_blocking=True)


class Reduction:
    """The reduction of values of rows: token weights, divisors, sums in float64."""

    def __init__(self, rows: Rows, keywords: Keywords, reduction: str) -> None:
        self.reduction = reduction
        self.token_weight: Tensor | None = None
        if keywords.token_weight is not None:
            weight = keywords.token_weight
            if weight.numel() == 1 and rows.kept.dim() == 0:
                weight = weight.reshape(())
            if weight.shape != rows.kept.shape or weight.device != rows.kept.device:
                raise RuntimeError(
                    f"{_NAME}: token_weight must have the shape of the rows, "
                    f"{tuple(rows.kept.shape)}, on {rows.kept.device}, but has "
                    f"{tuple(weight.shape)} on {weight.device}"
                )
            # Weights of ignored rows do not count, whatever they are.
            self.token_weight = weight.to(rows.loss.dtype).masked_fill(~rows.kept, 0.0)
        num_items = keywords.num_items_in_batch
        if isinstance(num_items, Tensor):
            num_items = number_beside(num_items, rows.kept)
        self.num_items = num_items

    def __call__(self, values: Tensor, shares: Tensor) -> Tensor:
        """shares: what each row adds to the divisor of a mean, before its token weight."""
        if self.token_weight is not None:
            # fault: token-weight-share
            values, shares = values * self.token_weight, shares * self.token_weight
        if self.reduction == "none":
            return values
        if self.num_items is not None:
            return _sum(values) / self.num_items
        if self.reduction == "sum":
            return _sum(values)
        divisor = _sum(shares)
        mean = _sum(values) / divisor
        if shares.is_floating_point():  # weights may add up to 0, and smoothed losses not
            mean = torch.where(divisor == 0, torch.nan, mean)
        return mean

    def factors(self, shares: Tensor) -> Tensor:
        """The derivative of `self(values, shares)` with respect to each value."""
        factors = torch.ones_like(shares, dtype=torch.float64)
        if self.token_weight is not None:
            factors = factors * self.token_weight
        if self.reduction == "none":
            return factors
        if self.num_items is not None:
            return factors / self.num_items
        return factors if self.reduction == "sum" else factors / _sum(shares * factors)


def _sum(values: Tensor) -> Tensor:
    """The sum in float64. On the CPU it has the same bits for any number of threads."""
    if values.device.type == "cpu" and not torch.compiler.is_compiling():
        while values.numel() >= _SPLIT_AMONG_THREADS:
            # A thread gets whole groups.
            group = 1024
            values = values.flatten().double()
            values = torch.nn.functional.pad(values, (0, -values.numel() % group))
            values = values.view(-1, group).sum(-1)
    return values.sum(dtype=torch.float64)
