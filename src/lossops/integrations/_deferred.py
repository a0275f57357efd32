"""Logits that are computed when something reads them: what a fused head hands its model.

A model that computes its own loss calls its head, maps the logits (scale, softcap) and passes them
to its loss function. `DeferredLogits` go through that code in place of logits. They record the map,
and the loss function finds in them the operands of `linear_cross_entropy`. Any other use computes
the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# An operation on logits: "mul" or "div" by a number, "tanh", or "to" a dtype.
Step = tuple[str, Any]


class Operands(NamedTuple):
    hidden: Tensor  # (..., H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)


class LogitMap(NamedTuple):
    """The keywords of `linear_cross_entropy`."""

    logit_scale: float
    softcap: float | None


@dataclass
class Call:
    """A call of a model. While it runs, only the head, a logit map and the loss use the logits."""

    model: str  # the name of its class
    runs: bool = True
    has_loss: bool = False  # its loss function was called


class _Autocast(NamedTuple):
    """The state of autocast for the device of the head, when the head was called."""

    device: str
    dtype: torch.dtype
    enabled: bool

    def __call__(self) -> torch.autocast:
        return torch.autocast(self.device, self.dtype, self.enabled)


@dataclass
class _Recipe:
    """How the logits are computed."""

    operands: Operands
    versions: tuple[int, ...]  # of the operands: what changes afterwards gives other logits
    steps: tuple[Step, ...]
    autocast: _Autocast
    call: Call

    def compute(self, operands: Operands) -> Tensor:
        with self.autocast():
            logits = F.linear(*operands)
            for name, value in self.steps:
                logits = _STEPS[name](logits, value)
        return logits

    def check(self) -> None:
        for name, tensor, version in zip(
            Operands._fields, self.operands, self.versions, strict=True
        ):
            if tensor is None:
                continue
            if tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0:
                problem = "was freed, as FSDP does after a pass"
            elif _version(tensor) != version:
                problem = "was changed, as an optimizer does"
            else:
                continue
            raise RuntimeError(
                f"fuse_head: the logits of {self.call.model} are computed when they are read, and "
                f"the {name} of the head {problem}. Read them before, or call the model without "
                "labels"
            )


_STEPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": torch.mul,
    "div": torch.div,
    "tanh": lambda logits, _: torch.tanh(logits),
    "to": lambda logits, dtype: logits.to(dtype),
}


class _Deferred(torch.autograd.Function):
    """Operands of a head -> logits without values, and the operands again, for the loss.

    A loss of the operands that this returns goes backward through this node. So do gradients of the
    logits. Hooks on the logits, as FSDP2 has them, run for both.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, recipe: _Recipe
    ) -> tuple[Tensor | None, ...]:
        ctx.recipe = recipe
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad
        again = (
            x.view_as(x) if x is not None and needs[i] else None
            for i, x in enumerate((hidden, weight, bias))
        )
        return _without_values(recipe), *again

    @staticmethod
    def backward(ctx: Any, grad_logits: Tensor | None, *grads: Tensor | None) -> Any:
        if grad_logits is None:
            return *grads, None
        recipe: _Recipe = ctx.recipe
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"fuse_head: the logits of {recipe.call.model} have no second derivatives in a "
                "call with labels. Call the model without labels"
            )
        recipe.check()
        needs = ctx.needs_input_grad
        with torch.enable_grad():
            operands = Operands(
                *(
                    x if x is None else x.detach().requires_grad_(needs[i])
                    for i, x in enumerate(recipe.operands)
                )
            )
            logits = recipe.compute(operands)
        wanted = [i for i in range(3) if needs[i]]
        found = torch.autograd.grad(logits, [operands[i] for i in wanted], grad_logits)
        total = list(grads)
        for i, grad in zip(wanted, found, strict=True):
            total[i] = grad if total[i] is None else total[i] + grad
        return *total, None


class _Read(torch.autograd.Function):
    """Logits without values -> their values. The gradient goes back through the former."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits) -> Tensor:
        recipe = logits._recipe
        recipe.check()
        return recipe.compute(recipe.operands)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Cast(torch.autograd.Function):
    """Logits without values -> the same in another dtype. Gradients go back through the former.

    The recipe has the cast as its last step.
    """

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits, recipe: _Recipe) -> DeferredLogits:
        ctx.dtype = logits.dtype
        return _without_values(recipe)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


class DeferredLogits(Tensor):
    """Logits of shape (..., V) that are computed when something reads them.

    What describes a tensor (shape, dtype, device, hooks) needs no values, and a cast is recorded.
    While the model's call runs, multiplications and divisions by numbers and `tanh` are recorded
    too, and anything else raises `NotImplementedError`. After the call, anything else computes the
    logits, once, and uses them. Later casts are of these values.

    Storage is one NaN, so that code that passes by `__torch_function__` cannot take it for logits.
    """

    _recipe: _Recipe
    # The operands that a loss should use: those that _Deferred returned.
    operands: Operands
    _values: Tensor | None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT or _is_about(func):
            return super().__torch_function__(func, types, args, kwargs)
        if _owner(func) == "_base":
            return None  # the storage is a view, the logits are not
        if args and isinstance(args[0], cls):
            logits: DeferredLogits = args[0]
            step = _step(func, *args[1:], **kwargs)
            if step is not None and logits._records(step):
                return logits if step in (_NO_STEP, ("to", logits.dtype)) else logits._then(step)
        return func(*_with_values(args, func), **_with_values(kwargs, func))

    def _records(self, step: Step) -> bool:
        """Whether the step is recorded. Values that were read may have been changed in place."""
        return self._recipe.call.runs or (step[0] == "to" and self._values is None)

    def _then(self, step: Step) -> DeferredLogits:
        recipe = self._recipe
        steps = (*recipe.steps, step)
        if recipe.call.runs:
            return defer(self.operands, recipe.call, steps, recipe.autocast)
        made: DeferredLogits = _Cast.apply(self, replace(recipe, steps=steps))
        made.operands = self.operands
        return made

    def read(self) -> Tensor:
        """The logits. A second call returns the same tensor."""
        if self._values is None:
            # A model's logits have their graph, whatever the mode they are read in.
            with torch.inference_mode(False), torch.set_grad_enabled(self.requires_grad):
                self._values = _Read.apply(self)
        return self._values

    def map(self) -> LogitMap:
        """The recorded operations as a logit map.

        Raises:
            NotImplementedError: they are no logit map.
        """
        recipe = self._recipe
        # Factors and divisors ahead of tanh. Kept apart: c / c is exactly 1, c * (1 / c) is not.
        times, over = 1.0, 1.0
        after: float | None = None  # the factor of tanh; None: there was no tanh
        for name, value in recipe.steps:
            if name == "tanh":
                if after is not None:
                    raise NotImplementedError(
                        f"fuse_head: {recipe.call.model} has two tanh between its head and its loss"
                    )
                after = 1.0
            elif name in ("mul", "div") and after is not None:
                after = after * value if name == "mul" else after / value
            elif name == "mul":
                times *= value
            elif name == "div":
                over *= value
        if after is None:
            return LogitMap(times / over, None)
        if not after > 0:
            raise NotImplementedError(
                f"fuse_head: {recipe.call.model} multiplies tanh of its logits by {after}"
            )
        return LogitMap(times * after / over, after)


def defer(
    operands: Operands,
    call: Call,
    steps: tuple[Step, ...] = (),
    autocast: _Autocast | None = None,
) -> DeferredLogits:
    """The logits of a head, without values. Autocast is by default as it is now."""
    if autocast is None:
        device = operands.hidden.device.type
        autocast = _Autocast(
            device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        )
    versions = tuple(_version(x) for x in operands)
    plain = Operands(*(x if x is None else x.detach() for x in operands))
    recipe = _Recipe(plain, versions, steps, autocast, call)
    logits, *again = _Deferred.apply(*operands, recipe)
    logits.operands = Operands(
        *(given if x is None else x for x, given in zip(again, operands, strict=True))
    )
    return logits


def _version(tensor: Tensor | None) -> int:
    """How often the tensor was changed in place. Those of inference mode do not count it."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _without_values(recipe: _Recipe) -> DeferredLogits:
    hidden, weight, _ = recipe.operands
    dtype = recipe.autocast.dtype if recipe.autocast.enabled else hidden.dtype
    if hidden.dtype is torch.float64:  # which autocast leaves alone
        dtype = hidden.dtype
    for name, value in recipe.steps:
        dtype = value if name == "to" else dtype
    shape = (*hidden.shape[:-1], weight.shape[0])
    nan = torch.full((), math.nan, dtype=dtype, device=hidden.device)
    logits = nan.expand(shape).as_subclass(DeferredLogits)
    logits._recipe = recipe
    logits._values = None
    return logits


# ---------------------------------------------------------------- the functions of torch

# Functions that need no values.
_ABOUT: frozenset[Any] = frozenset(
    {
        Tensor.__len__,
        Tensor.dim,
        Tensor.element_size,
        Tensor.is_complex,
        Tensor.is_floating_point,
        Tensor.ndimension,
        Tensor.nelement,
        Tensor.numel,
        Tensor.register_hook,
        Tensor.retain_grad,
        Tensor.size,
        torch.is_complex,
        torch.is_floating_point,
        torch.numel,
    }
)
# Attributes that need values, or are no attributes of the logits.
_VALUES = frozenset({"H", "T", "_base", "data", "imag", "mH", "mT", "real"})

_NO_STEP: Step = ("to", None)
_MUL = frozenset({Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__, torch.mul})
_DIV = frozenset({Tensor.div, Tensor.true_divide, Tensor.__truediv__, torch.div})
_TANH = frozenset({Tensor.tanh, torch.tanh, F.tanh})
_CAST = {
    Tensor.float: torch.float32,
    Tensor.double: torch.float64,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}


def _owner(func: Any) -> str:
    """The name of the attribute whose getter func is, or ""."""
    if getattr(func, "__name__", "") != "__get__":
        return ""
    return getattr(func.__self__, "__name__", "")


def _is_about(func: Any) -> bool:
    name = _owner(func)
    return name != "" and name not in _VALUES


def _step(func: Any, *args: Any, **kwargs: Any) -> Step | None:
    """The call as a step, or None: a number, and nothing else, may go with the logits."""
    if func in _TANH and not args and not kwargs:
        return "tanh", None
    if func in _CAST and not args and not kwargs:
        return "to", _CAST[func]
    if func is Tensor.contiguous and not args and not kwargs:
        return _NO_STEP
    if len(args) != 1 or kwargs:
        return None
    (value,) = args
    if func is Tensor.to and isinstance(value, torch.dtype) and value.is_floating_point:
        return "to", value
    if type(value) not in (int, float) or not math.isfinite(value) or value == 0:
        return None
    if func in _MUL:
        return "mul", value
    return ("div", value) if func in _DIV else None


def _with_values(found: Any, func: Any) -> Any:
    """Arguments of func, with values in place of logits without them."""
    if isinstance(found, DeferredLogits):
        call = found._recipe.call
        if call.runs:
            name = _owner(func) or torch.overrides.resolve_name(func) or repr(func)
            raise NotImplementedError(
                f"fuse_head: {call.model} does not fit. Its forward uses the logits by {name}, and "
                "not only in a scale, a softcap and its loss function"
            )
        return found.read()
    if isinstance(found, dict):
        return {key: _with_values(value, func) for key, value in found.items()}
    if type(found) in (list, tuple):
        return type(found)(_with_values(value, func) for value in found)
    return found
