"""Comparisons that the tests share: unit in the last place, error bounds, bits, memory layouts."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALF_TYPES = (torch.float16, torch.bfloat16)

_AS_INTEGER = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def bits_of(tensor: Tensor) -> Tensor:
    """The bit patterns of a floating-point tensor, as integers."""
    return tensor.detach().view(_AS_INTEGER[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bit patterns: NaN equals the same NaN, 0 differs from -0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.contiguous(), b.contiguous()
    if a.is_floating_point():
        a, b = bits_of(a), bits_of(b)
    return torch.equal(a, b.to(a.device))


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Spacing of the numbers of `dtype` at |value|, in float64 (subnormal spacing at the least)."""
    info = torch.finfo(dtype)
    magnitude = value.detach().double().abs().clamp(info.tiny, info.max)
    _, exponent = torch.frexp(magnitude)  # magnitude = m * 2^exponent with m in [0.5, 1)
    return torch.ldexp(torch.full_like(magnitude, info.eps), exponent - 1)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half a unit in the last place of 1 in the type that accumulates for `dtype`."""
    return 2.0**-53 if dtype == torch.float64 else 2.0**-24


def describe_worst(actual: Tensor, reference: Tensor, excess: Tensor) -> str:
    """Where a comparison fails most, with the two values there."""
    flat = int(torch.nan_to_num(excess, nan=math.inf).reshape(-1).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), tuple(excess.shape)))
    got, expected = actual.reshape(-1)[flat].item(), reference.reshape(-1)[flat].item()
    return f"worst at {index}: got {got!r}, expected {expected!r}"


def assert_within(actual: Tensor, reference: Tensor, bound: Tensor | float, what: str) -> None:
    """|actual - reference| <= bound for each element; NaN and infinities at the same places.

    `reference` is float64; where it rounds to an infinity of `actual`'s dtype, so must `actual`.
    """
    assert actual.shape == reference.shape, f"{what}: {actual.shape} is not {reference.shape}"
    if actual.numel() == 0:
        return
    actual64, reference = actual.detach().double(), reference.detach().double()
    reference = reference.to(actual64.device)
    rounded = reference.to(actual.dtype).double()
    special = ~torch.isfinite(rounded)
    same_special = (actual64 == rounded) | (actual64.isnan() & rounded.isnan())
    error = (actual64 - reference).abs()
    limit = torch.as_tensor(bound, dtype=torch.float64).to(error.device).expand_as(error)
    good = torch.where(special, same_special, error <= limit)
    if not bool(good.all()):
        excess = torch.where(good, torch.zeros_like(error), error / limit.clamp(min=1e-300))
        excess = torch.where(special & ~good, torch.full_like(error, math.inf), excess)
        raise AssertionError(
            f"{what}: {int((~good).sum())} of {good.numel()} elements out of bounds, "
            f"{describe_worst(actual64, reference, excess)}, "
            f"error / bound = {excess.max().item():.3g}"
        )


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Same dtype, shape and values; NaN equals NaN and 0 equals -0."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    expected = expected.to(actual.device)
    equal = (actual == expected) | (actual.isnan() & expected.isnan())
    if not bool(equal.all()):
        raise AssertionError(
            f"{what}: {describe_worst(actual, expected, (~equal).double())} "
            f"({int((~equal).sum())} of {equal.numel()} differ)"
        )


def significant_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of the dimensions that hold more than one element: the others mean nothing."""
    if tensor.numel() == 0:
        return ()
    return tuple(
        stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )


# Each maps a tensor to one with the same shape and values in other memory. They work from one
# dimension up unless they say otherwise; `layouts_of` gives those that apply.


def _misaligned(x: Tensor) -> Tensor:
    """Contiguous, one element past an aligned address."""
    buffer = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return buffer[1:].view(x.shape).copy_(x)


def _reversed(x: Tensor) -> Tensor:
    """Dense, dimensions in the opposite order in memory."""
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def _classes_last(x: Tensor) -> Tensor:
    """Dense, dimension 1 innermost: channels-last, or (batch, time, vocab).transpose(1, 2)."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def _gap_inner(x: Tensor) -> Tensor:
    """Every second element of the last dimension."""
    buffer = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 77)
    return buffer[..., ::2].copy_(x)


def _padded_rows(x: Tensor) -> Tensor:
    """Unit stride within rows, three elements of padding between them."""
    buffer = x.new_full((*x.shape[:-1], x.shape[-1] + 3), 77)
    return buffer[..., : x.shape[-1]].copy_(x)


def _aligned_rows(x: Tensor) -> Tensor:
    """Unit stride within rows, each of which begins at a multiple of 16 bytes."""
    vector = max(16 // x.element_size(), 1)
    buffer = x.new_full((*x.shape[:-1], (x.shape[-1] // vector + 2) * vector), 77)
    return buffer[..., : x.shape[-1]].copy_(x)


def _gap_outer(x: Tensor) -> Tensor:
    """Every second slice of the first dimension."""
    buffer = x.new_full((2 * x.shape[0], *x.shape[1:]), 77)
    return buffer[::2].copy_(x)


def layouts_of(x: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """The layouts that apply to `x`, by name."""
    found: dict[str, Callable[[Tensor], Tensor]] = {
        "contiguous": Tensor.contiguous,
        "misaligned": _misaligned,
    }
    if x.dim() >= 1:
        found |= {
            "gap_inner": _gap_inner,
            "gap_outer": _gap_outer,
            "padded_rows": _padded_rows,
            "aligned_rows": _aligned_rows,
        }
    if x.dim() >= 2:
        found["reversed"] = _reversed
    if x.dim() >= 3:
        found["classes_last"] = _classes_last
    return found
