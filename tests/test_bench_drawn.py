"""The benchmark's random draws: what they are, what they count, and what is said of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lossops.bench import cli, drawn, meter
from lossops.bench.drawn import LAYOUTS, Draw, Measured

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(drawn.SIZES, "cpu", (1 << 14, 1 << 16))


def layouts_of(draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    return drawn.operands(draw, CPU)


def test_same_for_the_same_seed() -> None:
    first, again, other = (list(drawn.draws(seed, 30, CPU)) for seed in (1, 1, 2))
    assert first == again != other
    for draw in first[:9]:
        for a, b in zip(layouts_of(draw), layouts_of(draw), strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.parametrize("seed", range(5))
def test_layouts(seed: int) -> None:
    for draw in drawn.draws(seed, 36, CPU):
        input, target = layouts_of(draw)
        assert torch.broadcast_shapes(input.shape, target.shape) == draw.shape
        assert (input.dtype, target.dtype) == tuple(drawn.DTYPES[name] for name in draw.dtypes)
        both = (input, target)
        if draw.layout == "contiguous":
            assert all(tensor.is_contiguous() for tensor in both)
        elif draw.layout == "permuted":
            assert input.stride() == target.stride()
        elif draw.layout in ("padded", "many"):
            assert not any(tensor.is_contiguous() for tensor in both)
        elif draw.layout == "shifted":
            offsets = [tensor.storage_offset() for tensor in both]
            assert offsets == [0, 1] and input.stride() == target.stride()
        elif draw.layout in ("broadcast", "expanded"):
            small, large = both if draw.layout == "expanded" else both[::-1]
            assert large.shape == draw.shape != small.shape
        elif draw.layout == "mixed":
            assert input.dtype != target.dtype
        else:
            assert draw.layout == "transposed"
            assert sorted(tensor.is_contiguous() for tensor in both) == [False, True]


def test_bytes() -> None:
    draw = Draw(0, "mse", "broadcast", (64, 32), ("fp32", "fp16"), "mean", "both")
    input, target = torch.rand(64, 32), torch.rand(1, 32).half()
    read = 64 * 32 * 4 + 32 * 2
    assert drawn._bytes(draw, input, target, torch.rand(())) == {"forward": read, "step": 2 * read}
    one = dataclasses.replace(draw, gradients="target", reduction="none")
    losses = 64 * 32 * 4
    assert drawn._bytes(one, input, target, torch.rand(64, 32)) == {
        "forward": read + losses,
        "step": 2 * (read + losses) + 32 * 2,
    }


def test_errors_are_seen() -> None:
    draw = next(drawn.draws(3, 1, CPU))
    draw = dataclasses.replace(draw, loss="mse", reduction="mean", gradients="both")
    leaves = [tensor.requires_grad_() for tensor in layouts_of(draw)]

    def error(value: torch.Tensor, gradients: list[torch.Tensor]) -> float:
        return drawn._error(draw, value, gradients, leaves, None, F.mse_loss)

    loss = F.mse_loss(*leaves)
    right = list(torch.autograd.grad(loss, leaves))
    assert error(loss, right) < 0.01
    assert error(loss * 1.1, right) > 0.03
    assert error(loss, [right[0], right[1] * 1.1]) > 0.01
    assert error(loss, [right[0] * torch.nan, right[1]]) == float("inf")


def test_sums_that_overflow() -> None:
    draw = Draw(0, "mse", "contiguous", (300, 300), ("fp16", "fp16"), "sum", "input")
    input, target = (
        torch.full((300, 300), 2.0).half().requires_grad_(),
        torch.zeros(300, 300).half(),
    )
    loss = F.mse_loss(input, target, reduction="sum")
    assert loss.isinf()
    (gradient,) = torch.autograd.grad(loss, input)
    measured = drawn._error(draw, loss, [gradient], [input, target], None, F.mse_loss)
    assert measured < 1e-3
    finite = torch.zeros_like(loss)
    assert drawn._error(draw, finite, [gradient], [input, target], None, F.mse_loss) == float("inf")


def test_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "drawn.json"
    arguments = ["--random", "5", "--count", "9", "--device", "cpu", "--peers", "eager"]
    with pytest.MonkeyPatch.context() as patch:
        rates = {"read": {"sum": 30.0}, "copy": {"copy": 30.0}}
        patch.setattr(cli, "measure_bandwidths", lambda _: rates)
        patch.setattr(meter.Meter, "medians", _medians)
        assert cli.main([*arguments, "--output", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "seed 5" in printed and "wrong: 0" in printed
    assert all(layout in printed for layout in LAYOUTS)
    found = json.loads(file.read_text())
    assert found["seed"] == 5 and len(found["draws"]) == 9
    assert all(set(one["ms"]["step"]) == {"ours", "eager"} for one in found["draws"])


def _medians(self: object, calls: dict[str, meter.Call], failed: meter.Failed) -> dict[str, float]:
    for call in calls.values():
        call()
    return dict.fromkeys(calls, 1.0)


def test_table() -> None:
    draws = list(drawn.draws(1, 9, CPU))
    floor = {"forward": 0.5, "step": 0.9}
    times = {"forward": {"ours": 1.0, "eager": 0.9}, "step": {"ours": 1.0, "eager": 2.0}}
    found = [Measured(draw, times, floor, 0.0, True, {}) for draw in draws]
    found[8] = dataclasses.replace(found[8], passed=False, error=0.5)
    text = drawn.render(found, ["eager"])
    row = next(line for line in text.splitlines() if line.startswith("all "))
    assert row.split() == ["all", "9", "0.50", "0.50", "0.50", "0.90", "0.90", "0.90"]
    assert "a peer is ahead by more than 2 %: 9 of 18 passes" in text
    assert f"wrong: 1\n{draws[8]}: error 0.5" in text
