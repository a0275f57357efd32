"""What the pictures of all runs share: the page, its title, bars with their values.

matplotlib is optional: `pip install 'lossops[bench]'`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

MISSING = "matplotlib is not installed (pip install 'lossops[bench]')"

# The card is opaque, so that a page's light or dark background changes nothing.
INK, FAINT, GRID, CARD = "#1F2933", "#5F6B76", "#D9DEE4", "#FBFCFD"

# Inches.
WIDTH, MARGIN, GAP = 12.0, 0.45, 0.4
ROW, HEADING = 0.215, 0.30
LABELS = 2.75
VALUES = 0.5  # beside bars


class Style(NamedTuple):
    """How a contender looks, and its name in the title."""

    colour: str
    marker: str
    label: str


# Colours of Okabe and Ito, which colour-blind people tell apart; the markers differ too.
STYLES = {
    "ours": Style("#0072B2", "o", "lossops"),
    "eager": Style("#5F6B76", "s", "torch, eager"),
    "compile": Style("#E69F00", "^", "torch.compile"),
    "liger": Style("#009E73", "D", "Liger-Kernel"),
    "quack": Style("#CC5A9B", "v", "quack"),
}


def available() -> bool:
    """Whether there is a matplotlib."""
    return importlib.util.find_spec("matplotlib") is not None


class Canvas:
    """A figure measured in inches from its top left corner."""

    def __init__(self, figure: Any, height: float) -> None:
        self.figure, self.height = figure, height

    def axes(self, left: float, top: float, width: float, height: float) -> Any:
        bottom = self.height - top - height
        box = (left / WIDTH, bottom / self.height, width / WIDTH, height / self.height)
        axes = self.figure.add_axes(box)
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=0)
        axes.set_axisbelow(True)
        return axes

    def text(self, left: float, top: float, words: str, **style: Any) -> Any:
        return self.figure.text(left / WIDTH, 1 - top / self.height, words, va="baseline", **style)

    def heading(self, left: float, top: float, words: str, rest: str) -> None:
        """A section's name, and what there is to know of it."""
        self.text(left, top, words, size=12, weight="bold")
        self.text(left, top + 0.22, rest, size=8.5, color=FAINT)


# A part of a picture: its height, and what draws it from a height on.
Part = tuple[float, Callable[[Canvas, float], None]]


def nothing(canvas: Canvas, top: float) -> None:
    """Draws a part of no height."""


def draw(
    path: str,
    about: dict[str, Any],
    facts: Sequence[str],
    styles: Sequence[Style],
    parts: Sequence[Part],
) -> None:
    """Writes a picture: title, contenders, parts. The path's ending chooses the format."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings = {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": GRID,
        "axes.facecolor": CARD,
        "figure.facecolor": CARD,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "svg.hashsalt": "lossops",
    }
    with rc_context(settings):
        top = 1.25
        height = top + sum(height for height, _ in parts) + 0.25
        figure = Figure(figsize=(WIDTH, height))
        FigureCanvasAgg(figure)  # measures text
        canvas = Canvas(figure, height)
        _title(canvas, about, facts, styles)
        for height, part in parts:
            if height:
                part(canvas, top)
            top += height
        figure.savefig(path, dpi=160)


def _title(
    canvas: Canvas, about: dict[str, Any], facts: Sequence[str], styles: Sequence[Style]
) -> None:
    canvas.text(MARGIN, 0.52, f"lossops on {about.get('device')}", size=17, weight="bold")
    facts = [
        *facts,
        f"lossops {about.get('lossops')}",
        f"torch {about.get('torch')}",
        str(about.get("date"))[:10],
    ]
    canvas.text(MARGIN, 0.76, "   ·   ".join(facts), size=9, color=FAINT)
    left = WIDTH - MARGIN
    for style in reversed(styles):
        weight = "bold" if style == STYLES["ours"] else "normal"
        # The texts end where the next begins; their widths are known only once they are drawn.
        text = canvas.text(left, 0.52, style.label, size=9.5, ha="right", weight=weight)
        box = text.get_window_extent(canvas.figure.canvas.get_renderer())
        left -= box.width / canvas.figure.dpi + 0.14
        canvas.figure.add_artist(_dot(canvas, left, 0.52 - 0.045, style))
        left -= 0.22


def _dot(canvas: Canvas, left: float, top: float, style: Style) -> Any:
    from matplotlib.lines import Line2D

    place = [left / WIDTH], [1 - top / canvas.height]
    return Line2D(
        *place, color=style.colour, marker=style.marker, markersize=6.5, linestyle="none",
        transform=canvas.figure.transFigure,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of bars. A dashed line stands at `line`."""

    title: str
    shown: Callable[[float], str]
    line: float | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """A bar for each column, or None."""

    label: str
    colour: str
    values: Sequence[float | None]


def bars(
    heading: tuple[str, str], columns: Sequence[Column], groups: Sequence[tuple[str, Sequence[Row]]]
) -> Part:
    """Rows under the names of their groups: a label, then bars from zero with their values."""
    if not columns:
        return 0.0, nothing
    names: list[tuple[float, str]] = []  # with their places from the top
    rows: list[tuple[float, Row]] = []
    height = 0.0
    for name, group in groups:
        names.append((height, name))
        rows += [(height + HEADING + index * ROW, row) for index, row in enumerate(group)]
        height += HEADING + len(group) * ROW
    width = (WIDTH - 2 * MARGIN - LABELS - (len(columns) - 1) * GAP) / len(columns)

    def paint(canvas: Canvas, top: float) -> None:
        canvas.heading(MARGIN, top, *heading)
        top += 0.8
        for place, name in names:
            canvas.text(MARGIN, top + place + HEADING - 0.07, name, size=9.5, weight="bold")
        for place, row in rows:
            canvas.text(MARGIN + 0.12, top + place + ROW - 0.07, row.label, size=8)
        for number, column in enumerate(columns):
            axes = canvas.axes(MARGIN + LABELS + number * (width + GAP), top, width, height)
            longest = _bars_of_column(axes, column, number, rows)
            axes.set_xlim(0, longest * width / (width - VALUES))
            axes.set_ylim(height, 0)

    return 0.9 + height, paint


def _bars_of_column(
    axes: Any, column: Column, number: int, rows: Sequence[tuple[float, Row]]
) -> float:
    """The longest of them, as it is on the axis."""
    axes.set_title(column.title, loc="left", size=9.5, weight="bold", pad=5)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.axvline(0, color=GRID, linewidth=1.6)
    if column.line is not None:
        axes.axvline(column.line, color=INK, linewidth=1.1, linestyle=(0, (4, 2)), zorder=3)
    longest = column.line or 0.0
    for place, row in rows:
        value = row.values[number]
        if value is not None:
            middle = place + ROW / 2
            axes.barh(middle, value, height=ROW * 0.62, color=row.colour, linewidth=0)
            # At the column's right edge.
            axes.text(1, middle, column.shown(value), size=8, va="center", ha="right",
                      transform=axes.get_yaxis_transform())  # fmt: skip
            longest = max(longest, value)
    return longest or 1.0
