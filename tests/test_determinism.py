"""The same input gives the same bits: run to run, for any number of threads, from any thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from losses import BY_NAME, VARIANT_IDS, VARIANTS, Loss, Result, Sample, Variant, evaluate
from numerics import same_bits

per_variant = pytest.mark.parametrize(("loss", "variant"), VARIANTS, ids=VARIANT_IDS)

# Enough elements, or rows, to be split among threads and into more blocks than a GPU runs at once.
LARGE = (1537, 129)
LONG_ROWS = (5, 70_001)


def assert_same_result(a: Result, b: Result, what: str) -> None:
    assert same_bits(a.value, b.value), f"{what}: value"
    for name, gradient in a.gradients.items():
        assert same_bits(gradient, b.gradients[name]), f"{what}: gradient of {name}"


def samples(loss: Loss, variant: Variant, device: str) -> list[Sample]:
    """Large samples of both shapes, each with two reductions.

    Of float64 too: a narrower result hides in which order its terms were added.
    """
    kinds = ((LARGE, torch.float32), (LARGE, torch.float64), (LONG_ROWS, torch.bfloat16))
    return [
        variant.sample(shape, device=device, dtype=dtype, reduction=reduction)
        for shape, dtype in kinds
        for reduction in ("none", loss.reductions[-1])
    ]


@per_variant
def test_runs_are_equal(loss: Loss, variant: Variant, device: str) -> None:
    for sample in samples(loss, variant, device):
        first = evaluate(loss.function, sample)
        for _ in range(3):
            assert_same_result(evaluate(loss.function, sample), first, sample.name)
        copies = sample.map(torch.Tensor.clone)
        assert_same_result(evaluate(loss.function, copies), first, f"{sample.name}, cloned")
        assert_same_result(evaluate(loss.op, sample), first, f"{sample.name}, op")


BATCHES = (1, 2, 3, 7, 31, 32, 33, 127, 128, 255, 256, 257, 1000, 1024, 1025, 2047, 4095)


@pytest.mark.parametrize("classes", [2, 10, 100, 504, 1001, 2048, 2049])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_do_not_depend_on_the_batch_size(
    dtype: torch.dtype, classes: int, device: str
) -> None:
    """Losses and gradients of the first rows of 4096, for every kind of target."""
    loss = BY_NAME["cross_entropy"]
    x = (2 * torch.randn(4096, classes)).to(dtype)
    index = torch.randint(0, classes, (4096,))
    index[torch.rand(4096) < 0.2] = -100
    probabilities = torch.softmax(torch.randn(4096, classes), 1).to(dtype)
    for target, options in (
        (index, {}),
        (index, {"label_smoothing": 0.1}),
        (probabilities, {}),
    ):
        tensors = {"input": x.to(device), "target": target.to(device)}
        all_rows = Sample("", tensors, {"reduction": "none", **options}, ("input",))
        expected = evaluate(loss.function, all_rows)
        for rows in BATCHES:
            some = evaluate(loss.function, all_rows.map(lambda t, rows=rows: t[:rows]))
            what = f"{rows} rows, {options}, target {target.dtype}"
            assert same_bits(some.value, expected.value[:rows]), what
            assert same_bits(some.gradients["input"], expected.gradients["input"][:rows]), what


@per_variant
def test_thread_counts_are_equal(loss: Loss, variant: Variant) -> None:
    for sample in samples(loss, variant, "cpu"):
        torch.set_num_threads(1)
        first = evaluate(loss.function, sample)
        for threads in (2, 3, 8):
            torch.set_num_threads(threads)
            result = evaluate(loss.function, sample)
            assert_same_result(result, first, f"{sample.name}, {threads} threads")


@per_variant
def test_calls_from_several_threads(loss: Loss, variant: Variant, device: str) -> None:
    found = samples(loss, variant, device)
    expected = [evaluate(loss.function, sample) for sample in found]
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(evaluate, loss.function, sample) for sample in found * 3]
        for i, job in enumerate(jobs):
            sample = found[i % len(found)]
            assert_same_result(job.result(), expected[i % len(found)], sample.name)


@per_variant
def test_deterministic_mode_changes_nothing(loss: Loss, variant: Variant, device: str) -> None:
    """No alert is raised, and uninitialised memory, which that mode fills with NaN, is not read."""
    for sample in samples(loss, variant, device):
        expected = evaluate(loss.function, sample)
        torch.use_deterministic_algorithms(True)
        for call in (loss.function, loss.op):
            assert_same_result(evaluate(call, sample), expected, sample.name)
        torch.use_deterministic_algorithms(False)


@per_variant
def test_default_dtype_changes_nothing(loss: Loss, variant: Variant, device: str) -> None:
    sample = variant.sample((33, 65), device=device)
    expected = evaluate(loss.function, sample)
    torch.set_default_dtype(torch.float64)
    try:
        for call in (loss.function, loss.op):
            assert_same_result(evaluate(call, sample), expected, sample.name)
    finally:
        torch.set_default_dtype(torch.float32)
