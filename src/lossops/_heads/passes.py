"""The passes of linear_cross_entropy: chunks of logits, cross entropy's row operators, products.

Each chunk's logits take the memory of the chunk before, and the gradient over the logits takes
their place. Nothing here waits for the device, and nothing depends on data.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import _privates
from .._ops.cross_entropy import make_forward_inplace, raise_first_invalid
from .._ops.description import widened
from .._ops.losses import CROSS_ENTROPY
from .._ops.overwriting import scale_kept
from . import chunks, products

_NAME = "linear_cross_entropy"
_ops = CROSS_ENTROPY.loss.ops
_forward_rows = _privates.below_autograd(_ops.forward)
_backward_rows = _privates.below_autograd(_ops.backward)
_forward_inplace = make_forward_inplace()
_overwrite = torch.ops.lossops.cross_entropy_backward_inplace.default
_OVERWRITE_ARGUMENTS = tuple(_privates.schema_of(_overwrite)[0])

# Float32 gradients over the logits are rounded to a half type in their own memory. The first rows,
# one of so many, go through memory of their own. The others take log2 of it in copies.
_ROWS_PER_ROW_BESIDE = 64

# The gradient over float16 logits is multiplied by this power of two, or less where class weights
# or probabilities are large: as much as float16 holds.
_LARGEST_SCALE = 15.0


class Operands(NamedTuple):
    """The tensors of a call. Their order is that of the operators' arguments."""

    input: Tensor  # (N, H)
    linear_weight: Tensor  # (C, d1, ..., H)
    linear_bias: Tensor | None  # (C, d1, ...)
    target: Tensor  # class indices (N, d1, ...), or probabilities (N, C, d1, ...)
    weight: Tensor | None  # (C,)


class Options(NamedTuple):
    """What a call says beside its tensors."""

    row: Any  # the options of cross entropy's operators
    compute_dtype: torch.dtype  # of the factors of all products
    logits_dtype: torch.dtype  # compute_dtype, or float32 for a half type
    accum_dtype: torch.dtype  # of sums over chunks
    max_workspace_bytes: int | None
    batch_chunk_size: int | None

    @property
    def has_wide_logits(self) -> bool:
        return self.logits_dtype != self.compute_dtype


# The gradients of input, linear_weight and linear_bias.
Gradients: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]
# Their dtypes, which are those of the operands.
Dtypes: TypeAlias = tuple[torch.dtype | None, ...]


class Kept(NamedTuple):
    """The gradients of a reduced loss for a grad_output of 1, where wanted.

    Of float16 they are float32, and have yet to be multiplied by `factor`, a scalar.
    """

    gradients: Gradients
    factor: Tensor | None


class Found(NamedTuple):
    """What the forward pass returns."""

    loss: Tensor
    row_stats: Tensor | None  # of all rows, as the row operators return them
    kept: Kept


class Problem:
    """A call's operands as matrices, and what is computed of one chunk of rows."""

    def __init__(
        self,
        operands: Operands,
        options: Options,
        *,
        adds_up_weight: bool,
        tensors: int = 1,
        divisor: Tensor | None = None,
    ) -> None:
        """tensors: `chunks.rows_of_chunk`'s. divisor: of a mean, if not what the targets say."""
        dtype = options.compute_dtype
        self.divisor = divisor
        self.given, self.options, self.row = operands, options, options.row
        self.input = operands.input.to(dtype)
        self.num_rows = self.input.size(0)
        self.classes = tuple(operands.linear_weight.shape[:-1])  # (C, d1, ...)
        self.linear_weight = operands.linear_weight.to(dtype).flatten(0, -2)
        bias = operands.linear_bias
        self.linear_bias = None if bias is None else bias.to(dtype).reshape(-1)
        self.target, self.weight = operands.target, operands.weight
        self.is_probability = self.target.shape == (self.num_rows, *self.classes)
        self.is_reduced = self.row.reduction != "none"
        width = self.linear_weight.size(0)
        self.chunk_rows = chunks.rows_of_chunk(
            rows=self.num_rows,
            features=self.input.size(1),
            classes=width,
            dtype=dtype,
            device_type=self.input.device.type,
            adds_up_weight=adds_up_weight,
            max_workspace_bytes=options.max_workspace_bytes,
            batch_chunk_size=options.batch_chunk_size,
            tensors=tensors,
            logits_dtype=options.logits_dtype,
        )
        self.is_single = self.chunk_rows >= self.num_rows
        padded = chunks.padded_classes(width, dtype)
        self.buffer = self.input.new_empty(
            (min(self.chunk_rows, self.num_rows), padded), dtype=options.logits_dtype
        )

    def chunks(self) -> Iterator[slice]:
        """The rows of each chunk; without rows, one empty chunk, which checks the arguments."""
        for start in range(0, max(1, self.num_rows), self.chunk_rows):
            yield slice(start, min(start + self.chunk_rows, self.num_rows))

    def logits(self, rows: slice) -> Tensor:
        """The logits of a chunk as a matrix, (rows, C * d1 * ...), in the buffer."""
        features, weight = self.input[rows], self.linear_weight.t()
        logits = self.buffer[: features.size(0), : weight.size(1)]
        if self.options.has_wide_logits:
            products.multiply_by_blocks(features, weight, logits)
            if self.linear_bias is not None:
                logits += self.linear_bias
        elif self.linear_bias is None:
            products.multiply(features, weight, logits)
        else:
            products.multiply_and_add(self.linear_bias, features, weight, logits)
        return logits

    def factor(self, grad_logits: Tensor) -> Tensor:
        """The gradient over a chunk's logits in compute_dtype, a factor of the products.

        It takes the memory of float32 logits: row r of the half type lies where float32 row r / 2
        begins, so a copy of rows n to 2n writes where only rows before n were.
        """
        dtype = self.options.compute_dtype
        if grad_logits.dtype == dtype:
            return grad_logits
        rows, classes = grad_logits.shape
        capacity, stride = self.buffer.shape
        found = self.buffer.view(dtype).view(2 * capacity, stride)[:rows, :classes]
        if grad_logits.data_ptr() != self.buffer.data_ptr():
            return found.copy_(grad_logits)
        done = min(rows, max(1, rows // _ROWS_PER_ROW_BESIDE))
        found[:done] = grad_logits[:done].to(dtype)
        while done < rows:
            piece = slice(done, min(2 * done, rows))
            found[piece] = grad_logits[piece]
            done = piece.stop
        return found

    def by_class(self, logits: Tensor) -> Tensor:
        """The matrix of logits as the row operators take it, (rows, C, d1, ...)."""
        return logits if len(self.classes) == 1 else logits.unflatten(1, self.classes)

    def row_options(self) -> Any:
        """The options of the row operators: a chunk's loss is a sum, in float32 for half types."""
        if not self.is_reduced:
            return row_options(self.options)
        return self.row._replace(reduction="sum", float32_result=True)

    def row_loss(self, logits: Tensor, rows: slice, *, with_stats: bool) -> tuple[Tensor, Any]:
        """The loss of a chunk, and its row_stats if they are wanted."""
        arguments = (self.by_class(logits), self.target[rows], self.weight, *self.row_options())
        try:
            if with_stats:
                loss, row_stats, _ = _forward_rows(*arguments)
                return loss, row_stats
            return _ops.value(*arguments), None
        except IndexError:  # on the CPU; it names the row of the chunk
            raise_first_invalid(_NAME, self.target, self.classes[0], self.row.ignore_index)
            raise

    def overwrite_in_forward(
        self, logits: Tensor, rows: slice, denominator: Tensor | None
    ) -> Tensor:
        """The sum of a chunk's losses. Writes its gradient, divided by the denominator, over the
        logits; where there is a kernel for that, in the pass that reads them.

        denominator: a float64 scalar. None: 1.
        """
        try:
            return _forward_inplace(
                self.by_class(logits),
                self.target[rows],
                self.weight,
                denominator,
                self.row.ignore_index,
                self.row.label_smoothing,
            )
        except IndexError:  # on the CPU; it names the row of the chunk
            raise_first_invalid(_NAME, self.target, self.classes[0], self.row.ignore_index)
            raise

    def overwrite(
        self, logits: Tensor, rows: slice, row_stats: Tensor, grad: Tensor, options: Any = None
    ) -> None:
        """Writes the gradient over the logits. grad: a scalar, or a number for each row.

        options: of the row operator, if not `row_options`.
        """
        given = {
            "input": self.by_class(logits),
            "grad_output": grad,
            "target": self.target[rows],
            "weight": self.weight,
            "row_stats": row_stats,
            "mean_terms": None,
            **_ops.formula(options or self.row_options()),
        }
        _overwrite(*map(given.__getitem__, _OVERWRITE_ARGUMENTS))

    def gradients_of_distribution(
        self,
        logits: Tensor,
        rows: slice,
        row_stats: Tensor,
        grad: Tensor,
        needed: Sequence[bool],
        options: Any = None,
    ) -> Iterator[Tensor]:
        """The gradients of a chunk's probabilities and of the class weights, where needed."""
        operands = (self.by_class(logits), self.target[rows], self.weight)
        mask = [False, *needed]
        arguments = _ops.backward_arguments(
            grad, operands, (row_stats, None), options or self.row_options(), mask
        )
        return iter(_backward_rows(*arguments))

    @functools.cached_property
    def denominator(self) -> Tensor:
        """What a mean divides by, a float64 scalar: rows that are not ignored, or their weights."""
        target, weight = self.target, self.weight
        if self.divisor is not None:
            # A number on the CPU goes with any device.
            return self.divisor * self.input.new_ones((), dtype=torch.float64)
        if self.is_probability:
            rows = target.numel() // max(1, self.classes[0])
            return target.new_full((), rows, dtype=torch.float64)
        target = target.long()
        kept = target != self.row.ignore_index
        if weight is None or weight.numel() == 0:
            return kept.sum(dtype=torch.float64)
        inside = kept & (target >= 0) & (target < weight.numel())
        each = weight.double()[target.where(inside, 0)]
        return each.where(inside, 0).sum()

    def total(self, loss_of_chunks: list[Tensor], dtype: torch.dtype) -> Tensor:
        """The reduced loss. It is divided before it is rounded to a half type."""
        total = loss_of_chunks[0]
        if len(loss_of_chunks) > 1:
            total = torch.stack(loss_of_chunks).sum(dtype=torch.float64)
        if self.row.reduction == "mean":
            denominator = self.denominator
            total = total / denominator  # in float64
            if self.weight is not None and not self.is_probability and self.divisor is None:
                # Weights may add up to 0, and smoothed losses not.
                total = total.masked_fill(denominator == 0, torch.nan)
        return total.to(dtype)

    def scaled(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Of a float16 problem: what multiplies the gradient over the logits instead of grad, and
        what multiplies the results at the end. Both are float64 scalars.

        grad holds the 1/N of a mean. Small numbers of a gradient would be lost before a gradient
        scaler's grad_output could make them large, so grad is applied at the end. Until then the
        largest power of two that cannot overflow takes its place: 2^15, which no product of 1/N
        and a scaler's 2^16 exceeds for two rows or more.
        """
        largest = self.input.new_ones((), dtype=torch.float64)
        if self.weight is not None and self.weight.numel() > 0:
            largest = self.weight.double().abs().amax()
        if self.is_probability and self.target.numel() > 0:
            wide = torch.promote_types(self.target.dtype, torch.float32)
            sums = torch.linalg.vector_norm(self.target, 1, dim=1, dtype=wide)
            largest = largest * sums.amax()
        exponent = (_LARGEST_SCALE - largest.log2()).floor()
        scale = exponent.nan_to_num(_LARGEST_SCALE).clamp(-100, _LARGEST_SCALE).exp2()
        # 1/0, where all rows are ignored: the row operator knows which gradients are 0 then.
        is_finite = grad.isfinite()
        return scale.where(is_finite, grad), (grad / scale).where(is_finite, 1)


class Sums:
    """The gradients of input, linear_weight and linear_bias, of the chunks so far."""

    def __init__(self, problem: Problem, needed: Sequence[bool], *, is_scaled: bool) -> None:
        self.problem = problem
        given = problem.given
        wide = torch.float32 if is_scaled else None
        sums = wide or (None if problem.is_single else problem.options.accum_dtype)
        self.is_first = True
        self.input = self.linear_weight = self.linear_bias = None
        if needed[0]:
            self.input = torch.empty_like(problem.input, dtype=wide or given.input.dtype)
        if needed[1]:
            dtype = sums or given.linear_weight.dtype
            self.linear_weight = torch.empty_like(problem.linear_weight, dtype=dtype)
        if needed[2] and problem.linear_bias is not None:
            # The sum of a column is a small part of the work: it is never of a half type.
            dtype = torch.promote_types(problem.linear_bias.dtype, torch.float32)
            self.linear_bias = torch.zeros_like(problem.linear_bias, dtype=dtype)

    def add(self, rows: slice, grad_logits: Tensor) -> None:
        problem = self.problem
        if self.linear_bias is not None:
            self.linear_bias += grad_logits.sum(0, dtype=self.linear_bias.dtype)
        if self.input is not None or self.linear_weight is not None:
            grad_logits = products.with_clear_gaps(problem.factor(grad_logits))
        if self.input is not None:
            products.multiply(grad_logits, problem.linear_weight, self.input[rows])
        if self.linear_weight is not None:
            product = products.multiply if self.is_first else products.add_product
            product(grad_logits.t(), problem.input[rows], self.linear_weight)
        self.is_first = False

    def gradients(self) -> Gradients:
        """In the shapes of the operands."""
        weight, bias, classes = self.linear_weight, self.linear_bias, self.problem.classes
        if len(classes) > 1:
            weight = None if weight is None else weight.unflatten(0, classes)
            bias = None if bias is None else bias.view(classes)
        return self.input, weight, bias


def as_matrix(gradient: Tensor, logits: Tensor) -> Tensor:
    """The gradient over the logits in rows that matrix products read well: else in their place."""
    # A view for classes in the last dimension, and one row a chunk has any stride.
    matrix = gradient.reshape(logits.shape)
    if matrix.dtype == logits.dtype and matrix.data_ptr() == logits.data_ptr():
        return matrix
    if matrix.dtype == logits.dtype and matrix.stride(1) == 1 and logits.is_contiguous():
        return matrix
    return logits.copy_(matrix)


def row_options(options: Options) -> Any:
    """The options of the row operators for all rows. The loss of float32 logits is float32 at
    first, and class weights may have the dtype of the factors."""
    if options.has_wide_logits:
        return options.row._replace(float32_result=True)
    return options.row


def loss_dtype(operands: Operands, options: Options) -> torch.dtype:
    """The dtype of the loss, which that of the logits does not change."""
    dtype = options.compute_dtype
    if operands.target.is_floating_point():
        for other in (operands.target, operands.weight):
            dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    return widened(dtype, options.row.float32_result)


def result_dtype(operands: Operands, options: Options) -> torch.dtype:
    """The dtype of the loss. It raises what is wrong with the arguments of the row operators."""
    is_known = options.row.reduction in ("none", "mean", "sum")
    if not is_known or operands.target.is_floating_point() or operands.weight is not None:
        # The operators of the first chunk raise the rest.
        classes = operands.linear_weight.shape[:-1]
        nothing = operands.input.new_empty((0, *classes), dtype=options.logits_dtype)
        _ops.value(nothing, operands.target[:0], operands.weight, *row_options(options))
    return loss_dtype(operands, options)


def dtypes_of(operands: Operands) -> Dtypes:
    return tuple(None if operand is None else operand.dtype for operand in operands[:3])


def converted(values: Sequence[Tensor | None], dtypes: Dtypes) -> Gradients:
    input, linear_weight, linear_bias = (
        value if value is None else value.to(dtype)
        for value, dtype in zip(values, dtypes, strict=True)
    )
    return input, linear_weight, linear_bias


def is_scaled(options: Options) -> bool:
    """Whether gradients stay unnormalised and float32 until grad_output is known."""
    return options.compute_dtype == torch.float16 and options.row.reduction != "none"


def forward(
    operands: Operands,
    options: Options,
    kept: Sequence[bool],
    *,
    with_stats: bool,
    divisor: Tensor | None = None,
) -> Found:
    """The loss; and for a reduced one the gradients of input, linear_weight and linear_bias.

    kept: which of these gradients are wanted. with_stats: whether `backward` may follow, if none
    is: else it computes the statistics again. divisor: `Problem`'s.
    """
    dtype = result_dtype(operands, options)
    keeps = any(kept)
    problem = Problem(operands, options, adds_up_weight=kept[1], divisor=divisor)
    if not keeps:
        return _forward(problem, dtype, with_stats)
    found = _forward_with_gradients(problem, dtype, kept)
    if is_scaled(options):
        return found
    del problem  # the conversion may take the memory of the logits
    gradients = converted(found.kept.gradients, dtypes_of(operands))
    return found._replace(kept=Kept(gradients, None))


def _forward(problem: Problem, dtype: torch.dtype, with_stats: bool) -> Found:
    losses, stats = [], []
    for rows in problem.chunks():
        logits = problem.logits(rows)
        loss, row_stats = problem.row_loss(logits, rows, with_stats=with_stats)
        losses.append(loss)
        stats.append(row_stats)
    result = problem.total(losses, dtype) if problem.is_reduced else joined(losses, 0).to(dtype)
    all_stats = joined(stats, dim=1) if with_stats else None
    return Found(result, all_stats, Kept((None, None, None), None))


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """Of one chunk, or of several."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _forward_with_gradients(problem: Problem, dtype: torch.dtype, kept: Sequence[bool]) -> Found:
    sums = Sums(problem, kept, is_scaled=is_scaled(problem.options))
    denominator = problem.denominator if problem.row.reduction == "mean" else None
    factor = None
    if is_scaled(problem.options):
        one = torch.ones((), dtype=torch.float64, device=problem.input.device)
        scale, factor = problem.scaled(one if denominator is None else one / denominator)
        denominator = 1 / scale  # of powers of two, and of 1/0
    losses = []
    for rows in problem.chunks():
        logits = problem.logits(rows)
        losses.append(problem.overwrite_in_forward(logits, rows, denominator))
        sums.add(rows, logits)
    return Found(problem.total(losses, dtype), None, Kept(sums.gradients(), factor))


def finished(kept: Kept, dtypes: Dtypes, grad: Tensor) -> Gradients:
    """The kept gradients times grad_output, in their own memory. A grad_output of 1 costs nothing:
    the kernel looks at it."""
    factor = grad if kept.factor is None else kept.factor * grad
    for gradient in kept.gradients:
        if gradient is None:
            continue
        rows = gradient if gradient.is_contiguous() or gradient.dim() != 2 else gradient.t()
        if rows.is_contiguous():
            scale_kept(rows, factor)
        else:
            gradient.mul_(factor)
    return converted(kept.gradients, dtypes)


def backward(
    operands: Operands,
    options: Options,
    needed: Sequence[bool],
    grad: Tensor,
    row_stats: Tensor | None,
) -> list[Tensor | None]:
    """The gradients of the operands that need one, from logits that are computed again.

    row_stats: those of `forward`, or None.
    """
    problem = Problem(operands, options, adds_up_weight=needed[1])
    *found, target, weight = _backward_pass(problem, needed, grad, row_stats)
    del problem  # the conversion may take the memory of the logits
    return [*converted(found, dtypes_of(operands)), target, weight]


def _backward_pass(
    problem: Problem, needed: Sequence[bool], grad: Tensor, row_stats: Tensor | None
) -> list[Tensor | None]:
    sums = Sums(problem, needed[:3], is_scaled=is_scaled(problem.options))
    factor = None
    if problem.is_reduced:
        grad = grad.double()
        if problem.row.reduction == "mean":
            grad = grad / problem.denominator
    grad_logits = grad
    if is_scaled(problem.options):
        grad_logits, factor = problem.scaled(grad)
    grad_target = torch.empty_like(problem.target) if needed[3] else None
    grad_weight = None
    losses_of_row = math.prod(problem.classes[1:])
    for rows in problem.chunks():
        logits = problem.logits(rows)
        if row_stats is not None:
            # The chunks may differ from those of the forward pass.
            stats = row_stats[:, rows.start * losses_of_row : rows.stop * losses_of_row]
            stats = stats.contiguous()
        else:
            stats = problem.row_loss(logits, rows, with_stats=True)[1]
        part = slice(None) if problem.is_reduced else rows
        if needed[3] or needed[4]:
            each = problem.gradients_of_distribution(
                logits, rows, stats, grad[part] if grad.dim() else grad, needed[3:]
            )
            if grad_target is not None:
                grad_target[rows] = next(each)
            if needed[4]:
                of_chunk = next(each)
                wide = torch.promote_types(of_chunk.dtype, torch.float32)
                grad_weight = of_chunk.to(wide) + (0 if grad_weight is None else grad_weight)
        if any(needed[:3]):
            of_rows = grad_logits[part] if grad_logits.dim() else grad_logits
            problem.overwrite(logits, rows, stats, of_rows)
            sums.add(rows, logits)
    found = sums.gradients()
    if factor is not None:
        for gradient in found:
            if gradient is not None:
                gradient.mul_(factor)
    if grad_weight is not None and problem.weight is not None:
        grad_weight = grad_weight.to(problem.weight.dtype)
    return [*found, grad_target, grad_weight]
