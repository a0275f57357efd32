"""The picture of a run of heads: fractions of the products by pass, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import page
from ..page import FAINT, STYLES, Column, Row
from .measure import PASSES, PRODUCTS, Measured
from .problems import MIB

# Who -> colour and label, beside those of page.STYLES.
HEADS = {
    "narrow": ("#56B4E9", "lossops, bf16 sums"),
    "linear+ours": ("#56B4E9", "linear layer, lossops' loss"),
    "chunked": (FAINT, "torch, chunked"),
    "trl": ("#CC5A9B", "TRL"),
}
TITLES = {"step": "Step", "frozen": "Frozen weight", "forward": "Without autograd"}
HEADING = (
    "How near to the products alone",
    "Time of the same products by cuBLAS, over the time taken: further right is faster. A step has "
    "three products, with a frozen weight two, without autograd one.",
)


def draw(about: dict[str, Any], found: Sequence[Measured], path: str) -> None:
    """Writes the picture; the path's ending chooses the format."""
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


def _row(one: Measured, who: str, passes: Sequence[str], has_peaks: bool) -> Row:
    values = [one.fraction(who, doing) for doing in passes]
    if has_peaks:
        peak = one.heads[who].peak_bytes.get("step")
        values.append(None if peak is None else peak / MIB)
    if who in STYLES:
        colour, label = STYLES[who].colour, STYLES[who].label
    else:  # "ours 512"
        colour, label = HEADS.get(who, ("#56B4E9", who.replace("ours", "lossops") + " MiB"))
    return Row(label, colour, values)
