"""cross_entropy_forward_inplace: the sum of losses, and its gradient over the logits that it reads.

Its results have the bits of two calls, of which the second writes a new tensor.
"""

from __future__ import annotations

import math

import pytest
import torch
from checks import assert_raises
from numerics import DTYPES, same_bits
from torch import Tensor

from lossops import _plan

OP = torch.ops.lossops.cross_entropy_forward_inplace.default
HALF = torch.bfloat16

# Where one kernel of the policy ends and the next begins, and odd vocabularies.
_EDGES = _plan.table_data("h200")["edges"]
CLASSES = {
    torch.float32: sorted({1, 2, 3, 33, 150, 1000, 3001, 50257, 151937, *_EDGES["float32"]}),
    HALF: sorted(
        {1, 2, 3, 16, 33, 64, 150, 320, 1003, 3001, 50257, 128256, 151937, *_EDGES["bfloat16"]}
    ),
    torch.float16: [1000, 1024, 4096, 5000, 40000],
    torch.float64: [2, 100, 5000],
}


def problem(
    rows: int, classes: int, dtype: torch.dtype, device: str, padding: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits of all kinds of rows, in rows of a larger stride if there is padding; class indices.

    There are confident rows, large logits and ignored rows of NaN.
    """
    x = torch.randn(rows, classes + padding, dtype=torch.float32)
    target = torch.randint(classes, (rows,))
    x[2::7] *= 30
    x[3::7, : max(1, classes // 2)] += 3000
    x.scatter_add_(1, target.unsqueeze(1), 40.0 * (torch.arange(rows) % 5 == 1).unsqueeze(1))
    if rows > 6:
        target[6::11] = -100
        x[6::11] = float("nan")
    return x.to(device, dtype)[:, :classes], target.to(device)


def copied(x: Tensor) -> Tensor:
    """A copy of the memory too that lies between rows."""
    return x._base.clone()[:, : x.size(1)] if x._base is not None else x.clone()


def check(
    x: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    smoothing: float = 0.0,
    denominator: float | None = None,
) -> None:
    options = (ignore_index, "sum", smoothing)
    loss, row_stats, _ = torch.ops.lossops.cross_entropy_forward(x, target, weight, *options, True)
    divisor = None
    terms = None
    if denominator is not None:
        divisor = torch.tensor(denominator, dtype=torch.float64, device=x.device)
        options = (ignore_index, "mean", smoothing)
        terms = torch.stack((divisor, divisor))
    one = torch.ones((), dtype=torch.float64, device=x.device)
    (gradient,) = torch.ops.lossops.cross_entropy_backward(
        one, x, target, weight, row_stats, terms, *options, [True, False, False]
    )
    base = copied(x)
    around = None if base._base is None else base._base.clone()
    found = OP(base, target, weight, divisor, ignore_index, smoothing)
    assert same_bits(found, loss)
    assert same_bits(base, gradient)
    if around is not None:  # what lies between rows is not written
        around[:, : x.size(1)] = base
        assert same_bits(base._base, around)


@pytest.mark.parametrize(
    ("dtype", "classes"),
    [
        pytest.param(dtype, classes, id=f"{str(dtype)[6:]}-{classes}")
        for dtype, counts in CLASSES.items()
        for classes in counts
    ],
)
def test_kernels(device: str, dtype: torch.dtype, classes: int) -> None:
    """Every family, as rows lie in memory and with rows that are padded, odd and to vectors."""
    rows = max(7, min(300 if device == "cuda" else 40, 1_000_000 // classes))
    for padding in (0, 1, -classes % 8):
        x, target = problem(rows, classes, dtype, device, padding)
        check(x, target)
        check(x, target, denominator=rows + 0.5)
    check(x, target, smoothing=0.1, denominator=3.0)
    weight = torch.rand(classes, device=device).to(dtype)
    check(x, target, weight=weight, denominator=float(rows))


@pytest.mark.gpu_memory(2)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("classes", [64, 101, 512, 1000, 1024, 1030, 1251, 4096, 4104, 5001, 33000])
def test_many_rows(device: str, dtype: torch.dtype, classes: int) -> None:
    """More rows than the blocks of any device take at a time."""
    rows = 9000 if device == "cuda" else 500
    x, target = problem(rows, classes, dtype, device)
    check(x, target, denominator=float(rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probabilities(device: str, dtype: torch.dtype) -> None:
    x, _ = problem(40, 2050, dtype, device)
    x = x.nan_to_num()
    target = torch.rand(40, 2050, device=device).to(dtype)
    check(x, target)
    check(x, target, smoothing=0.1, denominator=77.0)


@pytest.mark.parametrize("shape", [(5, 20, 7), (3, 300, 4, 5), (1, 1000, 2)], ids=str)
def test_more_dimensions(device: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=device)
    target = torch.randint(shape[1], (shape[0], *shape[2:]), device=device)
    check(x, target, denominator=4.0)
    check(torch.randn(shape[1], device=device), torch.tensor(3, device=device), denominator=4.0)


def test_parts_of_a_mean(device: str) -> None:
    """Of all parts: the loss of the mean of all rows, and its gradient in the bits of one call."""
    x, target = problem(60, 3000, torch.float32, device)
    count = (target != -100).sum(dtype=torch.float64)
    loss, gradient, _ = torch.ops.lossops.cross_entropy_forward_gradient(x, target)
    parts = zip(x.split(25), target.split(25), strict=True)
    total = sum(OP(part, of_part, None, count, -100, 0.0) for part, of_part in parts)
    torch.testing.assert_close(total / count.to(x.dtype), loss)
    assert same_bits(x, gradient)


def test_class_index_out_of_range(device: str) -> None:
    x, target = problem(5, 1000, torch.float32, device)
    target[2] = 1000
    if device == "cpu":
        assert_raises(IndexError, lambda: OP(x, target, None, None, -100, 0.0), "1000", "row 2")
        return
    assert OP(x, target, None, None, -100, 0.0).isnan()
    assert x[2].isnan().all()
    assert not x[1].isnan().any()


def test_no_rows(device: str) -> None:
    x = torch.empty(0, 5, device=device)
    target = torch.empty(0, dtype=torch.int64, device=device)
    none = torch.zeros((), dtype=torch.float64, device=device)
    for denominator in (None, none):
        assert OP(x, target, None, denominator, -100, 0.0) == 0
    x, target = torch.randn(4, 5, device=device), torch.full((4,), -100, device=device)
    assert OP(x, target, None, none, -100, 0.0) == 0
    assert (x == 0).all()  # although 1/0 is infinite


def test_versions_and_fakes(device: str) -> None:
    x, target = problem(5, 10, HALF, device)
    version = x._version
    found = OP(x, target, None, None, -100, 0.0)
    assert x._version == version + 1
    assert found.dtype == torch.float32
    fake = OP(x.to("meta"), target.to("meta"), None, None, -100, 0.0)
    assert (fake.dtype, fake.shape) == (found.dtype, found.shape)


@pytest.mark.parametrize(
    ("denominator", "words"),
    [
        (torch.ones(()), ("denominator", "float64")),
        (torch.ones(2, dtype=torch.float64), ("denominator", "one element")),
    ],
    ids=["dtype", "size"],
)
def test_wrong_denominator(device: str, denominator: Tensor, words: tuple[str, ...]) -> None:
    x, target = problem(5, 10, torch.float32, device)
    call = lambda: OP(x, target, None, denominator.to(device), -100, 0.0)  # noqa: E731
    assert_raises(RuntimeError, call, *words)


# ---------------------------------------------------------------- scale_kept


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 1000, 100_003])
def test_scale_kept(device: str, dtype: torch.dtype, numel: int) -> None:
    """As a product; from an address that is not of a whole vector, too."""
    scale = torch.ops.lossops.scale_kept
    memory = torch.randn(numel + 1, device=device).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    for x in (memory[:numel], memory[1:]):
        for factor in (1.0, 0.37, -(2.0**-20), math.inf, math.nan):
            for factor_dtype in (dtype, torch.float32, torch.float64):
                number = torch.tensor(factor, dtype=factor_dtype, device=device)
                expected = (x.to(wide) * number.to(wide)).to(dtype)
                found = memory.clone()
                part = found[:numel] if x.storage_offset() == 0 else found[1:]
                scale(part, number)
                torch.testing.assert_close(part, expected, rtol=0, atol=0, equal_nan=True)
                untouched = found[numel:] if x.storage_offset() == 0 else found[:1]
                assert untouched.item() == memory[-1 if x.storage_offset() == 0 else 0].item()


def test_scale_kept_wrongly(device: str) -> None:
    scale = torch.ops.lossops.scale_kept
    x, factor = torch.randn(4, 6, device=device), torch.ones((), device=device)
    assert_raises(RuntimeError, lambda: scale(x.t(), factor), "gradient", "contiguous")
    assert_raises(RuntimeError, lambda: scale(x, x), "factor", "one element")
    assert_raises((RuntimeError, NotImplementedError), lambda: scale(x.int(), factor), "gradient")
    version = x._version
    scale(x, factor)
    assert x._version == version + 1
