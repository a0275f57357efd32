"""linear_selective_log_softmax as torch knows it: its operators, and its autograd Function.

linear_token_values_forward   log-probabilities, entropies, and what the backward pass needs
linear_token_values_backward  the gradients whose output_mask is set
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _privates
from .._ops import by_torch, errors
from .._ops.row_values import pull_back
from .._ops.tokens import TOKEN_VALUES
from . import operators, reference, token_passes
from .autograd import is_plain
from .passes import Operands
from .token_passes import NAME, TokenOperands, TokenOptions

_OPERANDS = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor index, Tensor? row_mask"
)
_OPTIONS = (
    "float temperature, float logit_scale, float? softcap, bool has_entropy, "
    "ScalarType compute_dtype, ScalarType accum_dtype, SymInt? max_workspace_bytes"
)
_NUM_OPERANDS = len(TokenOperands._fields)
_NUM_ARGUMENTS = _NUM_OPERANDS + len(TokenOptions._fields)
# The operands with a gradient.
_DIFFERENTIABLE = 3

_library = torch.library.Library("lossops", "FRAGMENT")
_library.define(
    f"linear_token_values_forward({_OPERANDS}, {_OPTIONS}, bool with_stats) -> "
    "(Tensor log_probs, Tensor entropy, Tensor row_stats)"
)
_library.define(
    "linear_token_values_backward(Tensor? grad_log_probs, Tensor? grad_entropy, "
    f"{_OPERANDS}, Tensor row_stats, {_OPTIONS}, bool[3] output_mask) -> Tensor[]"
)
forward_op = torch.ops.lossops.linear_token_values_forward.default
backward_op = torch.ops.lossops.linear_token_values_backward.default


def call(operands: TokenOperands, options: TokenOptions) -> tuple[Tensor, Tensor]:
    """The log-probabilities (N, K) and the entropies (N,)."""
    needs = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands[:3])
    if not torch.compiler.is_compiling():
        if (
            _privates.functorch_is_active()
            or _privates.is_tracing()
            or _privates.has_tangents(*operands[:3])
        ):
            return _by_reference(operands, options)
        if _privates.dispatch_modes() == 0:
            if needs:
                found = _apply(*by_torch.alive(operands), options)
            else:
                found = token_passes.forward(operands, options, with_stats=False)
            return found[0], found[1]
    log_probs, entropy, _ = forward_op(*operands, *options, needs)
    return log_probs, entropy


def _by_reference(operands: TokenOperands, options: TokenOptions) -> tuple[Tensor, Tensor]:
    """The values from all logits, by operations that torch can differentiate."""
    given = Operands(*operands[:4], None)
    logits = reference.logits(given, options.compute_dtype)
    if options.logit_scale == 0:
        logits, options = logits * 0, options._replace(logit_scale=1.0)
    values = TOKEN_VALUES(logits, *operands[3:], *options[:4], False)
    return values[0], values[1]


def _gradients_by_reference(
    operands: TokenOperands,
    options: TokenOptions,
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    sources = [i for i, needs in enumerate(needed) if needs]

    def values(*given: Tensor) -> tuple[Tensor, Tensor]:
        return _by_reference(TokenOperands(*by_torch.replaced(operands, sources, given)), options)

    tensors = [x for x, needs in zip(operands, needed, strict=False) if needs and x is not None]
    found = iter(pull_back(values, tensors, grads))
    return [next(found) if needs else None for needs in needed]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        index: Tensor,
        row_mask: Tensor | None,
        options: TokenOptions,
    ) -> Any:
        operands = TokenOperands(input, linear_weight, linear_bias, index, row_mask)
        found = token_passes.forward(operands, options, with_stats=True)
        ctx.options = options
        ctx.save_for_backward(*operands, found.row_stats)
        ctx.set_materialize_grads(False)
        ctx.versions = [0 if x is None else x._version for x in operands]
        return found.log_probs, found.entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        present = [grad for grad in grads if grad is not None]
        if not present:
            return (None,) * (_NUM_OPERANDS + 1)
        *saved, row_stats = errors.saved_tensors(NAME, ctx)
        operands, options = TokenOperands(*saved), ctx.options
        needed = list(ctx.needs_input_grad[:_DIFFERENTIABLE])
        found: Sequence[Tensor | None]
        if all(map(is_plain, present)):
            found = token_passes.backward(operands, options, needed, grads, row_stats)
        elif torch.compiler.is_compiling():  # compiled autograd
            again = iter(backward_op(*grads, *operands, row_stats, *options, needed))
            found = [next(again) if needs else None for needs in needed]
        else:
            found = _gradients_by_reference(operands, options, needed, grads)
        return *found, None, None, None


_privates.name_nodes(_Function, f"lossops_{NAME}")
_apply = _privates.short_apply(_Function)


# ---------------------------------------------------------------- registration


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    operands = TokenOperands(*arguments[:_NUM_OPERANDS])
    options = TokenOptions(*arguments[_NUM_OPERANDS:_NUM_ARGUMENTS])
    with torch.no_grad():
        return tuple(token_passes.forward(operands, options, with_stats=arguments[-1]))


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    operands = TokenOperands(*arguments[:_NUM_OPERANDS])
    options = TokenOptions(*arguments[_NUM_OPERANDS:_NUM_ARGUMENTS])
    rows = operands.input.size(0)
    dtype = torch.float64 if options.compute_dtype == torch.float64 else torch.float32

    def empty(*shape: int) -> Tensor:
        return operands.input.new_empty(shape, dtype=dtype)

    return (
        empty(rows, operands.index.size(1)),
        empty(rows) if options.has_entropy else empty(rows, 0),
        empty(3 if arguments[-1] else 0, rows),
    )


def _backward(*arguments: Any) -> list[Tensor]:
    grads, call, mask = arguments[:2], arguments[2:-1], arguments[-1]
    operands, row_stats = TokenOperands(*call[:_NUM_OPERANDS]), call[_NUM_OPERANDS]
    options = TokenOptions(*call[_NUM_OPERANDS + 1 :])
    with torch.no_grad():
        found = token_passes.backward(operands, options, mask, grads, row_stats)
    return [gradient for gradient in found if gradient is not None]


def _fake_backward(*arguments: Any) -> list[Tensor]:
    pairs = zip(arguments[2 : 2 + _DIFFERENTIABLE], arguments[-1], strict=True)
    return [torch.empty_like(x) for x, wanted in pairs if wanted and x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.options = TokenOptions(*inputs[_NUM_OPERANDS:_NUM_ARGUMENTS])
    ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_NUM_OPERANDS], output[-1])


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    others = (None,) * (_NUM_ARGUMENTS + 1 - _DIFFERENTIABLE)
    grads = grads[:2]
    needed = list(ctx.needs_input_grad[:_DIFFERENTIABLE])
    if all(grad is None for grad in grads):
        return (None,) * _DIFFERENTIABLE + others
    *saved, row_stats = ctx.saved_tensors
    operands = TokenOperands(*saved)
    found: Sequence[Tensor | None]
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        found = _gradients_by_reference(operands, ctx.options, needed, grads)
    else:
        again = iter(backward_op(*grads, *operands, row_stats, *ctx.options, needed))
        found = [next(again) if needs else None for needs in needed]
    return *found, *others


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        f"{NAME}: a graph that holds its backward pass has no second derivative; compute it "
        "outside of the graph, with create_graph=True"
    )


operators.register(_library, forward_op, _forward, _fake_forward)
operators.register(_library, backward_op, _backward, _fake_backward)
torch.library.register_autograd(forward_op, _gradients, setup_context=_setup_context)
torch.library.register_autograd(
    backward_op, _no_second_derivative, setup_context=lambda ctx, inputs, output: None
)
