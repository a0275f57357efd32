"""The part of the command line that is about compiled steps: `--compiled`."""

from __future__ import annotations

import argparse
import fnmatch
import time
from collections.abc import Sequence
from typing import Any

from .. import files, page
from ..heads.problems import MIB
from ..meter import Meter
from . import measure, plot
from .measure import FEWEST, GOALS, Measured
from .problems import CPU_CASES, CUDA_CASES, DEFAULT, PEERS, TITLES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `settle` and `run` read."""
    group = parser.add_argument_group("compiled steps, with torch's loss and with ours")
    group.add_argument(
        "--compiled",
        nargs="*",
        metavar="GLOB",
        help="times compiled steps, as 'ce-float-*', '*'; default: "
        f"{', '.join(DEFAULT)}. --peers takes {','.join(PEERS)}; default: torch. With --breakdown "
        "the time by kind of kernel",
    )


def settle(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Chooses the cases, so that a mistake ends the run at once."""
    cases = CUDA_CASES if options.device.type == "cuda" else CPU_CASES
    globs = options.compiled or DEFAULT
    options.compiled = [
        case for case in cases if any(fnmatch.fnmatch(case.name, glob) for glob in globs)
    ]
    if not options.compiled:
        names = ", ".join(case.name for case in cases)
        parser.error(f"--compiled {' '.join(globs)}: there are {names}")


def run(options: argparse.Namespace, device: str) -> int:
    """Measures the cases. 1 when a result of ours is wrong, else 0."""
    if options.list:
        print("\n".join(case.name for case in options.compiled))
        return 0
    about = files.about(device) | {"goals": GOALS}
    whos = [who for who in TITLES if who == "ours" or who in options.peers]
    print(_above(about, whos), flush=True)
    started = time.monotonic()
    meter = Meter(options.device)
    meter.fewest = max(meter.fewest, FEWEST) if meter.cuda else meter.fewest
    found: list[Measured] = []
    for case in options.compiled:
        one = measure.run(case, whos, meter, with_breakdown=options.breakdown)
        found.append(one)
        print(render(one), flush=True)
    about["seconds"] = round(time.monotonic() - started)
    if options.output:
        files.save(options.output, about | {"compiled": [one.fields() for one in found]})
    return close(about, found, options.plot)


def read(fields: dict[str, Any]) -> tuple[dict[str, Any], list[Measured]]:
    """Takes what a file has. Raises ValueError where it is something else."""
    return files.read(fields, "compiled", Measured.read)


def show(about: dict[str, Any], found: Sequence[Measured], picture: str | None) -> int:
    """Prints again what `run` printed, and draws it."""
    print(_above(about, list(found[0].steps)))
    for one in found:
        print(render(one))
    return close(about, found, picture)


def close(about: dict[str, Any], found: Sequence[Measured], picture: str | None) -> int:
    """The last lines, then the picture. 1 when a result of ours is wrong, else 0."""
    print(f"\n{about.get('seconds')} s")
    ours = [(one, who) for one in found for who in ("ours", "patch") if who in one.steps]
    missed = [f"{one.name} {who}" for one, who in ours if misses_goal(one, who, about["goals"])]
    if missed:
        print(f"Not at the goals: {', '.join(missed)}")
    wrong = [f"{one.name} {who}" for one, who in ours if not one.passed(who)]
    print(f"FAILED: {', '.join(wrong)}" if wrong else "All checks passed.")
    if picture and page.available():
        plot.draw(about, found, picture)
    return int(bool(wrong))


def misses_goal(one: Measured, who: str, goals: dict[str, float]) -> bool:
    """Whether a ratio is above its goal."""
    return any(ratio > goals[what] for what, ratio in one.ratios(who).items())


def _above(about: dict[str, Any], whos: Sequence[str]) -> str:
    lines = [f"{files.heading(about)}, bfloat16", *(f"{who}: {TITLES[who]}" for who in whos)]
    goals = ", ".join(f"{what} {goal:.2f}" for what, goal in about["goals"].items())
    return "\n".join([*lines, f"goals: {goals} of torch's\n", header(whos)])


def header(whos: Sequence[str]) -> str:
    """The line above the table."""
    line = f"{'':<28}"
    for who in whos:
        line += f"{f'{who} ms':>10}{'MiB':>8}"
        line += f"{'time':>7}{'memory':>8}" if who != "torch" else ""
    return line


def render(one: Measured) -> str:
    """The line of a case: ms and MiB of each step, and both as fractions of torch's; then notes."""
    line, notes = f"{one.name:<28}", []
    for who, step in one.steps.items():
        ms, peak = step.ms.get("step"), step.peak_bytes.get("step")
        line += f"{'-' if ms is None else f'{ms:.3f}':>10}"
        line += f"{'-' if peak is None else f'{peak / MIB:.0f}':>8}"
        if who != "torch":
            ratios = one.ratios(who)
            for what, width in (("time", 7), ("memory", 8)):
                line += f"{f'{ratios[what]:.3f}' if what in ratios else '-':>{width}}"
        notes += [f"  {who}, {doing}: {note}" for doing, note in step.notes.items()]
        if step.errors and not one.passed(who):
            notes.append(f"  {who}: WRONG, errors {step.errors}")
        if step.breakdown:
            parts = ", ".join(f"{kind} {ms:.2f}" for kind, ms in step.breakdown.items())
            notes.append(f"  {who}, a step in ms: {parts}")
            notes += [f"    {ms:8.3f} ms {n:3} x {name[:100]}" for name, n, ms in step.kernels]
    return "\n".join([line, *notes])
