"""The picture of a run of compiled steps: time and memory, as fractions of torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import page
from ..page import FAINT, STYLES, Column, Row
from ..plot import FAMILIES
from .measure import Measured

COLUMNS = {"time": "Time of a step", "memory": "Peak memory of a step"}


def draw(about: dict[str, Any], found: Sequence[Measured], path: str) -> None:
    """Writes the picture; the path's ending chooses the format."""
    goals = about["goals"]
    of_goals = " and ".join(f"{goal:.2f} for {what}" for what, goal in goals.items())
    heading = (
        "Compiled steps beside those with torch's loss",
        "The same model compiled with lossops' loss and with torch's: ratios to torch's, less is "
        f"better. The dashed lines are the goals, at most {of_goals}.",
    )
    columns = [Column(COLUMNS[what], "{:.3f}".format, line=goals[what]) for what in COLUMNS]
    groups = []
    for family, title in FAMILIES.items():
        of_family = [one for one in found if one.name.startswith(f"{family}-")]
        rows = [_row(one, who) for one in of_family for who in one.steps if who != "torch"]
        if rows:
            groups.append((title, rows))
    page.draw(path, about, [], [], [page.bars(heading, columns, groups)])


def _row(one: Measured, who: str) -> Row:
    _, ahead, shape = one.name.split("-")
    ratios = one.ratios(who)
    label = f"{ahead}, {shape.replace('x', '×')}" + ("" if who == "ours" else f", {who}")
    colour = STYLES[who].colour if who in STYLES else FAINT
    return Row(label, colour, [ratios.get(what) for what in COLUMNS])
