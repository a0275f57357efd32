"""Draws a run of heads: fractions of the products by pass, and memory. A run that varies only the
number of tokens becomes lines over the tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .. import page
from ..page import CARD, FAINT, GRID, INK, MARGIN, STYLES, WIDTH, Canvas, Column, Part, Row
from .measure import PASSES, PRODUCTS, Measured
from .problems import MIB, Shape

# Who -> colour and label, beside those of page.STYLES.
HEADS = {
    "narrow": ("#56B4E9", "lossops, bf16 sums"),
    "linear+ours": ("#56B4E9", "linear layer, lossops' loss"),
    "chunked": (FAINT, "torch, chunked"),
    "trl": ("#CC5A9B", "TRL"),
    "liger-sm90": ("#7FCDB8", "Liger-Kernel, Hopper"),
    "cce": ("#D4A72C", "Cut Cross-Entropy"),
}
TITLES = {"step": "Step", "frozen": "Frozen weight", "forward": "Without autograd"}
HEADING = (
    "How near to the products alone",
    "Time of the same products by cuBLAS, over the time taken: further right is faster. A step has "
    "three products, with a frozen weight two, without autograd one.",
)


def draw(about: dict[str, Any], found: Sequence[Measured], path: str) -> None:
    """Writes the picture; the path's ending chooses the format."""
    if _varies_only_tokens(found):
        page.draw(path, about, [], [], [_lines(found)])
        return
    passes = [doing for doing in PASSES if any(doing in one.heads[PRODUCTS].ms for one in found)]
    columns = [Column(TITLES[doing], "{:.3f}".format, line=1.0) for doing in passes]
    peaks = [
        step.peak_bytes["step"]
        for one in found
        for step in one.heads.values()
        if "step" in step.peak_bytes
    ]
    if peaks:
        columns.append(Column("Peak of a step, MiB", "{:.0f}".format))
    groups = [
        (
            f"{one.shape.replace('x', '×')} {one.dtype}",
            [_row(one, who, passes, bool(peaks)) for who in one.heads if who != PRODUCTS],
        )
        for one in found
    ]
    page.draw(path, about, [], [], [page.bars(HEADING, columns, groups)])


def _varies_only_tokens(found: Sequence[Measured]) -> bool:
    """Whether the run has three or more numbers of tokens, with the same features and classes."""
    shapes = [Shape.parse(one.shape) for one in found]
    return len({shape.tokens for shape in shapes}) >= 3 and (
        len({dataclasses.replace(shape, tokens=1) for shape in shapes}) == 1
    )


def _lines(found: Sequence[Measured]) -> Part:
    """Time and memory of a step over the tokens, all logarithmic."""
    found = sorted(found, key=lambda one: Shape.parse(one.shape).tokens)
    tokens = [Shape.parse(one.shape).tokens for one in found]
    _, features, classes = dataclasses.astuple(Shape.parse(found[0].shape))
    heading = (
        f"By the number of tokens: {features} features, {classes} classes, {found[0].dtype}",
        "A step. The dashed line is the time of its products alone by cuBLAS.",
    )

    def values(who: str, field: str, unit: float) -> list[tuple[int, float]]:
        return [
            (count, getattr(one.heads[who], field)["step"] / unit)
            for count, one in zip(tokens, found, strict=True)
            if who in one.heads and "step" in getattr(one.heads[who], field)
        ]

    def paint(canvas: Canvas, top: float) -> None:
        from matplotlib.ticker import LogLocator

        canvas.heading(MARGIN, top, *heading)
        width = (WIDTH - 2 * MARGIN - 1.3) / 2
        panels = (("Time, ms", "ms", 1.0), ("Peak beyond the inputs, MiB", "peak_bytes", MIB))
        for number, (title, field, unit) in enumerate(panels):
            left = MARGIN + 0.5 + number * (width + 0.8)
            axes = canvas.axes(left, top + 0.75, width, 3.2)
            axes.set_title(title, loc="left", size=9.5, weight="bold", pad=5)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(tokens, [f"{count}" for count in tokens])
            axes.minorticks_off()
            # Memory may have no power of ten in its range.
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.grid(color=GRID, linewidth=0.8)
            axes.set_xlabel("tokens", size=8.5, color=FAINT)
            for who in found[0].heads:
                points = values(who, field, unit)
                if not points:
                    continue
                colour, label = (INK, "the products") if who == PRODUCTS else _style(who)
                dashes = (0, (4, 2)) if who == PRODUCTS else "-"
                axes.plot(
                    *zip(*points, strict=True), color=colour, label=label, linestyle=dashes,
                    marker="" if who == PRODUCTS else "o", ms=5, mec=CARD,
                )  # fmt: skip
            axes.legend(frameon=False, fontsize=8)

    return 4.6, paint


def _style(who: str) -> tuple[str, str]:
    """The colour and the label of a head."""
    if who in STYLES:
        return STYLES[who].colour, STYLES[who].label
    return HEADS.get(who, ("#56B4E9", who.replace("ours", "lossops") + " MiB"))  # "ours 512"


def _row(one: Measured, who: str, passes: Sequence[str], has_peaks: bool) -> Row:
    values = [one.fraction(who, doing) for doing in passes]
    if has_peaks:
        peak = one.heads[who].peak_bytes.get("step")
        values.append(None if peak is None else peak / MIB)
    colour, label = _style(who)
    return Row(label, colour, values)
