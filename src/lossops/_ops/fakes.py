"""Fake kernels: the shapes, dtypes and strides of results, for torch.compile and torch.export.

`elementwise.py` and `cross_entropy.py` say what *_forward returns. The fake kernels of the other
operators of a loss follow from it. A fake kernel raises what the kernel raises, as far as it can
tell without data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .description import Loss

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGRAL = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
# Every dtype that at least one loss takes.
DTYPES = FLOATING + _INTEGRAL


def register(loss: Loss) -> None:
    name, ops = loss.name, loss.ops

    def forward(*args: Any) -> tuple[Tensor, ...]:
        return loss.fake_forward(name, ops.Forward(*args))

    def public(*args: Any, **kwargs: Any) -> Tensor:
        return loss.fake_forward(name, ops.Forward(*args, **kwargs))[0]

    def value(*args: Any) -> Tensor:
        return forward(*args)[0]

    def forward_gradient(input: Tensor, *args: Any) -> tuple[Tensor, ...]:
        results = forward(input, *args)
        return results[0], loss.fake_gradient(input), *loss.fake_saved(results)

    def forward_gradients(*args: Any, output_mask: list[bool]) -> tuple[Tensor | None, ...]:
        loss_of_call = forward(*args)[0]
        # No loss that has this operator saves anything.
        return loss_of_call, *(
            torch.empty_like(operand) if is_wanted else None
            for operand, is_wanted in zip(args[:2], output_mask, strict=True)
        )

    def backward(*args: Any) -> list[Tensor]:
        arguments = ops.Backward(*args)
        operands = (arguments.input, arguments.target, arguments.weight)
        is_reduced = arguments.reduction != "none"
        of_input = loss.fake_gradient if is_reduced else torch.empty_like
        new = (of_input, torch.empty_like, torch.empty_like)
        check_devices(
            name,
            arguments.input,
            grad_output=arguments.grad_output,
            target=arguments.target,
            weight=arguments.weight,
        )
        return [
            empty(operand)
            for empty, operand, wanted in zip(new, operands, arguments.output_mask, strict=True)
            if wanted and operand is not None
        ]

    torch.library.register_fake(f"lossops::{name}", public)
    torch.library.register_fake(f"lossops::{name}_forward", forward)
    torch.library.register_fake(f"lossops::{name}_backward", backward)
    torch.library.register_fake(f"lossops::{name}_value", value)
    torch.library.register_fake(f"lossops::{name}_forward_gradient", forward_gradient)
    register_overwriting(f"{name}_backward_kept")
    if ops.forward_gradients is not None:
        torch.library.register_fake(f"lossops::{name}_forward_gradients", forward_gradients)
        register_overwriting(f"{name}_backward_kept_gradients")


def register_overwriting(name: str) -> None:
    """The fake of an operator that writes over its first argument and returns nothing."""
    torch.library.register_fake(f"lossops::{name}", lambda *args: None)


def check_devices(op: str, input: Tensor, **others: Tensor | None) -> None:
    """Raises as the kernels do: fake kernels also get tensors on different devices."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != input.device:
            raise RuntimeError(f"{op}: {name} is on {tensor.device} but input is on {input.device}")


def check_dtype(
    op: str,
    name: str,
    tensor: Tensor | None,
    allowed: tuple[torch.dtype, ...],
    what: str = "",
) -> None:
    """Raises as the kernels do. what: names the allowed dtypes in the message."""
    if tensor is not None and tensor.dtype not in allowed:
        *most, last = [str(dtype).removeprefix("torch.") for dtype in allowed]
        what = what or f"{', '.join(most)} or {last}"
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise RuntimeError(f"{op}: {name} must be {what}, but is {dtype}")


@contextlib.contextmanager
def naming_arguments(name: str, input: Tensor, target: Tensor) -> Iterator[None]:
    """Adds the names of input and target to torch's errors about shapes and dtypes."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # torch.compile's own, which it catches
            raise
        raise RuntimeError(
            f"{name}: input {tuple(input.shape)} {input.dtype} and target {tuple(target.shape)} "
            f"{target.dtype} do not go together: {error}"
        ) from None
