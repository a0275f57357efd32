"""The benchmark: what it counts, what it finds wrong, and what it shows."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lossops.bench import cases, cli, files, page, report, run
from lossops.bench.cases import CASES, PEERS, PROBLEMS, Case, Data
from lossops.bench.compiled.problems import CUDA_CASES
from lossops.bench.heads.measure import PASSES, PRODUCTS
from lossops.bench.heads.problems import HEADS
from lossops.bench.meter import Meter, Progress, measure_overheads, measure_plain
from lossops.bench.report import Compiled, Report, Result, Small, Times

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]
PNG = b"\x89PNG"

# Shape, and the bytes of one pass over it in fp32, each tensor by hand.
ROWS, CLASSES = 40, 32
BYTES = {
    "mse": ((ROWS, CLASSES), 2 * 40 * 32 * 4),
    "kl-probs": ((ROWS, CLASSES), 2 * 40 * 32 * 4),
    "kl-log": ((ROWS, CLASSES), 2 * 40 * 32 * 4),
    "kl-log-target": ((ROWS, CLASSES), 2 * 40 * 32 * 4),
    "ce": ((ROWS, CLASSES), 40 * 32 * 4 + 40 * 8),
    "ce-weight": ((ROWS, CLASSES), 40 * 32 * 4 + 40 * 8 + 32 * 4),
    "ce-ignore": ((ROWS, CLASSES), 28 * 32 * 4 + 40 * 8),  # 12 rows are ignored
    "ce-smooth": ((ROWS, CLASSES), 40 * 32 * 4 + 40 * 8),
    "ce-probs": ((ROWS, CLASSES), 2 * 40 * 32 * 4),
    "ce-transposed": ((2, 20, CLASSES), 40 * 32 * 4 + 40 * 8),
}


def data_of(problem: str, dtype: str = "fp32") -> Data:
    shape, _ = BYTES[problem]
    return Case(problem, dtype, shape, shape).data(CPU)


# --- what is counted ----------------------------------------------------------------------------


def test_every_problem_is_counted_here() -> None:
    assert set(BYTES) == set(PROBLEMS) == {case.problem for case in cases.ALL}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_bytes(problem: str) -> None:
    data = data_of(problem)
    assert data.bytes_read == BYTES[problem][1]
    assert data.bytes_of_gradient == ROWS * CLASSES * 4
    half = data.to(torch.bfloat16)
    assert half.bytes_of_gradient == ROWS * CLASSES * 2
    indices = 0 if data.target.is_floating_point() else ROWS * 8
    assert half.bytes_read - indices == (data.bytes_read - indices) // 2


def test_bytes_of_ignored_pixels() -> None:
    target = torch.zeros(2, 3, 3, dtype=torch.long)
    target[0, 0] = 5
    data = Data(torch.rand(2, 7, 3, 3), target, {"ignore_index": 5})
    assert data.bytes_read == (18 - 3) * 7 * 4 + 18 * 8
    assert data.bytes_of_gradient == 18 * 7 * 4


def test_layouts() -> None:
    transposed = data_of("ce-transposed", "bf16").input
    assert transposed.shape == (2, CLASSES, 20)
    assert transposed.stride() == (20 * CLASSES, 1, CLASSES)
    # The packages get rows, and for this layout without a copy.
    seen = []

    def package(input: Tensor, target: Tensor) -> Tensor:
        seen.append((input.data_ptr(), tuple(input.shape), tuple(target.shape)))
        return input.sum()

    cases._by_rows(package, transposed, torch.zeros(2, 20))
    assert seen == [(transposed.data_ptr(), (40, CLASSES), (40,))]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_divisor_is_that_of_torch(problem: str) -> None:
    data, of = data_of(problem).to(torch.float64), PROBLEMS[problem]
    total = of.torch(data.input, data.target, reduction="sum", **data.options)
    reduced = of.torch(data.input, data.target, reduction=of.reduction, **data.options)
    assert math.isclose(float(total) / data.divisor(of.reduction), float(reduced), rel_tol=1e-12)


def test_names() -> None:
    for device in (CPU, torch.device("cuda")):
        there = [case for case in cases.ALL if device.type == "cuda" or case.cpu_shape]
        names = [case.name(device) for case in there]
        assert len(set(names)) == len(names)
    assert sum(not case.extra for case in CASES) <= 30, "more than a run has time for"
    assert [case.problem for case in CASES if case.quick] == ["mse", "kl-probs", "ce"]
    assert {who for problem in PROBLEMS.values() for who in problem.packages} <= set(PEERS)


# --- what is found wrong ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_check(problem: str, dtype: str) -> None:
    """Our losses pass; a gradient or a value that is wrong in one row does not."""
    data, of = data_of(problem, dtype), PROBLEMS[problem]
    errors, expected = run.check(of, data)
    assert max(errors.values()) <= run.LIMITS[dtype]
    exact = data.to(torch.float64)
    reduced = of.torch(exact.input, exact.target, reduction=of.reduction, **exact.options)
    assert math.isclose(expected, float(reduced), rel_tol=1e-12)

    def wrong(input: Tensor, target: Tensor, **options: Any) -> Tensor:
        hidden = input[:1].detach().clone()
        return of.ours(torch.cat([input[:1] * 1.25 - 0.25 * hidden, input[1:]]), target, **options)

    if dtype == "fp32":  # the value is right, the first row's gradient is not
        errors, _ = run.check(dataclasses.replace(of, ours=wrong), data)
        first_row_counts = problem != "ce-ignore" or bool(data.kept_rows()[0])
        assert (errors["gradient"] > run.LIMITS[dtype]) == first_row_counts
        assert errors["elements"] <= run.LIMITS[dtype]


class Quick(Meter):
    """No time is spent on being exact."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.warm_ups, self.fewest, self.seconds = 0, 1, 0.0
        self.other_data = torch.ones(8)


def run_with(monkeypatch: pytest.MonkeyPatch, **packages: Any) -> Result:
    """A small MSE with these peers, under their own names."""
    monkeypatch.setitem(
        PROBLEMS, "mse", dataclasses.replace(PROBLEMS["mse"], packages=dict(packages))
    )
    case = Case("mse", "fp32", (8, 16), (8, 16))
    return run.run_case(case, ["eager", *packages], Quick(CPU), Progress(9))


def test_wrong_peers_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def good(input: Tensor, target: Tensor, reduction: str) -> Tensor:
        return (input - target).square().mean()

    def value(input: Tensor, target: Tensor, reduction: str) -> Tensor:
        return 1.5 * good(input, target, reduction)

    def nan(input: Tensor, target: Tensor, reduction: str) -> Tensor:
        return math.nan * good(input, target, reduction)

    def gradient(input: Tensor, target: Tensor, reduction: str) -> Tensor:
        loss = good(input, target, reduction)
        return 2 * loss - loss.detach()

    def none(input: Tensor, target: Tensor, reduction: str) -> Tensor:
        raise NotImplementedError("no such loss")

    def overwrites(input: Tensor, target: Tensor, reduction: str) -> Tensor:
        loss = good(input.clone(), target, reduction)
        input.detach().zero_()
        return loss

    found = run_with(
        monkeypatch,
        good=good,
        value=value,
        nan=nan,
        gradient=gradient,
        none=none,
        overwrites=overwrites,
    )
    notes = {who: times.note or "" for who, times in found.times.items()}
    assert found.passed and not notes["ours"] and not notes["eager"] and not notes["good"]
    assert notes["value"].startswith("gives 0.")
    assert notes["nan"].startswith("gives nan")
    assert notes["gradient"].startswith("its gradient is off by 1 ")
    assert "no such loss" in notes["none"]
    assert not notes["overwrites"], "each package has logits of its own"
    timed = {who for who, times in found.times.items() if set(times.ms) == {"forward", "step"}}
    assert timed == set(found.times) - {"none"}


def test_wrong_results_of_ours_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PROBLEMS["mse"]

    def nan(input: Tensor, target: Tensor, **options: Any) -> Tensor:
        return right.ours(input, target, **options) * math.nan

    def raises(input: Tensor, target: Tensor, **options: Any) -> Tensor:
        raise RuntimeError("no kernel")

    for ours in (nan, raises):
        monkeypatch.setitem(PROBLEMS, "mse", dataclasses.replace(right, ours=ours))
        case = Case("mse", "fp32", (8, 16), (8, 16))
        assert not run.run_case(case, ["eager"], Quick(CPU), Progress(9)).passed
        assert not run.run_small(case, ["eager"], Quick(CPU), Progress(9)).passed


def test_small(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("ce", "fp32", (4, 8), (4, 8), section="small")
    small = run.run_small(case, ["eager", "compile"], Quick(CPU), Progress(9))
    assert small.passed
    assert list(small.us) == ["forward", "forward, grad", "step"]
    for times in small.us.values():
        assert set(times) == {"ours", "eager"}
        assert all(of["wall"] > 0 for of in times.values())


@pytest.mark.parametrize("problem", sorted({case.problem for case in cases.COMPILED}))
def test_training_steps(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiler, which tests/test_compile.py has: the losses fall, and agree."""
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    shape = (64, 16, 128)
    case = Case(problem, "fp32", shape, shape, section="compiled")
    compiled = run.run_compiled(case, ["compile"], Quick(CPU), Progress(9))
    assert compiled.passed, compiled
    assert set(compiled.errors) == {"compile", "eager"}
    losses = compiled.losses["ours"]
    assert len(losses) == run.STEPS
    assert losses[-1] < losses[0] * (1 - run.STEPS_LIMIT), "too small a change to see a wrong one"

    mse_loss = PROBLEMS["mse"].ours
    wrong = dataclasses.replace(
        PROBLEMS[problem], ours=lambda *a, **k: mse_loss(a[0], a[0].detach() * 0)
    )
    monkeypatch.setitem(PROBLEMS, problem, wrong)
    assert not run.run_compiled(case, ["compile"], Quick(CPU), Progress(9)).passed


# --- the command line ---------------------------------------------------------------------------


def names_of(*arguments: str) -> list[str]:
    options = cli.parse(["--device", "cpu", "--peers", "none", *arguments])
    return [case.name(CPU) for case in options.cases]


def test_cases_are_chosen_by_globs() -> None:
    assert names_of("--cases", "ce-bf16-512x5*", "small-mse-*") == [
        "ce-bf16-512x50257",
        "small-mse-fp32-32x1000",
        "small-mse-fp32-256x4096",
    ]
    everything = names_of()
    assert {name.partition("-")[0] for name in everything} >= {"size", "small", "compiled", "ce"}
    assert "ce-weight-fp32-4096x4096" not in everything  # an extra one
    assert "ce-weight-fp32-4096x4096" in names_of("--cases", "ce-weight-*")
    assert len(names_of("--quick")) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "eager,apex"], "no peer apex; there are eager, compile, liger, quack"),
        (["--cases", "huber-*"], "no case matches huber-*; there are mse-fp32-"),
        (["--device", "meta"], "lossops runs on cpu and cuda"),
        (["--from", "a.json", "--output", "b.json"], "--from reads a file"),
        (["--output", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["--plot", "/no/such/folder/x.png"], "there is no folder /no/such/folder"),
        (["--output", "/"], "--output / is a folder"),
        (["--plot", "x.json"], "--plot x.json: pictures are .png"),
        (["--heads", "8x4"], "--heads 8x4: TOKENSxFEATURESxCLASSES"),
        (["--heads", "--random", "1"], "--heads does not go together with --random"),
        (["--heads", "--peers", "nobody"], "no peer nobody; there are linear+ours, eager"),
        (["--heads", "--passes", "backward"], "invalid choice: 'backward'"),
        (["--heads", "--workspaces", "0"], "--workspaces: numbers above 0"),
        (["--compiled", "huber-*"], "--compiled huber-*: there are ce-plain-"),
        (["--compiled", "--heads"], "--compiled does not go together with --heads"),
        (["--compiled", "--peers", "liger"], "no peer liger; there are torch, patch, eager"),
    ],
)
def test_arguments_that_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    device = [] if "--device" in arguments else ["--device", "cpu"]
    with pytest.raises(SystemExit) as exit:
        cli.parse([*device, *arguments])
    assert exit.value.code == 2
    assert said in capsys.readouterr().err


def test_absent_peers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "quack", "no_such_package")
    options = cli.parse(["--device", "cpu", "--peers", "eager,quack"])
    assert (options.peers, options.absent) == (["eager"], ["quack"])


# --- what is shown ------------------------------------------------------------------------------


def made_up() -> Report:
    """A run of every section, with every peer."""
    about = {"device": "Device", "torch": "2", "lossops": "0", "date": "2026-01-01T00:00:00"}
    bandwidth = {"read": 1000.0, "copy": 900.0}
    found = Report(
        about, list(PEERS), bandwidth, {"read": {"sum": 1000.0}, "copy": {"copy": 900.0}}
    )

    def outcome(case: Case) -> dict[str, Any]:
        return {
            "name": case.name(torch.device("cuda")),
            "problem": case.problem,
            "dtype": case.dtype,
            "shape": case.cuda_shape,
            "limit": 1e-2,
            "errors": {"x": 1e-3},
            "passed": True,
        }

    for case in (*cases.CASES, *cases.SIZES):
        size = math.prod(case.cuda_shape)
        result = Result(**outcome(case), input_bytes=4 * size, gradient_bytes=4 * size)
        result.set_floor(bandwidth)
        result.plain_ms = {doing: 1.05 * ms for doing, ms in result.floor_ms.items()}
        for factor, who in enumerate(("ours", *PEERS)):
            if factor < 3 or who in PROBLEMS[case.problem].packages:
                ms = {doing: (1.1 + factor) * ms for doing, ms in result.floor_ms.items()}
                result.times[who] = Times(ms, 1 << 20)
            else:
                result.times[who] = Times()
        (found.sizes if case.section == "size" else found.cases).append(result)
    for case in cases.SMALL:
        us = {who: {"wall": 20.0, "gpu": 4.0} for who in ("ours", "eager")}
        passes = ("forward", "forward, grad", "step")
        counts: dict[str, int | None] = {"ours": 2, "eager": 5}
        small = Small(**outcome(case))
        small.us, small.launches = dict.fromkeys(passes, us), dict.fromkeys(passes, counts)
        found.small.append(small)
    for case in cases.COMPILED:
        times = {who: Times({"step": 3.0}) for who in ("ours", "compile", "eager")}
        losses = {who: [3.0, 2.0] for who in times}
        found.compiled.append(Compiled(**outcome(case), times=times, losses=losses))
    found.overhead_us = {"0": 1.5, "1": 3.0, "2": 4.5}
    return found


def test_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = str(tmp_path / "run.json")
    found = made_up()
    found.save(path)
    assert Report.read(files.load(path)) == found
    json.loads(Path(path).read_text(), parse_constant=pytest.fail)  # no NaN where there is none


class AsOnCuda(Quick):
    """Calls what it is to time, each of which takes 2 ms."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.cuda = True

    def medians(self, calls: dict[str, Any], failed: Any) -> dict[str, float]:
        for call in calls.values():
            call()
        return dict.fromkeys(calls, 2.0)


def test_what_is_measured_on_cuda_alone() -> None:
    assert measure_overheads(Quick(CPU)) == measure_plain(Quick(CPU), 64, 96) == {}
    assert measure_overheads(AsOnCuda()) == dict.fromkeys("012", 2000.0)
    for size in (0, 8, 64, 40_000_004):
        assert measure_plain(AsOnCuda(), size, 2 * size) == {"forward": 2.0, "step": 2.0}


class WithoutMemory(AsOnCuda):
    def medians(self, calls: dict[str, Any], failed: Any) -> dict[str, float]:
        failed("copy", torch.OutOfMemoryError("none left"))
        return {}


def test_a_run_outlives_plain_kernels() -> None:
    assert measure_plain(WithoutMemory(), 64, 96) == {}


def test_overheads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = made_up()
    for overheads, said in ((found.overhead_us, "1.5 with 0, 3.0 with 1, 4.5 with 2"), ({}, "")):
        found.overhead_us = overheads
        found.save(str(tmp_path / "run.json"))
        assert cli.main(["--from", str(tmp_path / "run.json")]) == 0
        out = capsys.readouterr().out
        assert said in out
        assert ("moves no data" in out) == bool(overheads)


def test_committed_reports_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With pictures beside them; those are drawn again where matplotlib is."""
    paths = sorted((ROOT / "docs" / "benchmarks").glob("*.json"))
    if not paths:
        pytest.skip("no docs/ beside tests/")
    for path in paths:
        picture = tmp_path / f"{path.stem}.png"
        plot_too = ["--plot", str(picture)] if page.available() else []
        assert cli.main(["--from", str(path), *plot_too]) == 0
        assert "All checks passed." in capsys.readouterr().out
        assert path.with_suffix(".png").read_bytes().startswith(PNG)
        assert not plot_too or picture.read_bytes().startswith(PNG)


ABOUT = '"device": "x", "torch": "2", "lossops": "0"'


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        '{"cases": [{"name": "x"}]}',
        "{",
        '{"heads": []}',
        f'{{{ABOUT}, "heads": []}}',
        f'{{{ABOUT}, "heads": [{{"shape": "1x1x1"}}]}}',
        f'{{{ABOUT}, "goals": {{}}}}',
        f'{{{ABOUT}, "goals": {{}}, "compiled": [3]}}',
    ],
)
def test_other_files_are_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    assert cli.main(["--from", str(path)]) == 2
    assert f"--from {path}: " in capsys.readouterr().err


def test_draws_are_not_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "draws.json"
    path.write_text(f'{{{ABOUT}, "seed": 1, "draws": []}}')
    assert cli.main(["--from", str(path)]) == 2
    assert "has calls drawn at random" in capsys.readouterr().err


def test_table() -> None:
    found = made_up()
    found.cases[0].times["eager"].note = "gives 1 where float64 gives 2"
    found.cases[1].errors["gradient"] = math.nan
    found.cases[1].passed = found.cases[1].fits()
    lines = report.render(found).splitlines()
    assert max(map(len, lines)) <= 100
    assert not any(line != line.rstrip() for line in lines)
    first = next(i for i, line in enumerate(lines) if line.startswith("MSE "))
    forward, step, _, bad = (line.split() for line in lines[first : first + 4])
    # ours takes 1.1 of the floor, eager 2.1
    assert forward[1:] == ["forward", "4.724", "0.91", "1.91x[1]", "2.82x", "-", "-"]
    assert step[-4:] == ["-", "1", "ok", "1e-03"]
    assert bad[-2:] == ["BAD", "nan"]
    assert lines[-1] == f"[1] eager, {found.cases[0].name}: gives 1 where float64 gives 2"
    for heading in (
        "case ",
        "time by size ",
        "torch's fastest ",
        "small inputs ",
        "compiled step ",
    ):
        assert any(line.startswith(heading) for line in lines)
    plain = next(line.split() for line in lines if line.startswith("MSE") and "32768x32768" in line)
    assert plain[2:] == ["32768x32768", "4.510", "0.95", "0.95x", "10.022", "0.95", "0.95x"]


def parts() -> dict[str, Report]:
    whole, alone = made_up(), made_up()
    alone.sizes, alone.small, alone.compiled, alone.peers = [], [], [], []
    for result in alone.cases:
        result.times = {"ours": result.times["ours"]}
    rest = made_up()
    rest.cases, rest.sizes, rest.small = [], [], rest.small[:1]
    rest.compiled[0].times["ours"] = Times(note="RuntimeError")
    broken = made_up()
    broken.cases, broken.sizes = broken.cases[:1], broken.sizes[:2]
    broken.cases[0].times["ours"] = broken.sizes[0].times["ours"] = Times(note="RuntimeError")
    broken.small[0].us = {}
    return {"whole": whole, "alone": alone, "rest": rest, "broken": broken}


@pytest.mark.parametrize("part", ["whole", "alone", "rest", "broken"])
def test_picture(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    source, picture = tmp_path / "run.json", tmp_path / "run.png"
    parts()[part].save(str(source))
    assert cli.main(["--from", str(source), "--plot", str(picture)]) == 0
    assert "on Device" in capsys.readouterr().out
    data = picture.read_bytes()
    assert data.startswith(PNG)
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width == page.WIDTH * 160 and height > 300
    assert len(data) > 10_000, "an empty picture"


ERRORS = {"loss": 1e-3, "input": 2e-3, "weight": 3e-3}


def made_up_heads() -> dict[str, Any]:
    """A file of heads: of every contender, one of them without a time."""
    heads = {PRODUCTS: {"ms": dict.fromkeys(PASSES, 3.0), "peak_bytes": {}}}
    for who in (*HEADS, "ours 512"):
        heads[who] = {"ms": dict.fromkeys(PASSES, 4.0), "peak_bytes": {"step": 99999 << 20}}
    del heads["liger"]["ms"]["step"], heads["quack"]["peak_bytes"]["step"]
    rest = {"errors": ERRORS, "notes": {}, "breakdown": {}, "kernels": [["k", 1, 2.0]]}
    heads = {who: found | rest for who, found in heads.items()}
    shape = {"shape": "8192x4096x128256", "dtype": "bfloat16", "limit": 0.02, "heads": heads}
    about = {"device": "Device", "torch": "2", "lossops": "0", "seconds": 3, "of_tokens": False}
    return about | {"heads": [shape, shape]}


def made_up_compiled() -> dict[str, Any]:
    """A file of compiled steps: every case with every contender."""
    step = {"ms": {"step": 4.0}, "peak_bytes": {"step": 1 << 20}, "errors": ERRORS}
    step |= {"notes": {}, "breakdown": {}, "kernels": [], "compile_s": 1.0}
    slow = step | {"ms": {"step": 5.0}}
    steps = {"torch": step, "ours": step, "patch": slow, "eager": step | {"peak_bytes": {}}}
    about = {"device": "Device", "torch": "2", "lossops": "0", "seconds": 3}
    compiled = [{"name": case.name, "steps": steps} for case in CUDA_CASES]
    return about | {"goals": {"time": 1.01, "memory": 1.0}, "compiled": compiled}


@pytest.mark.parametrize("kind", ["cases", "heads", "compiled"])
def test_texts_of_pictures_do_not_overlap(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    source = str(tmp_path / "run.json")
    if kind == "cases":
        made_up().save(source)
    else:
        files.save(source, made_up_heads() if kind == "heads" else made_up_compiled())
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: figures.append(self))
    assert cli.main(["--from", source, "--plot", str(tmp_path / "run.png")]) == 0
    (figure,) = figures
    page_box = figure.bbox
    texts = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    boxes = {text: text.get_window_extent() for text in texts if text.get_text()}
    assert len(boxes) > 50
    for text, box in boxes.items():
        inside = (
            page_box.x0 <= box.x0
            and box.x1 <= page_box.x1
            and page_box.y0 <= box.y0
            and box.y1 <= page_box.y1
        )
        assert inside, text.get_text()
    pairs = [(a, b) for a in boxes for b in boxes if id(a) < id(b)]
    for a, b in pairs:
        assert not boxes[a].overlaps(boxes[b]), (a.get_text(), b.get_text())


def test_bars_without_columns() -> None:
    """Where nothing could be timed."""
    height, _ = page.bars(("", ""), [], [("", [page.Row("", "", [])])])
    assert height == 0


def test_heads_and_compiled_steps_are_shown_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong, or misses a goal, is named again, and ends in 1 where it was wrong."""
    source = str(tmp_path / "run.json")
    of_heads, of_steps = made_up_heads(), made_up_compiled()
    for made, contenders, said in (
        (of_heads, of_heads["heads"][0]["heads"], "narrow              4.00    0.750    99999 "),
        (of_steps, of_steps["compiled"][0]["steps"], "goals: ce-plain-8192x768x50257 patch, "),
    ):
        files.save(source, made)
        assert cli.main(["--from", source]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("lossops 0 on Device, torch 2")
        assert said in shown
        contenders["ours"] = contenders["ours"] | {"errors": ERRORS | {"loss": math.nan}}
        files.save(source, made)
        assert cli.main(["--from", source]) == 1
        assert "FAILED: " in capsys.readouterr().out


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so at the start, and all else is as with it."""
    monkeypatch.setattr(page, "available", lambda: False)
    monkeypatch.setattr(cli, "Meter", Quick)
    rates = {"read": {"sum": 10.0}, "copy": {"copy": 9.0}}
    monkeypatch.setattr(cli, "measure_bandwidths", lambda meter: rates)
    tiny = (Case("ce-ignore", "fp32", (20, 8), (20, 8)),)
    monkeypatch.setattr(cli, "ALL", tiny)
    output = tmp_path / "run.json"
    arguments = ["--device", "cpu", "--peers", "eager", "--output", str(output)]
    assert cli.main(arguments) == 0
    said = capsys.readouterr()
    assert "matplotlib is not installed (pip install 'lossops[bench]')" in said.err
    assert "All checks passed." in said.out
    assert [result.name for result in Report.read(files.load(str(output))).cases] == [
        "ce-ignore-fp32-20x8"
    ]
    assert not output.with_suffix(".png").exists()
    assert cli.main(["--from", str(output), "--plot", str(tmp_path / "b.png")]) == 2
    assert cli.main(["--from", str(output)]) == 0
