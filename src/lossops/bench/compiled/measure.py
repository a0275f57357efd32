"""Checks and measurements of the steps of one case."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..heads import measure as heads
from ..meter import Call, Meter
from .problems import Case, Problem

# The largest error that passes, relative to float64 in the Euclidean norm: a few roundings of bf16.
LIMIT = 0.02
# At least so many samples: ours and torch's differ by a few percent.
FEWEST = 30
# What ours should take at most, as fractions of torch's.
GOALS = {"time": 1.01, "memory": 1.0}


@dataclasses.dataclass
class Contender(heads.Contender):
    """What one step took; its only pass is "step"."""

    compile_s: float | None = None  # compilation and first step


@dataclasses.dataclass
class Measured:
    """A case."""

    name: str
    steps: dict[str, Contender] = dataclasses.field(default_factory=dict)

    def ratios(self, who: str) -> dict[str, float]:
        """Time and memory of a step, as fractions of torch's; what is not known is left out."""
        found = {}
        for what, field in (("time", "ms"), ("memory", "peak_bytes")):
            theirs, torchs = (
                getattr(self.steps[name], field).get("step") if name in self.steps else None
                for name in (who, "torch")
            )
            if theirs and torchs:
                found[what] = theirs / torchs
        return found

    def passed(self, who: str) -> bool:
        """Whether the results of a step are right."""
        return self.steps[who].passed(LIMIT)

    def fields(self) -> dict[str, Any]:
        """What a file has."""
        return dataclasses.asdict(self) | {"ratios": {who: self.ratios(who) for who in self.steps}}

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Measured:
        """Takes what a file has."""
        steps = {who: Contender.read(found) for who, found in fields["steps"].items()}
        return cls(fields["name"], steps)


def run(case: Case, whos: Sequence[str], meter: Meter, *, with_breakdown: bool = False) -> Measured:
    """Checks and times the steps of one case."""
    meter.clean()
    problem = Problem(case, meter.device)
    found = Measured(case.name, {who: Contender() for who in whos})
    exact = problem.exact()
    steps: dict[str, Call] = {}
    # The keys of Inductor's caches do not tell operators apart whose tags or fakes differ.
    with torch.compiler.config.patch(force_disable_caches=True):
        for who in whos:
            step = problem.step(who)
            before = time.perf_counter()
            try:
                results = step()
                meter.synchronize()
            except Exception as error:  # of any kind: no peer may end the run
                found.steps[who].notes["compile"] = heads.said(error)
                continue
            found.steps[who].compile_s = time.perf_counter() - before
            found.steps[who].errors = _errors(results, exact)
            steps[who] = step
            del results
    del exact
    meter.clean()
    for who, call in steps.items():
        heads.note_peak(found.steps[who], "step", call, meter)

    def failed(who: str, error: Exception) -> None:
        found.steps[who].notes["step"] = heads.said(error)

    for who, ms in meter.medians(steps, failed).items():
        found.steps[who].ms["step"] = ms
    if with_breakdown:
        for who, call in steps.items():
            found.steps[who].breakdown, found.steps[who].kernels = heads.breakdown(call, meter)
    torch.compiler.reset()
    return found


def _errors(results: dict[str, Any], exact: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: float((results[name].double() - expected).norm() / expected.norm())
        for name, expected in exact.items()
    }
