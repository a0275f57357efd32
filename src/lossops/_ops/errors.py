"""Which exception a wrong call raises, and what it says.

C++ can raise RuntimeError and IndexError only. `as_torch_raises` learns the other types from torch
itself. That costs nothing until a call fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._privates import is_version_error
from .description import Loss

# A call with more elements is repeated without data to learn the type of an error.
_SMALL = 1 << 24


def as_memory_error(error: Exception) -> Exception:
    """torch.OutOfMemoryError if a GPU has no memory left; any other error as it is."""
    message = str(error)
    is_one = type(error) is RuntimeError and message.startswith("CUDA out of memory.")
    return torch.OutOfMemoryError(message) if is_one else error


# ---------------------------------------------------------------- operands that have changed


def changed_operand(name: str, error: Exception | None, why: str) -> RuntimeError:
    """The error of a backward pass whose operands have changed and that has no kept gradient."""
    return RuntimeError(
        f"{name}: an argument of the loss was modified by an inplace operation before its backward "
        f"pass, and {why}. Modify a copy, as in logits = logits / t, or do it after the backward "
        "pass." + (f" torch says: {error}" if error is not None else "")
    )


def were_changed(saved: Sequence[Tensor | None], versions: Sequence[int]) -> bool:
    """Whether one of the saved operands has a later version than it had in the forward pass.

    torch asks that itself, but not of tensors that go through saved-tensor hooks, as activation
    checkpointing has them. A hook that copies a tensor starts its version again at 0.
    """
    return any(
        tensor is not None and tensor._version > version
        for tensor, version in zip(saved, versions, strict=False)
    )


def saved_tensors(name: str, ctx: Any) -> tuple[Any, ...]:
    """ctx.saved_tensors; where one of them has changed, the error says what to do."""
    problem: RuntimeError | None = None
    try:
        saved: tuple[Any, ...] = ctx.saved_tensors
        is_traced = torch.compiler.is_compiling()  # a graph cannot branch on versions
        if is_traced or not were_changed(saved, getattr(ctx, "versions", ())):
            return saved
    except RuntimeError as error:
        if not is_version_error(error):
            raise
        problem = error
    raise changed_operand(
        name,
        problem,
        "no gradient was kept that could be handed out instead (docs/differences.md says for which "
        "calls one is kept: for the first backward pass of most losses that are reduced)",
    ) from None


# ---------------------------------------------------------------- wrong arguments


def deprecated_argument(function: str, size_average: object, reduce: object) -> TypeError:
    """The error of torch's deprecated arguments, which are in the third to sixth place."""
    name, value = "size_average", size_average
    if value is None:
        name, value = "reduce", reduce
    if isinstance(value, bool):
        if_false = "sum" if name == "size_average" else "none"
        remedy = f"write reduction={'mean' if value else if_false!r} for it"
    elif isinstance(value, str):
        remedy = f"if the reduction was meant, write reduction={value!r}"
    elif "ross" in function:  # cross_entropy, CrossEntropyLoss
        remedy = f"if ignore_index was meant, write ignore_index={value!r}"
    else:
        remedy = "give the argument that was meant by its name"
    return TypeError(
        f"{function}: {name} must be None, but is {value!r}: torch has deprecated it, and it is "
        f"here for torch's order of arguments alone; {remedy}"
    )


def check_reduction(name: str, reduction: object) -> None:
    """Raises for what is not a str, or has a NUL: C++ takes bytes, and ends a message at a NUL."""
    if not isinstance(reduction, str) or "\0" in reduction:
        choices = "'none', 'mean', 'sum'" + (", 'batchmean'" if name == "kl_div" else "")
        raise ValueError(f"{name}: reduction must be one of {choices}, but is {reduction!r}")


def _check_tensors(name: str, tensors: dict[str, Any]) -> None:
    """Raises for arguments that no loss takes: no tensors, nested, quantized and sparse ones."""
    for key, tensor in tensors.items():
        if key == "weight" and tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise TypeError(f"{name}: {key} must be a Tensor, but is {kind}")
        if tensor.is_nested or tensor.is_quantized:
            kind = "nested" if tensor.is_nested else "quantized"
            raise NotImplementedError(f"{name}: {key} must be a plain tensor, but is {kind}")
        if tensor.layout is not torch.strided:
            raise NotImplementedError(
                f"{name}: {key} must be dense (torch.strided), but has the layout {tensor.layout}"
            )


def check_numbers(message: str, *, ignore_index: int, label_smoothing: object, **_: object) -> None:
    """Raises for numbers that cross_entropy never takes. message: what C++ said of the call."""
    try:
        kind = type(label_smoothing)
        if not (hasattr(kind, "__float__") or hasattr(kind, "__index__")):  # text
            raise TypeError
        is_negative_or_nan = not float(label_smoothing) >= 0  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"cross_entropy: label_smoothing must be a number, but is {label_smoothing!r}"
        ) from None
    except (OverflowError, ValueError, RuntimeError):  # too large, or more than one number
        raise TypeError(
            "cross_entropy: label_smoothing must be a number between 0 and 1, but is "
            f"{label_smoothing!r}"
        ) from None
    if is_negative_or_nan:
        raise ValueError(message)
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(
            f"cross_entropy: ignore_index must be a 64-bit integer, but is {ignore_index}"
        )


def classes_last_hint(input: Tensor, target: Tensor) -> str:
    """The hint for logits (batch, time, classes) with class indices (batch, time): torch wants the
    classes in dimension 1."""
    if input.dim() < 3 or target.shape != input.shape[:-1]:
        return ""
    moved = "input.transpose(1, 2)" if input.dim() == 3 else "input.movedim(-1, 1)"
    return (
        f"; the classes are dimension 1 of input: where they are the last one here, pass {moved}, "
        "which copies nothing"
    )


def as_torch_raises(
    loss: Loss,
    error: Exception,
    tensors: dict[str, Any],
    options: dict[str, Any],
    *,
    refused_by_torch: Callable[..., Any] | None = None,
    check_options: Callable[..., None] | None = None,
    hint: Callable[[Tensor, Tensor], str] | None = None,
) -> Exception:
    """The error of a function of lossops, with the type that torch raises for the same call.

    torch gets the same call on zeros of the same shapes and dtypes. If that would take long, the
    zeros have no data.

    Args:
        error: what the call of lossops raised.
        tensors, options: the arguments of the function, as the formula takes them.
        refused_by_torch: calls torch, instead of the formula.
        check_options: takes the message and the options, and raises for options that are always
            wrong.
        hint: returns what to add to an error about shapes.
    """
    if type(error).__module__ != "builtins":
        return error  # raised by a hook of the program, or by torch itself
    message = str(error)
    try:
        _check_tensors(loss.name, tensors)
        check_reduction(loss.name, options["reduction"])
        if check_options is not None:
            check_options(message, **options)
    except (NotImplementedError, TypeError, ValueError) as refusal:
        return refusal
    if isinstance(error := as_memory_error(error), torch.OutOfMemoryError):
        return error
    if "reduction must be one of" in message:
        return ValueError(message)
    if isinstance(error, TypeError):
        return error
    if hint is not None and "but target has shape" in message:
        message += hint(tensors["input"], tensors["target"])
    small = sum(x.numel() for x in tensors.values() if x is not None) <= _SMALL
    device = "cpu" if small else "meta"
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            zeros = {
                key: None if x is None else torch.zeros_like(x, device=device)
                for key, x in tensors.items()
            }
            (refused_by_torch or loss.reference)(**zeros, **options)
    except (IndexError, NotImplementedError, TypeError, ValueError) as torch_error:
        return type(torch_error)(message)  # fault: type-of-error
    except Exception:
        pass
    return type(error)(message)
