"""Operators that write over tensors.

inplace_backward of cross entropy: the backward pass writes the gradient over the logits.

Anything that would compute with the overwritten numbers must raise instead. Autograd raises where
it sees that the version of the logits was counted up. This module checks what it cannot see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _privates
from .._privates import functorch_is_active, has_tangents, is_batched, is_tracing
from . import by_torch, fakes
from .autograd import Differentiable
from .description import library

# Multiplies a contiguous gradient, in place. It costs nothing where the factor is 1.
scale_kept = _privates.without_autograd(library, "scale_kept")
_privates.count_versions(library, "scale_kept")
fakes.register_overwriting("scale_kept")
# Writes the gradient of token values over the logits.
overwrite_tokens = _privates.without_autograd(library, "token_values_backward_inplace")
_privates.count_versions(library, "token_values_backward_inplace")
fakes.register_overwriting("token_values_backward_inplace")

_PROBLEM = "cross_entropy: inplace_backward=True "


def make_call(
    derivatives: Differentiable, call: Callable[..., Tensor]
) -> Callable[[Tensor, Tensor, Tensor | None, Any], Tensor]:
    """The loss with inplace_backward. call: the loss without it, if nothing can be overwritten."""
    name = f"{derivatives.loss.name}_backward_inplace"
    overwrite = _privates.without_autograd(library, name)
    _privates.count_versions(library, name)
    fakes.register_overwriting(name)
    overload = getattr(torch.ops.lossops, name).default
    names = tuple(_privates.schema_of(overload)[0])
    apply = _privates.short_apply(_make_function(derivatives, overwrite, names))

    def overwriting(input: Tensor, target: Tensor, weight: Tensor | None, options: Any) -> Tensor:
        _check_transforms(input, target, weight)
        if not (torch.is_grad_enabled() and input.requires_grad) or is_tracing():
            return call(input, target, weight, options)
        if _privates.saved_tensors_have_hooks():
            # What else reads the logits would not notice that they were overwritten.
            return call(input, target, weight, options)
        _check_overwritable(input, target=target, weight=weight)  # fault: overwritable
        result: Tensor = apply(*by_torch.alive((input, target, weight)), options)
        return result

    return overwriting


def _make_function(
    derivatives: Differentiable, overwrite: Callable[..., Any], names: tuple[str, ...]
) -> Any:
    """names: the names of the arguments of `overwrite`, in order."""
    loss = derivatives.loss
    forward_op = _privates.below_autograd(loss.ops.forward)

    class OverwritingFunction(torch.autograd.Function):
        """The gradient of input takes the memory of input."""

        @staticmethod
        def forward(
            ctx: Any, input: Tensor, target: Tensor, weight: Tensor | None, options: Any
        ) -> Tensor:
            output = forward_op(input, target, weight, *options)
            derivatives.save_for_backward(ctx, (input, target, weight), options, output)
            ctx.is_overwritten = False
            result: Tensor = output[0]
            return result

        @staticmethod
        def backward(ctx: Any, grad: Tensor | None) -> Any:
            if grad is None or not ctx.needs_input_grad[0] or torch.compiler.is_compiling():
                return derivatives.backward(ctx, grad)
            if ctx.is_overwritten:  # fault: overwritten-twice
                raise RuntimeError(
                    "cross_entropy: a backward pass has overwritten input, and with "
                    "inplace_backward=True there cannot be another; leave out retain_graph or "
                    "inplace_backward"
                )
            if torch.is_grad_enabled():
                raise RuntimeError(_PROBLEM + "does not work with create_graph=True")
            _check_transforms(grad)
            input, target, weight, *terms = _saved(ctx)
            _check_storage(input, grad_output=grad)  # fault: overwritten-storage
            # The other gradients come first: they need the logits.
            operands = (input, target, weight)
            needed = [False, *ctx.needs_input_grad[1:3]]
            rest: list[Tensor | None] = [None, None]
            if any(needed):
                rest = derivatives.gradients(needed, grad, operands, terms, ctx.options)[1:]
            ctx.is_overwritten = True
            given = {
                "input": input,
                "grad_output": grad,
                "target": target,
                "weight": weight,
                **dict(zip(loss.ops.terms, terms, strict=True)),
                **loss.ops.formula(ctx.options),
            }
            overwrite(*map(given.__getitem__, names))  # allocates nothing
            return input.detach(), *rest, None

    _privates.name_nodes(OverwritingFunction, f"lossops_{loss.name}_inplace")
    return OverwritingFunction


def _saved(ctx: Any) -> tuple[Any, ...]:
    try:
        saved: tuple[Any, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if not _privates.is_version_error(error):
            raise
        raise RuntimeError(
            _PROBLEM + "has no logits to compute with: an argument was modified by an inplace "
            "operation between the loss and its backward pass. Another loss with inplace_backward "
            "does that, of these logits or of another part of the tensor that they are a part of "
            "(chunk, split, a slice): compute each part's logits by themselves, as in "
            "[loss(head(x), t) for x, t in parts], or leave out inplace_backward. torch says: "
            f"{error}"
        ) from None
    return saved


def _check_transforms(*tensors: Tensor | None) -> None:
    """Raises if more than one gradient is wanted: tangents, torch.func, batches."""
    if has_tangents(*tensors):
        raise NotImplementedError(_PROBLEM + "has no forward-mode derivative")
    if functorch_is_active() or any(x is not None and is_batched(x) for x in tensors):
        raise RuntimeError(_PROBLEM + "does not work in torch.func, nor with is_grads_batched=True")


def _check_overwritable(input: Tensor, **others: Tensor | None) -> None:
    """Raises if writing the gradient over the logits would destroy something else."""
    problem = _PROBLEM + "cannot overwrite input, "
    if input.is_leaf:
        raise ValueError(
            problem + "which is a leaf that requires grad: its values are yours, and input.grad "
            "would share their memory; pass what a layer computed"
        )
    if _is_view_of_leaf(input):
        raise ValueError(
            problem
            + "which is a view of a leaf, whose values are yours; pass what a layer computed"
        )
    _check_storage(input, **others)
    last = 0
    for stride, size in sorted(zip(input.stride(), input.shape, strict=True)):
        if size > 1:
            if stride <= last:
                raise ValueError(
                    problem + f"whose elements share memory (shape {tuple(input.shape)}, strides "
                    f"{input.stride()}); pass input.contiguous()"
                )
            last += (size - 1) * stride


def _is_view_of_leaf(input: Tensor) -> bool:
    """Whether input shares memory with a leaf that one chain of operations leads to."""
    node: Any = input.grad_fn
    while node is not None:
        before = [function for function, _ in node.next_functions if function is not None]
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            return _memory(leaf) == _memory(input)
        node = before[0] if len(before) == 1 else None
    return False


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _check_storage(input: Tensor, **others: Tensor | None) -> None:
    memory = _memory(input)
    for name, tensor in others.items():
        if tensor is not None and memory != 0 and _memory(tensor) == memory:
            raise ValueError(
                _PROBLEM + f"cannot overwrite input, which shares memory with {name}; pass a copy "
                f"of {name}"
            )
