"""The check that most generic tests make: one call against torch and against float64."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from losses import Loss, LossFunction, Result, Sample, evaluate
from numerics import assert_within, significant_strides, ulp, unit_roundoff
from torch import Tensor


@dataclass(frozen=True)
class Truth:
    """A result in float64, and the magnitudes of what it is made of."""

    exact: Result
    sizes: Mapping[str, Tensor]
    grad_output: Tensor


def truth(
    loss: Loss, sample: Sample, grad_output: Tensor | None = None, *, device: str = "cpu"
) -> Truth:
    """The truth about `sample`; `grad_output` is random unless given (1 if a scalar)."""
    exact = sample.double().map(lambda t: t.to(device))
    with torch.no_grad():
        value = sample.call(loss.reference)
    if grad_output is None:
        grad_output = torch.randn(value.shape) if value.dim() else torch.ones(())
    # as the call itself sees it: rounded to its dtype
    grad_output = grad_output.to(value.dtype).to(device, torch.float64)
    with torch.no_grad():
        sizes = loss.magnitudes(exact, grad_output)
    return Truth(evaluate(loss.reference, exact, grad_output), sizes, grad_output)


def bound_of(
    reference: Tensor, dtype: torch.dtype, internal: torch.dtype, size: Tensor, tolerance: float
) -> Tensor:
    """Rounding to `dtype` of what was computed with `tolerance` roundings in `internal`."""
    roundoff = unit_roundoff(internal)
    if roundoff == unit_roundoff(torch.float64):
        # Most is the reference's own: torch adds up in longer chains. Those of long rows are the
        # longest, without AVX-512 the more so.
        tolerance *= max(32, max(reference.shape, default=1) / 1024)
    final = 0.5 * (1 + 2**-10) * ulp(reference, dtype)
    # a size is not finite where the result is NaN by definition: all rows ignored
    return final + (tolerance * roundoff * size).nan_to_num(0, 0) + torch.finfo(torch.float32).tiny


def check(
    loss: Loss,
    sample: Sample,
    *,
    function: LossFunction | None = None,
    grad_output: Tensor | None = None,
    known: Truth | None = None,
    not_worse_than_torch: bool = False,
) -> Result:
    """Values and gradients within the bounds of float64; dtype, shape, strides as torch's.

    `known` is the truth where the caller has it already. `not_worse_than_torch` also accepts an
    error that torch makes too.
    """
    what = sample.name
    with torch.no_grad():
        as_torch = sample.call(loss.reference)
    known = known or truth(loss, sample, grad_output)
    if grad_output is None:
        grad_output = known.grad_output
    grad_output = grad_output.to(as_torch)
    ours = evaluate(function or loss.function, sample, grad_output)

    value = ours.value
    assert value.dtype == as_torch.dtype, f"{what}: value has {value.dtype}"
    assert value.shape == as_torch.shape, f"{what}: value has {value.shape}"
    assert value.device == as_torch.device, f"{what}: value is on {value.device}"
    assert significant_strides(value) == significant_strides(as_torch), (
        f"{what}: value has strides {value.stride()}, torch's has {as_torch.stride()}"
    )
    for name, gradient in ours.gradients.items():
        leaf = sample.tensors[name]
        assert gradient.dtype == leaf.dtype, f"{what}: gradient of {name} has {gradient.dtype}"
        assert gradient.shape == leaf.shape, f"{what}: gradient of {name} has {gradient.shape}"
        assert gradient.device == leaf.device, f"{what}: gradient of {name} on {gradient.device}"

    terms = broadcast_numel(sample)
    torchs = evaluate(loss.reference, sample, grad_output) if not_worse_than_torch else None
    for name, result in {"value": value, **ours.gradients}.items():
        reference = known.exact.value if name == "value" else known.exact.gradients[name]
        tolerance = loss.tolerance
        bound: Tensor | float = 0.0
        if name != "value" and loss.elementwise and 0 < result.numel() < terms:
            # A broadcast argument's gradient adds up terms that are rounded before.
            tolerance += 2 * math.log2(terms / result.numel())
            bound = torch.finfo(result.dtype).eps * known.sizes[name]
        bound = bound + bound_of(reference, result.dtype, value.dtype, known.sizes[name], tolerance)
        if torchs is not None:
            theirs = torchs.value if name == "value" else torchs.gradients[name]
            bound = torch.maximum(bound, (theirs.cpu().double() - reference).abs())
        assert_within(result, reference, bound, f"{what}: {name}")
    return ours


def broadcast_numel(sample: Sample) -> int:
    """Elements of the broadcast input and target."""
    x, t = sample.tensors["input"], sample.tensors["target"]
    if not t.is_floating_point():
        return x.numel()
    return torch.broadcast_shapes(x.shape, t.shape).numel()


def assert_raises(
    kind: type[Exception] | tuple[type[Exception], ...], call: Callable[[], object], *words: str
) -> None:
    """`call()` raises `kind`, and the message holds a match for each regular expression.

    NotImplementedError is a RuntimeError to Python but another type to the contract.
    """
    with pytest.raises(kind) as caught:
        call()
    if kind is RuntimeError:
        assert not issubclass(caught.type, NotImplementedError), f"raised {caught.type}"
    for word in words:
        assert re.search(word, str(caught.value), re.IGNORECASE), (
            f"{word!r} is not in the message of {caught.type.__name__}: {caught.value}"
        )


def words_of_shape(*shape: int) -> str:
    """A regular expression for a shape as Python or as C++ prints it."""
    return r"[\[(]" + ", ?".join(map(str, shape)) + r",?[\])]"


def words_of_dtype(dtype: torch.dtype) -> str:
    """A regular expression for a dtype as Python names it or as C++ does."""
    python = str(dtype).removeprefix("torch.")
    cpp = {
        torch.float64: "Double",
        torch.float32: "Float",
        torch.float16: "Half",
        torch.bfloat16: "BFloat16",
        torch.int64: "Long",
        torch.int32: "Int",
        torch.int16: "Short",
        torch.int8: "Char",
        torch.uint8: "Byte",
        torch.bool: "Bool",
        torch.complex64: "ComplexFloat",
        torch.complex128: "ComplexDouble",
    }[dtype]
    return rf"\b({python}|{cpp})\b"
