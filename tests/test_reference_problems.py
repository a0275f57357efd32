"""Three problems as they are usually posed: small on the CPU, in full on a GPU.

Their losses are nearly constants, so a check of the scalar passes wrong kernels: each element's
loss and each gradient are held against float64 too, also on data of more varied size.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from checks import bound_of
from losses import BY_NAME, Loss, Sample, evaluate
from numerics import assert_within, ulp
from torch import Tensor

import lossops


def check_by_rows(loss: Loss, sample: Sample, divisor: float, rows: int = 1024) -> None:
    """Value, per-element values and gradients against float64, `rows` rows at a time."""
    reduced = evaluate(loss.function, sample)
    elements = evaluate(loss.function, sample.with_options(reduction="none"))
    total = torch.zeros((), dtype=torch.float64, device=reduced.value.device)
    size = torch.zeros_like(total)
    for start in range(0, sample.tensors["input"].shape[0], rows):
        part = sample.map(lambda t, s=start: t[s : s + rows]).with_options(reduction="none")
        exact = part.double()
        with torch.no_grad():
            shape = part.call(loss.function).shape
        for result, factor in ((reduced, 1 / divisor), (elements, 1.0)):
            grad_output = torch.full(shape, factor, dtype=torch.float64, device=total.device)
            truth = evaluate(loss.reference, exact, grad_output)
            sizes = loss.magnitudes(exact, grad_output)
            for name, true in truth.gradients.items():
                bound = bound_of(true, torch.float32, torch.float32, sizes[name], loss.tolerance)
                mine = result.gradients[name][start : start + rows]
                assert_within(mine, true, bound, f"{sample.name}, rows from {start}: {name}")
        bound = bound_of(truth.value, torch.float32, torch.float32, sizes["value"], loss.tolerance)
        mine = elements.value[start : start + rows]
        assert_within(mine, truth.value, bound, f"{sample.name}, rows from {start}: value")
        total += truth.value.sum()
        size += sizes["value"].sum()
    mean, size = total / divisor, size / divisor
    if loss.name == "mse_loss":  # terms of one sign
        bound = 2 * ulp(mean, torch.float32)
    else:
        bound = ulp(mean, torch.float32) + 4 * 2.0**-24 * size
    assert_within(reduced.value, mean, bound, f"{sample.name}: reduced")


def spread(shape: tuple[int, int], device: str) -> Tensor:
    """Numbers of very different sizes and either sign."""
    exponent = 6 * torch.rand(shape, device=device) - 4
    return torch.randn(shape, device=device) * 10**exponent


def mse_problems(device: str) -> Iterator[Sample]:
    n = 32768 if device == "cuda" else 1024
    scale = torch.rand((), device=device)
    both = ("input", "target")
    p, t = torch.rand(n, n, device=device) * scale, torch.rand(n, n, device=device)
    yield Sample("rand", {"input": p, "target": t}, {"reduction": "mean"}, both)
    del p, t
    p, t = spread((n // 4, n), device), spread((n // 4, n), device)
    yield Sample("spread", {"input": p, "target": t}, {"reduction": "mean"}, both)


@pytest.mark.gpu_memory(50)
def test_mean_squared_error(device: str) -> None:
    """mean((p - t) ** 2) of (32768, 32768): 2^30 elements."""
    for sample in mse_problems(device):
        x, t = sample.tensors["input"], sample.tensors["target"]
        direct = torch.zeros((), dtype=torch.float64, device=device)
        for a, b in zip(x.split(1024), t.split(1024), strict=True):
            direct += ((a.double() - b.double()) ** 2).sum() / x.numel()
        assert_within(lossops.mse_loss(x, t), direct, 2 * ulp(direct, torch.float32), "direct")
        check_by_rows(BY_NAME["mse_loss"], sample, x.numel())
        del x, t, sample


@pytest.mark.gpu_memory(10)
def test_cross_entropy(device: str) -> None:
    """cross_entropy of (32768, 4096) logits."""
    n, classes = (32768, 4096) if device == "cuda" else (1024, 4096)
    for name, x in (
        ("rand", torch.rand(n, classes, device=device)),
        ("spread", spread((n, classes), device)),
    ):
        t = torch.randint(0, classes, (n,), device=device)
        sample = Sample(name, {"input": x, "target": t}, {"reduction": "mean"}, ("input",))
        direct = torch.zeros((), dtype=torch.float64, device=device)
        for logits, index in zip(x.split(1024), t.split(1024), strict=True):
            wide = logits.double()
            direct += (wide.logsumexp(1) - wide.gather(1, index[:, None])[:, 0]).sum()
        bound = 2 * ulp(direct / n, torch.float32)
        assert_within(lossops.cross_entropy(x, t), direct / n, bound, f"{name}: direct")
        check_by_rows(BY_NAME["cross_entropy"], sample, n)


@pytest.mark.gpu_memory(20)
@pytest.mark.parametrize("log_input", [False, True], ids=["fused_log", "log"])
def test_kl_divergence(log_input: bool, device: str) -> None:
    """kl_div(log(p), t, reduction="batchmean") of (16384, 16384) distributions."""
    n = 16384 if device == "cuda" else 1024
    scale = torch.rand((), device=device)
    for name in ("rand", "peaked"):
        if name == "rand":
            p = (torch.rand(n, n, device=device) * scale).softmax(-1)
            t = torch.rand(n, n, device=device).softmax(-1)
        else:
            p = (2 * torch.randn(n // 4, n, device=device)).softmax(-1)
            t = (4 * torch.randn(n // 4, n, device=device)).softmax(-1)
        x = torch.log(p) if log_input else p
        direct = torch.zeros((), dtype=torch.float64, device=device)
        for a, b in zip(x.split(1024), t.split(1024), strict=True):
            log_p = a.double() if log_input else a.double().log()
            direct += (b.double() * (b.double().log() - log_p)).sum()
        options = {"reduction": "batchmean", "log_input": log_input}
        sample = Sample(name, {"input": x, "target": t}, options, ("input", "target"))
        check_by_rows(BY_NAME["kl_div"], sample, x.shape[0])
        value = lossops.kl_div(x, t, **options)
        assert_within(value, direct / x.shape[0], 1e-3 * direct.abs() / x.shape[0], "direct")
        del p, t, x, sample


@pytest.mark.parametrize("name", ["rand", "peaked"])
def test_kl_divergence_is_no_worse_than_torch(name: str, device: str) -> None:
    """The root mean square error of a term and the error of the sum, on these distributions."""
    n = 4096 if device == "cuda" else 512
    peak = (0.5, 1.0) if name == "rand" else (2.0, 4.0)
    p = (torch.rand(n, n, device=device) * peak[0]).softmax(-1)
    t = (torch.rand(n, n, device=device) * peak[1]).softmax(-1)
    exact = torch.nn.functional.kl_div(p.double().log(), t.double(), reduction="none")
    theirs = torch.nn.functional.kl_div(p.log(), t, reduction="none").double() - exact
    ours = lossops.kl_div(p, t, reduction="none", log_input=False).double() - exact
    assert ours.square().mean() <= 1.01 * theirs.square().mean()
    total = exact.sum()
    wrong = (lossops.kl_div(p, t, reduction="sum", log_input=False).double() - total).abs()
    theirs_wrong = (torch.nn.functional.kl_div(p.log(), t, reduction="sum") - total).abs()
    # a sum may be right by luck: within half a unit of the terms' own errors is as good
    luck = 2.0**-24 * (t.double() * t.double().log()).abs().sum()
    assert wrong <= torch.maximum(theirs_wrong, luck)
