"""What lossops takes of torch beyond its public interface, with a public way beside each name.

Every other module takes these names from here. A private name is looked for once, at import. If
this torch lacks it, a public way takes its place: slower, with the same results.
`tests/test_privates.py` removes the names, one by one and all together.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Every private name that was looked for, as "torch._C._is_tracing".
LOOKED_FOR: list[str] = []


def _look_for(name: str) -> Any:
    """The object of that name, or None."""
    LOOKED_FOR.append(name)
    found: Any = sys.modules["torch"]
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    return found


# ---------------------------------------------------------------- what is around a call

# The public way asks torch's dispatcher: an operator that has a kernel of its own under the key of
# a transform or a mode answers True where that transform or mode is on.


@functools.cache
def _questions() -> torch.library.Library:
    return torch.library.Library("lossops", "FRAGMENT")


def _asks_dispatcher(question: str, key: str) -> Callable[[], bool]:
    """A function that tells whether the dispatcher goes through `key` now, without tensors."""
    library = _questions()
    library.define(f"{question}() -> bool")
    library.impl(question, lambda: False, "CompositeExplicitAutograd")
    for other in ("Tracer", "Python"):  # they would record the question
        if other != key:
            library.impl(question, lambda: False, other)
    library.impl(question, lambda: True, key)
    ask: Callable[[], bool] = getattr(torch.ops.lossops, question).default
    return ask


# Whether a transform of torch.func is on.
functorch_is_active: Callable[[], bool] = _look_for(
    "torch._C._are_functorch_transforms_active"
) or _asks_dispatcher("_functorch_is_active", "FuncTorchDynamicLayerFrontMode")

# Whether torch.jit.trace is on. torch.jit.is_tracing() calls the private one.
is_tracing: Callable[[], bool] = _look_for("torch._C._is_tracing") or _asks_dispatcher(
    "_is_tracing", "Tracer"
)

# How many dispatch modes, such as make_fx's, are on. The public way tells only whether any is on.
dispatch_modes: Callable[[], int] = _look_for(
    "torch._C._len_torch_dispatch_stack"
) or _asks_dispatcher("_dispatch_modes", "Python")

# Whether autocast may be on for some device. The public way always says yes: asking would cost a
# question for each device.
autocast_may_be_on: Callable[[], bool] = _look_for("torch._C._is_any_autocast_enabled") or (
    lambda: True
)

# Whether a TorchFunctionMode is on. If so, torch says of any value that it overrides functions.
torch_function_mode_is_on: Callable[[], bool] = _look_for(
    "torch._C._is_torch_function_mode_enabled"
) or (lambda: torch.overrides.has_torch_function((None,)))


# Whether torch.func.functionalize is one of the transforms that are on. No private name says so.
is_functionalized: Callable[[], bool] = _asks_dispatcher("_is_functionalized", "Functionalize")


class _PerhapsALevel:
    """Takes the place of forward_ad: a level may be on, and only the tensors say whether."""

    _current_level = 0


# levels._current_level is below 0 if no thread differentiates in forward mode.
levels: Any = forward_ad
if _look_for("torch.autograd.forward_ad._current_level") is None:
    levels = _PerhapsALevel


def has_tangents(*tensors: Tensor | None) -> bool:
    """Whether a tensor may have a tangent (forward mode); torch.func does not show which has."""
    if levels._current_level < 0:  # fault: tangents
        return False
    return functorch_is_active() or any(
        tensor is not None and forward_ad.unpack_dual(tensor, level=0).tangent is not None
        for tensor in tensors
    )


# ---------------------------------------------------------------- tensors of transforms


def _without_any_level(tensor: Tensor) -> Tensor:
    found: Tensor = tensor if functorch_is_active() else torch.func.debug_unwrap(tensor)
    return found


# The tensor without the wrapper of a torch.func level that has ended.
unwrap_if_dead: Callable[[Tensor], Tensor] = (
    _look_for("torch._C._functorch.unwrap_if_dead") or _without_any_level
)


def _asks_for_batches() -> Callable[[Tensor], bool]:
    library = _questions()
    library.define("_is_batched(Tensor tensor) -> bool")
    library.impl("_is_batched", lambda _: False, "CompositeExplicitAutograd")
    library.impl("_is_batched", torch.library.fallthrough_kernel, "Autograd")
    library.impl("_is_batched", lambda _: True, "Batched")
    overload = torch.ops.lossops._is_batched.default

    def ask(tensor: Tensor) -> bool:
        # The batched tensors of torch.func are of another kind.
        return not functorch_is_active() and bool(overload(tensor))

    return ask


# Whether a grad_output comes from is_grads_batched=True.
is_batched: Callable[[Tensor], bool] = (
    _look_for("torch._C._functorch.is_legacy_batchedtensor") or _asks_for_batches()
)


# ---------------------------------------------------------------- below autograd

_BelowAutograd = _look_for("torch._C._AutoDispatchBelowAutograd")
_BelowInplaceOrView = _look_for("torch._C._AutoDispatchBelowADInplaceOrView")
_after_inplace_or_view = _look_for("torch._C._after_ADInplaceOrView_keyset")
_BACKENDS = {"cpu": "CPU", "cuda": "CUDA", "meta": "Meta"}


def _kernel_of(overload: Any, args: Sequence[Any]) -> Any:
    """The result of the operator's kernel for the device of its first tensor."""
    device = next(value for value in args if isinstance(value, Tensor)).device.type
    key = torch.DispatchKeySet(getattr(torch.DispatchKey, _BACKENDS[device]))
    return overload.redispatch(key, *args)


def below_autograd(overload: Any) -> Callable[..., Any]:
    """The operator without its autograd formula, for the forward pass of a Function."""
    if _BelowAutograd is not None:
        op = getattr(overload, "_op", overload)

        def guarded(*args: Any) -> Any:
            with _BelowAutograd():
                return op(*args)

        return guarded

    def redispatched(*args: Any) -> Any:
        if functorch_is_active() or dispatch_modes() > 0 or is_tracing():
            with torch.no_grad():  # the formula of torch.library obeys it
                return overload(*args)
        return _kernel_of(overload, args)

    return redispatched


def without_autograd(library: torch.library.Library, name: str) -> Callable[..., Any]:
    """The operator `lossops::{name}`, which lossops alone calls, by the shortest way.

    It has neither a formula nor torch's fallback for operators without one: autograd passes it by.
    """
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    overload = getattr(torch.ops.lossops, name).default
    op: Callable[..., Any] = getattr(overload, "_op", overload)  # spares a Python frame
    return op


def count_versions(library: torch.library.Library, name: str) -> None:
    """Makes autograd notice that the operator changes its first argument, as its schema says."""
    overload = getattr(torch.ops.lossops, name).default

    def kernel(keyset: Any, changed: Tensor, *args: Any) -> Any:
        torch.autograd.graph.increment_version(changed)  # fault: overwritten-version
        if _BelowInplaceOrView is None or _after_inplace_or_view is None:
            return _kernel_of(overload, (changed, *args))
        with _BelowInplaceOrView():
            return overload.redispatch(keyset & _after_inplace_or_view, changed, *args)

    library.impl(name, kernel, "ADInplaceOrView", with_keyset=True)


# ---------------------------------------------------------------- autograd.Function

# save_for_backward and set_materialize_grads only set these, each in a Python frame of its own.
_look_for("torch.autograd.Function.to_save")
_look_for("torch.autograd.Function.materialize_grads")
CONTEXT_HAS_ATTRIBUTES = hasattr(torch.autograd.Function, "to_save") and hasattr(
    torch.autograd.Function, "materialize_grads"
)


def set_on_nodes(function: Any, **attributes: Any) -> bool:
    """Sets attributes on the class of a Function's nodes, so that every ctx has them. Returns
    whether there is such a class. Without it, a ctx has only what forward sets."""
    node = getattr(function, "_backward_cls", None)
    if node is None:
        return False
    for name, value in attributes.items():
        setattr(node, name, value)
    return True


def short_apply(function: Any) -> Callable[..., Any]:
    """`function.apply` for small tensors, outside torch.func.

    It spares two things. Function.apply only looks for torch.func and for tensors that torch.func
    left behind, in Python that costs a third of the whole. And each backward pass searches the
    Function for backward and vjp.
    """
    set_on_nodes(function, apply=function.backward)
    base = super(torch.autograd.Function, function)
    apply: Callable[..., Any] = getattr(base, "apply", None) or function.apply
    return apply


def name_nodes(function: Any, name: str) -> None:
    """Names a Function `name`, and the nodes of its graphs `name` with "Backward" behind it."""
    function.__name__ = function.__qualname__ = name
    set_on_nodes(function, __name__=f"{name}Backward")


def _said_of(part: Callable[[Tensor], Tensor]) -> str:
    """torch's error if `part` of a tensor was saved, and the tensor then changed in place."""
    leaf = torch.zeros(2, requires_grad=True)
    with torch.enable_grad():
        x = leaf * 1
        saved = part(x)
        result = saved * saved
    with torch.no_grad():
        x.add_(1)
    try:
        torch.autograd.grad(result, leaf, torch.ones_like(result))
    except RuntimeError as error:
        return str(error)
    return ""


@functools.cache
def _version_errors() -> tuple[str, ...]:
    """The words that torch's errors about changed saved tensors share, whatever the tensors.

    torch is asked on the first such error: autograd starts CUDA where torch has it. It is asked in
    a thread, which has none of the modes, transforms and hooks that the caller may be in.
    """
    found: list[str] = []

    def ask() -> None:
        whole = _said_of(lambda x: x).partition(":")[0]
        # One of several views, as of chunk, has another error: "Output 0 of Split is a view".
        several = "".join(_said_of(lambda x: x.chunk(2)[0]).partition(" is a view")[1:])
        found.extend(words for words in (whole, several.partition(".")[0]) if words)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return tuple(found)


def is_version_error(error: Exception) -> bool:
    """Whether error is torch's about a changed saved tensor. torch is asked what it says then."""
    message = str(error)
    return type(error) is RuntimeError and any(words in message for words in _version_errors())


def _hooks_by_their_error() -> bool:
    """A saved tensor takes hooks once: one that has the default ones already refuses others."""
    with torch.enable_grad():
        node: Any = (torch.zeros((), requires_grad=True).exp()).grad_fn
    try:
        node._raw_saved_result.register_hooks(lambda x: x, lambda x: x)
    except RuntimeError:
        return True
    return False


_top_hooks: Any = _look_for("torch._C._autograd._top_saved_tensors_default_hooks")


def saved_tensors_have_hooks() -> bool:
    """Whether torch.autograd.graph.saved_tensors_hooks is on, as in activation checkpointing."""
    return _hooks_by_their_error() if _top_hooks is None else _top_hooks(True) is not None


# ---------------------------------------------------------------- schemas, compilers


def _declaration(overload: Any) -> str:
    """The text of the schema. The error of a call without arguments quotes it."""
    try:
        overload()
    except RuntimeError as error:
        return str(error).partition("Declaration: ")[2]
    return ""


def schema_of(overload: Any) -> tuple[dict[str, Any], list[str]]:
    """The arguments of an operator with their defaults (or None), and the names of its results."""
    schema = getattr(overload, "_schema", None)
    if schema is not None:
        arguments = {argument.name: argument.default_value for argument in schema.arguments}
        return arguments, [result.name for result in schema.returns]
    return parse_schema(_declaration(overload))


def parse_schema(text: str) -> tuple[dict[str, Any], list[str]]:
    """`schema_of` by the text of a schema, as "name(Tensor a, *, str b=\"mean\") -> (Tensor c)"."""
    taken, _, returned = text.partition("->")
    arguments: dict[str, Any] = {}
    for argument in taken.partition("(")[2].rstrip().removesuffix(")").split(", "):
        name, _, default = argument.rpartition(" ")[2].partition("=")
        if name and name != "*":
            arguments[name] = ast.literal_eval(default) if default else None
    results = [re.split(r"\s+", result)[-1] for result in returned.strip(" ()").split(", ")]
    return arguments, ["" if "Tensor" in name else name for name in results]


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that this one is a view of, or itself. Without torch's attribute itself."""
    base: Tensor | None = getattr(tensor, "_base", None)
    return tensor if base is None else base


def is_for_inductor() -> bool:
    """Whether the graph that is traced now is for Inductor.

    Inductor has a setting for the time of its compilation, which no public name shows. Without it,
    the answer is whether Inductor is loaded and a graph is traced.
    """
    if torch.compiler.is_dynamo_compiling():  # Python is traced, for a graph that is compiled later
        return False
    virtualized = sys.modules.get("torch._inductor.virtualized")
    if virtualized is None:
        return False
    try:
        return not isinstance(virtualized.V.fake_mode, virtualized.NullHandler)
    except AttributeError:
        return dispatch_modes() > 0
