"""The operators that graphs hold for linear_cross_entropy with further keywords.

linear_cross_entropy_output_forward   what the call returns, and kept gradients
linear_cross_entropy_output_backward  the gradients whose output_mask is set, computed again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._ops.cross_entropy_by_rows import CrossEntropyOutput, Keywords
from . import keyword_passes, operators, passes, reference
from .operators import OPERANDS, OPTIONS
from .passes import Operands, Options

# The keywords that are no tensors, with their types in a schema.
_KEYWORDS = {
    "logit_scale": "float",
    "softcap": "float?",
    "temperature": "float",
    "lse_square_scale": "float",
    "return_lse": "bool",
    "return_entropy": "bool",
    "return_z_loss": "bool",
    "return_token_accuracy": "bool",
    "return_predicted_tokens": "bool",
}
_TENSORS = ("token_weight", "num_items_in_batch")
_MORE = ", ".join(
    [f"Tensor? {name}" for name in _TENSORS]
    + [f"{kind} {name}" for name, kind in _KEYWORDS.items()]
)
_NUM_OPERANDS = len(Operands._fields)
_NUM_ARGUMENTS = _NUM_OPERANDS + operators.NUM_OPTIONS + len(_TENSORS) + len(_KEYWORDS)
_NUM_OUTPUTS = len(CrossEntropyOutput._fields)
# Of the outputs, those with a gradient.
_DIFFERENTIABLE = ("loss", "entropy", "lse")

_library = torch.library.Library("lossops", "FRAGMENT")
_library.define(
    f"linear_cross_entropy_output_forward({OPERANDS}, {OPTIONS}, {_MORE}, bool[3] kept) -> ("
    + ", ".join(f"Tensor {name}" for name in CrossEntropyOutput._fields)
    + ", Tensor grad_input, Tensor grad_linear_weight, Tensor grad_linear_bias, Tensor factor)"
)
_library.define(
    "linear_cross_entropy_output_backward("
    + ", ".join(f"Tensor? grad_{name}" for name in _DIFFERENTIABLE)
    + f", {OPERANDS}, {OPTIONS}, {_MORE}, bool[5] output_mask) -> Tensor[]"
)
forward_op = torch.ops.lossops.linear_cross_entropy_output_forward.default
backward_op = torch.ops.lossops.linear_cross_entropy_output_backward.default


def flat(operands: Operands, options: Options, keywords: Keywords) -> tuple[Any, ...]:
    """A call as the operators take it."""
    names = (*_TENSORS, *_KEYWORDS)
    return *operands, *operators.flat(options), *(getattr(keywords, name) for name in names)


def _split(arguments: Sequence[Any]) -> tuple[Operands, Options, Keywords]:
    options_end = _NUM_OPERANDS + operators.NUM_OPTIONS
    operands = Operands(*arguments[:_NUM_OPERANDS])
    more = dict(zip((*_TENSORS, *_KEYWORDS), arguments[options_end:], strict=True))
    return operands, operators.named(arguments[_NUM_OPERANDS:options_end]), Keywords(**more)


def output(results: Sequence[Tensor], keywords: Keywords) -> CrossEntropyOutput:
    """What a call returns, from the results of the operator: None for what was not asked for."""
    found = CrossEntropyOutput(*results[:_NUM_OUTPUTS])
    wanted = {name: getattr(keywords, f"return_{name}") for name in found._fields[1:]}
    return found._replace(**{name: None for name, is_wanted in wanted.items() if not is_wanted})


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *call, kept = arguments
    operands, options, keywords = _split(call)
    with torch.no_grad():
        found = keyword_passes.forward(operands, options, keywords, kept)
    none = operands.input.new_empty(0)
    results = (*found.output, *found.kept.gradients, found.kept.factor)
    return tuple(none.clone() if result is None else result for result in results)


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    *call, kept = arguments
    operands, options, keywords = _split(call)
    input, linear_weight, linear_bias = operands[:3]
    loss = operators.fake_loss(operands, options)
    rows = (input.size(0), *linear_weight.shape[1:-1])
    dtype = torch.float64 if options.compute_dtype == torch.float64 else torch.float32
    none = input.new_empty(0)
    is_none = options.row.reduction == "none"
    scaled = passes.is_scaled(options)

    def gradient(operand: Tensor | None, wanted: bool) -> Tensor:
        if operand is None or not wanted:
            return none.clone()
        return torch.empty_like(operand, dtype=torch.float32 if scaled else operand.dtype)

    values = {
        "z_loss": torch.empty_like(loss),
        "token_accuracy": input.new_empty(rows if is_none else (), dtype=torch.float32),
        "predicted_tokens": input.new_empty(rows, dtype=torch.int64),
        "lse": input.new_empty(rows, dtype=dtype),
        "entropy": input.new_empty(rows, dtype=dtype),
    }
    return (
        loss,
        *(
            values[name] if getattr(keywords, f"return_{name}") else none.clone()
            for name in CrossEntropyOutput._fields[1:]
        ),
        *(gradient(*each) for each in zip((input, linear_weight, linear_bias), kept, strict=True)),
        input.new_empty((), dtype=torch.float64) if scaled and any(kept) else none.clone(),
    )


def _backward(*arguments: Any) -> list[Tensor]:
    *grads_and_call, mask = arguments
    num = len(_DIFFERENTIABLE)
    operands, options, keywords = _split(grads_and_call[num:])
    loss, entropy, lse = grads_and_call[:num]
    with torch.no_grad():
        found = keyword_passes.backward(operands, options, keywords, mask, (loss, entropy, lse))
    return [gradient for gradient in found if gradient is not None]


def _fake_backward(*arguments: Any) -> list[Tensor]:
    operands, mask = arguments[3 : 3 + _NUM_OPERANDS], arguments[-1]
    pairs = zip(operands, mask, strict=True)
    return [torch.empty_like(x) for x, wanted in pairs if wanted and x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *call, ctx.kept = inputs
    operands, ctx.options, keywords = _split(call)
    tensors = (keywords.token_weight, keywords.num_items_in_batch)
    ctx.keywords = keywords._replace(token_weight=None, num_items_in_batch=None)
    # lse and entropy do not depend on target and weight.
    varies = _DIFFERENTIABLE if any(ctx.needs_input_grad[:3]) else ("loss",)
    fixed = dict(zip(CrossEntropyOutput._fields, output, strict=False))
    ctx.mark_non_differentiable(
        *(x for name, x in fixed.items() if name not in varies), *output[_NUM_OUTPUTS:]
    )
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, *tensors, *output[_NUM_OUTPUTS:])


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    others = (None,) * (_NUM_ARGUMENTS - _NUM_OPERANDS + 1)
    of_output = CrossEntropyOutput(*grads[:_NUM_OUTPUTS])
    given = tuple(getattr(of_output, name) for name in _DIFFERENTIABLE)
    if all(grad is None for grad in given):
        return (None,) * _NUM_OPERANDS + others
    saved = ctx.saved_tensors
    operands = Operands(*saved[:_NUM_OPERANDS])
    token_weight, num_items, *gradients, factor = saved[_NUM_OPERANDS:]
    keywords = ctx.keywords._replace(token_weight=token_weight, num_items_in_batch=num_items)
    needed = list(ctx.needs_input_grad[:_NUM_OPERANDS])
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        found = reference.output_gradients(operands, ctx.options, keywords, needed, given)
        return *found, *others
    has_all = all(
        kept or not needs for kept, needs in zip((*ctx.kept, False, False), needed, strict=True)
    )
    if has_all and given[1] is None and given[2] is None:
        grad = given[0]
        assert grad is not None
        if passes.is_scaled(ctx.options):
            grad = grad * factor
        each = [  # in new memory: a graph may be run through again
            (gradient * grad).to(operand.dtype) if needs else None
            for gradient, operand, needs in zip(gradients, operands, needed, strict=False)
        ]
        return *each, None, None, *others
    again = iter(backward_op(*given, *flat(operands, ctx.options, keywords), needed))
    return *(next(again) if needs else None for needs in needed), *others


operators.register(_library, forward_op, _forward, _fake_forward)
operators.register(_library, backward_op, _backward, _fake_backward)
torch.library.register_autograd(forward_op, _gradients, setup_context=_setup_context)
torch.library.register_autograd(
    backward_op,
    operators.no_second_derivative,
    setup_context=lambda ctx, inputs, output: None,
)
