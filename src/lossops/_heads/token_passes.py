"""The passes of linear_selective_log_softmax: log-probabilities and entropies of chunks of rows.

The forward pass leaves the statistics of each row. The gradients of the values are not known before
the backward pass, which computes the logits of each chunk again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._ops.losses import CROSS_ENTROPY
from . import passes
from .passes import Operands, Options, Problem, Sums
from .rows import Tokens, Wanted

NAME = "linear_selective_log_softmax"


class TokenOperands(NamedTuple):
    """The tensors of a call. Their order is that of the operators' arguments."""

    input: Tensor  # (N, H)
    linear_weight: Tensor  # (C, H)
    linear_bias: Tensor | None  # (C,)
    index: Tensor  # (N, K)
    row_mask: Tensor | None  # (N,)


class TokenOptions(NamedTuple):
    """What a call says beside its tensors."""

    temperature: float
    logit_scale: float
    softcap: float | None
    has_entropy: bool
    compute_dtype: torch.dtype
    accum_dtype: torch.dtype
    max_workspace_bytes: int | None

    @property
    def wanted(self) -> Wanted:
        return Wanted(*self[:4], False)


class Values(NamedTuple):
    """What the forward pass returns. Without has_entropy, entropy is (N, 0)."""

    log_probs: Tensor  # (N, K)
    entropy: Tensor  # (N,)
    row_stats: Tensor  # (3, N), or without elements


def _problem(operands: TokenOperands, options: TokenOptions, *, adds_up_weight: bool) -> Problem:
    row = CROSS_ENTROPY.loss.ops.Options(reduction="none")
    dtype = options.compute_dtype
    made = Options(row, dtype, dtype, options.accum_dtype, options.max_workspace_bytes, None)
    return Problem(Operands(*operands[:4], None), made, adds_up_weight=adds_up_weight)


def forward(operands: TokenOperands, options: TokenOptions, *, with_stats: bool) -> Values:
    """The values, and row_stats if `backward` may follow."""
    problem = _problem(operands, options, adds_up_weight=False)
    found = []
    for rows in problem.chunks():
        mask = None if operands.row_mask is None else operands.row_mask[rows]
        try:
            tokens = Tokens(
                problem.logits(rows),
                operands.index[rows],
                mask,
                options.wanted,
                with_stats=with_stats,
            )
        except IndexError:  # on the CPU; it names the row of the chunk
            _raise_first_invalid(operands, problem.classes[0])
            raise
        assert tokens.row_stats is not None
        found.append((tokens.log_probs, tokens.entropy, tokens.row_stats))
    log_probs, entropy, row_stats = zip(*found, strict=True)
    return Values(torch.cat(log_probs), torch.cat(entropy), torch.cat(row_stats, dim=1))


def _raise_first_invalid(operands: TokenOperands, classes: int) -> None:
    index, row_mask = operands.index.long(), operands.row_mask
    invalid = (index < 0) | (index >= classes)
    if row_mask is not None:
        invalid &= (row_mask != 0).unsqueeze(-1)
    row, column = invalid.nonzero()[0].tolist()
    raise IndexError(
        f"{NAME}: index {int(index[row, column])} at row {row} is out of range for {classes} "
        "classes"
    )


def backward(
    operands: TokenOperands,
    options: TokenOptions,
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
    row_stats: Tensor,
) -> passes.Gradients:
    """The gradients of input, linear_weight and linear_bias, where needed.

    grads: of the log-probabilities and of the entropies. row_stats: those of `forward`.
    """
    problem = _problem(operands, options, adds_up_weight=needed[1])
    sums = Sums(problem, needed, is_scaled=False)
    for rows in problem.chunks():
        logits = problem.logits(rows)
        tokens = Tokens(
            logits,
            operands.index[rows],
            None if operands.row_mask is None else operands.row_mask[rows],
            options.wanted,
            row_stats=row_stats[:, rows].contiguous(),
        )
        log_probs, entropy = (None if grad is None else grad[rows] for grad in grads)
        gradient = tokens.gradient((log_probs, entropy, None), overwrites=True)
        sums.add(rows, passes.as_matrix(gradient, logits))
        del tokens
    found = sums.gradients()
    del problem, logits, sums  # the conversion may take the memory of the logits
    return passes.converted(found, tuple(None if x is None else x.dtype for x in operands[:3]))
