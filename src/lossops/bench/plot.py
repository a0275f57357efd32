"""The picture of a run of the cases."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from . import page
from .cases import PROBLEMS
from .page import (
    CARD,
    FAINT,
    GAP,
    GRID,
    HEADING,
    INK,
    LABELS,
    MARGIN,
    ROW,
    STYLES,
    WIDTH,
    Canvas,
    Part,
    nothing,
)
from .report import Compiled, Report, Result, Small, Times

FAMILIES = {"mse": "Mean squared error", "kl": "KL divergence", "ce": "Cross entropy"}
PASSES = {"forward": "Forward", "step": "Training step: forward and backward"}

# Inches.
BARS = 0.72


def draw(report: Report, path: str) -> None:
    """Writes the picture; the path's ending chooses the format."""
    bandwidth = report.bandwidth_gb_per_s
    facts = [f"memory reads {bandwidth['read']:.0f} GB/s, copies {bandwidth['copy']:.0f} GB/s"]
    styles = [STYLES[who] for who in ("ours", *report.peers)]
    parts = [_fractions(report), _sizes(report), _hosts(report)]
    page.draw(path, report.about, facts, styles, parts)


def _family(problem: str) -> str:
    return problem.split("-")[0]


def _by_family(results: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    for family, name in FAMILIES.items():
        if found := [result for result in results if _family(result.problem) == family]:
            yield name, found


def _label(canvas: Canvas, result: Any, right: float, top: float) -> None:
    """Variant, shape and dtype, each in its column."""
    what = PROBLEMS[result.problem].title.partition(", ")[2]
    canvas.text(MARGIN + 0.12, top, what, size=8)
    canvas.text(right - 0.42, top, "×".join(map(str, result.shape)), size=8, ha="right")
    canvas.text(right, top, result.dtype, size=8, ha="right", color=FAINT)


def _fractions(report: Report) -> Part:
    """How near each case comes to the floor: our bar, the peers' markers."""
    if not report.cases:
        return 0.0, nothing
    groups = list(_by_family(report.cases))
    rows = len(report.cases) * ROW + len(groups) * HEADING
    height = 1.0 + rows

    def paint(canvas: Canvas, top: float) -> None:
        canvas.heading(
            MARGIN,
            top,
            "How near to the limit of the memory",
            "Least time that the memory's bandwidth allows, over the time taken: "
            "1 is the floor, and further right is faster. No marker: no such loss.",
        )
        top += 0.8
        width = (WIDTH - 2 * MARGIN - LABELS - GAP) / 2
        for column, (doing, title) in enumerate(PASSES.items()):
            axes = canvas.axes(MARGIN + LABELS + column * (width + GAP), top, width, rows)
            axes.set_title(title, loc="left", size=9.5, weight="bold", pad=17)
            axes.set_xlim(0, 1.16)
            axes.set_ylim(rows, 0)
            axes.set_yticks([])
            axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "¼", "½", "¾", "1"])
            axes.tick_params(top=True, labeltop=True, labelbottom=False, pad=1)
            axes.grid(axis="x", color=GRID, linewidth=0.8)
            axes.axvline(1, color=INK, linewidth=1.1, linestyle=(0, (4, 2)))
            y = 0.0
            for name, results in groups:
                y += HEADING
                if column == 0:
                    canvas.text(MARGIN, top + y - 0.07, name, size=9.5, weight="bold")
                for result in results:
                    _fraction_row(axes, result, doing, y + ROW / 2)
                    y += ROW
                    if column == 0:
                        _label(canvas, result, MARGIN + LABELS - 0.12, top + y - 0.07)

    return height, paint


def _fraction_row(axes: Any, result: Result, doing: str, y: float) -> None:
    floor = result.floor_ms[doing]
    for who, times in sorted(result.times.items(), key=lambda item: item[0] == "ours"):
        if doing not in times.ms or who not in STYLES:
            continue
        colour, marker, _ = STYLES[who]
        share = floor / times.ms[doing]
        if who == "ours":
            axes.barh(y, share, height=ROW * 0.62, color=colour, alpha=0.28, zorder=2, linewidth=0)
            axes.plot(share, y, marker, color=colour, ms=6.8, mec=CARD, mew=0.7, zorder=6)
            style = {"size": 8, "weight": "bold", "color": colour, "va": "center", "ha": "right"}
            axes.text(1.155, y, f"{share:.2f}", **style)
        else:
            axes.plot(
                share, y, marker, color=colour, ms=5.4, mec=CARD, mew=0.7, zorder=5
            )  # fmt: skip


def _sizes(report: Report) -> Part:
    """Time of a step over the number of elements, both logarithmic."""
    if not report.sizes:
        return 0.0, nothing
    groups = list(_by_family(report.sizes))

    def paint(canvas: Canvas, top: float) -> None:
        kind = "GPU time" if "cuda" in _device_kind(report) else "Time"
        canvas.heading(
            MARGIN,
            top + 0.2,
            "Time by size",
            f"{kind} of a training step, cold caches; the dashed line is the floor.",
        )
        width = (WIDTH - 2 * MARGIN - 2 * 0.75 - 0.55) / 3
        for column, (name, results) in enumerate(groups):
            axes = canvas.axes(MARGIN + 0.55 + column * (width + 0.75), top + 0.95, width, 2.6)
            dtype, columns = results[0].dtype, results[0].shape[-1]
            what = PROBLEMS[results[0].problem].title.partition(", ")[2]
            detail = f"{what + ', ' if what else ''}{dtype}, rows of {columns}"
            axes.set_title(name, loc="left", size=9.5, weight="bold", pad=6)
            axes.set_title(detail, loc="right", size=8, color=FAINT, pad=6)
            _size_lines(axes, results)

    return 4.3, paint


def _size_lines(axes: Any, results: Sequence[Result]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    results = sorted(results, key=lambda result: math.prod(result.shape))
    elements = [math.prod(result.shape) for result in results]
    floors = [result.floor_ms["step"] for result in results]
    axes.plot(elements, floors, color=INK, linewidth=1.1, linestyle=(0, (4, 2)), zorder=3)
    for who in reversed(STYLES):
        points = [
            (count, result.times[who].ms["step"])
            for count, result in zip(elements, results, strict=True)
            if who in result.times and "step" in result.times[who].ms
        ]
        if points:
            colour, marker, _ = STYLES[who]
            wide = 2.2 if who == "ours" else 1.3
            axes.plot(
                *zip(*points, strict=True), color=colour, marker=marker, ms=5.4, mec=CARD, mew=0.7,
                linewidth=wide, zorder=5 if who == "ours" else 4,
            )  # fmt: skip
    axes.grid(color=GRID, linewidth=0.8)
    axes.xaxis.set_major_locator(FixedLocator(elements))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _count(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _duration(value)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    times = [
        ms for result in results for times in result.times.values() for ms in times.ms.values()
    ]
    # The floor of the smallest would leave the rest of the picture empty.
    axes.set_ylim(min(times) / 3, max(times) * 1.6)
    axes.set_xlabel("elements", size=8.5, color=FAINT)


def _count(value: float) -> str:
    for unit, size in (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def _duration(ms: float) -> str:
    return f"{ms * 1e3:g} µs" if ms < 1 else f"{ms:g} ms" if ms < 1e3 else f"{ms / 1e3:g} s"


def _device_kind(report: Report) -> str:
    results = [*report.cases, *report.sizes]
    return "cuda" if any(r.times["ours"].peak_bytes is not None for r in results) else "cpu"


def _hosts(report: Report) -> Part:
    """Small inputs on the left, the compiled step on the right."""
    if not report.small and not report.compiled:
        return 0.0, nothing
    groups = list(_by_family(report.small))
    rows = max(len(report.small) * ROW + len(groups) * HEADING, len(report.compiled) * BARS)
    half = (WIDTH - 2 * MARGIN - 0.7) / 2

    def paint(canvas: Canvas, top: float) -> None:
        left = MARGIN
        if report.small:
            words = "Wall time of a call in microseconds, and eager torch's over ours; fp32."
            canvas.heading(left, top + 0.2, "Small inputs", words)
            _small_rows(canvas, groups, top + 1.0, half)
            left += half + 0.7
        if report.compiled:
            words = (
                "A linear layer, the loss and SGD, all by torch.compile: lossops and torch's loss."
            )
            canvas.heading(left, top + 0.2, "Compiled training step", words)
            _compiled_rows(canvas, report.compiled, left, top + 0.75, half)

    return 1.3 + rows, paint


def _small_rows(
    canvas: Canvas, groups: Sequence[tuple[str, list[Small]]], top: float, half: float
) -> None:
    from matplotlib.ticker import MaxNLocator

    rows = sum(len(smalls) * ROW + HEADING for _, smalls in groups)
    label, gap = 1.6, 0.25
    width = (half - label - gap) / 2
    for column, doing in enumerate(("forward", "step")):
        axes = canvas.axes(MARGIN + label + column * (width + gap), top, width, rows)
        axes.set_title(doing.capitalize(), loc="left", size=9.5, weight="bold", pad=17)
        axes.set_ylim(rows, 0)
        axes.set_yticks([])
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.tick_params(top=True, labeltop=True, labelbottom=False, pad=1)
        y, longest = 0.0, 0.0
        for name, smalls in groups:
            y += HEADING
            if column == 0:
                canvas.text(MARGIN, top + y - 0.07, name, size=9.5, weight="bold")
            for small in smalls:
                y += ROW
                wall = {who: of["wall"] for who, of in small.us.get(doing, {}).items()}
                longest = max(longest, *wall.values(), 0.0)
                _small_row(axes, wall, y - ROW / 2)
                if column == 0:
                    shape = "×".join(map(str, small.shape))
                    canvas.text(MARGIN + label - 0.12, top + y - 0.07, shape, size=8, ha="right")
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.set_xlim(0, longest * 1.05 or 1)  # ticks no further than the times,
        axes.set_xticks([tick for tick in axes.get_xticks() if tick <= longest])
        axes.set_xlim(0, longest * 1.5 or 1)  # and room for the ratios


def _small_row(axes: Any, wall: dict[str, float], y: float) -> None:
    if "ours" in wall and "eager" in wall:
        axes.plot([wall["ours"], wall["eager"]], [y, y], color="#B8C2CC", lw=2.6, zorder=2)
        ratio = f"{wall['eager'] / wall['ours']:.2f}x"
        axes.text(1, y, ratio, size=8, weight="bold", color=STYLES["ours"].colour, va="center",
                  ha="right", transform=axes.get_yaxis_transform())  # fmt: skip
    for who in sorted(wall, key=lambda who: who == "ours"):
        colour, marker, _ = STYLES[who]
        axes.plot(wall[who], y, marker, color=colour, ms=6.5, mec=CARD, mew=0.7, zorder=4)


def _compiled_rows(
    canvas: Canvas, results: Sequence[Compiled], left: float, top: float, half: float
) -> None:
    """Bars from zero, in milliseconds: the whole step, of which the loss is a part."""
    rows = len(results) * BARS
    axes = canvas.axes(left, top, half, rows)
    axes.set_ylim(rows, 0)
    axes.set_yticks([])
    axes.set_xticks([])
    longest = 0.0
    for index, compiled in enumerate(results):
        y = index * BARS
        batch, features, outputs = compiled.shape
        name = FAMILIES[_family(compiled.problem)]
        detail = f"batch {batch}, {features} → {outputs}, {compiled.dtype}"
        canvas.text(left, top + y + 0.15, name, size=9.5, weight="bold")
        canvas.text(left + 1.65, top + y + 0.15, detail, size=8, color=FAINT)
        for offset, who in enumerate(("ours", "compile")):
            ms = _step_of(compiled.times, who)
            if ms is None:
                continue
            place = y + 0.31 + offset * 0.19
            axes.barh(place, ms, height=0.15, color=STYLES[who].colour, linewidth=0)
            style = {"size": 8, "va": "center", "weight": "bold" if who == "ours" else "normal"}
            axes.annotate(f"{ms:.2f} ms", (ms, place), (4, 0),
                          textcoords="offset points", **style)  # fmt: skip
            longest = max(longest, ms)
    axes.set_xlim(0, longest * 1.13 or 1)


def _step_of(times: dict[str, Times], who: str) -> float | None:
    return times[who].ms.get("step") if who in times else None
