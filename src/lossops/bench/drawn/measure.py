"""Checks and times drawn calls beside their peers."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..meter import Call, Failed, Meter, Progress, plain_calls
from . import elements, peers, rows
from .elements import ElementDraw
from .jobs import Draw, Job, job
from .rows import RowDraw
from .spec import MIB, Bounds, parse

# Below it launches and the last wave cost what a floor of bytes does not know, so torch's own
# kernels are timed beside the call.
SMALL_BYTES = 256 * MIB
ANY_SIZE = Bounds()
# How far a peer's outputs may be from ours before a note says so: each rounds in its own places.
PEER_LIMIT = 0.02
# Elements that are compared at a time. A choice: a GPU takes fewer at less than its speed.
PIECE = 1 << 26


def families(globs: Sequence[str] = ("*",)) -> list[str]:
    """Those of "kind/family" that match, and that this lossops has."""
    there = [f"elements/{family}" for family in elements.FAMILIES]
    there += [f"rows/{family}" for family in rows.families()]
    return [name for name in there if any(fnmatch.fnmatch(name, glob) for glob in globs)]


def draws(
    seed: int, count: int, chosen: Sequence[str], bounds: Bounds = ANY_SIZE
) -> Iterator[Draw]:
    """Calls of the chosen families in turn; the same for the same arguments, on any device.

    A family's n-th call does not depend on which other families are chosen.
    """
    for number in range(count):
        turn, which = divmod(number, len(chosen))
        name = chosen[which]
        source = random.Random(f"{seed} {name} {turn}")
        kind, _, family = name.partition("/")
        yield (rows.draw if kind == "rows" else elements.draw)(source, family, bounds)


def spec(text: str) -> Draw:
    """The call that `text` describes. Raises ValueError, and names what is wrong."""
    if text.startswith("elements/"):
        return parse(text, ElementDraw)
    found = parse(text, RowDraw)
    if not rows.has(found.loss):
        raise ValueError(f"loss={found.loss}: this lossops has no {rows.FUNCTIONS[found.loss]}")
    return found


@dataclasses.dataclass
class Measured:
    """A call, checked and timed: milliseconds by pass and contender, and the floor's."""

    draw: Draw
    ms: dict[str, dict[str, float]]
    floor_ms: dict[str, float]
    # By pass: of torch's fastest reduction, and copy, of as many bytes. Empty for large calls.
    plain_ms: dict[str, float]
    error: float
    passed: bool
    notes: dict[str, str]  # contender -> what is wrong with its result, or with its run
    skipped: dict[str, str]  # contender -> why it was not timed, or one of its passes

    def fraction(self, doing: str) -> float | None:
        """Of the floor."""
        ours = self.ms.get(doing, {}).get("ours")
        return None if ours is None else self.floor_ms[doing] / ours

    def plain(self, doing: str) -> float | None:
        """The time of torch's own kernels over ours."""
        ours, plain = self.ms.get(doing, {}).get("ours"), self.plain_ms.get(doing)
        return None if ours is None or plain is None else plain / ours

    def ahead(self, doing: str) -> dict[str, float]:
        """Each peer's time over ours."""
        of = self.ms.get(doing, {})
        return {who: ms / of["ours"] for who, ms in of.items() if who != "ours" and "ours" in of}


def measure(draw: Draw, whos: Sequence[str], meter: Meter, bandwidth: dict[str, float]) -> Measured:
    """Checks a call against float64, and times it beside the peers that take it."""
    notes: dict[str, str] = {}
    broken: set[str] = set()

    def failed(who: str, error: Exception) -> None:
        broken.add(who)
        notes[who] = f"{type(error).__name__}: {error}".splitlines()[0][:160]

    try:
        todo = job(draw, whos, meter, bandwidth)
        error = todo.error()
    except Exception as problem:  # no call may end the run
        failed("ours", problem)
        return Measured(draw, {}, {}, {}, float("inf"), False, notes, {})
    found = Measured(draw, {}, todo.floor_ms, {}, error, error <= todo.limit, notes, todo.skipped)
    try:
        for doing, calls in todo.passes().items():
            sound = {who: call for who, call in calls.items() if who not in broken}
            sound = _that_run(doing, sound, todo, found, failed)
            if "ours" in sound:
                _time(doing, sound, todo, meter, found, failed)
    except Exception as problem:  # memory may be short
        failed("ours", problem)
    found.passed &= "ours" not in broken
    if "compile" in whos:
        torch.compiler.reset()
    return found


def _time(
    doing: str, calls: dict[str, Call], todo: Job, meter: Meter, found: Measured, failed: Failed
) -> None:
    plain: dict[str, Call] = {}
    if meter.cuda and todo.draw.nbytes < SMALL_BYTES:
        of_bytes = plain_calls(meter, todo.moved["read"], todo.moved["step"])[doing]
        plain = {f"torch {name}": call for name, call in of_bytes.items()}
    ms = meter.medians(calls | plain, failed)
    found.ms[doing] = {who: one for who, one in ms.items() if who not in plain}
    if of_torch := [ms[name] for name in plain if name in ms]:
        found.plain_ms[doing] = min(of_torch)


def _that_run(
    doing: str, calls: dict[str, Call], todo: Job, found: Measured, failed: Failed
) -> dict[str, Call]:
    """Calls each contender once, notes outputs that are not ours, and leaves out what fails."""
    sound: dict[str, Call] = {}
    ours: Any = None
    for who, call in calls.items():
        try:
            got: Any = call()
            ours = got if who == "ours" else ours
            share = 0.0 if ours is None else max(map(_difference, got, ours))
        except Exception as error:  # of any kind: no peer may end the run
            failed(who, error)
            continue
        if who != "ours" and not share <= PEER_LIMIT:
            found.notes.setdefault(who, f"{doing}: its result is off by {share:.2g}")
        if doing == "forward" and who in peers.WRITES_LOGITS:
            mine, theirs = todo.operands["ours"][0], todo.operands[who][0]
            if not torch.equal(mine, theirs):
                found.skipped[who] = "forward: it writes the gradient, so a step alone is timed"
                with torch.no_grad():
                    theirs.copy_(mine)
                continue
        sound[who] = call
    return sound


def _difference(theirs: Tensor, ours: Tensor) -> float:
    """Largest difference over the largest of our finite numbers; equal infinities do not differ."""
    sizes, differences = [], []
    for their, our in zip(_pieces(theirs), _pieces(ours), strict=True):
        sizes.append(torch.where(our.isfinite(), our, 0.0).abs().amax().float())
        apart = torch.where(their == our, 0.0, (their - our).abs().float())
        differences.append(apart.amax())
    size, apart = (torch.stack(each).amax() for each in (sizes, differences))
    return float(apart / (size + torch.finfo(ours.dtype).smallest_normal))


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """What is compared at a time, so that it takes little memory beside what is compared."""
    if tensor.numel() <= PIECE:
        yield tensor
        return
    dim = max(range(tensor.dim()), key=tensor.size)
    for half in tensor.tensor_split(2, dim):
        yield from _pieces(half)


def run(
    todo: Sequence[Draw], whos: Sequence[str], meter: Meter, bandwidth: dict[str, float]
) -> list[Measured]:
    """Measures calls one after the other; an interrupt (Ctrl-C) ends it with what there is."""
    meter.warm_ups, meter.fewest, meter.seconds = (1, 7, 0.02) if meter.cuda else (1, 5, 0.2)
    meter.most = 0.15 if meter.cuda else 1.0
    progress = Progress(len(todo))
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: of shapes that broadcast, of reduction="mean"
        with contextlib.suppress(KeyboardInterrupt):
            for draw in todo:
                progress.advance(str(draw))
                found.append(measure(draw, whos, meter, bandwidth))
                meter.clean()
    progress.close()
    return found
