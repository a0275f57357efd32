"""The benchmark of compiled steps: what it computes, what it finds wrong, and what it shows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lossops.bench import cli
from lossops.bench.compiled import measure
from lossops.bench.compiled.cli import header, misses_goal, render
from lossops.bench.compiled.measure import Contender, Measured
from lossops.bench.compiled.problems import (
    AHEAD,
    CPU_CASES,
    CUDA_CASES,
    Case,
    Problem,
)
from lossops.bench.heads.problems import MIB, Shape
from lossops.bench.meter import Meter

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")


def small(loss: str, ahead: str) -> Problem:
    return Problem(Case(loss, ahead, Shape(24, 8, 33)), CPU)


def test_cases() -> None:
    """The eight cells of the goals are what runs if no case is named."""
    options = cli.parse(["--compiled", "--device", "cpu"])
    assert [case.name for case in options.compiled] == [
        "ce-plain-512x128x8193",
        "ce-float-512x128x8193",
    ]
    for cases in (CPU_CASES, CUDA_CASES):
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)
        for loss in ("mse", "kl"):
            assert {case.ahead for case in cases if case.loss == loss} == {"bias", "float", "scale"}
    of_heads = [case for case in CUDA_CASES if case.name.startswith(("ce-plain-", "ce-float-"))]
    assert len(of_heads) == 8


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("loss", ["ce", "mse", "kl"])
def test_steps_are_right(loss: str, ahead: str) -> None:
    """Without a compiler; against torch in float64."""
    problem = small(loss, ahead)
    exact = problem.exact()
    assert set(exact) == {"loss", "input", "weight"} | ({"bias"} if ahead == "bias" else set())
    found = problem.step("eager")()
    assert {name: x.dtype for name, x in found.items() if name != "loss"} == dict.fromkeys(
        problem.operands, torch.bfloat16
    )
    assert max(measure._errors(found, exact).values()) <= measure.LIMIT
    target = problem.target
    assert torch.equal(problem.function("torch")(target, *problem.operands.values()), found["loss"])
    of_ours = problem.function("ours")(target, *problem.operands.values())
    torch.testing.assert_close(of_ours, found["loss"], rtol=1e-2, atol=0)


def test_what_stands_ahead() -> None:
    """It changes the loss, or its dtype."""
    losses = {ahead: small("ce", ahead).step("eager")()["loss"] for ahead in AHEAD}
    assert losses["plain"].dtype == torch.bfloat16
    assert losses["float"].dtype == torch.float32
    assert len({float(losses[ahead]) for ahead in ("plain", "bias", "scale")}) == 3


def test_exact_results() -> None:
    problem = small("ce", "scale")
    leaves = [problem.operands[name].double().requires_grad_() for name in ("input", "weight")]
    logits = torch.matmul(leaves[0], leaves[1].t()) / 2
    loss = F.cross_entropy(logits.flatten(0, 1), problem.target)
    gradients = torch.autograd.grad(loss, leaves)
    for found, expected in zip(problem.exact().values(), (loss, *gradients), strict=True):
        torch.testing.assert_close(found, expected.detach())


@pytest.mark.usefixtures("quick_meters")
def test_wrong_and_failing_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong result fails; an error of a peer is noted, and ends nothing."""
    function = Problem.function

    def other(self: Problem, who: str) -> Any:
        def wrong(*operands: Tensor) -> Tensor:
            return 1.1 * function(self, "torch")(*operands)

        def failing(*operands: Tensor) -> Tensor:
            raise RuntimeError("no such kernel")

        return {"ours": wrong, "eager": failing}[who]

    monkeypatch.setattr(Problem, "function", other)
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    found = measure.run(small("ce", "plain").case, ["ours", "eager"], Meter(CPU))
    assert not found.passed("ours")
    assert found.steps["ours"].ms["step"] > 0
    assert not found.steps["eager"].ms
    shown = render(found)
    assert "ours: WRONG" in shown
    assert "eager, compile: RuntimeError: no such kernel" in shown


def test_ratios_and_table() -> None:
    def took(ms: float, mib: int) -> Contender:
        errors = {"loss": 1e-3, "input": 2e-3}
        return Contender(ms={"step": ms}, peak_bytes={"step": mib * MIB}, errors=errors)

    whos = ("torch", "ours", "eager")
    found = Measured("ce-plain-8x4x2", {"torch": took(4.0, 100), "ours": took(4.04, 100)})
    found.steps["eager"] = Contender(notes={"step": "OutOfMemoryError: "})
    assert found.ratios("ours") == {"time": pytest.approx(1.01), "memory": 1.0}
    assert found.ratios("eager") == {}
    ours, note = render(found).splitlines()
    assert (
        ours.split()
        == ["ce-plain-8x4x2", "4.000", "100", "4.040", "100", "1.010", "1.000"] + ["-"] * 4
    )
    assert note == "  eager, step: OutOfMemoryError: "
    assert len(ours) == len(header(whos))
    goals = measure.GOALS
    for ours_took, misses in (
        (took(4.0, 101), True),
        (took(4.05, 100), True),
        (took(4.0, 99), False),
    ):
        found.steps["ours"] = ours_took
        assert misses_goal(found, "ours", goals) == misses
    without = Measured("ce-plain-8x4x2", {"ours": took(4.0, 100)})
    assert without.ratios("ours") == {}


@pytest.mark.usefixtures("quick_meters")
def test_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = dataclasses.replace(CPU_CASES[0], shape=Shape(16, 8, 33))
    monkeypatch.setattr("lossops.bench.compiled.cli.CPU_CASES", (case,))
    file = tmp_path / "compiled.json"
    arguments = ["--compiled", "--device", "cpu", "--breakdown", "--output", str(file)]
    assert cli.main([*arguments, "--peers", "torch,patch"]) == 0
    shown = capsys.readouterr().out
    assert case.name in shown
    assert "All checks passed." in shown
    saved = json.loads(file.read_text())
    (found,) = saved["compiled"]
    assert set(found["steps"]) == {"torch", "ours", "patch"}
    for who, step in found["steps"].items():
        assert step["compile_s"] > 0
        assert set(step["errors"]) == {"loss", "input", "weight"}
        assert found["ratios"][who]["time"] == pytest.approx(
            step["ms"]["step"] / found["steps"]["torch"]["ms"]["step"]
        )
        # Only what calls lossops spends time in it.
        assert (step["breakdown"]["loss"] > 0) == (who != "torch")


def test_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--compiled", "mse-*", "--list", "--device", "cpu"]) == 0
    names = capsys.readouterr().out.split()
    assert names == [case.name for case in CPU_CASES if case.loss == "mse"]
