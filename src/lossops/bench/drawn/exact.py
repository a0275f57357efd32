"""What calls of rows must return: torch's formulas in float64, a chunk of rows at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..run import relative_error
from .rows import RowDraw, Rows

Outputs = tuple[Tensor, ...]

# What float32 may take from the terms that cancel in the gradient of an entropy, and in that of a
# loss with several coefficients. Each of the latter is a product of three rounded factors.
ROUNDING_OF_ENTROPIES = 2.0**-20
ROUNDING_OF_COEFFICIENTS = 2.0**-22


def outputs(draw: RowDraw, logits: Tensor, rows: Rows) -> Outputs:
    """The call by torch's functions, in the dtype of the logits; of tokens in at least float32."""
    if not draw.is_tokens:
        loss = F.cross_entropy(
            logits,
            rows.target,
            rows.weight,
            reduction=draw.reduction,
            label_smoothing=draw.smoothing,
        )
        return (loss,)
    logs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(1)
    found: list[Tensor] = []
    if draw.loss != "entropy":
        picked = rows.target if draw.indices > 1 else rows.target.unsqueeze(1)
        found.append(logs.gather(1, picked).view(rows.target.shape))
    if draw.loss != "logp":
        found.append(-(logs.exp() * logs).sum(1))
    if rows.kept is not None:
        found = [one * rows.kept.view(-1, *[1] * (one.dim() - 1)) for one in found]
    return tuple(found)


def error(
    draw: RowDraw,
    rows: Rows,
    got: Outputs,
    gradients: Sequence[tuple[Tensor, float]],
    grad_outputs: Outputs | None,
) -> float:
    """The largest error of the outputs and of each gradient, inf for a NaN.

    A gradient stands beside the factor that it was computed with. `grad_outputs` has a tensor
    for each output where rows have values of their own, else None.
    """
    smallest = torch.finfo(rows.logits.dtype).smallest_normal
    divisor = _divisor(draw, rows)
    by_row = dataclasses.replace(draw, reduction="none")
    total = size = torch.zeros((), dtype=torch.float64, device=rows.logits.device)
    errors = []
    for part in _parts(rows.logits):
        exact = part.rows(rows)
        leaf = exact.logits.requires_grad_()
        terms = outputs(by_row, leaf, exact)
        if grad_outputs is None:
            weights: Outputs = (torch.full_like(terms[0], 1 / divisor),)
        else:
            weights = tuple(part.of_rows(one).double() for one in grad_outputs)
        (gradient,) = torch.autograd.grad(terms, leaf, weights)
        rounding = _rounding(draw, exact, weights[-1])
        for found, factor in gradients:
            mine = part.of_logits(found)
            errors.append(relative_error(mine, gradient * factor, smallest, rounding * factor))
        if grad_outputs is None:
            losses = terms[0].detach()
            total, size = total + losses.sum(), size + losses.abs().sum()
            continue
        for mine, right in zip(got, terms, strict=True):
            least = torch.finfo(mine.dtype).smallest_normal
            errors.append(relative_error(part.of_rows(mine.detach()), right.detach(), least))
    if grad_outputs is None:
        errors.append(_error_of_sum(got[0].detach(), total / divisor, size / divisor))
    worst = float(torch.stack([one.double() for one in errors]).max())
    return math.inf if math.isnan(worst) else worst


def _rounding(draw: RowDraw, exact: Rows, weights: Tensor) -> Tensor | float:
    """What rounding may take from each gradient, because two terms of it cancel.

    For an entropy H, the terms are p (|log p| + H). For a loss with coefficients q, whose sum is
    Q, they are Q p + q. The result is a fixed fraction of them, times |weights|: the grad_output
    of each row, which for tokens is that of the last output.
    """
    logits = exact.logits.detach()
    if draw.loss in ("entropy", "logp-entropy"):
        logs = logits.log_softmax(1)
        p = logs.exp()
        entropy = -(p * logs).sum(1, keepdim=True)
        terms = ROUNDING_OF_ENTROPIES * p * (entropy - logs)
    elif draw.smoothing or draw.probabilities:
        q = _coefficients(draw, exact)
        terms = ROUNDING_OF_COEFFICIENTS * (q.sum(1, keepdim=True) * logits.softmax(1) + q)
    else:
        return 0.0
    return terms * weights.abs().unsqueeze(1)


def _coefficients(draw: RowDraw, exact: Rows) -> Tensor:
    """The coefficient of each class: its probability, or 1 at the class index and 0 elsewhere.

    It is smoothed, multiplied by the class weight, and 0 in rows that do not count.
    """
    if draw.probabilities:
        target = exact.target
    else:
        index = exact.target.clamp(min=0).unsqueeze(1)
        target = torch.zeros_like(exact.logits).scatter_(1, index, 1.0)
    q = (1 - draw.smoothing) * target + draw.smoothing / draw.classes
    if exact.weight is not None:
        q = q * exact.weight.view(-1, *[1] * (q.dim() - 2))
    return q if exact.kept is None else q * exact.kept.unsqueeze(1)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Some of the rows: those at `first` and after it, in a dimension of the logits."""

    dim: int
    first: int
    count: int

    def of_logits(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(self.dim, self.first, self.count)

    def of_rows(self, tensor: Tensor) -> Tensor:
        """Of a tensor that lacks the dimension of the classes."""
        return tensor.narrow(max(0, self.dim - 1), self.first, self.count)

    def rows(self, rows: Rows) -> Rows:
        """In float64."""
        by_class = rows.target.is_floating_point()
        target = self.of_logits(rows.target).double() if by_class else self.of_rows(rows.target)
        return Rows(
            self.of_logits(rows.logits).double(),
            target,
            None if rows.weight is None else rows.weight.double(),
            None if rows.kept is None else self.of_rows(rows.kept),
        )


def _parts(logits: Tensor) -> Iterator[_Part]:
    """Cuts the largest dimension that is not the classes', so that memory stays bounded."""
    dims = [dim for dim in range(logits.dim()) if dim != 1]
    dim = max(dims, key=logits.size)
    count = logits.size(dim)
    step = max(1, (1 << (26 if logits.is_cuda else 21)) * count // logits.numel())
    for first in range(0, count, step):
        yield _Part(dim, first, min(step, count - first))


def _divisor(draw: RowDraw, rows: Rows) -> float:
    """What torch divides the sum of the losses by."""
    if draw.reduction != "mean":
        return 1.0
    if rows.weight is None or draw.probabilities:
        return float(rows.kept_rows)
    indices = rows.target if rows.kept is None else rows.target[rows.kept]
    return float(rows.weight.double()[indices].sum())


def _error_of_sum(got: Tensor, right: Tensor, size: Tensor) -> Tensor:
    limits = torch.finfo(got.dtype)
    if right.abs() > limits.max:  # a sum that overflows a half type
        return torch.where(got.double() == right.sign() * torch.inf, 0.0, torch.inf)
    return (got.double() - right).abs() / (size + limits.smallest_normal)
