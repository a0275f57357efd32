"""Gradients that the forward pass leaves: the same bits as those of a backward pass, always."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from losses import LOSSES, VARIANT_IDS, VARIANTS, Loss, Sample, Variant
from numerics import DTYPES, layouts_of, same_bits
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import lossops
from lossops import ops

per_variant = pytest.mark.parametrize(("loss", "variant"), VARIANTS, ids=VARIANT_IDS)


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    yield
    lossops.keep_gradients(True)


def gradient_of_input(
    loss: Loss, sample: Sample, grad_output: float = 1.0, *, kept: bool = True
) -> Tensor:
    lossops.keep_gradients(kept)
    x = sample.tensors["input"].detach().requires_grad_()  # the same memory
    value = sample.with_tensors(input=x).call(loss.function)
    assert (getattr(value.grad_fn, "kept", None) is not None) == (kept and keeps(loss, sample))
    (gradient,) = torch.autograd.grad(value, x, torch.full_like(value, grad_output))
    assert getattr(value.grad_fn, "kept", None) is None
    with torch.no_grad():
        alone = sample.call(loss.function)
    assert same_bits(value, alone), f"{sample.name}: the loss depends on who wants a gradient"
    return gradient


def keeps(loss: Loss, sample: Sample) -> bool:
    """Whether this call is one whose forward pass computes the gradient."""
    elementwise_weight = loss.elementwise and "weight" in sample.tensors
    return sample.options.get("reduction") != "none" and not elementwise_weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@per_variant
def test_same_bits(loss: Loss, variant: Variant, dtype: torch.dtype, device: str) -> None:
    sizes = (1, 7, 33, 1000, 1025, 2049, 4100, 9001, 20_000, 60_001)
    for size in sizes:
        shape = loss.size_to_shape[0](size)
        for reduction in loss.reductions:
            sample = variant.sample(shape, device=device, dtype=dtype, reduction=reduction)
            for grad_output in (1.0, 0.0, -3.0, 1024.0):
                kept = gradient_of_input(loss, sample, grad_output)
                computed = gradient_of_input(loss, sample, grad_output, kept=False)
                assert same_bits(kept, computed), f"{sample.name}, grad_output {grad_output}"


@per_variant
def test_layouts(loss: Loss, variant: Variant, device: str) -> None:
    for shape in ((33, 19), (3, 9, 7), (2, 3, 5, 4), (3, 2050), (0, 3)):
        sample = variant.sample(shape, device=device, reduction="mean")
        for name, layout in layouts_of(sample.tensors["input"]).items():
            changed = sample.with_tensors(input=layout(sample.tensors["input"])).renamed(name)
            for grad_output in (1.0, 2.0):
                kept = gradient_of_input(loss, changed, grad_output)
                computed = gradient_of_input(loss, changed, grad_output, kept=False)
                assert same_bits(kept, computed), f"{changed.name}, grad_output {grad_output}"
                assert kept.stride() == computed.stride(), changed.name


def test_ignored_rows_and_weights(device: str) -> None:
    """The mean's denominator is known before the gradient is written."""
    (loss,) = [x for x in LOSSES if not x.elementwise]
    for shape in ((50, 10), (300, 1500), (20, 9001), (7, 5, 3)):
        x = torch.randn(shape, device=device)
        t = torch.randint(shape[1], (shape[0], *shape[2:]), device=device)
        t[::3] = -100
        for weight in (None, torch.rand(shape[1], device=device)):
            for target in (t, torch.full_like(t, -100)):
                tensors = {"input": x, "target": target}
                if weight is not None:
                    tensors["weight"] = weight
                sample = Sample("ignored", tensors, {"reduction": "mean"}, ("input",))
                kept = gradient_of_input(loss, sample)
                assert same_bits(kept, gradient_of_input(loss, sample, kept=False))


@pytest.mark.parametrize("through", ["function", "op"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_given_away_once(loss: Loss, through: str, device: str) -> None:
    """What a caller does to a gradient does not reach the next one."""
    sample = loss.variants[0].sample((6, 9), device=device, reduction="sum")
    x = sample.tensors["input"].detach().clone().requires_grad_()
    value = sample.with_tensors(input=x).call(getattr(loss, through))
    assert value.grad_fn is not None and value.grad_fn.kept is not None
    (first,) = torch.autograd.grad(value, x, retain_graph=True)
    expected = first.clone()
    first.fill_(77)
    (second,) = torch.autograd.grad(value, x, retain_graph=True)
    assert same_bits(second, expected)
    (third,) = torch.autograd.grad(value, x, create_graph=True)
    assert third.grad_fn is not None
    assert same_bits(third, expected)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_changed_input_is_an_error(loss: Loss, device: str) -> None:
    sample = loss.variants[0].sample((6, 9), device=device, reduction="sum")
    x = sample.tensors["input"].detach().clone().requires_grad_()
    y = x * 1
    value = sample.with_tensors(input=y).call(loss.function)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@per_variant
def test_operator_keeps_what_the_function_does(loss: Loss, variant: Variant, device: str) -> None:
    """Outside of what records operators; and nothing for an input that is broadcast."""
    for reduction in loss.reductions:
        sample = variant.sample((6, 9), device=device, reduction=reduction)
        x = sample.tensors["input"].detach().requires_grad_()
        sample = sample.with_tensors(input=x)
        kept = getattr(sample.call(loss.op).grad_fn, "kept", None)
        assert (kept is not None) == keeps(loss, sample), sample.name
        with FlopCounterMode(display=False):
            recorded = sample.call(loss.op)
        assert getattr(recorded.grad_fn, "kept", None) is None
        assert same_bits(recorded, sample.call(loss.op))
    if loss.elementwise:
        x = torch.rand(1, 9, device=device, requires_grad=True)
        value = loss.op(x, torch.rand(6, 9, device=device))
        assert getattr(value.grad_fn, "kept", None) is None


def test_accumulates_and_scales(device: str) -> None:
    """Gradients of two losses of one input, one of them scaled."""
    x = torch.randn(40, 1200, device=device, requires_grad=True)
    t = torch.randint(1200, (40,), device=device)
    (lossops.cross_entropy(x, t) + 3 * lossops.mse_loss(x, torch.zeros_like(x))).backward()
    assert x.grad is not None
    y = x.detach().double().requires_grad_()
    functional = torch.nn.functional
    (functional.cross_entropy(y, t) + 3 * functional.mse_loss(y, torch.zeros_like(y))).backward()
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-5, atol=1e-9)


def test_loss_scaling_in_half_precision(device: str) -> None:
    """A gradient too small for float16 is not lost where grad_output makes it large."""
    x = torch.zeros(4096, 33, dtype=torch.float16, device=device, requires_grad=True)
    t = torch.zeros(4096, dtype=torch.int64, device=device)
    (32768 * lossops.cross_entropy(x, t).float()).backward()
    exact = 32768 / 4096 / 33
    assert x.grad is not None
    assert (x.grad[:, 1:].double() / exact - 1).abs().max().item() < 2**-10


@pytest.mark.cuda
def test_memory_of_a_step() -> None:
    """One gradient, and at most 16 MiB, beyond the inputs."""
    for name, shape in (("mse_loss", (4096, 8192)), ("cross_entropy", (4096, 8192))):
        x = torch.randn(shape, device="cuda", requires_grad=True)
        t: Any = torch.randn(shape, device="cuda")
        if name == "cross_entropy":
            t = torch.randint(shape[1], shape[:1], device="cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        getattr(lossops, name)(x, t).backward()
        torch.cuda.synchronize()
        beyond = torch.cuda.max_memory_allocated() - before
        assert beyond <= x.numel() * 4 + 2**24, f"{name}: {beyond / 2**20:.0f} MiB"


def test_switch() -> None:
    lossops.keep_gradients(False)
    assert not ops._keeps_gradients
    x = torch.randn(3, requires_grad=True)
    assert not hasattr(lossops.mse_loss(x, torch.zeros(3)).grad_fn, "kept")
