"""What is said of drawn calls: percentiles, the worst passes, those in which a peer is ahead."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from .. import files
from .measure import SMALL_BYTES, Measured
from .spec import MIB

PASSES = ("forward", "step")
# A peer's time over ours below which it counts as ahead.
AHEAD = 0.98
Value = Callable[[Measured, str], float | None]
Group = tuple[str, list[Measured]]


def render(found: Sequence[Measured], brief: bool = False) -> str:
    """The tables; without `brief` also the worst twenty passes and what goes beyond the tables."""
    lines = _percentiles(found)
    passes = [(one, doing) for one in found for doing in PASSES]
    timed = sorted(
        (
            (value, one, doing)
            for one, doing in passes
            if (value := one.fraction(doing)) is not None
        ),
        key=lambda item: item[0],
    )
    if not brief:
        lines += ["", "the worst twenty: fraction of the floor, pass, call, peers' time over ours"]
        lines += [
            f"{value:.2f} {doing:<8} {one.draw}  {_ratios(one, doing)}"
            for value, one, doing in timed[:20]
        ]
    behind = sorted(
        (
            (ratio, who, one, doing)
            for one, doing in passes
            for who, ratio in one.ahead(doing).items()
            if ratio < AHEAD
        ),
        key=lambda item: item[0],
    )
    many = len({(id(one), doing) for _, _, one, doing in behind})
    lines += ["", f"a peer is ahead by more than 2 %: {many} of {len(timed)} passes"]
    if not brief:
        lines += [
            f"{ratio:.2f} {who:<8}{doing:<8} {one.draw}{_note(one, who)}"
            for ratio, who, one, doing in behind
        ]
    wrong = [one for one in found if not one.passed]
    lines += ["", f"wrong: {len(wrong)}"]
    lines += [f"{one.draw}: error {one.error:.2g} {one.notes.get('ours', '')}" for one in wrong]
    return "\n".join(line.rstrip() for line in [*lines, *([] if brief else _left_out(found))])


def _percentiles(found: Sequence[Measured]) -> list[str]:
    """By family, and by size within it."""
    heads = "".join(f"{part:>8}" for part in ("worst", "5 %", "median")) * 2
    limit = SMALL_BYTES // MIB
    lines = [
        f"{'fraction of the floor':<34}{'n':>4}{'forward':>24}{'step':>24}",
        f"{'':<38}{heads}",
    ]
    for name, group in _groups(found):
        lines.append(_line(name, group, Measured.fraction))
        small = [one for one in group if one.draw.nbytes < SMALL_BYTES]
        if 0 < len(small) < len(group):
            large = [one for one in group if one.draw.nbytes >= SMALL_BYTES]
            lines.append(_line(f"  from {limit} MiB on", large, Measured.fraction))
            lines.append(_line(f"  below {limit} MiB", small, Measured.fraction))
        if any(one.plain_ms for one in small):
            lines.append(_line("    of torch's reduction, copy", small, Measured.plain))
    return lines


def _groups(found: Sequence[Measured]) -> list[Group]:
    """Families in the order in which they were drawn, and what goes across families."""
    names = list(dict.fromkeys(one.draw.group for one in found))
    groups = [(name, [one for one in found if one.draw.group == name]) for name in names]
    of_elements = [one for one in found if one.draw.kind == "elements"]
    straight = [one for one in of_elements if one.draw.family != "transposed"]
    argued = [
        one
        for one in found
        if getattr(one.draw, "weight", False) or getattr(one.draw, "ignored", 0)
    ]
    across = [
        ("elements", of_elements),
        ("elements but transposed", straight if len(straight) < len(of_elements) else []),
        ("rows: class weights, ignored rows", argued),
    ]
    groups.sort(key=lambda item: item[0])
    return [(name, group) for name, group in [*groups, *across] if group]


def _line(name: str, group: Sequence[Measured], value_of: Value) -> str:
    line = f"{name:<34}{len(group):>4}"
    for doing in PASSES:
        values = [value for one in group if (value := value_of(one, doing)) is not None]
        if not values:
            line += f"{'-':>24}"
            continue
        shown = (min(values), percentile(values, 0.05), statistics.median(values))
        line += "".join(f"{value:>8.2f}" for value in shown)
    return line


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of them lies, rounded towards the least."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _ratios(one: Measured, doing: str) -> str:
    return " ".join(f"{who} {ratio:.2f}" for who, ratio in one.ahead(doing).items())


def _note(one: Measured, who: str) -> str:
    return f"  ({one.notes[who]})" if who in one.notes else ""


def _left_out(found: Sequence[Measured]) -> list[str]:
    """How often a peer was not timed, by peer and reason."""
    counts: dict[str, int] = {}
    for one in found:
        for who, reason in one.skipped.items():
            counts[f"{who}: {reason}"] = counts.get(f"{who}: {reason}", 0) + 1
        for who, note in one.notes.items():
            if who != "ours":
                counts[f"{who}: {note}"] = counts.get(f"{who}: {note}", 0) + 1
    heading = ["", "peers not timed, or with another result: calls, peer, reason"]
    return [*heading, *(f"{n:>4} {what}" for what, n in sorted(counts.items()))] if counts else []


def detail(one: Measured) -> str:
    """All that is known of one call, as `--spec` prints it."""
    lines = [str(one.draw), f"error {one.error:.2g}, {'ok' if one.passed else 'WRONG'}"]
    for doing, ms in one.ms.items():
        floor, ours = one.floor_ms[doing], ms.get("ours")
        lines.append(f"{doing}: the floor is {floor:.4f} ms")
        times = ms | ({"torch's own": one.plain_ms[doing]} if doing in one.plain_ms else {})
        for who, time in times.items():
            ratio = f"{time / ours:>8.2f}x" if ours else ""
            lines.append(f"  {who:<12}{time:>10.4f} ms{floor / time:>7.2f}{ratio}")
    notes = [*one.skipped.items(), *one.notes.items()]
    return "\n".join([*lines, *(f"{who}: {note}" for who, note in notes)])


def save(path: str, about: dict[str, Any], found: Sequence[Measured]) -> None:
    """All numbers, as JSON; "spec" is what `--spec` takes."""
    calls = [
        {"spec": str(one.draw), "bytes": one.draw.nbytes} | dataclasses.asdict(one) for one in found
    ]
    files.save(path, about | {"draws": calls})
