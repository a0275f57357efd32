"""The numbers of a run: as JSON, and as a table for people."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from . import files
from .cases import PROBLEMS, Shape


@dataclasses.dataclass
class Times:
    """What one contender took: medians by "forward" and "step", empty where it has no such loss."""

    ms: dict[str, float] = dataclasses.field(default_factory=dict)
    peak_bytes: int | None = None  # of a step, on CUDA, beyond what is there before it
    note: str | None = None  # what went wrong


@dataclasses.dataclass
class Outcome:
    """What every measurement has. `limit` is the largest error that passes."""

    name: str
    problem: str
    dtype: str
    shape: Shape
    limit: float
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    passed: bool = False

    def fits(self) -> bool:
        """Whether all errors are within the limit; not where there are none, nor with a NaN."""
        return bool(self.errors) and all(error <= self.limit for error in self.errors.values())


@dataclasses.dataclass
class Result(Outcome):
    """A case, checked and timed. `times` has "ours" and the peers."""

    input_bytes: int = 0  # that must be read
    gradient_bytes: int = 0
    times: dict[str, Times] = dataclasses.field(default_factory=dict)
    floor_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    plain_ms: dict[str, float] = dataclasses.field(default_factory=dict)  # see measure_plain()

    @property
    def moved_bytes(self) -> int:
        return self.input_bytes + self.gradient_bytes

    def set_floor(self, bandwidth: dict[str, float]) -> None:
        self.floor_ms["forward"] = self.input_bytes / bandwidth["read"] / 1e6
        self.floor_ms["step"] = self.moved_bytes / bandwidth["copy"] / 1e6


@dataclasses.dataclass
class Small(Outcome):
    """Microseconds a call, `us[pass][who][kind]` with kinds "wall" and "gpu"; and launches."""

    us: dict[str, dict[str, dict[str, float]]] = dataclasses.field(default_factory=dict)
    launches: dict[str, dict[str, int | None]] = dataclasses.field(default_factory=dict)
    note: str | None = None


@dataclasses.dataclass
class Compiled(Outcome):
    """Milliseconds of a training step, and the losses of the first few steps."""

    times: dict[str, Times] = dataclasses.field(default_factory=dict)
    losses: dict[str, list[float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Report:
    """A run. `about` says when, where and with what."""

    about: dict[str, Any]
    peers: list[str]
    bandwidth_gb_per_s: dict[str, float]
    bandwidths_gb_per_s: dict[str, dict[str, float]]
    cases: list[Result] = dataclasses.field(default_factory=list)
    sizes: list[Result] = dataclasses.field(default_factory=list)
    small: list[Small] = dataclasses.field(default_factory=list)
    compiled: list[Compiled] = dataclasses.field(default_factory=list)
    overhead_us: dict[str, float] = dataclasses.field(default_factory=dict)  # by kernels launched

    @property
    def outcomes(self) -> Iterator[Outcome]:
        yield from (*self.cases, *self.sizes, *self.small, *self.compiled)

    def save(self, path: str) -> None:
        fields = dataclasses.asdict(self)
        files.save(path, fields.pop("about") | fields)

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Report:
        """Takes what `save` wrote. Raises ValueError where it is something else."""
        found = dict(fields)
        with files.reading(found):
            measured: dict[str, Any] = {
                key: [_outcome(kind, fields) for fields in found.pop(key, [])]
                for key, kind in _KINDS.items()
            }
            bandwidths = found.pop("bandwidth_gb_per_s"), found.pop("bandwidths_gb_per_s")
            measured["overhead_us"] = found.pop("overhead_us", {})
            timed = [*measured["cases"], *measured["sizes"]]
            peers = [who for who in timed[0].times if who != "ours"] if timed else []
            peers = found.pop("peers", peers)
            return cls(found, peers, *bandwidths, **measured)


_KINDS: dict[str, type[Outcome]] = {
    "cases": Result,
    "sizes": Result,
    "small": Small,
    "compiled": Compiled,
}


def _outcome(kind: type[Outcome], fields: dict[str, Any]) -> Outcome:
    fields = fields | {"shape": tuple(fields["shape"])}
    if "times" in fields:
        fields["times"] = {who: Times(**times) for who, times in fields["times"].items()}
    return kind(**fields)


class _Notes:
    """What is told below a table."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, who: str, name: str, text: str | None) -> str:
        if not text:
            return ""
        who = "lossops" if who == "ours" else who
        self.texts.append(f"[{len(self.texts) + 1}] {who}, {name}: {text}")
        return f"[{len(self.texts)}]"


def render(report: Report) -> str:
    """The tables for people, at most 100 columns wide."""
    notes = _Notes()
    lines: list[str] = []
    if report.cases or report.sizes:
        lines += [
            "floor: the least time that the memory bandwidth allows, over our time; "
            "1.00 is the limit.",
            "peers: their time over ours; above 1.00x lossops is faster. "
            "step: forward and backward.",
        ]
    lines += _render_cases("case", report.cases, report.peers, notes)
    lines += _render_cases("time by size", report.sizes, report.peers, notes)
    lines += _render_plain([*report.cases, *report.sizes])
    lines += _render_small(report.small, notes)
    lines += _render_compiled(report.compiled, report.peers, notes)
    lines += [""] * bool(notes.texts)
    lines += [textwrap.fill(note, 100, subsequent_indent="    ") for note in notes.texts]
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def _shape(outcome: Outcome) -> str:
    return f"  {outcome.dtype} {'x'.join(map(str, outcome.shape))}"


def _verdict(outcome: Outcome) -> str:
    worst = sorted(outcome.errors.values(), key=lambda error: (error != error, error))
    return ("  ok" if outcome.passed else "  BAD") + (f" {worst[-1]:.0e}" if worst else "")


def _render_cases(
    heading: str, results: Sequence[Result], peers: Sequence[str], notes: _Notes
) -> list[str]:
    if not results:
        return []
    cuda = any(result.times["ours"].peak_bytes is not None for result in results)
    head = "".join(f"{peer:>9}" for peer in peers) + (f"{'peak MiB':>9}" if cuda else "")
    lines = ["", f"{heading:<21}{'pass':<8}{'ms':>9}{'floor':>6}{head}  max error"]
    for result in results:
        marks = {
            who: notes.mark(who, result.name, times.note) for who, times in result.times.items()
        }
        ours = result.times["ours"]
        title = PROBLEMS[result.problem].title
        for doing, label in ("forward", title), ("step", _shape(result)):
            ms = ours.ms.get(doing)
            line = f"{label:<21}{doing:<8}"
            line += f"{marks['ours'] or '-':>9}" if ms is None else f"{ms:>9.3f}"
            line += f"{'-' if ms is None else format(result.floor_ms[doing] / ms, '.2f'):>6}"
            for peer in peers:
                theirs = result.times[peer].ms.get(doing) if peer in result.times else None
                ratio = "" if ms is None or theirs is None else f"{theirs / ms:.2f}x"
                line += f"{ratio + marks.get(peer, '') or '-':>9}"
            if cuda:
                peak = ours.peak_bytes if doing == "step" else None
                line += f"{'' if peak is None else format(peak / 2**20, '.0f'):>9}"
            lines.append(line + (_verdict(result) if doing == "step" else ""))
    return lines


def _render_plain(results: Sequence[Result]) -> list[str]:
    """How close the floor comes to what can be had for so many bytes."""
    results = [result for result in results if result.plain_ms and result.times["ours"].ms]
    if not results:
        return []
    head = f"{'floor':>6}{'over ours':>11}"
    lines = [
        "",
        "torch's fastest reduction of as many bytes as forward reads, and copy of as many as a "
        "step moves:",
        f"{'':<42}{'read ms':>9}{head}{'copy ms':>9}{head}",
    ]
    for result in results:
        line = f"{PROBLEMS[result.problem].title:<19}{_shape(result):<23}"
        for doing, ms in result.plain_ms.items():
            ours = result.times["ours"].ms.get(doing)
            ratio = "-" if ours is None else f"{ms / ours:.2f}x"
            line += f"{ms:>9.3f}{result.floor_ms[doing] / ms:>6.2f}{ratio:>11}"
        lines.append(line)
    return lines


def _render_small(results: Sequence[Small], notes: _Notes) -> list[str]:
    """Both contenders' own numbers: at this size a microsecond says more than a ratio."""
    if not results:
        return []
    gpu = any(
        "gpu" in times for small in results for of in small.us.values() for times in of.values()
    )
    head = f"{'wall us':>8}{'eager':>8}" + (f"{'GPU us':>9}{'eager':>8}" * gpu)
    head += f"{'launches':>10}{'eager':>7}" * gpu
    lines = ["", f"{'small inputs':<21}{'pass':<14}{head}  max error"]
    for small in results:
        mark = notes.mark("ours", small.name, small.note)
        labels = [PROBLEMS[small.problem].title, _shape(small), ""]
        for label, (doing, by) in zip(labels, small.us.items(), strict=False):
            line = f"{label:<21}{doing:<14}"
            for kind in ("wall", "gpu") if gpu else ("wall",):
                for who, width in ("ours", 8 if kind == "wall" else 9), ("eager", 8):
                    value = by.get(who, {}).get(kind)
                    line += f"{'-' if value is None else format(value, '.1f'):>{width}}"
            for who, width in (("ours", 10), ("eager", 7)) if gpu else ():
                count = small.launches.get(doing, {}).get(who)
                line += f"{'-' if count is None else count:>{width}}"
            lines.append(line + (_verdict(small) + mark if doing == "step" else ""))
    return lines


def _render_compiled(results: Sequence[Compiled], peers: Sequence[str], notes: _Notes) -> list[str]:
    """`ours` is compiled too; "compile" is torch's loss in the same compiled step."""
    if not results:
        return []
    others = [peer for peer in ("compile", "eager") if peer in peers]
    head = "".join(f"{other:>12}" for other in others)
    lines = ["", f"{'compiled step':<21}{'batch x in x out':<19}{'ms':>9}{head}  losses differ by"]
    for compiled in results:
        marks = {
            who: notes.mark(who, compiled.name, times.note) for who, times in compiled.times.items()
        }
        ours = compiled.times["ours"].ms.get("step")
        line = f"{PROBLEMS[compiled.problem].title:<21}{_shape(compiled).strip():<19}"
        line += f"{marks['ours'] or '-':>9}" if ours is None else f"{ours:>9.3f}"
        for other in others:
            theirs = compiled.times[other].ms.get("step") if other in compiled.times else None
            ratio = "" if ours is None or theirs is None else f"{theirs / ours:.2f}x"
            line += f"{ratio + marks.get(other, '') or '-':>12}"
        lines.append(line + _verdict(compiled))
    return lines
