"""The passes of linear_cross_entropy with the keywords from logit_scale on: as `passes.py`.

The values of all rows are reduced at the end. What a reduction multiplies each value by is known
from the targets before the first product, so the gradients of a mean or a sum can be computed
beside the values here too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._ops import cross_entropy_by_rows as by_rows
from .._ops.cross_entropy_by_rows import CrossEntropyOutput, Keywords
from . import passes
from .passes import Kept, Operands, Options, Problem, Sums
from .rows import Gradients, Labels, Losses, Wanted, tensors_of_chunk

# As `passes.py`: the gradient over float16 logits is at most this power of two.
_LARGEST_SCALE = 15.0


class Found(NamedTuple):
    """What the forward pass returns."""

    output: CrossEntropyOutput
    kept: Kept


class _Call:
    """What all chunks of a pass have in common."""

    def __init__(
        self, operands: Operands, options: Options, keywords: Keywords, *, adds_up_weight: bool
    ) -> None:
        row, target = options.row, operands.target
        classes = operands.linear_weight.shape[:-1]
        is_probability = target.shape == (operands.input.shape[0], *classes)
        self.keywords = keywords
        scale = keywords.lse_square_scale
        self.wanted = Wanted(
            *keywords.map(),
            keywords.return_entropy,
            keywords.return_lse or keywords.return_z_loss or scale != 0,
        )
        tensors = tensors_of_chunk(
            self.wanted,
            is_composed=is_probability or row.label_smoothing > 0,
            itemsize=options.logits_dtype.itemsize,
        )
        self.problem = Problem(operands, options, adds_up_weight=adds_up_weight, tensors=tensors)
        self.dtype = torch.float64 if options.compute_dtype == torch.float64 else torch.float32
        if is_probability:
            shape = (target.size(0), *target.shape[2:])
            kept = target.new_ones((), dtype=torch.bool).expand(shape)
            share = by_rows.shares_of_probabilities(kept, classes[0])
        else:
            kept = by_rows.kept_rows(target, row.ignore_index)
            share = by_rows.shares(target, kept, operands.weight, self.dtype)
        self.labels = Labels(self.problem, kept, share, self.wanted)
        self.kept, self.share = kept, share
        nothing = kept.new_empty((0,), dtype=self.dtype)
        rows = by_rows.Rows(nothing, share, kept, nothing, nothing)
        self.reduction = by_rows.Reduction(rows, keywords, row.reduction)

    def row_gradients(self, grad: Tensor | None) -> _RowGradients:
        """The gradients of rows, for a grad_output of the loss."""
        if grad is None:
            return _RowGradients(None, None)
        of_loss = (grad * self.reduction.factors(self.share)).to(self.dtype)
        scale = self.keywords.lse_square_scale
        if scale == 0:
            return _RowGradients(of_loss, None)
        return _RowGradients(
            of_loss, (2 * scale * grad * self.reduction.factors(self.kept)).to(self.dtype)
        )

    def scale(self, rows: _RowGradients, grads: Gradients) -> Tensor:
        """A power of two: what float16 gradients over the logits are multiplied by.

        It brings a bound of them to 2^15. No product of the gradients of a mean and a gradient
        scaler's 2^16 exceeds that for two rows or more.
        """
        problem = self.problem
        log_classes = math.log(max(2, problem.classes[0]))
        bound = problem.input.new_zeros((), dtype=torch.float64)
        if rows.loss is not None:
            largest = bound + 1
            if problem.weight is not None and problem.weight.numel() > 0:
                largest = problem.weight.double().abs().amax()
            if problem.is_probability and problem.target.numel() > 0:
                wide = torch.promote_types(problem.target.dtype, torch.float32)
                sums = torch.linalg.vector_norm(problem.target, 1, dim=1, dtype=wide)
                largest = largest * sums.amax()
            bound = bound + _largest(rows.loss) * largest
        if rows.per_lse is not None:
            bound = bound + _largest(rows.per_lse) * (self._largest_logit() + log_classes)
        _, entropy, lse = grads
        if lse is not None:
            bound = bound + _largest(lse)
        if entropy is not None:  # p (log p + H)
            bound = bound + _largest(entropy) * (log_classes + 1)
        exponent = (_LARGEST_SCALE - (bound * self.wanted.slope).log2()).floor()
        return exponent.nan_to_num(0.0, 0.0, 0.0).clamp(-100, 100).exp2()

    def _largest_logit(self) -> Tensor | float:
        """A bound of the mapped logits' size, of rows that are not ignored."""
        wanted, problem = self.wanted, self.problem
        if wanted.softcap is not None:
            return wanted.softcap / wanted.temperature
        of_rows, of_classes = (
            torch.linalg.vector_norm(x, dim=1, dtype=torch.float32)
            for x in (problem.input, problem.linear_weight)
        )
        counts = self.kept.flatten(1).any(1) if self.kept.dim() > 1 else self.kept
        of_rows = of_rows.masked_fill(~counts, 0.0)  # which may be NaN
        bias = 0.0 if problem.linear_bias is None else _largest(problem.linear_bias)
        return (_largest(of_rows) * _largest(of_classes) + bias) * wanted.slope


class _RowGradients(NamedTuple):
    """What the losses of rows are multiplied by, and what their lse are for the z-loss."""

    loss: Tensor | None
    per_lse: Tensor | None

    def of_chunk(self, rows: slice, losses: Losses, more: Gradients) -> Gradients:
        """The gradients of the values of a chunk. more: those of the returned entropy and lse."""
        of_lse = None if more[2] is None else more[2][rows]
        if self.per_lse is not None:
            of_z_loss = self.per_lse[rows] * losses.lse
            of_lse = of_z_loss if of_lse is None else of_lse + of_z_loss
        of_loss = None if self.loss is None else self.loss[rows]
        return of_loss, None if more[1] is None else more[1][rows], of_lse

    def times(self, scale: Tensor) -> _RowGradients:
        return _RowGradients(*(_times(x, scale) for x in self))


def _times(x: Tensor | None, scale: Tensor) -> Tensor | None:
    return None if x is None else (x * scale).to(x.dtype)


def _largest(x: Tensor) -> Tensor:
    return x.double().abs().amax() if x.numel() > 0 else x.new_zeros((), dtype=torch.float64)


def forward(
    operands: Operands, options: Options, keywords: Keywords, kept: Sequence[bool]
) -> Found:
    """What the call returns, and the gradients of input, linear_weight and linear_bias."""
    dtype = passes.result_dtype(operands, options)
    keeps = any(kept)
    by_rows.check(keywords, options.row.reduction, operands.target.is_floating_point())
    num_items: Any = keywords.num_items_in_batch  # a tensor or None
    others = keywords._replace(num_items_in_batch=None)
    if num_items is not None and by_rows.checked(others) is None:
        # A mean with another divisor, as gradient accumulation has it.
        divisor = by_rows.number_beside(num_items, operands.input)
        mean = options._replace(row=options.row._replace(reduction="mean"))
        of_mean = passes.forward(operands, mean, kept, with_stats=False, divisor=divisor)
        return Found(CrossEntropyOutput(of_mean.loss), of_mean.kept)
    call = _Call(operands, options, keywords, adds_up_weight=kept[1])
    problem = call.problem
    sums, factor = None, None
    grads = _RowGradients(None, None)
    nothing: Gradients = (None, None, None)
    if keeps:
        sums = Sums(problem, kept, is_scaled=passes.is_scaled(options))
        grads = call.row_gradients(problem.input.new_ones((), dtype=torch.float64))
        if passes.is_scaled(options):
            scale = call.scale(grads, nothing)
            grads, factor = grads.times(scale), 1 / scale
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    predicted: list[Tensor] = []
    for rows in problem.chunks():
        logits = problem.logits(rows)
        if keywords.return_token_accuracy or keywords.return_predicted_tokens:
            by_class = problem.by_class(logits)
            predicted.append(by_rows.predictions(by_class.movedim(1, -1), keywords))
        losses = call.labels.chunk(logits, rows, with_stats=keeps)
        found.append((losses.loss, losses.lse, losses.entropy))
        if sums is not None:
            of_chunk = grads.of_chunk(rows, losses, nothing)
            sums.add(rows, passes.as_matrix(losses.gradient(of_chunk), logits))
        del losses  # its gradient, before the next chunk has one
    loss, lse, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
    output = by_rows.results(
        by_rows.Rows(loss, call.share, call.kept, lse, entropy),
        problem.target,
        torch.cat(predicted) if predicted else None,
        keywords,
        options.row.reduction,
        dtype,
    )
    gradients = (None, None, None) if sums is None else sums.gradients()
    if factor is None:
        del call, problem, logits, sums  # the conversion may take the memory of the logits
        gradients = passes.converted(gradients, passes.dtypes_of(operands))
    return Found(output, Kept(gradients, factor))


def backward(
    operands: Operands,
    options: Options,
    keywords: Keywords,
    needed: Sequence[bool],
    grads: Gradients,
) -> list[Tensor | None]:
    """The gradients of the operands that need one, from logits that are computed again.

    grads: of the loss, of the entropies and of lse.
    """
    call = _Call(operands, options, keywords, adds_up_weight=needed[1])
    problem, grad = call.problem, grads[0]
    sums = Sums(problem, needed[:3], is_scaled=passes.is_scaled(options))
    of_rows = call.row_gradients(None if grad is None else grad.double())
    factor = None
    plain = of_rows.loss
    if passes.is_scaled(options):
        scale = call.scale(of_rows, grads)
        of_rows, factor = of_rows.times(scale), 1 / scale
        grads = (None, _times(grads[1], scale), _times(grads[2], scale))
    grad_target = torch.zeros_like(problem.target) if needed[3] else None
    grad_weight: Tensor | None = None
    for rows in problem.chunks():
        logits = problem.logits(rows)
        losses = call.labels.chunk(logits, rows, with_stats=True)
        if (needed[3] or needed[4]) and plain is not None:
            each = losses.gradients_of_distribution(plain[rows], needed[3:])
            if grad_target is not None:
                grad_target[rows] = next(each)
            if needed[4]:
                of_chunk = next(each)
                wide = torch.promote_types(of_chunk.dtype, torch.float32)
                grad_weight = of_chunk.to(wide) + (0 if grad_weight is None else grad_weight)
        if any(needed[:3]):
            gradient = losses.gradient(of_rows.of_chunk(rows, losses, grads))
            sums.add(rows, passes.as_matrix(gradient, logits))
            del gradient
        del losses
    found = sums.gradients()
    if factor is not None:
        for each_sum in found:
            if each_sum is not None:
                each_sum.mul_(factor)
    if needed[4] and problem.weight is not None:
        weight = problem.weight
        grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight
        grad_weight = grad_weight.to(weight.dtype)
    del call, problem, logits, sums
    converted = passes.converted(found, passes.dtypes_of(operands))
    return [*converted, grad_target, grad_weight]
