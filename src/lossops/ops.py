"""What torch must know of the operators beyond their kernels.

csrc/bindings.cpp defines the schemas and the CPU and CUDA kernels. Here each operator gets its
fake kernel (for `torch.compile` and `torch.export`), its autograd formula and its behaviour
under autocast, once for all elementwise losses and once for cross entropy.

A public operator such as `lossops::mse_loss` returns the loss. Where it is recorded or transformed
it goes through `lossops::mse_loss_forward`, which also returns what the backward pass needs; else
it takes the way of the Python functions, `_Loss.call`.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _extension

_extension.load()

_library = torch.library.Library("lossops", "IMPL")

# A differentiable torch implementation with the arguments of the *_forward operator.
Reference: TypeAlias = Callable[..., Tensor]

# Of the loss of an element with respect to input, by input, target and the loss's parameters, in
# torch's pointwise functions.
Derivative: TypeAlias = Callable[..., Tensor]


def environment_flag(name: str, default: bool) -> bool:
    """A switch from the environment."""
    value = os.environ.get(name)
    if value is None:
        return default
    return value.strip().lower() not in ("", "0", "false", "no", "off")


_keeps_gradients = environment_flag("LOSSOPS_KEEP_GRADIENTS", True)


def keep_gradients(enabled: bool) -> None:
    """Whether the forward pass of a loss that is to be differentiated computes the gradient too.

    On by default: a training step then reads its inputs once and writes the gradient once. The
    gradient takes its memory from the forward pass on, not from the backward pass, and a loss that
    is never differentiated has computed it in vain (`torch.no_grad()` spares it). The environment
    variable LOSSOPS_KEEP_GRADIENTS=0 switches it off at import.

    Args:
        enabled: compute gradients in forward from now on, or no longer.
    """
    global _keeps_gradients
    _keeps_gradients = bool(enabled)


_functorch_is_active = torch._C._are_functorch_transforms_active
_is_tracing = torch._C._is_tracing
_dispatch_modes = torch._C._len_torch_dispatch_stack
_grad_is_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead

_HALF_DTYPES = (torch.float16, torch.bfloat16)


def _widened(dtype: torch.dtype, float32_result: bool) -> torch.dtype:
    return torch.float32 if float32_result and dtype in _HALF_DTYPES else dtype


def _wide(tensors: Sequence[Tensor | None], float32_result: bool) -> list[Tensor | None]:
    """As autocast of torch's losses has its operands."""
    # fault: wide
    return [x if x is None else x.to(_widened(x.dtype, float32_result)) for x in tensors]


def _has_tangents(*tensors: Tensor | None) -> bool:
    """Whether forward-mode derivatives are wanted; in torch.func that cannot be seen: perhaps."""
    if forward_ad._current_level < 0:  # fault: tangents
        return False
    return _functorch_is_active() or any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )


def _without_autograd(name: str) -> Callable[..., Any]:
    """The operator `lossops::{name}`, which lossops alone calls, by the shortest way.

    It has no formula and no fallback in its place: autograd passes it by.
    """
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    overload = getattr(torch.ops.lossops, name).default
    return getattr(overload, "_op", overload)  # spares a Python frame


def _short_apply(function: Any) -> Callable[..., Any]:
    """`function.apply` for small tensors, outside torch.func.

    Without Function.apply, whose Python costs a third of the whole and does nothing but look for
    torch.func and for tensors that it left behind, and without the search for backward and vjp in
    each backward pass.
    """
    function._backward_cls.apply = function.backward
    return super(torch.autograd.Function, function).apply


_is_batched = torch._C._functorch.is_legacy_batchedtensor  # is_grads_batched=True


def _is_one(grad: Tensor) -> bool:
    """Whether a number on the CPU is 1; False where looking at it would disturb a tracer."""
    is_plain = type(grad) is Tensor and _dispatch_modes() == 0
    return is_plain and grad.item() == 1


def as_memory_error(error: Exception) -> Exception:
    """torch's error where a GPU has no memory left: C++ here has RuntimeError only."""
    message = str(error)
    is_one = type(error) is RuntimeError and message.startswith("CUDA out of memory.")
    return torch.OutOfMemoryError(message) if is_one else error


def _check_devices(op: str, input: Tensor, **others: Tensor | None) -> None:
    """As the kernels do: fake kernels also meet a real tensor beside one without data."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != input.device:
            raise RuntimeError(f"{op}: {name} is on {tensor.device} but input is on {input.device}")


_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGRAL = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
DTYPES = _FLOATING + _INTEGRAL
_CLASS_INDICES = (torch.int64, torch.int32, torch.uint8)


def _check_dtype(
    op: str,
    name: str,
    tensor: Tensor | None,
    allowed: tuple[torch.dtype, ...],
    what: str = "",
) -> None:
    """As the kernels do, for fake ones."""
    if tensor is not None and tensor.dtype not in allowed:
        *most, last = [str(dtype).removeprefix("torch.") for dtype in allowed]
        what = what or f"{', '.join(most)} or {last}"
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise RuntimeError(f"{op}: {name} must be {what}, but is {dtype}")


@contextlib.contextmanager
def _naming_arguments(name: str, input: Tensor, target: Tensor) -> Iterator[None]:
    """Adds to torch's errors about shapes and dtypes whose they are."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # what torch.compile throws to itself
            raise
        raise RuntimeError(
            f"{name}: input {tuple(input.shape)} {input.dtype} and target {tuple(target.shape)} "
            f"{target.dtype} do not go together: {error}"
        ) from None


def _differentiable(tensor: Tensor | None, needed: bool) -> Any:
    """An alias of its own, so that a gradient with respect to it is a partial one."""
    if tensor is None:
        return None
    # A pull-back of torch.func may be called when the level of its vjp is gone.
    alias = _unwrap_if_dead(tensor)
    alias = alias.view_as(alias)  # fault: second-alias
    return alias.requires_grad_() if needed and not alias.requires_grad else alias


def _alive(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Without the wrappers of levels that are gone."""
    return [None if tensor is None else _unwrap_if_dead(tensor) for tensor in tensors]


def _call_for_each(op: Any, info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
    """vmap by one call for each sample: right for every layout and reduction, not fused."""

    def sample(arg: Any, dim: int | None, index: int) -> Any:
        if not isinstance(dim, int):
            return arg
        if info.batch_size == 0:
            return arg.new_zeros(arg.shape[:dim] + arg.shape[dim + 1 :])
        return arg.select(dim, index)  # fault: vmap-dimension

    # A batch of none still needs one call, to learn what its results look like.
    results = [
        op(*(sample(arg, dim, i) for arg, dim in zip(args, in_dims, strict=True)), **kwargs)
        for i in range(max(info.batch_size, 1))
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results)[: info.batch_size], 0
    stacked = [torch.stack(parts)[: info.batch_size] for parts in zip(*results, strict=True)]
    return type(results[0])(stacked), type(results[0])([0] * len(stacked))


class _Loss:
    """The operators of one loss: registrations, and the fast way to call them."""

    def __init__(self, name: str, reference: Reference) -> None:
        self.name = name
        self.reference = reference
        self.public_op = getattr(torch.ops.lossops, name).default
        self.forward_op = getattr(torch.ops.lossops, f"{name}_forward").default
        self.backward_op = getattr(torch.ops.lossops, f"{name}_backward").default
        self.value_op = _without_autograd(f"{name}_value")
        # Of *_value and *_forward: input, target, weight and the options.
        schema = getattr(torch.ops.lossops, f"{name}_value").default._schema
        self.arguments = [(argument.name, argument.default_value) for argument in schema.arguments]
        self.option_names, self.defaults = zip(*self.arguments[3:], strict=True)
        self.public_names = [argument.name for argument in self.public_op._schema.arguments][2:]
        self.float32_position = self.option_names.index("float32_result")
        self.shortened = self._short_calls()
        # Of *_backward: grad_output, input, target, weight, terms, options and in between the mask.
        names = [argument.name for argument in self.backward_op._schema.arguments]
        self.options_position = names.index(self.option_names[0])
        self.mask_position = names.index("output_mask")
        self.forward_gradient_op = _without_autograd(f"{name}_forward_gradient")
        self.backward_kept_op = _without_autograd(f"{name}_backward_kept")

        torch.library.register_fake(f"lossops::{name}_forward", self.fake_forward)
        torch.library.register_fake(f"lossops::{name}_backward", self.fake_backward)
        torch.library.register_fake(f"lossops::{name}_value", self.fake_value)
        torch.library.register_fake(f"lossops::{name}_forward_gradient", self.fake_forward_gradient)
        torch.library.register_fake(f"lossops::{name}_backward_kept", self.fake_backward_kept)
        torch.library.register_fake(f"lossops::{name}", self.fake_loss)
        torch.library.register_autograd(
            f"lossops::{name}_forward", self.backward, setup_context=self.setup_context
        )
        torch.library.register_autograd(
            f"lossops::{name}_backward",
            self.double_backward,
            setup_context=self.setup_double_backward,
        )
        for op in (self.forward_op, self.backward_op):
            torch.library.register_vmap(op, functools.partial(_call_for_each, op))
        _library.impl(name, self.autograd_kernel, "Autograd")
        for device in ("CPU", "CUDA"):
            _library.impl(name, self.autocast_kernel, f"Autocast{device}")
        self._make_functions()

    # ------------------------------------------------------------------ calling

    def call(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        options: tuple[Any, ...],
        may_keep: bool | None = None,
    ) -> Tensor:
        """The loss, by the arguments of the *_forward operator.

        The same as the operator with its autograd formula, without the Python that torch.library
        puts around it. Small losses take as long as the lines here.

        Where input alone requires a gradient, forward computes it too, if it can: one pass then
        reads the inputs and writes the gradient. It is the gradient for a grad_output of 1;
        backward looks, on the device, whether that is what it got, and computes the gradient again
        where it is not.

        may_keep: what `may_keep()` says, where the caller knows: looking at shapes takes time.
        """
        if forward_ad._current_level >= 0 and _has_tangents(input, target, weight):
            return self.call_of_torch(input, target, weight, *options)
        if _functorch_is_active():
            return self.call_under_functorch(input, target, weight, *options)
        if _is_tracing() or _dispatch_modes() > 0:  # fault: traced
            # A graph is made of what is called here: the operators below have no gradients.
            return self.public_call(input, target, weight, options)
        try:
            short = self.shortened.get(options, options)
        except TypeError:
            short = options  # cannot be hashed, and the operator says what should be there
        loss: Tensor
        if _grad_is_enabled():
            if target.requires_grad or (weight is not None and weight.requires_grad):
                loss = self.apply(*_alive((input, target, weight)), *options)
                return loss
            if input.requires_grad:
                # A tensor that torch.func left behind has a graph of its own.
                input = _unwrap_if_dead(input)
                if may_keep is None:
                    may_keep = self.may_keep(input, target, weight, options)
                if may_keep and _keeps_gradients:  # fault: keep-switch
                    loss = self.apply_keeping(input, (target, weight, short))
                else:
                    loss = self.apply(input, target, weight, *options)
                return loss
        if short or weight is not None:
            loss = self.value_op(input, target, weight, *short)
        else:
            loss = self.value_op(input, target)
        return loss

    def may_keep(
        self, input: Tensor, target: Tensor, weight: Tensor | None, options: tuple[Any, ...]
    ) -> bool:
        """Whether forward can compute the gradient of input."""
        raise NotImplementedError

    def call_of_torch(self, *args: Any) -> Tensor:
        """The same by torch, which has forward-mode derivatives."""
        if not _functorch_is_active():
            self.value_op(*args)  # says what is wrong with the arguments
        options = args[3:]
        operands = _wide(args[:3], options[self.float32_position])
        return self.reference(*operands, *self.reference_options(options))

    def reference_options(self, options: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the reference takes after weight, which *_backward takes too."""
        return options[: self.float32_position] + options[self.float32_position + 1 :]

    def public_call(
        self, input: Tensor, target: Tensor, weight: Tensor | None, options: Sequence[Any]
    ) -> Tensor:
        """The public operator, by the arguments of call()."""
        given = dict(zip(self.option_names, options, strict=True), weight=weight)
        named = {name: given[name] for name in self.public_names}
        loss: Tensor = self.public_op(input, target, **named)
        return loss

    def call_under_functorch(self, *args: Any) -> Tensor:
        if torch.is_grad_enabled():
            # What requires a gradient may do so at another level than this one.
            loss: Tensor = self.transformable_function.apply(*args)[0]
            return loss
        with torch._C._AutoDispatchBelowAutograd():
            loss = self.forward_op(*args)[0]
            return loss

    def _make_functions(self) -> None:
        """The loss, by three Functions, and its gradients, by one.

        torch.func wants setup_context, which costs 10 us a call, and takes no formula of
        register_autograd.
        """
        loss = self
        forward_gradient_op, backward_kept_op = self.forward_gradient_op, self.backward_kept_op

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Tensor:
                with torch._C._AutoDispatchBelowAutograd():
                    output = loss.forward_op(*args)
                loss.save_for_backward(ctx, args, output)
                result: Tensor = output[0]
                return result

            @staticmethod
            def backward(ctx: Any, grad: Tensor | None) -> Any:
                return loss.backward(ctx, grad)

        class KeepingFunction(torch.autograd.Function):
            """The gradient comes with the loss."""

            @staticmethod
            def forward(
                ctx: Any, input: Tensor, others: tuple[Tensor, Tensor | None, tuple[Any, ...]]
            ) -> Tensor:
                # A tuple, in which autograd does not look for more that requires a gradient, and
                # to_save instead of save_for_backward, which is a Python frame around it.
                target, weight, options = others
                operands = (input, target)
                if options or weight is not None:
                    output = forward_gradient_op(input, target, weight, *options)
                    ctx.options = options
                    ctx.to_save = (*operands, *output[2:], weight)
                else:
                    output = forward_gradient_op(input, target)
                    ctx.to_save = operands + output[2:]
                ctx.kept = output[1]
                ctx.materialize_grads = False
                result: Tensor = output[0]
                return result

            @staticmethod
            def backward(ctx: Any, grad: Tensor | None) -> Any:
                if grad is None:
                    return None, None
                # The gradient that forward left is given away once: nothing may change it then.
                kept, ctx.kept = ctx.kept, None  # fault: kept-given-away
                if (
                    kept is None
                    or _grad_is_enabled()
                    or _is_compiling()
                    or _is_batched(grad)
                    or _functorch_is_active()
                    or forward_ad._current_level >= 0  # fault: tangent-of-grad-output
                ):
                    saved = ctx.saved_tensors  # raises where one has changed
                    try:
                        arguments = loss.backward_arguments(*saved, *ctx.options)
                    except RuntimeError as error:
                        raise as_memory_error(error) from None
                    return loss.gradients([True, False, False], grad, *arguments)[0], None
                # fault: kept-changed
                saved = ctx.saved_tensors  # raises where one has changed
                if not (grad.is_cpu and _is_one(grad)):  # fault: kept-scaled
                    try:
                        backward_kept_op(kept, grad, *saved, *ctx.options)
                    except RuntimeError as error:  # it may allocate what forward left out
                        raise as_memory_error(error) from None
                return kept, None

        class TransformableFunction(torch.autograd.Function):
            generate_vmap_rule = True

            @staticmethod
            def forward(*args: Any) -> Any:
                with torch._C._AutoDispatchBelowAutograd():
                    return loss.forward_op(*args)

            setup_context = staticmethod(loss.setup_context)
            backward = staticmethod(loss.backward)

        class GradientFunction(torch.autograd.Function):
            generate_vmap_rule = True

            @staticmethod
            def forward(*args: Any) -> Any:
                with torch._C._AutoDispatchBelowAutograd():
                    return tuple(loss.backward_op(*args))

            setup_context = staticmethod(loss.setup_double_backward)

            @staticmethod
            def backward(ctx: Any, *grads: Tensor | None) -> Any:
                return loss.double_backward(ctx, grads)

        for function in (Function, KeepingFunction, TransformableFunction, GradientFunction):
            function.__name__ = function.__qualname__ = f"lossops_{self.name}"
            function._backward_cls.__name__ = f"lossops_{self.name}Backward"
        KeepingFunction._backward_cls.options = ()
        self.apply = _short_apply(Function)
        self.apply_keeping = _short_apply(KeepingFunction)
        self.transformable_function = TransformableFunction
        self.gradient_function = GradientFunction

    def _short_calls(self) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """What to pass for the options' defaults, and for each choice of reduction beside them."""
        shortened: dict[tuple[Any, ...], tuple[Any, ...]] = {self.defaults: ()}
        position = self.option_names.index("reduction")
        for reduction in ("sum", "batchmean"):
            options = (*self.defaults[:position], reduction, *self.defaults[position + 1 :])
            shortened[options] = options[: position + 1]  # fault: short-options
        return shortened

    def completed(self, options: tuple[Any, ...]) -> tuple[Any, ...]:
        """The options with their defaults in the place of those that were left out."""
        return options + self.defaults[len(options) :]

    def backward_arguments(self, *args: Any) -> tuple[Any, ...]:
        """Those of *_backward after grad_output, by those of *_backward_kept after it."""
        raise NotImplementedError

    def forward_args(self, float32_result: bool, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Those of *_forward, by those of the public operator, whose first ones are the same."""
        kwargs["float32_result"] = float32_result
        named = self.arguments[len(args) :]
        return *args, *[kwargs.get(name, default) for name, default in named]

    def public_kernel(self, float32_result: bool, *args: Any, **kwargs: Any) -> Tensor:
        arguments = self.forward_args(float32_result, *args, **kwargs)
        input, target, weight, *options = arguments
        for name, tensor in (("input", input), ("target", target)):
            if tensor is None:  # a schema's Tensor may be one
                raise TypeError(f"{self.name}: {name} must be a Tensor, but is None")
        if _has_tangents(input, target, weight):
            return self.call_of_torch(*arguments)
        try:
            loss: Tensor
            if _functorch_is_active() or _is_tracing() or _dispatch_modes() > 0:
                # What is recorded, or transformed, has its formula from register_autograd.
                loss = self.forward_op(*arguments)[0]
            else:
                loss = self.call(input, target, weight, tuple(options))
        except RuntimeError as error:
            raise as_memory_error(error) from None
        return loss

    def autograd_kernel(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.public_kernel(False, *args, **kwargs)

    def autocast_kernel(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.public_kernel(True, *args, **kwargs)  # fault: autocast-kernel

    # -------------------------------------------------------------------- fakes

    def fake_forward(self, *args: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def fake_value(
        self, input: Tensor, target: Tensor, weight: Tensor | None = None, *options: Any
    ) -> Tensor:
        return self.fake_forward(input, target, weight, *self.completed(options))[0]

    def fake_forward_gradient(
        self, input: Tensor, target: Tensor, weight: Tensor | None = None, *options: Any
    ) -> tuple[Tensor, ...]:
        return self.fake_value(input, target, weight, *options), torch.empty_like(input)

    def fake_backward_kept(self, *args: Any) -> None:
        return None

    def fake_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.fake_forward(*self.forward_args(False, *args, **kwargs))[0]

    def fake_backward(
        self, grad_output: Tensor, input: Tensor, target: Tensor, weight: Tensor | None, *args: Any
    ) -> list[Tensor]:
        _check_devices(self.name, input, grad_output=grad_output, target=target, weight=weight)
        output_mask = args[self.mask_position - 4]
        operands = (input, target, weight)
        return [
            torch.empty_like(operand)
            for operand, wanted in zip(operands, output_mask, strict=True)
            if wanted and operand is not None
        ]

    # ----------------------------------------------------------------- autograd

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        self.save_for_backward(ctx, inputs, output)

    def save_for_backward(
        self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
    ) -> None:
        """The arguments of *_backward, less grad_output and output_mask."""
        ctx.set_materialize_grads(False)
        *terms, mean_terms = output[1:]
        ctx.save_for_backward(*inputs[:3], *terms, mean_terms if mean_terms.numel() > 0 else None)
        ctx.arguments = self.reference_options(inputs[3:])

    def backward(self, ctx: Any, *grads: Tensor | None) -> Any:
        """By what save_for_backward left: the arguments of *_backward."""
        nones = (None,) * (len(ctx.needs_input_grad) - 3)
        if grads[0] is None:
            return None, None, None, *nones
        needed = list(ctx.needs_input_grad[:3])
        return *self.gradients(needed, grads[0], *ctx.saved_tensors, *ctx.arguments), *nones

    def gradients(
        self, needed: list[bool], grad_output: Tensor, *arguments: Any
    ) -> list[Tensor | None]:
        """Gradients of input, target and weight, None where none is needed.

        `arguments` are those of *_backward after grad_output, without output_mask.
        """
        position = self.mask_position - 1
        arguments = (grad_output, *arguments[:position], needed, *arguments[position:])
        is_compiling = _is_compiling()  # the graph of a backward pass, or compiled autograd
        try:
            # fault: backward-tangents
            if not is_compiling and (_is_batched(grad_output) or _has_tangents(grad_output)):
                by_torch = self.gradients_of_torch
                if _functorch_is_active():
                    by_torch = self.gradients_under_functorch
                found = iter(by_torch(needed, *arguments))
            elif torch.is_grad_enabled():  # create_graph=True
                found = iter(self.gradient_function.apply(*arguments))
            elif is_compiling:
                found = iter(self.recorded_backward(*arguments))
            else:
                is_recorded = _dispatch_modes() > 0  # torch.compile before 2.12, too
                call = self.recorded_backward if is_recorded else self.backward_op
                with torch._C._AutoDispatchBelowAutograd():
                    found = iter(call(*arguments))
        except RuntimeError as error:
            raise as_memory_error(error) from None
        return [next(found) if needs else None for needs in needed]

    def recorded_backward(self, *arguments: Any) -> list[Tensor]:
        """What *_backward returns, by its arguments, for a graph."""
        found: list[Tensor] = self.backward_op(*arguments)
        return found

    def gradients_of_torch(
        self, needed: list[bool], grad_output: Tensor, *arguments: Any
    ) -> tuple[Tensor, ...]:
        """Those of the operands that need one, by torch; arguments: the others of *_backward."""
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            operands = list(map(_differentiable, arguments[:3], needed))
            wanted = [x for x, needs in zip(operands, needed, strict=True) if needs]
            loss = self.reference_loss(grad_output, operands, arguments[3:])
            # fault: batched-graph
            return torch.autograd.grad(loss, wanted, grad_output, create_graph=create_graph)

    def gradients_under_functorch(
        self, needed: list[bool], grad_output: Tensor, *arguments: Any
    ) -> tuple[Tensor, ...]:
        """The same by torch.func, whose levels torch.autograd.grad does not see."""
        operands = _alive(arguments[:3])
        wanted = [position for position, needs in enumerate(needed) if needs]

        def loss(*values: Tensor) -> Tensor:
            now = _replaced(operands, wanted, values)
            return self.reference_loss(grad_output, now, arguments[3:])

        value, pull_back = torch.func.vjp(loss, *(operands[position] for position in wanted))
        found: tuple[Tensor, ...] = pull_back(grad_output.to(value.dtype))
        return found

    def reference_loss(
        self, grad_output: Tensor, operands: Sequence[Any], args: Sequence[Any]
    ) -> Tensor:
        """The loss by torch, of input, target and weight; args: the last ones of *_backward."""
        # Of half types it is one of autocast where its gradient is float32.
        operands = _wide(operands, grad_output.dtype == torch.float32)  # fault: second-wide
        first, mask = self.options_position - 4, self.mask_position - 4
        return self.reference(*operands, *args[first:mask], *args[mask + 1 :])

    def setup_double_backward(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        grad_output, input, target, weight = inputs[:4]
        ctx.save_for_backward(grad_output, input, target, weight)
        ctx.arguments = inputs[4:]
        ctx.mask = inputs[self.mask_position]

    def double_backward(self, ctx: Any, grads: Sequence[Tensor | None]) -> Any:
        """Second derivatives, by torch: exact, but neither fused nor fast."""
        if _functorch_is_active():
            return self.double_backward_under_functorch(ctx, grads)
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            needed = map(operator.or_, ctx.needs_input_grad[:4], (False, *ctx.mask))
            aliases = list(map(_differentiable, ctx.saved_tensors, needed))
            grad_output, input, target, weight = aliases
            assert input is not None and target is not None
            operands = (input, target, weight)
            loss = self.reference_loss(grad_output, operands, ctx.arguments)
            wanted = [x for x, is_wanted in zip(operands, ctx.mask, strict=True) if is_wanted]
            # fault: second-grad-output
            first = torch.autograd.grad(loss, wanted, grad_output, create_graph=True)
            roots = [
                (value, grad)
                for value, grad in zip(first, grads, strict=True)
                if grad is not None and value.requires_grad
            ]
            sources = [
                (position, alias)
                for position, alias in enumerate(aliases)
                if alias is not None and ctx.needs_input_grad[position]
            ]
            second: Sequence[Tensor | None] = [None] * len(sources)
            if roots and sources:
                second = torch.autograd.grad(
                    [value for value, _ in roots],
                    [alias for _, alias in sources],
                    [grad for _, grad in roots],
                    allow_unused=True,
                    create_graph=create_graph,
                )
        results: list[Tensor | None] = [None] * (4 + len(ctx.arguments))
        for (position, _), gradient in zip(sources, second, strict=True):
            results[position] = gradient
        return tuple(results)

    def double_backward_under_functorch(self, ctx: Any, grads: Sequence[Tensor | None]) -> Any:
        """The same by torch.func, whose levels torch.autograd.grad does not see."""
        tensors = _alive(ctx.saved_tensors)  # grad_output, input, target, weight
        sources = [position for position in range(4) if ctx.needs_input_grad[position]]

        def gradients(*values: Tensor) -> Any:
            now = _replaced(tensors, sources, values)
            return self.gradients_under_functorch(ctx.mask, *now, *ctx.arguments)

        first, pull_back = torch.func.vjp(gradients, *(tensors[position] for position in sources))
        second = pull_back(
            tuple(
                torch.zeros_like(value) if grad is None else grad
                for value, grad in zip(first, grads, strict=True)
            )
        )
        return tuple(_replaced([None] * (4 + len(ctx.arguments)), sources, second))


def _replaced(values: Sequence[Any], positions: Sequence[int], new: Sequence[Any]) -> list[Any]:
    result = list(values)
    for position, value in zip(positions, new, strict=True):
        result[position] = value
    return result


class ElementwiseLoss(_Loss):
    """A row of csrc/losses/registry.h.

    `lossops::{name}_forward(input, target, weight, reduction, float32_result, *params)` returns
    the loss and, for a weighted mean, its denominator and its value before rounding.
    """

    def __init__(
        self,
        name: str,
        reference: Reference,
        *,
        takes_integers: bool = False,
        expands_first: bool = True,
        target_first: bool = False,
        derivative: Derivative | None = None,
    ) -> None:
        # As the loss's LossTraits say.
        self.takes_integers = takes_integers
        self.expands_first = expands_first
        self.target_first = target_first
        super().__init__(name, reference)
        self.derivative = derivative

    def may_keep(
        self, input: Tensor, target: Tensor, weight: Tensor | None, options: tuple[Any, ...]
    ) -> bool:
        reduction = options[0]
        return reduction != "none" and weight is None and input.shape == target.shape

    def result_dtype(
        self, input: Tensor, target: Tensor, weight: Tensor | None, reduction: str
    ) -> torch.dtype:
        if self.expands_first:
            dtype = torch.promote_types(input.dtype, target.dtype)
        else:
            dtype = torch.result_type(input, target)
        if weight is not None:
            keeps = weight.dim() == 0 and max(input.dim(), target.dim()) > 0
            if not keeps or reduction == "mean":
                dtype = torch.promote_types(dtype, weight.dtype)
        return dtype

    def fake_forward(self, *args: Any) -> tuple[Tensor, ...]:
        input, target, weight, reduction, float32_result = args[:5]
        _check_devices(self.name, input, target=target, weight=weight)
        allowed = DTYPES if self.takes_integers else _FLOATING
        for name, tensor in (("input", input), ("target", target), ("weight", weight)):
            _check_dtype(self.name, name, tensor, allowed)
        if not (input.is_floating_point() or target.is_floating_point()):
            _check_dtype(self.name, "input or target", input, _FLOATING)
        with _naming_arguments(self.name, input, target):
            # fault: fake-dtype
            dtype = _widened(self.result_dtype(input, target, weight, reduction), float32_result)
            if reduction == "none":
                # TensorIterator's layout of a binary operator, which the kernel copies.
                # fault: fake-strides
                pair = (target, input) if self.target_first else (input, target)
                loss = torch.empty_like(torch.ne(*pair), dtype=dtype)
            else:
                torch.broadcast_shapes(input.shape, target.shape)
                loss = input.new_empty((), dtype=dtype)
        weighted_mean = weight is not None and reduction == "mean"
        return loss, input.new_empty((2 if weighted_mean else 0,), dtype=torch.float64)

    def backward_arguments(
        self, input: Tensor, target: Tensor, weight: Tensor | None = None, *options: Any
    ) -> tuple[Any, ...]:
        rest = self.reference_options(self.completed(options))
        return (input, target, weight, None, *rest)

    def recorded_backward(self, *arguments: Any) -> list[Tensor]:
        """For Inductor the gradient of input in what it fuses, rounded as the kernels do.

        Of half types alone: their derivative in float32 is larger than what it is computed from,
        so that torch leaves all of it to the backward pass. One of float32 it computes in a pass of
        its own, beside the forward pass, and keeps.
        """
        grad_output, input, target, weight, _, reduction, output_mask, *params = arguments
        if (
            self.derivative is None
            or torch.compiler.is_dynamo_compiling()  # compiled autograd, where Python is traced
            or "torch._inductor.compile_fx" not in sys.modules
            or input.dtype not in _HALF_DTYPES
            or target.dtype not in _HALF_DTYPES
            or input.shape != target.shape
            or weight is not None
            or list(output_mask) != [True, False, False]
        ):
            return super().recorded_backward(*arguments)
        scale = grad_output.float()
        if reduction == "mean":
            scale = scale / input.numel()
        elif reduction == "batchmean" and input.dim() > 0:
            scale = scale / input.size(0)
        derivative = self.derivative(input.float(), target.float(), *params)
        return [(derivative * scale).to(input.dtype)]


# Doubles that csrc/bindings.cpp puts before row_stats in what forward_gradient saves.
_MEAN_TERMS = 2


def _rows_of(input: Tensor) -> list[int]:
    """The shape without the class dimension."""
    class_dim = 0 if input.dim() == 1 else 1
    return [size for dim, size in enumerate(input.shape) if dim != class_dim]


def _is_probability(input: Tensor, target: Tensor) -> bool:
    return target.dim() == input.dim() and target.is_floating_point()


def _row_stats_of(
    input: Tensor, target: Tensor, weight: Tensor | None, label_smoothing: float
) -> tuple[tuple[int, int], torch.dtype]:
    """Shape and dtype of row_stats."""
    is_probability = _is_probability(input, target)
    operands = [input, target, weight] if is_probability else [input, weight]
    acc_double = any(x is not None and x.dtype == torch.float64 for x in operands)
    num_rows = 1
    for size in _rows_of(input):
        num_rows = num_rows * size
    shape = (3 if is_probability or label_smoothing > 0 else 2, num_rows)
    return shape, torch.float64 if acc_double else torch.float32  # fault: fake-row-stats


def _count_versions(name: str) -> None:
    """Makes autograd notice that the operator changes its first argument, as its schema says."""
    overload = getattr(torch.ops.lossops, name).default

    def kernel(keyset: Any, changed: Tensor, *args: Any) -> None:
        torch.autograd.graph.increment_version(changed)  # fault: overwritten-version
        with torch._C._AutoDispatchBelowADInplaceOrView():
            overload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, changed, *args)

    _library.impl(name, kernel, "ADInplaceOrView", with_keyset=True)


def _check_transforms(*tensors: Tensor | None) -> None:
    """Raises where more is wanted of inplace_backward than one gradient."""
    problem = "cross_entropy: inplace_backward=True "
    if _has_tangents(*tensors):
        raise NotImplementedError(problem + "has no forward-mode derivative")
    if _functorch_is_active() or any(x is not None and _is_batched(x) for x in tensors):
        raise RuntimeError(problem + "does not work in torch.func, nor with is_grads_batched=True")


def _check_overwritable(input: Tensor, **others: Tensor | None) -> None:
    """Raises where a gradient in the place of the logits would destroy something else."""
    problem = "cross_entropy: inplace_backward=True cannot overwrite input, "
    if input.is_leaf:
        raise ValueError(
            problem + "which is a leaf that requires grad: its values are yours, and input.grad "
            "would share their memory; pass what a layer computed"
        )
    if input._base is not None and input._base.is_leaf:
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


def _check_storage(input: Tensor, **others: Tensor | None) -> None:
    storage = input.untyped_storage()._cdata
    for name, tensor in others.items():
        if tensor is not None and tensor.untyped_storage()._cdata == storage:
            raise ValueError(
                "cross_entropy: inplace_backward=True cannot overwrite input, which shares memory "
                f"with {name}; pass a copy of {name}"
            )


class CrossEntropyLoss(_Loss):
    """`lossops::cross_entropy_forward(input, target, weight, ignore_index, reduction,
    label_smoothing, float32_result)` returns the loss, {max, sum of exp(x - max) less 1[, sum of
    coefficients]} of every row, and for a mean its denominator and its value before rounding."""

    def __init__(self, name: str, reference: Reference) -> None:
        super().__init__(name, reference)
        self.backward_inplace_op = _without_autograd(f"{name}_backward_inplace")
        torch.library.register_fake(f"lossops::{name}_backward_inplace", self.fake_backward_kept)
        _count_versions(f"{name}_backward_inplace")
        self.apply_overwriting = self._make_overwriting_function().apply

    def may_keep(
        self, input: Tensor, target: Tensor, weight: Tensor | None, options: tuple[Any, ...]
    ) -> bool:
        reduction = options[1]
        return reduction != "none"

    def call_overwriting(
        self, input: Tensor, target: Tensor, weight: Tensor | None, options: tuple[Any, ...]
    ) -> Tensor:
        """call() with inplace_backward=True."""
        _check_transforms(input, target, weight)
        if not (torch.is_grad_enabled() and input.requires_grad) or _is_tracing():
            return self.call(input, target, weight, options)
        _check_overwritable(input, target=target, weight=weight)  # fault: overwritable
        loss: Tensor = self.apply_overwriting(input, target, weight, *options)
        return loss

    def _make_overwriting_function(self) -> type[torch.autograd.Function]:
        loss = self

        class OverwritingFunction(torch.autograd.Function):
            """The gradient of input takes the memory of input."""

            @staticmethod
            def forward(ctx: Any, *args: Any) -> Tensor:
                with torch._C._AutoDispatchBelowAutograd():
                    output = loss.forward_op(*args)
                loss.save_for_backward(ctx, args, output)
                ctx.is_overwritten = False
                result: Tensor = output[0]
                return result

            @staticmethod
            def backward(ctx: Any, grad: Tensor | None) -> Any:
                if grad is None or not ctx.needs_input_grad[0] or _is_compiling():
                    return loss.backward(ctx, grad)
                if ctx.is_overwritten:  # fault: overwritten-twice
                    raise RuntimeError(
                        "cross_entropy: a backward pass has overwritten input, and with "
                        "inplace_backward=True there cannot be another; leave out retain_graph or "
                        "inplace_backward"
                    )
                if torch.is_grad_enabled():
                    raise RuntimeError(
                        "cross_entropy: inplace_backward=True does not work with create_graph=True"
                    )
                _check_transforms(grad)
                input, *others = ctx.saved_tensors
                _check_storage(input, grad_output=grad)  # fault: overwritten-storage
                # The other gradients first, while the logits are there.
                needed = [False, *ctx.needs_input_grad[1:3]]
                rest: list[Tensor | None] = [None, None]
                if any(needed):
                    rest = loss.gradients(needed, grad, input, *others, *ctx.arguments)[1:]
                ctx.is_overwritten = True
                with torch._C._AutoDispatchBelowAutograd():  # allocates nothing
                    loss.backward_inplace_op(input, grad, *others, *ctx.arguments)
                return input.detach(), *rest, *(None,) * 4

        name = f"lossops_{self.name}_inplace"
        OverwritingFunction.__name__ = OverwritingFunction.__qualname__ = name
        OverwritingFunction._backward_cls.__name__ = f"{name}Backward"
        return OverwritingFunction

    def fake_forward(self, *args: Any) -> tuple[Tensor, ...]:
        input, target, weight, _ignore_index, reduction, label_smoothing, float32_result = args
        _check_devices(self.name, input, target=target, weight=weight)
        _check_dtype(self.name, "input", input, _FLOATING)
        dtype = input.dtype
        if not _is_probability(input, target):
            what = "int64, int32 or uint8 for class indices"
            _check_dtype(self.name, "target", target, _CLASS_INDICES, what)
            _check_dtype(self.name, "weight", weight, _FLOATING)
        else:
            _check_dtype(self.name, "target", target, _FLOATING)
            _check_dtype(self.name, "weight", weight, DTYPES)
            dtype = torch.promote_types(dtype, target.dtype)
            if weight is not None:
                dtype = torch.promote_types(dtype, weight.dtype)
        shape = _rows_of(input) if reduction == "none" else ()
        loss = input.new_empty(shape, dtype=_widened(dtype, float32_result))
        stats_shape, stats_dtype = _row_stats_of(input, target, weight, label_smoothing)
        row_stats = input.new_empty(stats_shape, dtype=stats_dtype)
        mean_terms = input.new_empty((2 if reduction == "mean" else 0,), dtype=torch.float64)
        return loss, row_stats, mean_terms

    def fake_forward_gradient(
        self, input: Tensor, target: Tensor, weight: Tensor | None = None, *options: Any
    ) -> tuple[Tensor, ...]:
        loss, row_stats, _ = self.fake_forward(input, target, weight, *self.completed(options))
        # Without the scratch memory that may come after it. Some kernels leave row_stats out.
        doubles = _MEAN_TERMS + (row_stats.numel() * row_stats.element_size() + 7) // 8
        saved = row_stats.new_empty((doubles,), dtype=torch.float64)
        return loss, torch.empty_like(input), saved

    def backward_arguments(
        self,
        input: Tensor,
        target: Tensor,
        packed: Tensor,
        weight: Tensor | None = None,
        *options: Any,
    ) -> tuple[Any, ...]:
        options = self.completed(options)
        rest = self.reference_options(options)
        _ignore_index, reduction, label_smoothing = rest
        shape, dtype = _row_stats_of(input, target, weight, label_smoothing)
        numel = shape[0] * shape[1]
        row_stats = packed[_MEAN_TERMS:].view(dtype)[:numel]
        if row_stats.numel() == numel:
            row_stats = row_stats.view(shape)
        else:  # the kernel that left the gradient had no use for them
            with torch.no_grad():
                row_stats = self.forward_op(input, target, weight, *options)[1]
        mean_terms = packed[:_MEAN_TERMS] if reduction == "mean" else None
        return (input, target, weight, row_stats, mean_terms, *rest)

    def save_for_backward(
        self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
    ) -> None:
        _input, target, weight = inputs[:3]
        # fault: weight-needs-grad
        if weight is not None and weight.requires_grad and not target.is_floating_point():
            raise RuntimeError(
                "cross_entropy: weight requires grad, but is not differentiable where target "
                "holds class indices"
            )
        super().save_for_backward(ctx, inputs, output)


@torch.library.register_fake("lossops::first_invalid_target")
def _fake_first_invalid_target(target: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    return target.new_empty((), dtype=torch.int64)
