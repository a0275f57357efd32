"""What is computed of a chunk's rows by the keywords that cross entropy's kernels do not have.

A chunk has values of its rows, and a gradient over its logits from the gradients of these values:

    InPlace    the loss, by the kernels of cross entropy; the gradient takes the place of the logits
    Tokens     log-probabilities, entropies and lse of mapped logits, in one pass
    Composed   label smoothing and probabilities: the mapped logits are a tensor of their own

Rows are (n, d1, ...), and their logits (n, C, d1, ...).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _privates
from .._ops import logit_map
from .._ops.cross_entropy import raise_first_invalid
from .._ops.losses import CROSS_ENTROPY
from .._ops.overwriting import overwrite_tokens
from .._ops.tokens import TOKEN_VALUES
from .passes import Problem

_token_values = _privates.below_autograd(TOKEN_VALUES.forward_op)
_token_gradients = _privates.below_autograd(TOKEN_VALUES.backward_op)
_ops = CROSS_ENTROPY.loss.ops
_loss_rows = _privates.below_autograd(_ops.forward)


class Wanted(NamedTuple):
    """The logit map, and the values that are wanted beside losses or log-probabilities."""

    temperature: float
    logit_scale: float
    softcap: float | None
    has_entropy: bool
    has_lse: bool

    @property
    def is_mapped(self) -> bool:
        return self[:3] != (1.0, 1.0, None)

    @property
    def slope(self) -> float:
        """The largest derivative of the map."""
        return abs(self.logit_scale) / self.temperature


# The gradients of losses or log-probabilities, of entropies and of lse. None: a zero.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Tokens:
    """Values of each row's classes `index` (n, d1, ..., K), of rows whose `mask` is not 0."""

    def __init__(
        self,
        logits: Tensor,
        index: Tensor | None,
        mask: Tensor | None,
        wanted: Wanted,
        *,
        with_stats: bool = False,
        row_stats: Tensor | None = None,
    ) -> None:
        """row_stats: those of the same rows, if the values are known and the gradient is wanted."""
        is_zero = wanted.logit_scale == 0  # which no kernel takes
        self.logits = logits.movedim(1, -1) if logits.dim() > 1 else logits
        if is_zero:
            self.logits = self.logits.mul_(0)
        scale = 1.0 if is_zero else wanted.logit_scale
        self.is_zero = is_zero
        options = (wanted.temperature, scale, wanted.softcap, wanted.has_entropy, wanted.has_lse)
        self.arguments = index, mask
        self.options = options
        self.row_stats = row_stats
        if row_stats is None:
            values = _token_values(self.logits, index, mask, *options, with_stats)
            self.log_probs, self.entropy, self.lse, self.row_stats = values

    def gradient(self, grads: Gradients, *, overwrites: bool) -> Tensor:
        """The gradient of the logits, (n, C, d1, ...), in their place or a new tensor."""
        dtype = torch.float64 if self.logits.dtype == torch.float64 else torch.float32
        each = (None if x is None else x.to(dtype) for x in grads)
        if overwrites:
            found = self.logits
            overwrite_tokens(found, *each, *self.arguments, self.row_stats, *self.options)
        else:
            (found,) = _token_gradients(
                *each, self.logits, *self.arguments, self.row_stats, *self.options, [True]
            )
        if self.is_zero:
            found.zero_()
        return found.movedim(-1, 1)


class Labels:
    """The targets of a call as a problem has them, and what of them all chunks need."""

    def __init__(
        self, problem: Problem, kept: Tensor | None, share: Tensor | None, wanted: Wanted
    ) -> None:
        self.problem, self.wanted = problem, wanted
        self.kept, self.share = kept, share
        row = problem.row
        self.options = row._replace(reduction="none", float32_result=True)
        self.is_plain = not (wanted.is_mapped or wanted.has_entropy or wanted.has_lse)
        self.is_composed = row.label_smoothing > 0 or problem.is_probability

    def chunk(self, logits: Tensor, rows: slice, *, with_stats: bool) -> InPlace | Losses:
        """The losses of a chunk of logits."""
        try:
            if self.is_plain:
                return InPlace(self, logits, rows)
            kind = Composed if self.is_composed else OfClasses
            return kind(self, logits, rows, with_stats=with_stats)
        except IndexError:  # on the CPU; it names the row of the chunk
            problem = self.problem
            raise_first_invalid(
                "linear_cross_entropy",
                problem.target,
                problem.classes[0],
                problem.row.ignore_index,
            )
            raise


def tensors_of_chunk(wanted: Wanted, *, is_composed: bool, itemsize: int) -> int:
    """How many tensors of a chunk's logits there are at a time, of the logits' dtype."""
    if not is_composed or not (wanted.is_mapped or wanted.has_entropy or wanted.has_lse):
        return 1  # the gradient takes the place of the logits
    # The logits; and wide: the logits, the mapped ones, the derivative of the map, two gradients.
    return 1 + 5 * max(1, 4 // itemsize)


class Losses:
    """The losses of a chunk's rows, and their lse and entropies where wanted."""

    loss: Tensor
    lse: Tensor
    entropy: Tensor

    def gradient(self, grads: Gradients) -> Tensor:
        raise NotImplementedError

    def gradients_of_distribution(self, grad: Tensor, needed: Sequence[bool]) -> Iterator[Tensor]:
        """The gradients of probabilities and of class weights, where needed."""
        raise NotImplementedError


class InPlace(Losses):
    """By the kernels of cross entropy, over the logits."""

    def __init__(self, labels: Labels, logits: Tensor, rows: slice) -> None:
        self.labels, self.logits, self.rows = labels, logits, rows
        problem = labels.problem
        self.loss, self.row_stats, _ = _loss_rows(
            problem.by_class(logits), problem.target[rows], problem.weight, *labels.options
        )
        self.lse = self.entropy = self.loss[..., :0]

    def gradient(self, grads: Gradients) -> Tensor:
        problem = self.labels.problem
        grad = grads[0]
        assert grad is not None
        grad, options = grad.to(self.loss.dtype), self.labels.options
        problem.overwrite(self.logits, self.rows, self.row_stats, grad, options)
        return problem.by_class(self.logits)

    def gradients_of_distribution(self, grad: Tensor, needed: Sequence[bool]) -> Iterator[Tensor]:
        return self.labels.problem.gradients_of_distribution(
            self.logits,
            self.rows,
            self.row_stats,
            grad.to(self.loss.dtype),
            needed,
            self.labels.options,
        )


class OfClasses(Losses):
    """Of class indices without smoothing: log-probabilities of tokens, times class weights."""

    def __init__(self, labels: Labels, logits: Tensor, rows: slice, *, with_stats: bool) -> None:
        problem = labels.problem
        assert labels.kept is not None
        kept = labels.kept[rows]
        index = problem.target[rows].unsqueeze(-1)
        by_class = problem.by_class(logits)
        self.tokens = Tokens(by_class, index, kept, labels.wanted, with_stats=with_stats)
        self.share = None if labels.share is labels.kept else labels.share
        if self.share is not None:
            self.share = self.share[rows]
        self.lse, self.entropy = self.tokens.lse, self.tokens.entropy
        self.loss = 0.0 - self.tokens.log_probs.squeeze(-1)  # not -0 in ignored rows
        if self.share is not None:
            self.loss = self.loss * self.share

    def gradient(self, grads: Gradients) -> Tensor:
        grad, entropy, lse = grads
        if grad is not None:
            grad = -(grad if self.share is None else grad * self.share).unsqueeze(-1)
        return self.tokens.gradient((grad, entropy, lse), overwrites=True)


class Composed(Losses):
    """Of label smoothing and probabilities: cross entropy's kernels over mapped logits."""

    def __init__(self, labels: Labels, logits: Tensor, rows: slice, *, with_stats: bool) -> None:
        self.labels, self.rows = labels, rows
        problem, wanted = labels.problem, labels.wanted
        self.kept = None if problem.is_probability or labels.kept is None else labels.kept[rows]
        by_class = problem.by_class(logits)
        wide = by_class if by_class.dtype == torch.float64 else by_class.float()
        self.z = logit_map.mapped(wide, *wanted[:3])
        self.target, self.weight = problem.target[rows], problem.weight
        if self.weight is not None and not problem.is_probability:
            self.weight = self.weight.to(self.z.dtype)
        self.arguments = self.z, self.target, self.weight
        self.loss, self.row_stats, _ = _loss_rows(*self.arguments, *labels.options)
        self.tokens = Tokens(wide, None, self.kept, wanted, with_stats=with_stats)
        self.lse, self.entropy = self.tokens.lse, self.tokens.entropy

    def _gradients(self, grad: Tensor, mask: Sequence[bool]) -> list[Tensor]:
        arguments = _ops.backward_arguments(
            grad.to(self.loss.dtype), self.arguments, (self.row_stats, None),
            self.labels.options, mask,
        )  # fmt: skip
        found: list[Tensor] = _backward_rows(*arguments)
        return found

    def gradients_of_distribution(self, grad: Tensor, needed: Sequence[bool]) -> Iterator[Tensor]:
        return iter(self._gradients(grad, [False, *needed]))

    def gradient(self, grads: Gradients) -> Tensor:
        grad, entropy, lse = grads
        wanted = self.labels.wanted
        found = None
        if grad is not None:
            found = self._gradients(grad, [True, False, False])[0]
            found.mul_(logit_map.derivative(self.z, *wanted[:3]))
            if self.kept is not None:  # whatever the derivative of the map is there
                found.masked_fill_(~self.kept.unsqueeze(1), 0.0)
        if entropy is not None or lse is not None:
            more = self.tokens.gradient((None, entropy, lse), overwrites=False)
            found = more if found is None else found.add_(more)
        assert found is not None
        return found


_backward_rows = _privates.below_autograd(_ops.backward)
