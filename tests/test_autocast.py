"""Under autocast the result is float32 and the inputs are read as they are."""

from __future__ import annotations

import re

import pytest
import torch
from checks import bound_of, truth
from losses import (
    LOSS_IDS,
    LOSSES,
    VARIANT_IDS,
    VARIANTS,
    Loss,
    Variant,
    evaluate,
)
from numerics import DTYPES, HALF_TYPES, assert_within, same_bits
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

import lossops

per_variant = pytest.mark.parametrize(("loss", "variant"), VARIANTS, ids=VARIANT_IDS)
per_loss = pytest.mark.parametrize("loss", LOSSES, ids=LOSS_IDS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@per_variant
def test_result_is_float32(loss: Loss, variant: Variant, dtype: torch.dtype, device: str) -> None:
    """Of half inputs as accurately as of float32 ones; float64 stays float64."""
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    for reduction in loss.reductions:
        sample = variant.sample((33, 19), device=device, dtype=dtype, reduction=reduction)
        wide = sample.map(lambda t: t.to(expected) if t.is_floating_point() else t)
        known = truth(loss, wide)
        for call in (loss.function, loss.op):
            with torch.autocast(device, dtype=torch.bfloat16):
                result = evaluate(call, sample, known.grad_output.to(device))
            assert result.value.dtype == expected, sample.name
            sizes, exact = known.sizes, known.exact
            bound = bound_of(exact.value, expected, expected, sizes["value"], loss.tolerance)
            assert_within(result.value, exact.value, bound, f"{sample.name}: value")
            for name, gradient in result.gradients.items():
                assert gradient.dtype == dtype, f"{sample.name}: gradient of {name}"
                reference = exact.gradients[name]
                bound = bound_of(reference, dtype, expected, sizes[name], loss.tolerance)
                assert_within(gradient, reference, bound, f"{sample.name}: gradient of {name}")


@per_loss
def test_without_autocast_nothing_is_widened(loss: Loss, device: str) -> None:
    sample = loss.variants[0].sample((4, 5), device=device, dtype=torch.bfloat16)
    plain = sample.call(loss.function)
    assert plain.dtype == torch.bfloat16
    for call in (loss.function, loss.op):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=False):
            assert same_bits(sample.call(call), plain)
        with torch.autocast(device, dtype=torch.bfloat16):
            assert sample.call(call).dtype == torch.float32
            with torch.autocast(device, enabled=False):
                assert same_bits(sample.call(call), plain)
        assert same_bits(sample.call(call), plain)
    if device == "cuda":  # autocast of the other device is none of its business
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert same_bits(sample.call(loss.function), plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@per_variant
def test_fake_tensors(loss: Loss, variant: Variant, dtype: torch.dtype, device: str) -> None:
    """What the compiler is told of the result is what comes."""
    for reduction in loss.reductions:
        sample = variant.sample((4, 5), device=device, dtype=dtype, reduction=reduction)
        for call in (loss.function, loss.op):
            with torch.autocast(device, dtype=torch.bfloat16):
                value = sample.call(call)
                with FakeTensorMode() as mode:
                    fake = sample.map(mode.from_tensor).call(call)
            assert fake.dtype == value.dtype, sample.name
            assert fake.shape == value.shape, sample.name


CASTS = re.compile(r"aten::(_to_copy|copy_|clone|float|contiguous|type_as)$")


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@per_variant
def test_inputs_are_not_cast(loss: Loss, variant: Variant, dtype: torch.dtype, device: str) -> None:
    """No float32 copy of the input is made, and none is kept for the backward pass."""
    for reduction in ("none", "mean"):
        sample = variant.sample((64, 33), device=device, dtype=dtype, reduction=reduction)
        for call in (loss.function, loss.op):
            leaves = sample.leaves()
            kept: list[Tensor] = []

            def pack(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
                kept.append(tensor)
                return tensor

            with (
                torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
                torch.autocast(device, dtype=torch.bfloat16),
                profile(activities=[ProfilerActivity.CPU]) as recorded,
            ):
                value = leaves.call(call)
            assert value.dtype == torch.float32
            casts = {e.name for e in recorded.events() if CASTS.match(e.name)}
            assert not casts, f"{sample.name}: {sorted(casts)}"
            assert kept
            # 'none' may keep its own result, which has one float32 for each element or row
            wide = [t for t in kept if t.dtype == torch.float32 and t.numel() >= 64 * 33]
            assert not wide, f"{sample.name}: keeps float32 of {[t.shape for t in wide]}"


@per_loss
def test_mixed_dtypes(loss: Loss, device: str) -> None:
    """A float32 weight or target beside half-precision logits, as a mixed-precision model has."""
    for variant in loss.variants:
        sample = variant.sample((9, 5), device=device, dtype=torch.bfloat16)
        others = {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in sample.tensors.items()
            if name != "input"
        }
        sample = sample.with_tensors(**others)
        known = truth(loss, sample.map(lambda t: t.float() if t.is_floating_point() else t))
        for call in (loss.function, loss.op):
            with torch.autocast(device, dtype=torch.bfloat16):
                result = evaluate(call, sample)
            assert result.value.dtype == torch.float32
            bound = bound_of(
                known.exact.value,
                torch.float32,
                torch.float32,
                known.sizes["value"],
                loss.tolerance,
            )
            assert_within(result.value, known.exact.value, bound, sample.name)
            for name, gradient in result.gradients.items():
                assert gradient.dtype == sample.tensors[name].dtype


def test_float64_beside_half_precision(device: str) -> None:
    x = torch.rand(4, 5, device=device).bfloat16()
    t = torch.rand(4, 5, device=device, dtype=torch.float64)
    with torch.autocast(device, dtype=torch.bfloat16):
        for call in (lossops.mse_loss, lossops.kl_div, lossops.cross_entropy):
            assert call(x, t).dtype == torch.float64
            assert call(t, x).dtype == torch.float64


@per_loss
def test_grad_scaler_values(loss: Loss, device: str) -> None:
    """A scaled loss, as a GradScaler makes it: the backward pass runs outside autocast."""
    sample = loss.variants[0].sample((9, 5), device=device, dtype=torch.float16).leaves()
    with torch.autocast(device, dtype=torch.bfloat16):
        value = sample.call(loss.function)
    (gradient,) = torch.autograd.grad(value * 1024.0, sample.tensors["input"])
    exact = sample.double().leaves()
    true = exact.call(loss.reference) * 1024.0
    (expected,) = torch.autograd.grad(true, exact.tensors["input"])
    assert gradient.dtype == torch.float16
    assert_within(gradient, expected, 2e-3 * expected.abs().max(), loss.name)
