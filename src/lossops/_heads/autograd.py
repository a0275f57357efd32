"""Which way a call takes, and the autograd function of eager code.

The forward pass of a reduced loss computes the gradients while it has the logits, and keeps them
for the first backward pass. A second one, and that of "none", computes the logits again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _privates
from .._ops import by_torch, errors, settings
from .._ops.cross_entropy import check_differentiable
from .._ops.cross_entropy_by_rows import CrossEntropyOutput, Keywords
from . import keyword_operators, keyword_passes, operators, passes, reference
from .passes import Operands, Options

_NAME = "linear_cross_entropy"


def needs_gradient(operands: Operands) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)


def kept_gradients(operands: Operands, reduction: str) -> list[bool]:
    """Of which of the first three operands the forward pass keeps the gradient."""
    input, linear_weight, linear_bias, target, weight = operands
    if (
        not torch.is_grad_enabled()
        or reduction == "none"
        or not settings.gradients_are_kept
        or target.requires_grad
        or (weight is not None and weight.requires_grad)
    ):
        return [False, False, False]
    return [x is not None and x.requires_grad for x in (input, linear_weight, linear_bias)]


def _needs_reference(operands: Operands) -> bool:
    return (
        _privates.functorch_is_active()
        or _privates.is_tracing()
        or _privates.has_tangents(*operands)
    )


def needs_checked(operands: Operands) -> bool:
    """`needs_gradient`. Raises RuntimeError for class weights that cannot have one."""
    needs = needs_gradient(operands)
    if needs:
        check_differentiable(operands.target, operands.weight, _NAME)
    return needs


def call(operands: Operands, options: Options) -> Tensor:
    """The loss of canonical operands, outside of compiled code."""
    if _needs_reference(operands):
        return reference.loss(operands, options)
    needs = needs_checked(operands)
    if _privates.dispatch_modes() > 0:
        kept = kept_gradients(operands, options.row.reduction)
        loss: Tensor = operators.forward_op(*operands, *operators.flat(options), kept, needs)[0]
        return loss
    if needs:
        result: Tensor = _apply(*by_torch.alive(operands), options)
        return result
    return passes.forward(operands, options, [False] * 3, with_stats=False).loss


def call_with_keywords(
    operands: Operands, options: Options, keywords: Keywords
) -> CrossEntropyOutput:
    """As `call`, with further keywords. Their tensors need no gradients."""
    if torch.compiler.is_compiling() or (
        _privates.dispatch_modes() > 0 and not _needs_reference(operands)
    ):
        needs_checked(operands)
        kept = kept_gradients(operands, options.row.reduction)
        results = keyword_operators.forward_op(
            *keyword_operators.flat(operands, options, keywords), kept
        )
        return keyword_operators.output(results, keywords)
    if _needs_reference(operands):
        return reference.output(operands, options, keywords)
    if needs_checked(operands):
        results = _apply_with_keywords(*by_torch.alive(operands), options, keywords)
        return CrossEntropyOutput(*results)
    return keyword_passes.forward(operands, options, keywords, [False] * 3).output


class _HeadFunction(torch.autograd.Function):
    """`kept` of a node has the kept gradients, which the first backward pass takes."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        options: Options,
    ) -> Tensor:
        operands = Operands(input, linear_weight, linear_bias, target, weight)
        with torch.enable_grad():
            kept = kept_gradients(operands, options.row.reduction)
        # Under saved-tensor hooks, as of activation checkpointing, memory is wanted more than time.
        if _privates.saved_tensors_have_hooks():
            kept = [False] * 3
        found = passes.forward(operands, options, kept, with_stats=True)
        ctx.kept = found.kept if any(kept) else None  # not the loss, whose graph holds ctx
        ctx.options, ctx.dtypes = options, passes.dtypes_of(operands)
        ctx.save_for_backward(*operands, found.row_stats)
        ctx.set_materialize_grads(False)
        ctx.versions = [0 if x is None else x._version for x in operands]
        return found.loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        # The kept gradients are given away once. The caller may change them from then on.
        kept, ctx.kept = ctx.kept, None
        if grad is None:
            return (None,) * 6
        plain = is_plain(grad)
        if kept is not None and plain:
            return *passes.finished(kept, ctx.dtypes, grad), None, None, None
        saved = errors.saved_tensors(_NAME, ctx)
        operands, row_stats = Operands(*saved[:-1]), saved[-1]
        needed = list(ctx.needs_input_grad[:-1])
        if plain:
            found = passes.backward(operands, ctx.options, needed, grad, row_stats)
        elif torch.compiler.is_compiling():  # compiled autograd
            options = operators.flat(ctx.options)
            each = iter(operators.backward_op(grad, *operands, row_stats, *options, needed))
            found = [next(each) if needs else None for needs in needed]
        else:
            found = reference.gradients(operands, ctx.options, needed, grad)
        return *found, None


_privates.name_nodes(_HeadFunction, f"lossops_{_NAME}")
_apply = _privates.short_apply(_HeadFunction)


def is_plain(grad: Tensor) -> bool:
    """Whether a backward pass is for this gradient alone, and will not be differentiated."""
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or _privates.is_batched(grad)
        or _privates.functorch_is_active()
        or _privates.has_tangents(grad)
    )


class _KeywordFunction(torch.autograd.Function):
    """As `_HeadFunction`, with further keywords. Returns the fields of a CrossEntropyOutput."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        options: Options,
        keywords: Keywords,
    ) -> Any:
        operands = Operands(input, linear_weight, linear_bias, target, weight)
        with torch.enable_grad():
            kept = kept_gradients(operands, options.row.reduction)
        if _privates.saved_tensors_have_hooks():
            kept = [False] * 3
        found = keyword_passes.forward(operands, options, keywords, kept)
        ctx.kept = found.kept if any(kept) else None
        ctx.options, ctx.dtypes = options, passes.dtypes_of(operands)
        ctx.keywords = keywords._replace(token_weight=None, num_items_in_batch=None)
        num_items: Any = keywords.num_items_in_batch  # a tensor or None
        tensors = (*operands, keywords.token_weight, num_items)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.versions = [0 if x is None else x._version for x in tensors]
        _, z_loss, accuracy, predicted, lse, entropy = found.output
        fixed = [z_loss, accuracy, predicted]
        if not any(ctx.needs_input_grad[:3]):  # lse and entropy do not depend on the others
            fixed += [lse, entropy]
        ctx.mark_non_differentiable(*(x for x in fixed if x is not None))
        return tuple(found.output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        kept, ctx.kept = ctx.kept, None
        of_output = CrossEntropyOutput(*grads)
        given = of_output.loss, of_output.entropy, of_output.lse
        present = [grad for grad in given if grad is not None]
        if not present:
            return (None,) * 7
        plain = all(map(is_plain, present))
        if kept is not None and plain and len(present) == 1 and given[0] is not None:
            return *passes.finished(kept, ctx.dtypes, given[0]), None, None, None, None
        *saved, token_weight, num_items = errors.saved_tensors(_NAME, ctx)
        operands = Operands(*saved)
        keywords = ctx.keywords._replace(token_weight=token_weight, num_items_in_batch=num_items)
        needed = list(ctx.needs_input_grad[:5])
        if plain:
            each = keyword_passes.backward(operands, ctx.options, keywords, needed, given)
        elif torch.compiler.is_compiling():  # compiled autograd
            call = keyword_operators.flat(operands, ctx.options, keywords)
            again = iter(keyword_operators.backward_op(*given, *call, needed))
            each = [next(again) if needs else None for needs in needed]
        else:
            each = reference.output_gradients(operands, ctx.options, keywords, needed, given)
        return *each, None, None


_privates.name_nodes(_KeywordFunction, f"lossops_{_NAME}")
_apply_with_keywords = _privates.short_apply(_KeywordFunction)
