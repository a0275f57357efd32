"""Values of rows of logits, such as log-probabilities and entropies.

A loss of `description.py` has an input, a target, a weight and a reduction. `RowValues` describes
operators that have none of these: from tensors of logits and options they compute several values of
each row. Fake kernels, autograd, vmap and second derivatives follow from the description:

    name_forward   takes tensors, of which the first are logits, options, and keeps_stats. It
                   returns the values, and row_stats: what the backward pass needs of each row, with
                   the rows' shape behind its first dimension. Unless keeps_stats is set, row_stats
                   has no elements.
    name_backward  takes the gradients of the values, the tensors, row_stats, the options and
                   output_mask. It returns the gradients of the logits whose mask is set.

All tensors have the rows' dimensions first. So vmap is one call with one more such dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import _privates
from .._privates import (
    dispatch_modes,
    functorch_is_active,
    has_tangents,
    is_batched,
    is_functionalized,
    is_tracing,
    levels,
)
from . import by_torch, errors

# Takes the tensors and the options of *_forward. Returns the values.
Values: TypeAlias = Callable[..., tuple[Tensor, ...]]


class RowValues:
    """The values of rows as torch knows them. A call takes the tensors and the options.

    Args:
        name: the operators are `name_forward` and `name_backward`.
        logits: the names of the tensors of logits. They are differentiable.
        others: the names of the other tensors.
        reference: the values by differentiable functions of torch.
        fake: the values without data. It raises what the kernel raises.
    """

    def __init__(
        self,
        name: str,
        *,
        logits: tuple[str, ...],
        others: tuple[str, ...],
        reference: Values,
        fake: Values,
    ) -> None:
        self.name = name
        self.reference = reference
        self.num_logits = len(logits)
        self.num_tensors = len(logits) + len(others)
        self.forward_op = getattr(torch.ops.lossops, f"{name}_forward").default
        self.backward_op = getattr(torch.ops.lossops, f"{name}_backward").default
        taken, (*values, stats) = _privates.schema_of(self.forward_op)
        tensors = (*logits, *others)
        options = [key for key in taken if key not in tensors][:-1]
        grads = [f"grad_{value}" for value in values]
        assert tuple(taken) == (*tensors, *options, "keeps_stats") and stats == "row_stats"
        assert tuple(_privates.schema_of(self.backward_op)[0]) == (
            *grads, *tensors, "row_stats", *options, "output_mask"
        )  # fmt: skip
        self.num_values, self.num_options = len(values), len(options)
        self._register(fake)
        self._values_below = _privates.below_autograd(self.forward_op)
        self._gradients_below = _privates.below_autograd(self.backward_op)
        self._apply = _privates.short_apply(_make_function(self))
        # short_apply() changed the other's nodes in a way that torch.func does not know.
        self._transformable = _make_function(self)
        self._gradient_function = _make_gradient_function(self)

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        tensors = arguments[: self.num_tensors]
        logits = tensors[: self.num_logits]
        if levels._current_level >= 0 and has_tangents(*logits):  # forward mode
            return self.reference(*arguments)
        results: tuple[Tensor, ...]
        if functorch_is_active():
            # requires_grad shows only the level of torch.func that is on top.
            if is_functionalized():
                return self.reference(*arguments)
            if torch.is_grad_enabled():
                results = self._transformable.apply(*arguments)
            else:
                results = self.forward_op(*arguments, False)
        else:
            needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in logits)
            if is_tracing() or dispatch_modes() > 0:
                # The graph will hold the operator, which has a formula. What torch.jit.trace makes
                # serves calls with and without gradients.
                results = self.forward_op(*arguments, needs_grad or is_tracing())
            elif needs_grad:
                arguments = (*by_torch.alive(tensors), *arguments[self.num_tensors :])
                results = self._apply(*arguments)
            else:
                results = self._values_below(*arguments, False)
        return tuple(results[: self.num_values])

    # ------------------------------------------------------------ derivatives

    def save_for_backward(self, ctx: Any, inputs: Sequence[Any], results: Sequence[Tensor]) -> None:
        """Saves what `backward` needs. inputs: the tensors, the options and perhaps more."""
        ctx.mark_non_differentiable(results[-1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[: self.num_tensors], results[-1])
        ctx.options = tuple(inputs[self.num_tensors : self.num_tensors + self.num_options])

    def backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of all arguments of *_forward."""
        needed = list(ctx.needs_input_grad[: self.num_logits])
        none = (None,) * (len(ctx.needs_input_grad) - self.num_logits)
        grads = grads[: self.num_values]
        present = [grad for grad in grads if grad is not None]
        if not present or not any(needed):
            return *(None for _ in needed), *none
        *tensors, row_stats = errors.saved_tensors(self.name, ctx)
        is_compiling = torch.compiler.is_compiling()
        arguments = (*grads, *tensors, row_stats, *ctx.options, needed)
        found: Sequence[Tensor]
        try:
            if not is_compiling and (any(map(is_batched, present)) or has_tangents(*present)):
                found = self.gradients_by_reference(grads, tensors, ctx.options, needed)
            elif torch.is_grad_enabled():  # create_graph=True, and torch.func
                found = self._gradient_function.apply(*arguments)
            elif is_compiling:
                found = self.backward_op(*arguments)
            else:
                found = self._gradients_below(*arguments)
        except RuntimeError as error:
            raise errors.as_memory_error(error) from None
        each = iter(found)
        return *(next(each) if needs else None for needs in needed), *none

    def gradients_by_reference(
        self,
        grads: Sequence[Tensor | None],
        tensors: Sequence[Any],
        options: Sequence[Any],
        needed: Sequence[bool],
    ) -> list[Tensor]:
        """The gradients of the logits that need one, by the reference."""
        positions = [position for position, needs in enumerate(needed) if needs]

        def values(*logits: Tensor) -> tuple[Tensor, ...]:
            return self.reference(*by_torch.replaced(tensors, positions, logits), *options)

        logits = [tensors[position] for position in positions]
        found = pull_back(values, logits, grads)
        return [
            torch.zeros_like(x) if grad is None else grad
            for x, grad in zip(logits, found, strict=True)
        ]

    def save_for_double_backward(self, ctx: Any, inputs: Sequence[Any], _: Any) -> None:
        *differentiable, mask = inputs
        ctx.set_materialize_grads(False)
        ctx.mask = list(mask)
        end = self.num_values + self.num_tensors
        ctx.save_for_backward(*differentiable[:end])
        ctx.options = tuple(differentiable[end + 1 :])  # behind row_stats

    def double_backward(self, ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """The gradients of all arguments of *_backward, by the reference."""
        if len(grads) == 1 and not isinstance(grads[0], Tensor | None):
            (grads,) = grads  # of one result, which is a list
        saved = by_torch.alive(ctx.saved_tensors)
        sources = [i for i, x in enumerate(saved) if x is not None and ctx.needs_input_grad[i]]

        def gradients(*given: Tensor) -> tuple[Tensor, ...]:
            now = by_torch.replaced(saved, sources, given)
            of_values, tensors = now[: self.num_values], now[self.num_values :]
            return tuple(self.gradients_by_reference(of_values, tensors, ctx.options, ctx.mask))

        found = pull_back(gradients, [saved[i] for i in sources], grads)
        return tuple(by_torch.replaced([None] * len(ctx.needs_input_grad), sources, found))

    # ------------------------------------------------------------ registration

    def _register(self, fake: Values) -> None:
        forward, backward = f"lossops::{self.name}_forward", f"lossops::{self.name}_backward"
        first_stats = self.num_values + self.num_tensors

        def fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
            *taken, keeps_stats = arguments
            values = fake(*taken)
            rows = arguments[0].shape[:-1]
            stats = values[0].new_empty((3 if keeps_stats else 0, *rows))
            return *values, stats

        def fake_backward(*arguments: Any) -> list[Tensor]:
            logits = arguments[self.num_values : self.num_values + self.num_logits]
            mask = arguments[-1]
            return [torch.empty_like(x) for x, wanted in zip(logits, mask, strict=True) if wanted]

        def batch(info: Any, dim: int | None, x: Any, new_dim: int = 0) -> Any:
            """The tensor with the batch as dimension new_dim."""
            if not isinstance(x, Tensor):
                return x
            if dim is None:
                sizes = list(x.shape)
                sizes.insert(new_dim, info.batch_size)
                return x.unsqueeze(new_dim).expand(sizes)
            return x.movedim(dim, new_dim)

        def vmap_forward(info: Any, in_dims: Any, *arguments: Any) -> Any:
            given = [batch(info, dim, x) for dim, x in zip(in_dims, arguments, strict=True)]
            return self.forward_op(*given), (*[0] * self.num_values, 1)

        def vmap_backward(info: Any, in_dims: Any, *arguments: Any) -> Any:
            given = [
                batch(info, dim, x, 1).contiguous() if i == first_stats else batch(info, dim, x)
                for i, (dim, x) in enumerate(zip(in_dims, arguments, strict=True))
            ]
            found = self.backward_op(*given)
            return found, [0] * len(found)

        torch.library.register_fake(forward, fake_forward)
        torch.library.register_fake(backward, fake_backward)
        torch.library.register_vmap(forward, vmap_forward)
        torch.library.register_vmap(backward, vmap_backward)
        torch.library.register_autograd(
            forward,
            self.backward,
            setup_context=lambda ctx, inputs, output: self.save_for_backward(ctx, inputs, output),
        )
        torch.library.register_autograd(
            backward,
            self.double_backward,
            setup_context=lambda ctx, inputs, output: self.save_for_double_backward(
                ctx, inputs, output
            ),
        )


def _make_function(self: RowValues) -> Any:
    class Function(torch.autograd.Function):
        """The values and row_stats of the tensors and the options."""

        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: Any) -> Any:
            return self._values_below(*arguments, True)

        setup_context = staticmethod(self.save_for_backward)

        # A static method: compiled autograd passes no ctx to a bound one.
        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return self.backward(ctx, *grads)

    _privates.name_nodes(Function, f"lossops_{self.name}")
    return Function


def _make_gradient_function(self: RowValues) -> Any:
    class GradientFunction(torch.autograd.Function):
        """*_backward, for create_graph=True and torch.func."""

        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: Any) -> Any:
            return tuple(self._gradients_below(*arguments))

        setup_context = staticmethod(self.save_for_double_backward)

        # A static method: compiled autograd passes no ctx to a bound one.
        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return self.double_backward(ctx, *grads)

    _privates.name_nodes(GradientFunction, f"lossops_{self.name}")
    return GradientFunction


def pull_back(
    function: Callable[..., Sequence[Tensor]],
    sources: Sequence[Tensor],
    grads: Sequence[Tensor | None],
) -> Sequence[Tensor | None]:
    """The gradients of the sources from those of function's results. None: a zero."""
    if not sources:
        return ()
    if functorch_is_active():  # torch.autograd.grad does not see its levels
        results, pull = torch.func.vjp(function, *by_torch.alive(sources))
        filled = (
            torch.zeros_like(result) if grad is None else grad
            for result, grad in zip(results, grads, strict=True)
        )
        found: Sequence[Tensor | None] = pull(tuple(filled))
        return found
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [by_torch.differentiable(x, True) for x in sources]
        results = function(*aliases)
        roots = [
            (result, grad)
            for result, grad in zip(results, grads, strict=True)
            if grad is not None and result.requires_grad
        ]
        if not roots:
            return [None] * len(sources)
        return torch.autograd.grad(
            [result for result, _ in roots],
            aliases,
            [grad for _, grad in roots],
            allow_unused=True,
            create_graph=create_graph,
        )
