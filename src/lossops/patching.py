"""Routes the losses of torch.nn.functional to lossops, in code that nobody edited."""

from __future__ import annotations

import contextlib
import functools
import inspect
import numbers
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import functional, heads
from ._ops import by_torch, fakes
from ._privates import functorch_is_active, torch_function_mode_is_on

__all__ = ["patch", "patch_report", "patched", "unpatch"]

_LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": functional.cross_entropy,
    "kl_div": functional.kl_div,
    "mse_loss": functional.mse_loss,
}
_TORCHS = dict(by_torch.LOSSES)
if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
    _LOSSES["linear_cross_entropy"] = heads.linear_cross_entropy
    _TORCHS["linear_cross_entropy"] = F.linear_cross_entropy


def _positional(function: Callable[..., Tensor]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.kind is not each.KEYWORD_ONLY)


# The parameters of torch's functions that may be given by position, in order. A function in their
# place may have others.
_PARAMETERS = {name: _positional(function) for name, function in _TORCHS.items()}
_DEPRECATED = ("size_average", "reduce")

# What the functions of lossops raise for arguments that they do not take. Other exceptions come
# from hooks, and may mean no error: checkpointing ends its recomputation with one.
_REFUSALS = (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError)

# Reasons that are counted by themselves. Messages hold shapes and values: there is no end of them.
_MOST_REASONS = 100
_OTHERS = "other reasons"

_lock = threading.Lock()
_is_patched = False
_scopes = 0  # open blocks of patched()
_calls: Counter[str] = Counter()
_fallbacks: dict[str, Counter[str]] = {name: Counter() for name in _LOSSES}
_routes: dict[str, Callable[..., Tensor]] = {}  # what is in torch.nn.functional now, by name

_is_compiling = torch.compiler.is_compiling


def patch() -> None:
    """Makes torch.nn.functional's losses those of lossops, in the whole process.

    `torch.nn.functional.mse_loss`, `kl_div` and `cross_entropy` then call lossops, and with them
    `torch.nn.MSELoss`, `KLDivLoss` and `CrossEntropyLoss`, also in models that exist already. So do
    `linear_cross_entropy` and `LinearCrossEntropyLoss` where torch has them (2.13). Calls that
    lossops does not take go to torch as before, and are counted (`patch_report`). A second call
    changes nothing. `unpatch` undoes it; `patched` does both.

    Functions that were imported by name before (`from torch.nn.functional import cross_entropy`)
    stay torch's. TorchScript cannot compile a patched function: script a model before `patch`, or
    outside of `patched`.
    """
    global _is_patched
    with _lock:
        _is_patched = True
        _install()


def unpatch() -> None:
    """Undoes `patch`. Does nothing if nothing is patched."""
    global _is_patched
    with _lock:
        _is_patched = False
        _remove_if_unused()


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """`patch` for the time of a `with` block, or of a function that it decorates.

    It holds for the whole process, other threads included. Blocks may be nested. A loss inside
    `torch.utils.checkpoint` is computed again in the backward pass, so that pass has to be in the
    block too.
    """
    global _scopes
    with _lock:
        _scopes += 1
        _install()
    try:
        yield
    finally:
        with _lock:
            _scopes -= 1
            _remove_if_unused()


def patch_report() -> dict[str, dict[str, Any]]:
    """How many calls of the patched functions went where, since the start of the process.

    Returns:
        A dict for each function. `"lossops"` is the number of calls that lossops answered.
        `"torch"` has, for each reason, the number of calls that torch answered instead. After the
        first 100 reasons, the others are counted together. Calls in compiled code are not counted.
    """
    with _lock:
        return {
            name: {"lossops": _calls[name], "torch": dict(_fallbacks[name])} for name in _LOSSES
        }


def _install() -> None:
    for name in _LOSSES:
        current = getattr(F, name)
        if current is not _routes.get(name):
            _routes[name] = _route(name, _unrouted(current))
            setattr(F, name, _routes[name])


def _remove_if_unused() -> None:
    if _is_patched or _scopes > 0:
        return
    for name in _LOSSES:
        # What another program has put there since stays. It may call the route, which calls torch.
        setattr(F, name, _unrouted(getattr(F, name)))
    _routes.clear()


def _unrouted(function: Any) -> Any:
    """The function behind a route, and behind an old route that another program has put back."""
    while getattr(function, "__code__", None) is _ROUTE_CODE:
        function = function.__wrapped__
    return function


def _route(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function that takes the place of `original`."""
    loss = _LOSSES[name]
    parameters = _PARAMETERS[name]

    @functools.wraps(original)
    def routed(*args: Any, **kwargs: Any) -> Tensor:
        arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
        # If there are too many arguments, or one is given twice, torch raises the error.
        as_given = len(arguments) == len(args) + len(kwargs)
        deprecated = [key for key in _DEPRECATED if arguments.pop(key, None) is not None]
        if not (_is_patched or _scopes > 0) or not as_given:
            return original(*args, **kwargs)
        if _is_compiling():
            # A call refused for other reasons raises when the code is traced, or when it runs.
            reason = _why_not(name, deprecated, arguments)
            return loss(**arguments) if reason is None else original(*args, **kwargs)
        values = tuple(arguments.values())
        if has_torch_function(values):
            if torch_function_mode_is_on():
                return original(*args, **kwargs)  # the mode may call this again, inside
            # Subclasses know torch's function, from before the patch.
            result = handle_torch_function(original, values, *args, **kwargs)
            key, value = next(item for item in arguments.items() if has_torch_function(item[1:]))
            _count_fallback(name, f"{key} is a {type(value).__name__}")
            return result
        reason = _why_not(name, deprecated, arguments)
        if reason is None:
            try:
                result = loss(**arguments)
            except (IndexError, torch.OutOfMemoryError):
                raise  # torch would end the process, or need more
            except _REFUSALS as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
            else:
                with _lock:
                    _calls[name] += 1
                return result
        # This stands outside the handler, so that an error of torch's is shown alone.
        result = original(*args, **kwargs)
        _count_fallback(name, reason)
        return result

    return routed


# The code object of every route.
_ROUTE_CODE: Any = _route("mse_loss", F.mse_loss).__code__


def _count_fallback(name: str, reason: str) -> None:
    with _lock:
        counts = _fallbacks[name]
        counts[reason if reason in counts or len(counts) < _MOST_REASONS else _OTHERS] += 1


def _why_not(name: str, deprecated: list[str], arguments: dict[str, Any]) -> str | None:
    """Why lossops does not take the call, if that is known before the call."""
    if deprecated:
        return f"{' and '.join(deprecated)}, which torch has deprecated"
    if functorch_is_active():
        return "torch.func, whose transforms lossops has in part"
    smoothing = arguments.get("label_smoothing", 0.0)
    if not (isinstance(smoothing, numbers.Real) and 0 <= float(smoothing) <= 1):
        return "label_smoothing is no number from 0 to 1"
    for key, value in arguments.items():
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
                return f"{key} is a {type(value).__name__}"
            if value.device.type not in ("cpu", "cuda"):
                return f"{key} is on {value.device.type}"
            if value.dtype not in fakes.DTYPES:
                return f"{key} is {value.dtype}"
    if name in ("cross_entropy", "linear_cross_entropy"):
        logits = arguments.get("input")
        if isinstance(logits, Tensor) and not logits.is_floating_point():
            return f"input is {logits.dtype}"
    return None
