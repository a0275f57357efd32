"""The operators that graphs hold, for torch.compile and torch.export: the passes as they are.

linear_cross_entropy_forward   the loss, what its backward pass needs, and kept gradients
linear_cross_entropy_backward  the gradients whose output_mask is set, computed again
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._ops.losses import CROSS_ENTROPY
from . import passes, reference
from .arguments import renamed
from .passes import Operands, Options

_ops = CROSS_ENTROPY.loss.ops

# The options of cross entropy's operators that a head takes, with their types in a schema. Another
# keyword of the row operators is one line here, and an argument of the functions.
ROW_OPTIONS = {
    "ignore_index": "int",
    "reduction": "str",
    "label_smoothing": "float",
    "float32_result": "bool",
}

OPERANDS = "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? weight"
OPTIONS = ", ".join(
    [f"{kind} {name}" for name, kind in ROW_OPTIONS.items()]
    + ["ScalarType compute_dtype, ScalarType logits_dtype, ScalarType accum_dtype"]
    + ["SymInt? max_workspace_bytes, SymInt? batch_chunk_size"]
)
_NUM_OPERANDS = len(Operands._fields)
NUM_OPTIONS = len(ROW_OPTIONS) + len(Options._fields) - 1

_library = torch.library.Library("lossops", "FRAGMENT")
_library.define(
    f"linear_cross_entropy_forward({OPERANDS}, {OPTIONS}, bool[3] kept, bool with_stats) -> "
    "(Tensor loss, Tensor row_stats, Tensor grad_input, Tensor grad_linear_weight, "
    "Tensor grad_linear_bias, Tensor factor)"
)
_library.define(
    f"linear_cross_entropy_backward(Tensor grad_output, {OPERANDS}, Tensor? row_stats, "
    f"{OPTIONS}, bool[5] output_mask) -> Tensor[]"
)
forward_op = torch.ops.lossops.linear_cross_entropy_forward.default
backward_op = torch.ops.lossops.linear_cross_entropy_backward.default


def flat(options: Options) -> tuple[Any, ...]:
    """The options as the operators take them."""
    row, *others = options
    return *(getattr(row, name) for name in ROW_OPTIONS), *others


def named(values: Sequence[Any]) -> Options:
    """The options among the arguments of an operator."""
    row = dict(zip(ROW_OPTIONS, values, strict=False))
    return Options(_ops.Options(**row), *values[len(row) :])


def _split(arguments: Sequence[Any]) -> tuple[Operands, Options, Sequence[Any]]:
    options_end = _NUM_OPERANDS + NUM_OPTIONS
    operands = Operands(*arguments[:_NUM_OPERANDS])
    return operands, named(arguments[_NUM_OPERANDS:options_end]), arguments[options_end:]


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    operands, options, (kept, with_stats) = _split(arguments)
    with torch.no_grad():
        found = passes.forward(operands, options, kept, with_stats=with_stats)
    none = operands.input.new_empty(0)
    results = (found.row_stats, *found.kept.gradients, found.kept.factor)
    return found.loss, *(none.clone() if result is None else result for result in results)


def _fake_logits(operands: Operands, options: Options) -> Tensor:
    shape = (operands.input.size(0), *operands.linear_weight.shape[:-1])
    return operands.input.new_empty(shape, dtype=options.logits_dtype)


def _fake_rows(operands: Operands, options: Options) -> tuple[Tensor, Tensor]:
    """The loss and row_stats."""
    row = passes.row_options(options)
    logits = _fake_logits(operands, options)
    loss, row_stats, _ = _ops.forward(logits, operands.target, operands.weight, *row)
    return loss.to(passes.loss_dtype(operands, options)), row_stats


def fake_loss(operands: Operands, options: Options) -> Tensor:
    return _fake_rows(operands, options)[0]


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    operands, options, (kept, with_stats) = _split(arguments)
    input, linear_weight, linear_bias = operands[:3]
    loss, row_stats = _fake_rows(operands, options)
    scaled = passes.is_scaled(options)

    def gradient(operand: Tensor | None, wanted: bool) -> Tensor:
        if operand is None or not wanted:
            return input.new_empty(0)
        return torch.empty_like(operand, dtype=torch.float32 if scaled else operand.dtype)

    return (
        loss,
        row_stats if with_stats and not any(kept) else input.new_empty(0),
        *(gradient(*each) for each in zip((input, linear_weight, linear_bias), kept, strict=True)),
        input.new_empty((), dtype=torch.float64) if scaled and any(kept) else input.new_empty(0),
    )


def _backward(grad: Tensor, *arguments: Any) -> list[Tensor]:
    row_stats = arguments[_NUM_OPERANDS]
    without = (*arguments[:_NUM_OPERANDS], *arguments[_NUM_OPERANDS + 1 :])
    operands, options, (mask,) = _split(without)
    with torch.no_grad():
        found = passes.backward(operands, options, mask, grad, row_stats)
    return [gradient for gradient in found if gradient is not None]


def _fake_backward(grad: Tensor, *arguments: Any) -> list[Tensor]:
    operands, mask = arguments[:_NUM_OPERANDS], arguments[-1]
    pairs = zip(operands, mask, strict=True)
    return [torch.empty_like(x) for x, wanted in pairs if wanted and x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    operands, ctx.options, (ctx.kept, ctx.with_stats) = _split(inputs)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    # A second derivative needs the operands.
    ctx.save_for_backward(*operands, *output[1:])


def _gradients(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    others = (None,) * (NUM_OPTIONS + 2)
    if grad is None:
        return (None,) * _NUM_OPERANDS + others
    saved = ctx.saved_tensors
    operands, (row_stats, *gradients, factor) = Operands(*saved[:_NUM_OPERANDS]), saved[5:]
    needed = list(ctx.needs_input_grad[:_NUM_OPERANDS])
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return *reference.gradients(operands, ctx.options, needed, grad), *others
    has_all = all(
        kept or not needs for kept, needs in zip((*ctx.kept, False, False), needed, strict=True)
    )
    if has_all:
        # In new memory: a graph may be run through again.
        if passes.is_scaled(ctx.options):
            grad = grad * factor
        each = [
            (gradient * grad).to(operand.dtype) if needs else None
            for gradient, operand, needs in zip(gradients, operands, needed, strict=False)
        ]
        return *each, None, None, *others
    stats = row_stats if ctx.with_stats and not any(ctx.kept) else None
    found = iter(backward_op(grad, *operands, stats, *flat(ctx.options), needed))
    return *(next(found) if needs else None for needs in needed), *others


def no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "linear_cross_entropy: a graph that holds its backward pass has no second derivative; "
        "compute it outside of the graph, with create_graph=True"
    )


def register(library: Any, operator: Any, kernel: Any, fake: Any) -> None:
    """Registers the kernel of an operator, which is the same for both devices, and its fake. Their
    errors name the head."""
    for device in ("CPU", "CUDA"):
        library.impl(operator, _naming(kernel), device)
    torch.library.register_fake(operator, _naming(fake))


def _naming(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def named(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (IndexError, NotImplementedError, RuntimeError, ValueError) as error:
            found = renamed(error)
            if found is error:
                raise
            raise found from None

    return named


register(_library, forward_op, _forward, _fake_forward)
register(_library, backward_op, _backward, _fake_backward)
torch.library.register_autograd(forward_op, _gradients, setup_context=_setup_context)
torch.library.register_autograd(
    backward_op, no_second_derivative, setup_context=lambda ctx, inputs, output: None
)
