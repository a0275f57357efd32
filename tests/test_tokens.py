"""selective_log_softmax, entropy_from_logits and both in one: against composed torch in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import assert_raises
from numerics import DTYPES, HALF_TYPES, assert_within, layouts_of, same_bits
from torch import Tensor

import lossops
from lossops._ops import tokens as token_ops

NAMES = ("selective_log_softmax", "entropy_from_logits", "selective_log_softmax_and_entropy")


def composed(
    logits: Tensor,
    index: Tensor | None = None,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor | None, Tensor]:
    """The definition in plain torch, in the dtype of the logits."""
    z = logits if row_mask is None else torch.where((row_mask == 0).unsqueeze(-1), 0.0, logits)
    z = logit_scale * z
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / temperature
    log_probs = z.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs.masked_fill(z == -torch.inf, 0.0)).sum(-1)
    chosen = None
    if index is not None:
        single = index.dim() == logits.dim() - 1
        at = (index.unsqueeze(-1) if single else index).long()
        chosen = log_probs.gather(-1, at)
        if row_mask is not None:
            chosen = chosen.masked_fill((row_mask == 0).unsqueeze(-1), 0.0)
        chosen = chosen.squeeze(-1) if single else chosen
    if row_mask is not None:
        entropy = entropy.masked_fill(row_mask == 0, 0.0)
    return chosen, entropy


def value_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def check(logits: Tensor, index: Tensor, tolerance: float = 24.0, **options: Any) -> Tensor:
    """Values and their gradient within `tolerance` roundings of float64. Returns the gradient.

    A rounding of a logit, of magnitude m, is one of m in a value.
    """
    exact_logits = logits.detach().double().requires_grad_()
    leaf = logits.detach().requires_grad_()
    log_probs, entropy = lossops.selective_log_softmax_and_entropy(leaf, index, **options)
    exact_log_probs, exact_entropy = composed(exact_logits, index, **options)
    assert exact_log_probs is not None
    dtype = value_dtype(logits.dtype)
    assert log_probs.dtype == entropy.dtype == dtype
    assert log_probs.shape == index.shape and entropy.shape == logits.shape[:-1]
    assert log_probs.is_contiguous() and entropy.is_contiguous()
    roundoff = 2.0**-53 * 8 if dtype == torch.float64 else 2.0**-24
    finite = exact_logits.detach().nan_to_num(0, 0, 0).abs()
    largest = finite.max().item() if finite.numel() else 0.0
    size = tolerance * roundoff * (1 + largest * abs(options.get("logit_scale", 1.0)))
    assert_within(log_probs, exact_log_probs, size, "log_probs")
    assert_within(entropy, exact_entropy, size * 4, "entropy")
    of_log_probs = torch.randn(log_probs.shape, dtype=dtype).to(logits.device)
    of_entropy = torch.randn(entropy.shape, dtype=dtype).to(logits.device)
    grads = (of_log_probs, of_entropy)
    (gradient,) = torch.autograd.grad((log_probs, entropy), leaf, grads)
    (exact,) = torch.autograd.grad(
        (exact_log_probs, exact_entropy), exact_logits, [grad.double() for grad in grads]
    )
    assert gradient.dtype == logits.dtype and gradient.shape == logits.shape
    per_row = of_log_probs.double().abs()
    if index.dim() == logits.dim():
        per_row = per_row.sum(-1)
    per_row = (per_row + of_entropy.double().abs()).unsqueeze(-1)
    bound = size * 4 * per_row + torch.finfo(logits.dtype).eps * exact.abs()
    bound = bound + torch.finfo(logits.dtype).tiny
    assert_within(gradient, exact, bound.expand_as(exact), "gradient")
    return gradient


def draw(
    *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", k: int | None = None
) -> tuple[Tensor, Tensor]:
    """Logits and indices, drawn on the CPU: alike on all devices."""
    logits = (torch.randn(shape) * 3).to(dtype).to(device)
    rows = shape[:-1] if k is None else (*shape[:-1], k)
    return logits, torch.randint(0, shape[-1], rows).to(device)


# --- values and gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, 1, 20])
@pytest.mark.parametrize(
    "shape",
    [
        (7,),  # one row
        (5, 1),  # one class
        (600, 3),  # more rows than a block, of few classes
        (70, 2, 13),
        (3, 5, 256),  # the most classes of a short row on the CPU
        (3, 257),  # the least of a long one
        (9, 1024),  # the most classes of a short row of fp32 on CUDA
        (2, 3, 4, 1025),
        (9, 2048),  # of a half type
        (9, 2049),
        (3, 40001),  # two pieces
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(
    dtype: torch.dtype, shape: tuple[int, ...], k: int | None, device: str
) -> None:
    logits, index = draw(*shape, dtype=dtype, device=device, k=k)
    check(logits, index)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_dtypes_of_indices(dtype: torch.dtype, device: str) -> None:
    logits, index = draw(9, 200, device=device, k=2)
    expected = lossops.selective_log_softmax(logits, index)
    assert same_bits(lossops.selective_log_softmax(logits, index.to(dtype)), expected)


@pytest.mark.parametrize(
    "shape",
    [
        (700, 3),
        (700, 13),
        (300, 16),  # on CUDA rows of whole vectors, with gaps between them
        (300, 63),  # padded by one, lanes of half types would meet in a bank
        (300, 64),
        (40, 128),
        (40, 70),
        (33, 300),
        (9, 1024),
        (4, 9, 1030),
        (9, 2047),
        (9, 2048),
        (2, 40001),
    ],
)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "logit_scale": -1.3}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_have_equal_bits(
    dtype: torch.dtype, options: dict[str, float], shape: tuple[int, ...], device: str
) -> None:
    logits, index = draw(*shape, dtype=dtype, device=device, k=3)

    def run(x: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        values = lossops.selective_log_softmax_and_entropy(x, at, **options)
        (gradient,) = torch.autograd.grad(values, x, [torch.ones_like(v) for v in values])
        return *values, gradient

    expected = run(logits, index)
    for name, layout in layouts_of(logits).items():
        for ours, theirs in zip(run(layout(logits), index), expected, strict=True):
            assert same_bits(ours, theirs), name
    for name, layout in layouts_of(index).items():
        for ours, theirs in zip(run(logits, layout(index)), expected, strict=True):
            assert same_bits(ours, theirs), f"index {name}"


@pytest.mark.parametrize("num_classes", [13, 50, 811, 1000, 3000, 70000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_their_batch_nor_on_threads(
    dtype: torch.dtype, num_classes: int, device: str
) -> None:
    logits, index = draw(70, num_classes, dtype=dtype, device=device)
    logits.requires_grad_()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        values = lossops.selective_log_softmax_and_entropy(logits, index)
        gradient = torch.autograd.grad(values, logits, [torch.ones_like(v) for v in values])
        results.append((*values, *gradient))
    for one, other in zip(*results, strict=True):
        assert same_bits(one, other)
    row = logits[11:12].detach().requires_grad_()
    alone = lossops.selective_log_softmax_and_entropy(row, index[11:12])
    gradient = torch.autograd.grad(alone, row, [torch.ones_like(v) for v in alone])
    for one, other in zip((*alone, *gradient), results[0], strict=True):
        assert same_bits(one, other[11:12])


def test_expanded_logits_and_gradients(device: str) -> None:
    row = torch.randn(1, 300, device=device, requires_grad=True)
    index = torch.tensor([3, 3, 5], device=device)
    log_probs = lossops.selective_log_softmax(row.expand(3, 300), index)
    (gradient,) = torch.autograd.grad(log_probs.sum(), row)  # a grad_output with stride 0
    exact = row.detach().double().requires_grad_()
    chosen, _ = composed(exact.expand(3, 300), index)
    assert chosen is not None
    (expected,) = torch.autograd.grad(chosen.sum(), exact)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_classes", [9, 700])
def test_gradients_of_repeated_indices_add_up(num_classes: int, device: str) -> None:
    logits, _ = draw(6, num_classes, device=device)
    index = torch.tensor([[1, 8, 1, 1, 0]] * 6, device=device)
    check(logits, index)
    # The softmax's part cancels where all indices are one class that holds all probability.
    logits = torch.zeros(2, num_classes, device=device)
    logits[:, 1] = 200
    logits.requires_grad_()
    same = torch.ones(2, 4, dtype=torch.int64, device=device)
    (gradient,) = torch.autograd.grad(lossops.selective_log_softmax(logits, same).sum(), logits)
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("num_classes", [40, 600])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64, torch.float16])
def test_masked_rows_are_zero_and_not_read(
    dtype: torch.dtype, num_classes: int, device: str
) -> None:
    logits, index = draw(5, 7, num_classes, device=device)
    mask = (torch.rand(5, 7) < 0.6).to(dtype).to(device)
    if dtype == torch.float64:
        mask = mask * 1e-300  # counts
    check(logits, index, row_mask=mask)
    masked = mask == 0
    logits[masked] = torch.nan
    index[masked] = -100
    logits.requires_grad_()
    values = lossops.selective_log_softmax_and_entropy(logits, index, row_mask=mask)
    (gradient,) = torch.autograd.grad(values, logits, [torch.ones_like(v) for v in values])
    for result in (*values, gradient):
        assert torch.equal(result[masked], torch.zeros_like(result[masked]))
        assert bool(result[~masked].isfinite().all())


def test_mask_of_single_values(device: str) -> None:
    logits, index = draw(6, 50, device=device, k=3)
    mask = torch.ones(6, 3, device=device)
    mask[0, 1] = mask[2] = 0
    logits[2] = torch.nan
    logits.requires_grad_()
    found = lossops.selective_log_softmax(logits, index, row_mask=mask)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    whole = lossops.selective_log_softmax(logits, index)
    assert torch.equal(found, whole.masked_fill(mask == 0, 0.0))
    assert torch.equal(gradient[2], torch.zeros_like(gradient[2]))
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 3.0, "logit_scale": 0.25},
        {"logit_scale": -2.0},
        {"softcap": 5.0},
        {"softcap": 30.0, "temperature": 0.5, "logit_scale": 1.5},
        {"temperature": 2.0, "logit_scale": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_classes", [37, 1500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logit_map(
    dtype: torch.dtype, num_classes: int, options: dict[str, float], device: str
) -> None:
    logits, index = draw(11, num_classes, dtype=dtype, device=device, k=2)
    check(logits, index, tolerance=64.0, **options)


def test_softcap_is_about_as_near_to_float64_as_composed_float32(device: str) -> None:
    """Small logits too, where a tanh by exponentials would be a difference that cancels."""
    for size in (1e-3, 0.1, 1.0, 10.0, 100.0):
        logits = torch.randn(2048, 100).to(device) * size
        index = torch.randint(0, 100, (2048,)).to(device)
        exact, _ = composed(logits.double(), index, softcap=30.0)
        single, _ = composed(logits, index, softcap=30.0)
        ours = lossops.selective_log_softmax(logits, index, softcap=30.0)
        assert exact is not None and single is not None
        error = (ours - exact).abs().mean().item()
        assert error <= 1.25 * (single - exact).abs().mean().item(), size


# --- infinities, confident and uniform rows ------------------------------------------------------


@pytest.mark.parametrize("num_classes", [40, 600])
def test_infinite_logits(num_classes: int, device: str) -> None:
    logits, index = draw(8, num_classes, device=device)
    index[:] = 1
    logits[:4, 5:20] = -torch.inf
    logits[3, 1] = -torch.inf  # at the index
    exact = logits.double().requires_grad_()
    logits.requires_grad_()
    log_probs, entropy = lossops.selective_log_softmax_and_entropy(logits, index)
    assert log_probs[3] == -torch.inf
    chosen, exact_entropy = composed(exact, index)
    torch.testing.assert_close(log_probs, chosen.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, exact_entropy.float(), rtol=1e-5, atol=1e-5)
    values = (log_probs, entropy)
    (gradient,) = torch.autograd.grad(values, logits, [torch.ones_like(v) for v in values])
    assert torch.equal(gradient[:3, 5:20], torch.zeros_like(gradient[:3, 5:20]))
    assert chosen is not None
    exact_values = (chosen, exact_entropy)
    (expected,) = torch.autograd.grad(
        exact_values, exact, [torch.ones_like(v) for v in exact_values]
    )
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_classes", [40, 600])
@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan])
def test_rows_without_a_softmax_are_nan(value: float, num_classes: int, device: str) -> None:
    logits, index = draw(3, num_classes, device=device)
    if value == -torch.inf:
        logits[1] = value
    else:
        logits[1, 7] = value
    logits.requires_grad_()
    values = lossops.selective_log_softmax_and_entropy(logits, index)
    (gradient,) = torch.autograd.grad(values, logits, [torch.ones_like(v) for v in values])
    for result in (*values, gradient):
        assert bool(result[1].isnan().all())
        assert bool(result[::2].isfinite().all())


@pytest.mark.parametrize("num_classes", [100, 5000])
@pytest.mark.parametrize("rest", [0.1, 1e-2, 1e-3, 1e-5, 1e-7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_confident_rows(dtype: torch.dtype, rest: float, num_classes: int, device: str) -> None:
    """The gradient is relatively exact at the true class, where it is 1 - p, and elsewhere."""
    logits = torch.randn(16, num_classes, dtype=torch.float64) * 0.5
    others = logits[:, 1:].logsumexp(-1)
    logits[:, 0] = others + torch.tensor((1 - rest) / rest, dtype=torch.float64).log()
    logits = logits.to(dtype).to(device)
    exact = logits.double().requires_grad_()
    logits.requires_grad_()
    index = torch.zeros(16, dtype=torch.int64, device=device)
    # log p = -log1p(sum of the others), exactly
    distances = exact[:, 1:] - exact[:, :1]
    expected = -torch.log1p(distances.exp().sum(-1))
    log_probs, entropy = lossops.selective_log_softmax_and_entropy(logits, index)
    tolerance = 1e-12 if dtype == torch.float64 else 4e-6
    torch.testing.assert_close(log_probs.double(), expected, rtol=tolerance, atol=0)
    (gradient,) = torch.autograd.grad(log_probs.sum(), logits, retain_graph=True)
    (truth,) = torch.autograd.grad(expected.sum(), exact, retain_graph=True)
    torch.testing.assert_close(gradient.double(), truth, rtol=tolerance, atol=0)
    softmax = distances.exp() / (1 + distances.exp().sum(-1, keepdim=True))
    exact_entropy = -expected - (softmax * distances).sum(-1)
    torch.testing.assert_close(entropy.double(), exact_entropy, rtol=tolerance, atol=0)
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    (truth,) = torch.autograd.grad(exact_entropy.sum(), exact)
    torch.testing.assert_close(gradient.double(), truth, rtol=8 * tolerance, atol=0)


@pytest.mark.parametrize("num_classes", [100, 5000])
@pytest.mark.parametrize("strides", ["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_confident_rows_of_a_temperature(
    dtype: torch.dtype, strides: str, num_classes: int, device: str
) -> None:
    """The mapped logit of the true class is the maximum, to the bit."""
    logits = torch.full((16, num_classes), -2.0, dtype=torch.float64)
    logits[:, 0] = torch.linspace(7.0, 8.0, 16).bfloat16()
    logits = logits.to(dtype).to(device)
    logits = logits if strides == "rows" else logits.t().contiguous().t()
    options = {"temperature": 0.45}
    exact = logits.double().requires_grad_()
    expected = -torch.log1p(((exact[:, 1:] - exact[:, :1]) / 0.45).exp().sum(-1))
    index = torch.zeros(16, dtype=torch.int64, device=device)
    logits.requires_grad_()
    log_probs, entropy = lossops.selective_log_softmax_and_entropy(logits, index, **options)
    torch.testing.assert_close(log_probs.double(), expected, rtol=2e-5, atol=0)
    distances = (exact[:, 1:] - exact[:, :1]) / 0.45
    softmax = distances.exp() / (1 + distances.exp().sum(-1, keepdim=True))
    exact_entropy = -expected - (softmax * distances).sum(-1)
    torch.testing.assert_close(entropy.double(), exact_entropy, rtol=2e-5, atol=0)
    tolerance = max(8e-5, torch.finfo(dtype).eps / 2)
    for value, truth in ((log_probs, expected), (entropy, exact_entropy)):
        (gradient,) = torch.autograd.grad(value.sum(), logits, retain_graph=True)
        (exact_gradient,) = torch.autograd.grad(truth.sum(), exact, retain_graph=True)
        torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1.01 * tolerance, atol=0)


def test_tiny_temperatures(device: str) -> None:
    """Where the derivative of the map is near the largest number, far classes still have none."""
    logits = torch.tensor([[1.0, 0.0, -1.0]], device=device, requires_grad=True)
    index = torch.tensor([1], device=device)
    values = lossops.selective_log_softmax_and_entropy(logits, index, temperature=1e-37)
    (gradient,) = torch.autograd.grad(values[1].sum(), logits, retain_graph=True)
    assert torch.equal(gradient, torch.zeros_like(gradient))
    (gradient,) = torch.autograd.grad(values[0].sum(), logits)
    assert gradient[0, 2] == 0


@pytest.mark.parametrize("num_classes", [64, 4096])
def test_near_uniform_rows(num_classes: int, device: str) -> None:
    logits = 1e-3 * torch.randn(8, num_classes)
    check(logits.to(device), torch.zeros(8, dtype=torch.int64, device=device))
    equal = torch.full((2, num_classes), 7.5, device=device)
    entropy = lossops.entropy_from_logits(equal)
    torch.testing.assert_close(entropy, torch.full_like(entropy, num_classes).log())


@pytest.mark.parametrize("num_classes", [40, 5000, 50257])
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_large_logits_cost_no_accuracy(dtype: torch.dtype, num_classes: int, device: str) -> None:
    """Differences of logits are exact, so their magnitude must not show in sums over a row."""
    step = 4.0 if dtype == torch.float16 else 16.0
    below = torch.randint(0, 5, (6, num_classes)) * step
    below[:, 0] = 0
    logits = torch.tensor([3000.0, -3000.0, 2500.0, 1999.0, -2111.0, 3456.0]).unsqueeze(-1)
    logits = (logits.div(step).round() * step - below).to(dtype).to(device)
    log_probs, entropy = lossops.selective_log_softmax_and_entropy(
        logits, torch.zeros(6, dtype=torch.long, device=device), temperature=step * 4
    )
    exact_log_probs, exact_entropy = composed(
        logits.double(), torch.zeros(6, dtype=torch.long, device=device), temperature=step * 4
    )
    assert exact_log_probs is not None
    assert_within(log_probs, exact_log_probs, 2.0**-19, "log_probs")
    assert_within(entropy, exact_entropy, 2.0**-19, "entropy")


@pytest.mark.parametrize("k", [2, 5, 31, 32, 33, 70])
@pytest.mark.parametrize("num_classes", [3, 50, 1030])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_many_indices(dtype: torch.dtype, num_classes: int, k: int, device: str) -> None:
    """Rows of many indices are as exact as rows of few, and have equal bits in any layout."""
    logits, index = draw(300, num_classes, dtype=dtype, device=device, k=k)
    check(logits, index)
    grads = torch.randn(index.shape, device=device)
    gradients = []
    for order in (logits, logits.t().contiguous().t()):
        leaf = order.detach().requires_grad_()
        log_probs = lossops.selective_log_softmax(leaf, index)
        gradients += torch.autograd.grad(log_probs, leaf, grads)
    assert same_bits(*gradients)


@pytest.mark.parametrize("num_classes", [13, 2147, 20481])
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probs_do_not_depend_on_the_entropy(
    dtype: torch.dtype, num_classes: int, device: str
) -> None:
    logits, index = draw(5, num_classes, dtype=dtype, device=device, k=2)
    logits[1:4, ::3] = -torch.inf
    index[...] = 1
    with_entropy = logits.clone().requires_grad_()
    log_probs, _ = lossops.selective_log_softmax_and_entropy(with_entropy, index)
    alone = logits.clone().requires_grad_()
    log_probs_alone = lossops.selective_log_softmax(alone, index)
    assert same_bits(log_probs, log_probs_alone)
    log_probs.sum().backward()
    log_probs_alone.sum().backward()
    assert with_entropy.grad is not None and alone.grad is not None
    assert same_bits(with_entropy.grad, alone.grad)


def test_gradient_scaler_of_float16(device: str) -> None:
    """grad_output 2^16 reaches the gradient before it is rounded to float16."""
    logits, index = draw(64, 2000, dtype=torch.float16, device=device)
    logits.requires_grad_()
    log_probs = lossops.selective_log_softmax(logits, index)
    scale = torch.full_like(log_probs, 2.0**16 / 64)
    (gradient,) = torch.autograd.grad(log_probs, logits, scale)
    exact = logits.detach().double().requires_grad_()
    chosen, _ = composed(exact, index)
    (expected,) = torch.autograd.grad(chosen, exact, scale.double())
    assert_within(gradient, expected, expected.abs() * 2**-10 + 2**-24, "gradient")


# --- shapes and arguments ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 5), (0, 700), (3, 0, 5), (0, 0)])
def test_empty(shape: tuple[int, ...], device: str) -> None:
    logits = torch.randn(shape, device=device, requires_grad=True)
    index = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
    log_probs, entropy = lossops.selective_log_softmax_and_entropy(logits, index)
    assert log_probs.shape == entropy.shape == shape[:-1]
    (gradient,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), logits)
    assert gradient.shape == shape


def test_without_classes(device: str) -> None:
    entropy = lossops.entropy_from_logits(torch.empty(3, 0, device=device))
    assert bool(entropy.isnan().all()) and entropy.shape == (3,)
    none = torch.empty(3, 0, dtype=torch.int64, device=device)
    assert lossops.selective_log_softmax(torch.empty(3, 9, device=device), none).shape == (3, 0)


@pytest.mark.parametrize("value", [-1, 9, 2**40, -(2**63)])
def test_index_out_of_range(value: int, device: str) -> None:
    logits, index = draw(2, 5, 9, device=device, k=2)
    index[1, 3, 1] = value
    if device == "cpu":
        with pytest.raises(IndexError, match=rf"index {value} at row 8 .*for 9 classes"):
            lossops.selective_log_softmax(logits, index)
        with pytest.raises(IndexError, match=rf"index {value} at row 8"):
            torch.ops.lossops.selective_log_softmax(logits, index)
    else:
        found = lossops.selective_log_softmax(logits, index)
        assert bool(found[1, 3, 1].isnan()) and int(found.isnan().sum()) == 1


def test_wrong_arguments(device: str) -> None:
    logits, index = draw(4, 9, device=device)
    call: Callable[..., Any] = functools.partial(lossops.selective_log_softmax, logits, index)
    for name, value, kind in (
        ("temperature", 0.0, ValueError),
        ("temperature", float("nan"), ValueError),
        ("temperature", "hot", TypeError),
        ("logit_scale", float("inf"), ValueError),
        ("logit_scale", None, TypeError),
        ("softcap", -1.0, ValueError),
        ("softcap", [], TypeError),
        ("row_mask", [1], TypeError),
        ("row_mask", torch.ones(3, device=device), RuntimeError),
        ("row_mask", torch.ones(4, 1, device=device), RuntimeError),
        ("row_mask", torch.ones(4, dtype=torch.complex64, device=device), RuntimeError),
    ):
        assert_raises(kind, functools.partial(call, **{name: value}), name, "selective_log_softmax")
    for wrong in (index[:3], index.float(), index.unsqueeze(0).expand(2, 4), index[0]):
        assert_raises(
            RuntimeError, functools.partial(lossops.selective_log_softmax, logits, wrong), "index"
        )
    select = lossops.selective_log_softmax
    assert_raises(TypeError, lambda: select(None, index), "logits")  # type: ignore[arg-type]
    assert_raises(TypeError, lambda: select(logits, 3), "index")  # type: ignore[arg-type]
    assert_raises(NotImplementedError, lambda: select(logits.long(), index), "logits", "int64")
    assert_raises(NotImplementedError, lambda: select(logits.to_sparse(), index), "logits")
    assert_raises(RuntimeError, lambda: lossops.entropy_from_logits(logits[0, 0]), "logits", "0-d")
    if device != "cpu":
        assert_raises(RuntimeError, lambda: select(logits, index.cpu()), "index is on cpu")
    assert_raises(
        RuntimeError, lambda: torch.ops.lossops.entropy_from_logits(logits, temperature=-1.0),
        "temperature",
    )  # fmt: skip


def test_arguments_have_the_order_of_trl(device: str) -> None:
    logits, index = draw(4, 9, device=device)
    mask = torch.tensor([1, 0, 1, 1], device=device)
    one = lossops.selective_log_softmax(logits, index, 0.5, mask)
    both = lossops.selective_log_softmax_and_entropy(logits, index, False, 0.5, mask)
    assert torch.equal(one, both[0]) and one[1] == 0
    whole = lossops.entropy_from_logits(logits, 16, temperature=0.5)
    assert torch.equal(both[1], whole.masked_fill(mask == 0, 0.0))
    assert torch.equal(torch.ops.lossops.selective_log_softmax(logits, index, 0.5, mask), one)


# --- autograd and transforms ---------------------------------------------------------------------


def both(logits: Tensor, index: Tensor, **options: Any) -> Tensor:
    log_probs, entropy = lossops.selective_log_softmax_and_entropy(logits, index, **options)
    return (log_probs * log_probs).sum() + (entropy * entropy).sum()


def both_composed(logits: Tensor, index: Tensor, **options: Any) -> Tensor:
    log_probs, entropy = composed(logits, index, **options)
    assert log_probs is not None
    return (log_probs * log_probs).sum() + (entropy * entropy).sum()


def test_entropy_requires_grad(device: str) -> None:
    logits, index = draw(4, 90, device=device)
    logits.requires_grad_()
    log_probs, entropy = lossops.selective_log_softmax_and_entropy(logits, index, False)
    assert log_probs.requires_grad and not entropy.requires_grad
    with torch.no_grad():
        assert not lossops.selective_log_softmax(logits, index).requires_grad


def test_one_gradient_without_the_other(device: str) -> None:
    logits, index = draw(4, 900, device=device)
    logits.requires_grad_()
    log_probs, entropy = lossops.selective_log_softmax_and_entropy(logits, index)
    (of_entropy,) = torch.autograd.grad(entropy.sum(), logits, retain_graph=True)
    (of_log_probs,) = torch.autograd.grad(log_probs.sum(), logits)
    (alone,) = torch.autograd.grad(lossops.entropy_from_logits(logits).sum(), logits)
    assert torch.equal(of_entropy, alone)
    (alone,) = torch.autograd.grad(lossops.selective_log_softmax(logits, index).sum(), logits)
    assert torch.equal(of_log_probs, alone)


@pytest.mark.parametrize("k", [None, 3])
def test_gradcheck(k: int | None, device: str) -> None:
    logits, index = draw(3, 7, dtype=torch.float64, device=device, k=k)
    logits.requires_grad_()
    mask = torch.tensor([1, 0, 1], device=device)
    call = functools.partial(
        lossops.selective_log_softmax_and_entropy, index=index, row_mask=mask, softcap=4.0,
        temperature=0.8,
    )  # fmt: skip
    torch.autograd.gradcheck(call, logits, check_batched_grad=True, check_forward_ad=True)
    torch.autograd.gradgradcheck(call, logits)
    torch.autograd.gradcheck(lossops.entropy_from_logits, logits, check_batched_grad=True)
    torch.autograd.gradgradcheck(lossops.entropy_from_logits, logits)


def test_torch_func(device: str) -> None:
    logits, index = draw(3, 12, dtype=torch.float64, device=device)

    def ours(x: Tensor) -> Tensor:
        return both(x, index)

    def theirs(x: Tensor) -> Tensor:
        return both_composed(x, index)

    tangent = torch.randn_like(logits)
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        torch.testing.assert_close(transform(ours)(logits), transform(theirs)(logits))
    torch.testing.assert_close(
        torch.func.jvp(ours, (logits,), (tangent,)), torch.func.jvp(theirs, (logits,), (tangent,))
    )
    torch.testing.assert_close(torch.func.functionalize(ours)(logits), theirs(logits))


def test_torch_func_of_operators_raises(device: str) -> None:
    logits, index = draw(3, 12, device=device)
    operator = torch.ops.lossops.selective_log_softmax
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.func.grad(lambda x: operator(x, index).sum())(logits)


@pytest.mark.parametrize("in_dims", [(0, 0), (1, None), (2, 1), (None, 0)])
def test_vmap(in_dims: tuple[int | None, int | None], device: str) -> None:
    sizes = [[4, 70], [4]]
    for size, dim in zip(sizes, in_dims, strict=True):
        if dim is not None:
            size.insert(dim, 5)
    logits = torch.randn(sizes[0], device=device)
    index = torch.randint(0, 70, sizes[1], device=device)

    def each(call: Callable[..., Tensor]) -> Tensor:
        def sample(i: int) -> Tensor:
            x = logits if in_dims[0] is None else logits.select(in_dims[0], i)
            t = index if in_dims[1] is None else index.select(in_dims[1], i)
            return call(x, t)

        return torch.stack([sample(i) for i in range(5)])

    def gradient(x: Tensor, t: Tensor) -> Tensor:
        return torch.func.grad(both)(x, t)

    for call in (lossops.selective_log_softmax, both, gradient):
        found = torch.func.vmap(call, in_dims)(logits, index)
        torch.testing.assert_close(found, each(call))


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_autocast(dtype: torch.dtype, device: str) -> None:
    logits, index = draw(4, 600, dtype=dtype, device=device)
    expected = lossops.selective_log_softmax(logits, index)
    logits.requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        found = lossops.selective_log_softmax(logits, index)
        entropy = torch.ops.lossops.entropy_from_logits(logits)
    assert same_bits(found.detach(), expected) and entropy.dtype == torch.float32
    (gradient,) = torch.autograd.grad(found.sum() + entropy.sum(), logits)
    assert gradient.dtype == dtype


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(name: str, dynamic: bool, device: str) -> None:
    function = getattr(lossops, name)

    def step(logits: Tensor, index: Tensor) -> Any:
        args = (logits * 2,) if name == "entropy_from_logits" else (logits * 2, index)
        return function(*args, temperature=0.7)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for rows in (6, 8):
        logits, index = draw(rows, 300, device=device)
        results = []
        for call in (step, compiled):
            leaf = logits.clone().requires_grad_()
            values = call(leaf, index)
            values = values if isinstance(values, tuple) else (values,)
            gradient = torch.autograd.grad(values, leaf, [torch.ones_like(v) for v in values])
            results.append((*values, *gradient))
        for eager, other in zip(*results, strict=True):
            torch.testing.assert_close(other, eager)
            assert other.stride() == eager.stride()
    with torch.no_grad():
        torch.testing.assert_close(compiled(logits, index), step(logits, index))


@pytest.mark.parametrize("k", [None, 3])
def test_opcheck(k: int | None, device: str) -> None:
    logits, index = draw(4, 50, device=device, k=k)
    logits.requires_grad_()
    mask = torch.tensor([1, 0, 1, 1], device=device)
    ops = torch.ops.lossops
    for op, args in (
        (ops.selective_log_softmax, (logits, index, 0.5, mask)),
        (ops.entropy_from_logits, (logits,)),
        (ops.selective_log_softmax_and_entropy, (logits, index)),
    ):
        torch.library.opcheck(op.default, args)
    at = index if k else index.unsqueeze(-1)
    forward = (logits, at, mask, 0.5, 1.0, None, True, True, True)
    torch.library.opcheck(ops.token_values_forward.default, forward)
    *values, stats = (x.detach() for x in ops.token_values_forward(*forward))
    options = (0.5, 1.0, None, True, True, [True])
    backward = (*values, logits.detach(), at, mask, stats, *options)
    torch.library.opcheck(ops.token_values_backward.default, backward)


def test_strides_of_fakes(device: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    logits, index = draw(5, 6, 40, device=device, k=2)
    for name, layout in layouts_of(logits).items():
        x = layout(logits)
        arguments = (x, index, None, 1.0, 1.0, None, True, True, True)
        real = torch.ops.lossops.token_values_forward(*arguments)
        grads = torch.ops.lossops.token_values_backward(
            *real[:3], x, index, None, real[3], 1.0, 1.0, None, True, True, [True]
        )
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            y, at = mode.from_tensor(x), mode.from_tensor(index)
            fake = torch.ops.lossops.token_values_forward(y, at, *arguments[2:])
            fake_grads = torch.ops.lossops.token_values_backward(
                *fake[:3], y, at, None, fake[3], 1.0, 1.0, None, True, True, [True]
            )
        for a, b in zip((*real, *grads), (*fake, *fake_grads), strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), name


def test_no_gradient_keeps_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, index = draw(4, 50, device=device)
    kept = []
    values = token_ops.TOKEN_VALUES
    below = values._values_below
    monkeypatch.setattr(values, "_values_below", lambda *a: kept.append(below(*a)[3]) or below(*a))
    lossops.selective_log_softmax(logits, index)
    assert kept[0].numel() == 0
    lossops.selective_log_softmax(logits.requires_grad_(), index)
    assert kept[1].shape == (3, 4)


def test_changed_logits_raise(device: str) -> None:
    logits, index = draw(4, 50, device=device)
    leaf = logits.clone().requires_grad_()
    x = leaf * 1
    log_probs = lossops.selective_log_softmax(x, index)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


@pytest.mark.cuda
def test_no_synchronisation() -> None:
    logits, index = draw(64, 5000, device="cuda", k=2)
    logits.requires_grad_()
    mask = torch.ones(64, device="cuda")
    both(logits, index, row_mask=mask).backward()
    torch.cuda.set_sync_debug_mode("error")
    both(logits, index, row_mask=mask).backward()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-39},
        {"softcap": 1e-39},
        {"logit_scale": 1e30, "temperature": 1e-30},
        {"softcap": 1e30, "temperature": 1e-30},
        {"softcap": 1e-30, "logit_scale": 1e30},
    ],
    ids=str,
)
def test_masked_rows_of_extreme_maps(options: dict[str, float], device: str) -> None:
    """Constants of a map that float32 does not hold leave a masked row's gradient 0."""
    logits = torch.randn(2, 5, device=device, requires_grad=True)
    index = torch.tensor([0, 1], device=device)
    mask = torch.tensor([0, 1], device=device)
    values = lossops.selective_log_softmax(logits, index, row_mask=mask, **options)
    (gradient,) = torch.autograd.grad(values[0], logits)
    assert torch.equal(gradient[0], torch.zeros_like(gradient[0]))


def test_tiny_softcap(device: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]], device=device)
    index = torch.tensor([0], device=device)
    value = lossops.selective_log_softmax(logits, index, softcap=1e-39)
    torch.testing.assert_close(value, torch.full_like(value, -math.log(3)))


def test_logit_scale_of_zero(device: str) -> None:
    """All mapped logits are 0, however large the logits are; of infinities they are NaN."""
    least = torch.finfo(torch.float32).min
    logits = torch.tensor([[1.0, 2.0, least], [0, -math.inf, 1]], device=device)
    logits.requires_grad_()
    index = torch.tensor([0, 0], device=device)
    log_probs, entropy = lossops.selective_log_softmax_and_entropy(logits, index, logit_scale=0.0)
    assert log_probs[0].item() == pytest.approx(-math.log(3))
    assert entropy[0].item() == pytest.approx(math.log(3))
    assert log_probs[1].isnan()
    (gradient,) = torch.autograd.grad(log_probs[0], logits)
    assert torch.equal(gradient[0], torch.zeros(3, device=device))


def test_masked_values_need_no_class(device: str) -> None:
    logits = torch.randn(1, 4, device=device, requires_grad=True)
    index = torch.tensor([[1, -100]], device=device)
    mask = torch.tensor([[1, 0]], device=device)
    values = lossops.selective_log_softmax(logits, index, row_mask=mask)
    (expected,) = torch.autograd.grad(logits.log_softmax(-1)[0, 1], logits)
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    torch.testing.assert_close(
        values, torch.stack([logits.log_softmax(-1)[:, 1], 0 * logits[:, 0]], 1)
    )
    torch.testing.assert_close(gradient, expected)


def test_operators_name_what_is_missing() -> None:
    logits = torch.randn(2, 3)
    for name in ("selective_log_softmax", "selective_log_softmax_and_entropy"):
        with pytest.raises((TypeError, RuntimeError), match="index"):
            getattr(torch.ops.lossops, name)(logits, None)
        with pytest.raises(TypeError, match=rf"^{name}: logits must be a Tensor"):
            getattr(torch.ops.lossops, name)(None, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"^entropy_from_logits: logits must be a Tensor"):
        torch.ops.lossops.entropy_from_logits(None)
    with pytest.raises(RuntimeError, match="logits must have at least 1 dimension"):
        lossops.entropy_from_logits(torch.tensor(1.0, device="meta"))


# --- what TRL documents of these functions -------------------------------------------------------
# TRL's distributions have no tests. Values of half types are float32 here.


@pytest.mark.parametrize("dtype", DTYPES)
def test_trl_selective_log_softmax(dtype: torch.dtype, device: str) -> None:
    logits = torch.randn(4, 32, 1024, dtype=dtype, device=device)
    input_ids = torch.randint(0, 1024, (4, 32), device=device)
    expected = logits.log_softmax(-1).gather(-1, input_ids.unsqueeze(-1)).squeeze(-1)
    found = lossops.selective_log_softmax(logits, input_ids)
    tolerance = 1e-5 if dtype not in HALF_TYPES else torch.finfo(dtype).eps
    torch.testing.assert_close(
        found, expected.to(found.dtype), rtol=max(tolerance, 1e-5), atol=tolerance
    )


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_trl_selective_log_softmax_of_several(dtype: torch.dtype, k: int, device: str) -> None:
    logits = torch.randn(4, 32, 1024, dtype=dtype, device=device)
    index = torch.randint(0, 1024, (4, 32, k), device=device)
    expected = logits.log_softmax(-1).gather(-1, index)
    found = lossops.selective_log_softmax(logits, index)
    assert found.shape == (4, 32, k)
    tolerance = 1e-5 if dtype not in HALF_TYPES else torch.finfo(dtype).eps
    torch.testing.assert_close(
        found, expected.to(found.dtype), rtol=max(tolerance, 1e-5), atol=tolerance
    )


@pytest.mark.parametrize("shape", [(768,), (32, 768), (8, 16, 768), (2, 4, 8, 768)])
@pytest.mark.parametrize("chunk_size", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_trl_entropy_from_logits(
    dtype: torch.dtype, chunk_size: int, shape: tuple[int, ...], device: str
) -> None:
    logits = torch.randn(*shape, dtype=dtype, device=device)
    wide = logits.to(value_dtype(dtype))
    p = wide.softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    found = lossops.entropy_from_logits(logits, chunk_size=chunk_size)
    torch.testing.assert_close(found, entropy, rtol=1e-5, atol=1e-5)
