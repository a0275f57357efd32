"""First derivatives: the autograd functions of a loss, and its backward pass.

`Differentiable` is the loss as autograd sees it. `KeepingFunction` returns the kept gradients,
which the forward pass has computed. `gradients` computes all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import _privates
from .._privates import (
    CONTEXT_HAS_ATTRIBUTES,
    dispatch_modes,
    functorch_is_active,
    has_tangents,
    is_batched,
    levels,
)
from . import by_torch, errors, inductor
from .description import Loss
from .double_backward import gradient_function

_grad_is_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling

# Returns the gradients of input, target and weight; None for one that is not needed. Arguments: for
# each operand whether its gradient is needed; grad_output; the operands; what *_forward returned
# beside the loss; the options.
Gradients: TypeAlias = Callable[..., list[Tensor | None]]


class Differentiable:
    """A loss as autograd sees it: what the other modules call if a gradient is wanted."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.gradients = _make_gradients(loss)
        # Takes input, target, weight and the options. Returns the loss.
        self.apply = _privates.short_apply(_make_function(self))
        # Takes input, a tuple of the others, and target if its gradient is needed. Returns the
        # loss, and keeps its gradients.
        self.apply_keeping = _privates.short_apply(_make_keeping_function(self))
        torch.library.register_autograd(
            f"lossops::{loss.name}_forward", self.backward, setup_context=self.setup_context
        )

    def save_for_backward(
        self,
        ctx: Any,
        operands: tuple[Tensor, Tensor, Tensor | None],
        options: Any,
        output: Sequence[Tensor],
    ) -> None:
        """Saves what `backward` needs of the arguments and the results of *_forward."""
        check = self.loss.check_differentiable
        if check is not None:
            check(*operands[1:])
        ctx.set_materialize_grads(False)
        *terms, mean_terms = output[1:]
        ctx.save_for_backward(*operands, *terms, mean_terms if mean_terms.numel() > 0 else None)
        ctx.options = options

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """`save_for_backward` in the form that torch.library and torch.func call."""
        ctx.mark_non_differentiable(*output[1:])
        self.save_for_backward(ctx, inputs[:3], self.loss.ops.Options(*inputs[3:]), output)

    def backward(self, ctx: Any, *grads: Tensor | None) -> Any:
        """The gradients of all arguments of *_forward, computed from what was saved."""
        others = (None,) * (len(ctx.needs_input_grad) - 3)
        if grads[0] is None:
            return None, None, None, *others
        input, target, weight, *terms = errors.saved_tensors(self.loss.name, ctx)
        needed = list(ctx.needs_input_grad[:3])
        operands = (input, target, weight)
        return *self.gradients(needed, grads[0], operands, terms, ctx.options), *others


def _make_gradients(loss: Loss) -> Gradients:
    ops = loss.ops
    recorded = ops.backward
    computed = _privates.below_autograd(ops.backward)
    differentiated = gradient_function(loss)
    differentiated_plainly = _privates.short_apply(differentiated)

    def gradients(
        needed: list[bool],
        grad_output: Tensor,
        operands: Sequence[Tensor | None],
        terms: Sequence[Tensor | None],
        options: Any,
    ) -> list[Tensor | None]:
        is_compiling = _is_compiling()  # the graph of a backward pass, or compiled autograd
        found: Any
        try:
            # fault: backward-tangents
            if not is_compiling and (is_batched(grad_output) or has_tangents(grad_output)):
                formula = ops.formula(options)
                found = by_torch.gradients(loss, needed, grad_output, operands, formula)
            else:
                arguments = ops.backward_arguments(grad_output, operands, terms, options, needed)
                if _grad_is_enabled():  # create_graph=True
                    if functorch_is_active():
                        found = differentiated.apply(*arguments)
                    else:
                        found = differentiated_plainly(*arguments)
                elif is_compiling or dispatch_modes() > 0:
                    # Before torch 2.12, is_compiling may be False in torch.compile.
                    of_inductor = _privates.is_for_inductor()
                    found = inductor.gradients(loss, arguments) if of_inductor else None
                    found = found or (recorded if is_compiling else computed)(*arguments)
                else:
                    found = computed(*arguments)
        except RuntimeError as error:
            raise errors.as_memory_error(error) from None
        each = iter(found)
        return [next(each) if needs else None for needs in needed]

    return gradients


def _make_function(self: Differentiable) -> Any:
    forward_op = _privates.below_autograd(self.loss.ops.forward)

    class Function(torch.autograd.Function):
        """The loss; any of its operands may need a gradient."""

        @staticmethod
        def forward(
            ctx: Any, input: Tensor, target: Tensor, weight: Tensor | None, options: Any
        ) -> Tensor:
            output = forward_op(input, target, weight, *options)
            self.save_for_backward(ctx, (input, target, weight), options, output)
            ctx.versions = [0 if x is None else x._version for x in (input, target, weight)]
            result: Tensor = output[0]
            return result

        @staticmethod
        def backward(ctx: Any, grad: Tensor | None) -> Any:
            return self.backward(ctx, grad)

    _privates.name_nodes(Function, f"lossops_{self.loss.name}")
    return Function


def _is_one(grad: Tensor) -> bool:
    """Whether a number on the CPU is 1. False if a tracer is on, which the look would disturb."""
    is_plain = type(grad) is Tensor and dispatch_modes() == 0
    return is_plain and grad.item() == 1


def _make_keeping_function(self: Differentiable) -> Any:
    loss, ops = self.loss, self.loss.ops
    # By the shorter way if only input needs a gradient.
    forward_gradient_op, backward_kept_op = ops.forward_gradient, ops.backward_kept
    forward_gradients_op: Any = ops.forward_gradients
    backward_kept_gradients_op: Any = ops.backward_kept_gradients

    def computed_again(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_input, _, *needs_target = ctx.needs_input_grad
        needed = [needs_input, any(needs_target), False]
        saved = ops.Kept(*errors.saved_tensors(loss.name, ctx), *ctx.options)
        operands = (saved.input, saved.target, saved.weight)
        try:
            terms = loss.restored_terms(ops, saved)
        except RuntimeError as error:
            raise errors.as_memory_error(error) from None
        found = self.gradients(needed, grad, operands, terms, ops.options(saved))
        return (found[0], None, found[1]) if needs_target else (found[0], None)

    class KeepingFunction(torch.autograd.Function):
        """The loss and the kept gradients: those of input and target, for a grad_output of 1.

        `kept` of a node is what its backward pass returns: for each argument of forward a gradient.
        """

        @staticmethod
        def forward(
            ctx: Any,
            input: Tensor,
            others: tuple[Tensor, Tensor | None, tuple[Any, ...]],
            needs_gradient: Tensor | None = None,
        ) -> Tensor:
            # `others` is a tuple, because autograd does not look into one for tensors that require
            # a gradient. Its options leave out trailing defaults. needs_gradient: None or target.
            target, weight, options = others
            saved: tuple[Tensor | None, ...]
            if needs_gradient is not None:
                mask = [ctx.needs_input_grad[0], True]
                output = forward_gradients_op(input, target, weight, *options, output_mask=mask)
                saved = (input, target, weight)
                ctx.kept = (output[1], None, output[2])
            elif options or weight is not None:
                output = forward_gradient_op(input, target, weight, *options)
                saved = (input, target, *output[2:], weight)
                ctx.kept = (output[1], None)
            else:
                output = forward_gradient_op(input, target)
                saved = (input, target, *output[2:])
                ctx.kept = (output[1], None)
            if CONTEXT_HAS_ATTRIBUTES:
                ctx.to_save = saved
                ctx.materialize_grads = False
            else:
                ctx.save_for_backward(*saved)
                ctx.set_materialize_grads(False)
            if options or not has_default:
                ctx.options = options
            ctx.versions = (input._version, target._version)
            result: Tensor = output[0]
            return result

        @staticmethod
        def backward(ctx: Any, grad: Tensor | None) -> Any:
            if grad is None:
                return None, None, None  # autograd ignores None beyond what it passed
            # The kept gradients are given away once. The caller may change them from then on.
            kept, ctx.kept = ctx.kept, None  # fault: kept-given-away
            if (
                kept is None
                or _grad_is_enabled()
                or _is_compiling()
                or is_batched(grad)
                or functorch_is_active()
                # fault: tangent-of-grad-output
                or (levels._current_level >= 0 and has_tangents(grad))
            ):
                return computed_again(ctx, grad)
            try:
                # fault: kept-changed
                saved = ctx.saved_tensors  # raises if one has changed
            except RuntimeError as error:
                return _scaled(loss.name, kept, grad, error)
            # Saved-tensor hooks keep torch from asking: `errors.were_changed` written out.
            versions = ctx.versions
            if saved[0]._version > versions[0] or saved[1]._version > versions[1]:
                return _scaled(loss.name, kept, grad, None)
            # The condition is `_is_one` written out, which saves a Python frame.
            # fault: kept-scaled
            if not (
                grad.is_cpu and type(grad) is Tensor and dispatch_modes() == 0 and grad.item() == 1
            ):
                try:
                    if len(kept) == 2:
                        backward_kept_op(kept[0], grad, *saved, *ctx.options)
                    else:
                        backward_kept_gradients_op(kept[0], kept[2], grad, *saved, *ctx.options)
                except RuntimeError as error:  # it may allocate what forward left out
                    raise errors.as_memory_error(error) from None
            return kept

    _privates.name_nodes(KeepingFunction, f"lossops_{loss.name}")
    has_default = _privates.set_on_nodes(KeepingFunction, options=())
    return KeepingFunction


def _scaled(
    name: str, kept: tuple[Tensor | None, ...], grad: Tensor, error: RuntimeError | None
) -> tuple[Tensor | None, ...]:
    """The kept gradients times `grad`. An operand was changed in place, so none can be read.

    A product is rounded twice, by half a unit in the last place each time. That is too little for
    float16: a kept gradient has lost what is below 2^-24, and the grad_output of a gradient scaler
    may be large. On a GPU the value of grad_output is not known without waiting for the device.
    """
    if error is not None and not _privates.is_version_error(error):
        raise error
    if grad.is_cpu and _is_one(grad):
        return kept
    gradients = [gradient for gradient in kept if gradient is not None]
    if any(gradient.dtype == torch.float16 for gradient in gradients):
        raise errors.changed_operand(
            name,
            error,
            "the gradient that was kept is float16, in which small numbers are lost that "
            "grad_output may make large",
        ) from None
    for gradient in gradients:
        gradient.mul_(grad)
    return kept
