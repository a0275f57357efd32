"""The benchmark's random draws: what they are, what they count, and what is said of them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lossops
from lossops.bench import cases, meter
from lossops.bench import cli as command_line
from lossops.bench.drawn import cli, elements, exact, jobs, measure, peers, rows, tables
from lossops.bench.drawn.elements import ElementDraw
from lossops.bench.drawn.measure import Measured
from lossops.bench.drawn.rows import RowDraw, Rows
from lossops.bench.drawn.spec import Bounds, parse

CPU = torch.device("cpu")
SMALL = Bounds((1 / 64, 1 / 16))
RATES = {"read": 30.0, "copy": 20.0}
OF_ELEMENTS, OF_ROWS = (measure.families([f"{kind}/*"]) for kind in ("elements", "rows"))


def drawn_elements(seed: int, count: int) -> list[ElementDraw]:
    found = measure.draws(seed, count, OF_ELEMENTS, SMALL)
    return [one for one in found if isinstance(one, ElementDraw)]


def drawn_rows(seed: int, count: int, bounds: Bounds = SMALL) -> list[RowDraw]:
    found = measure.draws(seed, count, OF_ROWS, bounds)
    return [one for one in found if isinstance(one, RowDraw)]


# --- what is drawn ------------------------------------------------------------------------------


def test_same_for_the_same_seed() -> None:
    first, again, other = (drawn_elements(seed, 30) for seed in (1, 1, 2))
    assert first == again != other
    for draw in first[:9]:
        for a, b in zip(elements.operands(draw, CPU), elements.operands(draw, CPU), strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()
    assert drawn_rows(1, 30) == drawn_rows(1, 30) != drawn_rows(2, 30)
    for draw in drawn_rows(1, 12):
        one, two = rows.tensors(draw, CPU), rows.tensors(draw, CPU)
        assert torch.equal(one.logits, two.logits) and torch.equal(one.target, two.target)
        assert one.logits.stride() == two.logits.stride()


def test_same_on_every_device() -> None:
    """Nothing that draws knows the device, so what a seed draws can be written down."""
    first = [str(draw) for draw in measure.draws(7, 5, OF_ROWS[:5])]
    assert first == EXPECTED
    code = (
        "from lossops.bench.drawn import measure\n"
        "for draw in measure.draws(7, 5, measure.families(['rows/*'])[:5]): print(draw)\n"
    )
    # Another hash seed, as another process has.
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout.splitlines() == EXPECTED


EXPECTED = [
    "rows/contiguous shape=7168x124105 dtype=bf16 confident=14.0 data=1183106095",
    "rows/none shape=6144x10106 dtype=fp32 reduction=none ignored=0.1 data=1796056062",
    "rows/padded shape=9128832x21 dtype=fp16 reduction=sum pad=11 offset=1 data=1458852142",
    "rows/images shape=16x7x91x73x69 dtype=fp32 reduction=sum data=643552192",
    "rows/soft shape=4225020x35 dtype=bf16 smoothing=0.05 confident=14.0 data=448625515",
]


def test_a_family_draws_the_same_beside_others() -> None:
    alone = list(measure.draws(3, 4, ["rows/padded"]))
    beside = list(measure.draws(3, 8, ["rows/none", "rows/padded"]))
    assert alone == beside[1::2]


@pytest.mark.parametrize("seed", range(5))
def test_layouts_of_elements(seed: int) -> None:
    for draw in drawn_elements(seed, 36):
        input, target = elements.operands(draw, CPU)
        assert torch.broadcast_shapes(input.shape, target.shape) == draw.shape
        assert (input.dtype, target.dtype) == tuple(cases.DTYPES[name] for name in draw.dtypes)
        both = (input, target)
        if draw.family == "contiguous":
            assert all(tensor.is_contiguous() for tensor in both)
        elif draw.family == "permuted":
            assert input.stride() == target.stride()
        elif draw.family in ("padded", "many"):
            assert not any(tensor.is_contiguous() for tensor in both)
        elif draw.family == "shifted":
            offsets = [tensor.storage_offset() for tensor in both]
            assert offsets == [0, 1] and input.stride() == target.stride()
        elif draw.family in ("broadcast", "expanded"):
            small, large = both if draw.family == "expanded" else both[::-1]
            assert large.shape == draw.shape != small.shape
        elif draw.family == "mixed":
            assert input.dtype != target.dtype
        else:
            assert draw.family == "transposed"
            assert sorted(tensor.is_contiguous() for tensor in both) == [False, True]


def test_rows_cover_what_they_promise() -> None:
    draws = drawn_rows(11, 400, Bounds())
    count = collections.Counter(draw.family for draw in draws)
    assert set(count) == set(rows.families()) and max(count.values()) - min(count.values()) <= 1
    assert {draw.dtype for draw in draws} == set(cases.DTYPES)
    of_ce = [draw for draw in draws if not draw.is_tokens]
    assert {draw.reduction for draw in of_ce} == {"mean", "sum", "none"}
    for family in ("padded", "images", "soft", "soft-images"):
        found = [draw for draw in draws if draw.family == family]
        assert {draw.reduction for draw in found} == {"mean", "sum", "none"}
    assert {draw.reduction for draw in draws if draw.family == "contiguous"} == {"mean", "sum"}
    assert {draw.reduction for draw in draws if draw.family == "none"} == {"none"}
    images = [draw for draw in draws if draw.family in ("images", "soft-images")]
    assert {len(draw.shape) for draw in images} == {3, 4, 5}

    padded = [draw for draw in draws if draw.family == "padded"]
    strides = [draw.classes + draw.pad for draw in padded if draw.pad]
    assert any(stride % 8 == 0 for stride in strides) and any(stride % 2 for stride in strides)
    assert any(draw.offset and not draw.pad for draw in padded)
    assert all(draw.pad or draw.offset for draw in padded)
    assert not any(draw.pad or draw.offset for draw in of_ce if draw.family != "padded")

    for family in ("soft", "soft-images"):
        soft = [draw for draw in draws if draw.family == family]
        assert {(draw.probabilities, draw.smoothing > 0) for draw in soft} == {
            (False, True),
            (True, False),
            (True, True),
        }
    assert 20 < sum(draw.weight for draw in draws) < 100
    assert 20 < sum(draw.ignored > 0 for draw in draws) < 100
    for family in rows.families():
        assert {draw.confident for draw in draws if draw.family == family} == {0.0, 14.0}

    classes = [draw.classes for draw in draws if draw not in images]
    assert 2 <= min(classes) < 8 and 100_000 < max(classes) <= 262144
    assert any(c % 2 for c in classes) and any(c % 1024 == 0 for c in classes)
    assert min(draw.rows for draw in draws) < 1000 < 1_000_000 < max(draw.rows for draw in draws)
    # Shapes are rounded, so bytes are about what was asked for.
    mib = [draw.nbytes / 2**20 for draw in draws]
    assert 64 * 0.7 < min(mib) < 80 and 1600 < max(mib) < 2048 * 1.4


def test_bounds() -> None:
    draws = drawn_rows(2, 100, Bounds((1, 2), (10, 20)))
    classes = {draw.classes for draw in draws}
    assert classes <= set(range(10, 21)) and len(classes) > 8
    assert 0.7 < min(draw.nbytes for draw in draws) / 2**20
    assert max(draw.nbytes for draw in draws) / 2**20 < 2.8


def test_tensors_of_rows() -> None:
    for draw in drawn_rows(4, 60):
        data = rows.tensors(draw, CPU)
        assert data.logits.shape == draw.shape
        assert data.logits.dtype == cases.DTYPES[draw.dtype]
        assert data.logits.storage_offset() == draw.offset
        if len(draw.shape) == 2:
            assert data.logits.stride() == (draw.classes + draw.pad, 1)
        else:
            assert data.logits.is_contiguous() and not draw.pad
        if draw.probabilities:
            assert data.target.shape == draw.shape
        elif not draw.is_tokens:
            assert data.target.shape == (draw.shape[0], *draw.shape[2:])
            kept = data.target[data.target != cases.IGNORED]
            assert kept.numel() == data.kept_rows
            assert 0 <= int(kept.min()) and int(kept.max()) < draw.classes
        assert (data.weight is not None) == draw.weight


@pytest.mark.parametrize(
    "text",
    [
        "rows/contiguous shape=400x70 dtype=bf16",
        "rows/images shape=4x70x100 dtype=fp16",
        "rows/padded shape=400x70 dtype=fp32 pad=1 ignored=0.3",
        "rows/tokens shape=400x70 dtype=fp32 loss=logp reduction=none indices=20",
    ],
)
def test_confident_rows(text: str) -> None:
    plain, sure = (rows.tensors(parse(text + more, RowDraw), CPU) for more in ("", " confident=14"))
    raised = sure.logits.double() - plain.logits.double() > 13
    assert raised.sum(1).eq(1).all()
    index = sure.target if sure.target.shape[1:] == sure.logits.shape[2:] else sure.target[:, 0]
    kept = index != cases.IGNORED
    share = (raised.double().argmax(1) == index)[kept].double().mean()
    assert 0.65 < share < 0.85
    assert torch.equal(sure.target, plain.target)


def test_confident_rows_of_probabilities() -> None:
    text = "rows/soft shape=400x70 dtype=bf16 probabilities=yes confident=14"
    data = rows.tensors(parse(text, RowDraw), CPU)
    assert data.logits.softmax(1).amax(1).double().mean() > 0.99
    share = (data.logits.argmax(1) == data.target.argmax(1)).double().mean()
    assert 0.65 < share < 0.85


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("shape", ["140001x3", "3x140001"])
def test_values_are_finite_beyond_what_a_half_counts(dtype: str, shape: str) -> None:
    data = rows.tensors(parse(f"rows/none shape={shape} dtype={dtype} weight=yes", RowDraw), CPU)
    assert data.logits.isfinite().all()
    assert data.weight is not None and data.weight.isfinite().all()


def test_draws_are_written_and_read() -> None:
    for draw in (*drawn_elements(5, 40), *drawn_rows(5, 80)):
        assert measure.spec(str(draw)) == draw
    written = "rows/padded shape=4096x50257 dtype=bf16 pad=47 weight=yes ignored=0.3"
    draw = parse(written, RowDraw)
    assert draw == RowDraw("padded", (4096, 50257), "bf16", pad=47, weight=True, ignored=0.3)
    assert str(draw) == written


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rows/padded shape=4x5", "dtype must be given"),
        ("rows/none shape=4x5 dtype=fp12", "fp12"),
        ("rows/nothing shape=4x5 dtype=fp32", "family nothing"),
        ("rows/none shape=4x5 dtype=fp32 colour=red", "colour=red"),
        ("rows/none shape=4x dtype=fp32", "shape=4x"),
        ("rows/images shape=4x5x6 dtype=fp32 pad=1", "pad is for"),
        ("rows/soft shape=4x5 dtype=fp32 probabilities=yes ignored=0.1", "no ignored rows"),
        ("rows/none shape=4x5 dtype=fp32 weight=maybe", "yes or no"),
        ("elements/padded shape=4x5 loss=mse dtypes=fp32", "two, as in"),
        ("columns/padded shape=4x5", "rows/"),
    ],
)
def test_wrong_specs(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=said):
        measure.spec(text)
    with pytest.raises(SystemExit):
        command_line.parse(["--spec", text, "--device", "cpu"])
    assert said in capsys.readouterr().err


# --- what is counted ----------------------------------------------------------------------------


def test_bytes_of_elements() -> None:
    draw = ElementDraw("broadcast", (64, 32), "mse", ("fp32", "fp16"), gradients="both")
    input, target = torch.rand(64, 32), torch.rand(1, 32).half()
    read = 64 * 32 * 4 + 32 * 2
    moved = elements.moved_bytes(draw, input, target, torch.rand(()))
    assert moved == {"read": read, "written": 0, "step": 2 * read}
    one = dataclasses.replace(draw, gradients="target", reduction="none")
    losses = 64 * 32 * 4
    assert elements.moved_bytes(one, input, target, torch.rand(64, 32)) == {
        "read": read,
        "written": losses,
        "step": 2 * (read + losses) + 32 * 2,
    }
    # The gradient of an input of logarithms does not depend on that input.
    for loss, gradients, saved, written in (
        ("kl-log", "input", 64 * 32 * 4, 64 * 32 * 4),
        ("kl-log", "both", 0, read),
        ("kl-probs", "input", 0, 64 * 32 * 4),
    ):
        none = dataclasses.replace(draw, loss=loss, gradients=gradients, reduction="none")
        moved = elements.moved_bytes(none, input, target, torch.rand(64, 32))
        assert moved["step"] == 2 * (read + losses) - saved + written


# Of 40 rows (30 of them kept where some are ignored) and 32 classes, each number by hand.
BYTES = {
    "rows/contiguous shape=40x32 dtype=fp32": (40 * 32 * 4 + 40 * 8, 0, 2 * 40 * 32 * 4 + 40 * 8),
    # Padding is not read.
    "rows/padded shape=40x32 dtype=bf16 pad=8 offset=3 reduction=sum": (
        40 * 32 * 2 + 40 * 8,
        0,
        2 * 40 * 32 * 2 + 40 * 8,
    ),
    # Class indices twice; losses and grad_output; a statistic written and read.
    "rows/none shape=40x32 dtype=fp16 reduction=none": (
        40 * 32 * 2 + 40 * 8,
        40 * 2,
        2 * 40 * 32 * 2 + 2 * 40 * 8 + 2 * 40 * 2 + 2 * 40 * 4,
    ),
    # Ignored rows are not read, and their gradient is written.
    "rows/contiguous shape=40x32 dtype=fp32 ignored=0.3 weight=yes": (
        30 * 32 * 4 + 40 * 8 + 32 * 4,
        0,
        30 * 32 * 4 + 40 * 8 + 32 * 4 + 40 * 32 * 4,
    ),
    "rows/images shape=2x32x4x5 dtype=fp32": (
        40 * 32 * 4 + 40 * 8,
        0,
        2 * 40 * 32 * 4 + 40 * 8,
    ),
    "rows/soft shape=40x32 dtype=bf16 probabilities=yes reduction=none": (
        2 * 40 * 32 * 2,
        40 * 2,
        3 * 40 * 32 * 2 + 2 * 40 * 2 + 2 * 40 * 4,
    ),
    # A mask of a byte a row; float32 outputs; two statistics.
    "rows/tokens shape=40x32 dtype=bf16 loss=logp-entropy reduction=none ignored=0.3": (
        30 * 32 * 2 + 40 * 8 + 40,
        2 * 40 * 4,
        30 * 32 * 2 + 2 * (40 * 8 + 40) + 2 * 2 * 40 * 4 + 2 * 2 * 40 * 4 + 40 * 32 * 2,
    ),
    "rows/tokens shape=40x32 dtype=fp32 loss=logp reduction=none indices=20": (
        40 * 32 * 4 + 40 * 20 * 8,
        40 * 20 * 4,
        2 * 40 * 32 * 4 + 2 * 40 * 20 * 8 + 2 * 40 * 20 * 4 + 2 * 40 * 4,
    ),
}


@pytest.mark.parametrize("text", BYTES)
def test_bytes_of_rows(text: str) -> None:
    draw = parse(text, RowDraw)
    read, written, step = BYTES[text]
    moved = rows.moved_bytes(draw, 30 if draw.ignored else 40)
    assert moved == {"read": read, "written": written, "step": step}


@pytest.mark.parametrize(
    ("shape", "dtype", "kept", "read"),
    [
        ((1, 5, 40), "bf16", [0, 17], 32),  # 16 pixels a sector, and 8 at the end
        ((1, 5, 40), "fp32", [0, 39], 16),
        ((2, 5, 10), "bf16", [12], 10),  # the second of two short planes
        ((40, 2), "fp32", [3, 5], 8),  # 4 rows a sector
        ((40, 100), "fp32", [3, 5], 2),
    ],
)
def test_sectors_are_read_whole(
    shape: tuple[int, ...], dtype: str, kept: list[int], read: int
) -> None:
    logits = torch.zeros(shape, dtype=cases.DTYPES[dtype])
    mask = torch.zeros(shape[0], *shape[2:], dtype=torch.bool)
    mask.view(-1)[kept] = True
    data = rows.Rows(logits, torch.zeros(mask.shape, dtype=torch.int64), None, mask)
    assert (data.kept_rows, data.read_rows) == (len(kept), read)


def test_a_loss_for_each_row_reaches_two_thirds() -> None:
    draw = RowDraw("none", (1024, 65536), "bf16", reduction="none")
    three_passes = 3 * draw.nbytes
    assert rows.moved_bytes(draw, 1024)["step"] / three_passes == pytest.approx(2 / 3, abs=1e-3)


def test_floor() -> None:
    draw = parse("rows/none shape=400x32 dtype=fp32 reduction=none", RowDraw)
    todo = jobs.job(draw, [], _meter(), RATES)
    read, written = 400 * 32 * 4 + 400 * 8, 400 * 4
    assert todo.floor_ms["forward"] == pytest.approx((read / 30 + written / 20) / 1e6)
    assert todo.floor_ms["step"] == pytest.approx(todo.moved["step"] / 20 / 1e6)


# --- what is found wrong ------------------------------------------------------------------------


def test_errors_of_elements_are_seen() -> None:
    draw = drawn_elements(3, 1)[0]
    draw = dataclasses.replace(draw, loss="mse", reduction="mean", gradients="both")
    leaves = [tensor.requires_grad_() for tensor in elements.operands(draw, CPU)]

    def error(value: torch.Tensor, gradients: list[torch.Tensor]) -> float:
        return elements.error(draw, value, gradients, leaves, None, F.mse_loss)

    loss = F.mse_loss(*leaves)
    right = list(torch.autograd.grad(loss, leaves))
    assert error(loss, right) < 0.01
    assert error(loss * 1.1, right) > 0.03
    assert error(loss, [right[0], right[1] * 1.1]) > 0.01
    assert error(loss, [right[0] * torch.nan, right[1]]) == float("inf")


def test_sums_that_overflow() -> None:
    draw = ElementDraw("contiguous", (300, 300), "mse", ("fp16", "fp16"), reduction="sum")
    input, target = (
        torch.full((300, 300), 2.0).half().requires_grad_(),
        torch.zeros(300, 300).half(),
    )
    loss = F.mse_loss(input, target, reduction="sum")
    assert loss.isinf()
    (gradient,) = torch.autograd.grad(loss, input)
    measured = elements.error(draw, loss, [gradient], [input, target], None, F.mse_loss)
    assert measured < 1e-3
    finite = torch.zeros_like(loss)
    assert elements.error(draw, finite, [gradient], [input, target], None, F.mse_loss) == float(
        "inf"
    )


@pytest.mark.parametrize(
    "text",
    [
        "rows/contiguous shape=50x33 dtype=fp32 ignored=0.3 weight=yes",
        "rows/padded shape=50x33 dtype=fp32 reduction=none pad=2",
        "rows/images shape=3x5x7x4 dtype=fp32 reduction=sum",
        "rows/images shape=3x5x70x4 dtype=fp32 reduction=none ignored=0.3",
        "rows/soft shape=50x33 dtype=fp32 probabilities=yes weight=yes smoothing=0.1",
        "rows/soft shape=50x33 dtype=fp32 reduction=none smoothing=0.1 weight=yes",
    ],
)
def test_errors_of_rows_are_seen(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_parts", _in_parts)
    draw = parse(text, RowDraw)
    data = rows.tensors(draw, CPU)
    leaf = data.logits.detach().requires_grad_()
    got = exact.outputs(draw, leaf, data)
    grads = (torch.rand_like(got[0]),) if draw.reduction == "none" else None
    (gradient,) = torch.autograd.grad(got, leaf, grads)
    value = got[0].detach()

    def error(value: torch.Tensor, gradient: torch.Tensor, factor: float = 1.0) -> float:
        return exact.error(draw, data, (value,), [(gradient, factor)], grads)

    assert error(value, gradient) < 1e-5
    assert error(value, gradient * 8, 8.0) < 1e-5
    worse = value.clone()
    worse.view(-1)[-1] += 0.1 * value.abs().max()
    assert error(worse, gradient) > 0.02
    off = gradient.clone()
    off[-1] = gradient[-1] * 1.1
    assert error(value, off) > 0.01
    off[-1] = torch.nan
    assert error(value, off) == float("inf")


def test_terms_that_cancel() -> None:
    """Where log p is near -H the gradient of an entropy is a small difference of large terms.

    An error that is small beside the terms passes, and one that is not is seen.
    """
    draw = parse("rows/tokens shape=1x502 dtype=fp32 loss=entropy reduction=none", RowDraw)
    weights = (torch.ones(1),)

    def gradient_of(logit: float) -> tuple[Rows, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Of a row with one likely class, 500 unlikely ones, and `logit` behind these."""
        logits = torch.tensor([[0.0] + [-6.2] * 500 + [logit]])
        rows = Rows(logits, torch.zeros(1, dtype=torch.long), None, None)
        leaf = logits.double().requires_grad_()
        values = exact.outputs(draw, leaf, rows)
        (gradient,) = torch.autograd.grad(values[0].sum(), leaf)
        return rows, gradient, tuple(one.detach().float() for one in values)

    below, above = -6.0, 0.0
    for _ in range(30):
        middle = (below + above) / 2
        crosses = gradient_of(middle)[1][0, -1] > 0
        below, above = (middle, above) if crosses else (below, middle)
    rows, gradient, values = gradient_of(below)
    assert gradient[0, -1].abs() < 1e-6

    def error(off: float) -> float:
        changed = gradient.clone()
        changed[0, -1] += off
        return exact.error(draw, rows, values, [(changed, 1.0)], weights)

    assert error(1e-7) < 2e-6
    assert 1e-7 / gradient.abs().mean() > 1e-5  # beside the gradients it is not small
    assert error(1e-5) > 1e-3
    assert exact.error(draw, rows, values, [(gradient * 1.03, 1.0)], weights) > 0.014


def test_coefficients_that_cancel() -> None:
    """Where a probability is its coefficient, the gradient of a smoothed loss is 0.

    A gradient whose error is small beside these two numbers passes. One with a larger error is
    seen.
    """
    draw = parse("rows/soft shape=1x2001 dtype=fp32 reduction=none smoothing=0.05", RowDraw)
    largest = math.log(2000 * (0.95 + 0.05 / 2001) / (0.05 - 0.05 / 2001))
    rows = Rows(torch.tensor([[largest] + [0.0] * 2000]), torch.tensor([0]), None, None)
    leaf = rows.logits.double().requires_grad_()
    values = exact.outputs(draw, leaf, rows)
    (gradient,) = torch.autograd.grad(values[0].sum(), leaf)
    assert gradient.abs().max() < 1e-7

    def error(off: float) -> float:
        changed = gradient.clone()
        changed[0, 0] += off
        found = tuple(one.detach().float() for one in values)
        return exact.error(draw, rows, found, [(changed, 1.0)], (torch.ones(1),))

    assert error(2.0**-25) < 1e-6
    assert error(1e-6) > 0.5


def _in_parts(logits: torch.Tensor) -> list[exact._Part]:
    """Several, so that it matters where they begin."""
    dim = max((dim for dim in range(logits.dim()) if dim != 1), key=logits.size)
    half = logits.size(dim) // 2
    return [exact._Part(dim, 0, half), exact._Part(dim, half, logits.size(dim) - half)]


# --- peers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "skipped"),
    [
        ("rows/contiguous shape=64x128 dtype=bf16", {"trl"}),
        ("rows/contiguous shape=64x127 dtype=bf16", {"trl", "quack"}),
        ("rows/padded shape=64x128 dtype=bf16 pad=8", {"trl", "quack"}),
        ("rows/padded shape=64x128 dtype=bf16 offset=1", {"trl", "quack"}),
        ("rows/none shape=64x128 dtype=bf16 reduction=none", {"trl"}),
        ("rows/soft shape=64x128 dtype=bf16 smoothing=0.1", {"trl", "quack"}),
        ("rows/soft shape=64x128 dtype=bf16 probabilities=yes", {"trl", "quack", "liger"}),
        ("rows/none shape=64x128 dtype=bf16 weight=yes ignored=0.3", {"trl", "quack"}),
        ("rows/tokens shape=64x128 dtype=bf16 loss=logp reduction=none", {"quack", "liger"}),
        (
            "rows/tokens shape=64x128 dtype=bf16 loss=logp reduction=none indices=20",
            {"quack", "liger", "trl"},
        ),
    ],
)
def test_who_takes_a_call(text: str, skipped: set[str]) -> None:
    reasons = {who: peers.why_not(who, parse(text, RowDraw)) for who in peers.PEERS}
    assert {who for who, reason in reasons.items() if reason} == skipped


def test_absent_peers_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.why_absent("eager") is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(peers.PEERS, "quack", "no_such_package")
        reason = peers.why_absent("quack")
        assert reason is not None and "ModuleNotFoundError" in reason
        _quickly(patch)
        arguments = ["--random", "1", "--count", "1", "--families", "rows/none", "--mib", "1", "1"]
        assert command_line.main([*arguments, "--device", "cpu", "--peers", "quack"]) == 0
    assert f"without quack: {reason}" in capsys.readouterr().out


def _quickly(patch: pytest.MonkeyPatch) -> None:
    rates = {"read": {"sum": 30.0}, "copy": {"copy": 30.0}}
    patch.setattr(cli, "measure_bandwidths", lambda _: rates)
    patch.setattr(meter.Meter, "medians", _medians)


def _medians(self: object, calls: dict[str, meter.Call], failed: meter.Failed) -> dict[str, float]:
    for call in calls.values():
        call()
    return dict.fromkeys(calls, 1.0)


def _meter() -> meter.Meter:
    found = object.__new__(meter.Meter)
    found.device, found.cuda = CPU, False
    return found


def _as_package(writes: bool, factor: float = 1.0) -> cases.Loss:
    """A package of (N, C) alone, as `cases` has them."""

    def loss(input: torch.Tensor, target: torch.Tensor, **options: object) -> torch.Tensor:
        found = F.cross_entropy(input, target, **options)  # type: ignore[arg-type]
        if writes:
            input.data.mul_(0.5)
        return found * factor

    return lambda *arguments, **options: cases._by_rows(loss, *arguments, **options)


@pytest.mark.parametrize(
    "text",
    [
        "rows/images shape=2x5x6x7 dtype=fp32 reduction=none",
        "rows/padded shape=20x5 dtype=fp32 pad=3 offset=1",
    ],
)
def test_packages(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter.Meter, "medians", _medians)
    draw = parse(text, RowDraw)

    monkeypatch.setitem(cases.PACKAGE_CE, "liger", _as_package(writes=False))
    found = measure.measure(draw, ["eager", "liger"], _meter(), RATES)
    assert found.passed and not found.notes and not found.skipped
    assert all(set(ms) == {"ours", "eager", "liger"} for ms in found.ms.values())

    # A copy is made of images, so there nothing is written over.
    monkeypatch.setitem(cases.PACKAGE_CE, "liger", _as_package(writes=True))
    found = measure.measure(draw, ["liger"], _meter(), RATES)
    overwritten = draw.family == "padded"
    assert ("liger" in found.ms["forward"]) != overwritten
    assert ("writes the gradient" in found.skipped.get("liger", "")) == overwritten
    assert "liger" in found.ms["step"] and found.passed

    monkeypatch.setitem(cases.PACKAGE_CE, "liger", _as_package(writes=False, factor=1.1))
    found = measure.measure(draw, ["liger"], _meter(), RATES)
    assert "its result is off by" in found.notes["liger"] and "liger" in found.ms["step"]

    monkeypatch.delitem(cases.PACKAGE_CE, "liger")
    found = measure.measure(draw, ["liger"], _meter(), RATES)
    assert found.notes == {"liger": "KeyError: 'liger'"} and found.passed
    assert set(found.ms["forward"]) == set(found.ms["step"]) == {"ours"}


@pytest.mark.parametrize("reduction", ["sum", "batchmean"])
def test_gradients_that_overflow(reduction: str) -> None:
    """Sums over the dimensions that an operand lacks."""
    options: dict[str, Any] = {"reduction": reduction, "log_target": True}
    draw = ElementDraw("expanded", (200_000, 3), "kl-log-target", ("fp16", "fp16"), reduction)
    input, target = (-torch.ones(rows, 3).half() for rows in (1, 200_000))
    target[:, 0] = -20
    input.requires_grad_()
    loss = F.kl_div(input.float(), target.float(), **options).half()
    wide = input.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(F.kl_div(wide, target.double(), **options), wide)
    gradient = exact.half()
    assert gradient.isinf().tolist() == [[False, True, True]]

    def error(gradient: torch.Tensor) -> float:
        by_torch = functools.partial(F.kl_div, log_target=True)
        return elements.error(draw, loss, [gradient], [input, target], None, by_torch)

    assert error(gradient) < 1e-3
    for wrong in (-gradient, gradient.nan_to_num(), gradient / 0, gradient * torch.nan):
        assert error(wrong) > 0.1


def test_results_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PIECE", 7)
    ours = torch.arange(1.0, 31.0).view(2, 5, 3).transpose(0, 2)
    assert sum(piece.numel() for piece in measure._pieces(ours)) == 30
    assert max(piece.numel() for piece in measure._pieces(ours)) <= 7
    theirs = ours.clone()
    assert measure._difference(theirs, ours) == 0
    theirs[1, 4, 1] += 3
    assert measure._difference(theirs, ours) == pytest.approx(0.1)
    ours[0, 0, 0] = theirs[0, 0, 0] = torch.inf
    assert measure._difference(theirs, ours) == pytest.approx(0.1)
    theirs[0, 0, 1] = torch.inf
    assert measure._difference(theirs, ours) == torch.inf


def test_forward_alone_requires_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    required: list[bool] = []

    def loss(input: torch.Tensor, target: torch.Tensor, **options: object) -> torch.Tensor:
        required.append(input.requires_grad)
        return F.cross_entropy(input, target, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(meter.Meter, "medians", _medians)
    monkeypatch.setitem(cases.PACKAGE_CE, "liger", loss)
    draw = parse("rows/contiguous shape=20x5 dtype=fp32", RowDraw)
    measure.measure(draw, ["liger"], _meter(), RATES)
    # Each pass is called once to see that it runs, and once by the clock above.
    assert required == [False, False, True, True]


def test_our_failures_end_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(lossops, "cross_entropy", broken)
    draw = parse("rows/contiguous shape=20x5 dtype=fp32", RowDraw)
    found = measure.measure(draw, ["eager"], _meter(), RATES)
    assert not found.passed and found.notes == {"ours": "RuntimeError: no kernel"}
    assert f"wrong: 1\n{draw}: error inf RuntimeError: no kernel" in tables.render([found])


@pytest.mark.parametrize("where", ["_difference", "_time"])
def test_a_lack_of_memory_ends_no_run(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, where, without_memory)
    draw = parse("rows/contiguous shape=20x5 dtype=fp32", RowDraw)
    found = measure.measure(draw, ["eager"], _meter(), RATES)
    assert not found.passed and found.notes["ours"] == "OutOfMemoryError: CUDA out of memory"


# --- functions of tokens, which a lossops may lack ----------------------------------------------


def _token_functions() -> dict[str, object]:
    """Torch's formulas behind the names of lossops."""

    def logp(logits: torch.Tensor, index: torch.Tensor, row_mask: object = None) -> torch.Tensor:
        return _tokens("logp", logits, index, row_mask)[0]

    def entropy(logits: torch.Tensor) -> torch.Tensor:
        return _tokens("entropy", logits, torch.zeros(0), None)[0]

    def both(
        logits: torch.Tensor, index: torch.Tensor, row_mask: object = None
    ) -> tuple[torch.Tensor, ...]:
        return _tokens("logp-entropy", logits, index, row_mask)

    return {
        "selective_log_softmax": logp,
        "entropy_from_logits": entropy,
        "selective_log_softmax_and_entropy": both,
    }


def _tokens(
    loss: str, logits: torch.Tensor, index: torch.Tensor, mask: object
) -> tuple[torch.Tensor, ...]:
    indices = index.size(1) if index.dim() > 1 else 1
    draw = RowDraw(
        "tokens", tuple(logits.shape), "fp32", loss=loss, reduction="none", indices=indices
    )
    kept = mask if isinstance(mask, torch.Tensor) else None
    return exact.outputs(draw, logits, Rows(logits, index, None, kept))


def test_tokens_are_drawn_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in rows.FUNCTIONS.values():
        if name != "cross_entropy":
            monkeypatch.delattr(lossops, name, raising=False)
    assert "rows/tokens" not in measure.families()
    with pytest.raises(ValueError, match="has no entropy_from_logits"):
        measure.spec("rows/tokens shape=4x5 dtype=fp32 loss=entropy reduction=none")

    for name, function in _token_functions().items():
        monkeypatch.setattr(lossops, name, function, raising=False)
    assert "rows/tokens" in measure.families()
    draws = list(measure.draws(3, 60, ["rows/tokens"], SMALL))
    assert {draw.loss for draw in draws if isinstance(draw, RowDraw)} == set(rows.FUNCTIONS) - {
        "ce"
    }
    assert {draw.indices for draw in draws if isinstance(draw, RowDraw)} == {1, 20}
    monkeypatch.setattr(meter.Meter, "medians", _medians)
    for draw in draws[:12]:
        found = measure.measure(draw, ["eager", "trl"], _meter(), RATES)
        assert found.passed, f"{draw}: {found.error}, {found.notes}"
        assert {"ours", "eager"} <= set(found.ms["step"])


# --- what is said -------------------------------------------------------------------------------


def test_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "drawn.json"
    arguments = ["--random", "5", "--count", "28", "--device", "cpu", "--mib", "0.02", "0.1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOSSOPS_DISABLE_HOPPER", "1")
        _quickly(patch)
        patch.setattr(measure, "SMALL_BYTES", 1 << 15)
        assert command_line.main([*arguments, "--peers", "eager", "--output", str(file)]) == 0
        printed = capsys.readouterr().out
        assert command_line.main([*arguments, "--peers", "eager", "--brief"]) == 0
        brief = capsys.readouterr().out
    assert "seed 5" in printed and "wrong: 0" in printed
    assert "LOSSOPS_DISABLE_HOPPER is 1" in printed
    assert all(family in printed for family in measure.families())
    assert "the worst twenty" in printed and "the worst twenty" not in brief
    assert all(line in printed for line in brief.splitlines()[4:])
    found = json.loads(file.read_text())
    assert found["seed"] == 5 and len(found["draws"]) == 28
    assert found["LOSSOPS_DISABLE_HOPPER"] == "1"
    # Before torch 2.12 the eager MSE of mixed dtypes has no backward pass; a note says so.
    for one in found["draws"]:
        failed = {who for who, note in one["notes"].items() if "Error" in note}
        assert set(one["ms"]["step"]) == {"ours", "eager"} - failed

    # A line of the table is a call that can be run again.
    with pytest.MonkeyPatch.context() as patch:
        _quickly(patch)
        texts = [one["spec"] for one in found["draws"][-2:]]
        assert command_line.main(["--spec", *texts, "--device", "cpu"]) == 0
    again = capsys.readouterr().out
    assert all(text in again for text in texts) and "seed" not in again


def test_times_are_taken() -> None:
    """One call without a planted clock."""
    clock = meter.Meter(CPU)
    draw = parse("rows/padded shape=2000x50 dtype=bf16 pad=3 reduction=none", RowDraw)
    clock.warm_ups, clock.fewest, clock.seconds, clock.most = 1, 3, 0.01, 0.1
    found = measure.measure(draw, ["eager"], clock, RATES)
    assert found.passed
    for doing in ("forward", "step"):
        assert set(found.ms[doing]) == {"ours", "eager"}
        assert all(ms > 0 for ms in found.ms[doing].values())
    text = tables.detail(found)
    assert str(draw) in text and "forward" in text and "step" in text


def test_the_clock_gives_up_on_slow_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _meter()
    clock.other_data = torch.ones(1)
    clock.warm_ups, clock.fewest, clock.seconds, clock.most = 1, 50, 0.0, 0.0
    calls: list[int] = []

    def failed(who: str, error: Exception) -> None:
        raise error

    clock.medians({"slow": lambda: calls.append(1)}, failed)
    assert len(calls) == 1 + 3


def _measured(text: str, **changes: object) -> Measured:
    times = {"forward": {"ours": 1.0, "eager": 0.9}, "step": {"ours": 1.0, "eager": 2.0}}
    one = Measured(measure.spec(text), times, {"forward": 0.5, "step": 0.9}, {}, 0.0, True, {}, {})
    return dataclasses.replace(one, **changes)  # type: ignore[arg-type]


def test_tables() -> None:
    small = "rows/none shape=4096x4096 dtype=fp32 reduction=none"
    large = "rows/none shape=65536x4096 dtype=fp32 reduction=none"
    plain = {"forward": 0.8, "step": 0.7}
    fast = {"forward": 1.0, "step": 0.95}
    found = [_measured(small, plain_ms=plain) for _ in range(8)]
    found.append(_measured(large, floor_ms=fast))
    found.append(_measured("rows/padded shape=4096x4096 dtype=fp32 pad=1 reduction=none"))
    found.append(
        _measured(
            "elements/padded shape=4x5 loss=mse dtypes=fp32+fp32",
            passed=False,
            error=0.5,
            skipped={"liger": "elsewhere"},
            notes={"eager": "off"},
        )
    )
    text = tables.render(found)
    lines = [line.split() for line in text.splitlines()]

    def line(*start: str) -> list[str]:
        (values,) = [found[len(start) :] for found in lines if found[: len(start)] == list(start)]
        return values

    assert line("rows/none") == ["9", "0.50", "0.50", "0.50", "0.90", "0.90", "0.90"]
    assert line("from", "256", "MiB", "on") == ["1", *["1.00"] * 3, *["0.95"] * 3]
    assert line("below", "256", "MiB") == ["8", *["0.50"] * 3, *["0.90"] * 3]
    assert line("of", "torch's", "reduction,", "copy") == ["8", *["0.80"] * 3, *["0.70"] * 3]
    assert line("rows/padded,", "none")[0] == "1" and line("elements")[0] == "1"
    assert "a peer is ahead by more than 2 %: 11 of 22 passes" in text
    assert text.count("0.90 eager   forward") == 11, "each is listed"
    assert f"wrong: 1\n{found[-1].draw}: error 0.5" in text
    assert "1 liger: elsewhere" in text and "1 eager: off" in text
    assert len(tables.render(found, brief=True).splitlines()) < len(text.splitlines()) - 20
