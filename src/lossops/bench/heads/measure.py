"""Checks and measurements of the heads of one shape."""

from __future__ import annotations

import dataclasses
import functools
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..meter import Call, Meter
from .problems import Head, Problem, Shape

# Pass -> how many products are its floor.
PASSES = {"step": 3, "frozen": 2, "forward": 1}
# The largest error of a gradient that passes, relative to float64 in the Euclidean norm. bf16: a
# few roundings, and those of sums in bf16.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 0.02}
PRODUCTS = "products"
OneContender = TypeVar("OneContender", bound="Contender")

# The kinds of kernels of CUDA, and of operators on the CPU, by their names. The first that fits.
KINDS = {
    "products": r"gemm|nvjet|xmma|cutlass|cublas|splitK|aten::(add)?mm\b",
    "loss": r"lossops",
    "copies": r"copy|Memcpy",
    "others": "",
}


@dataclasses.dataclass
class Contender:
    """What one head took, by pass; `ms` of "products" is the floor."""

    ms: dict[str, float] = dataclasses.field(default_factory=dict)
    peak_bytes: dict[str, int] = dataclasses.field(default_factory=dict)  # gradients included
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)  # what went wrong, by pass
    # A step, in milliseconds by kind, and its longest kernels as (name, calls, ms).
    breakdown: dict[str, float] = dataclasses.field(default_factory=dict)
    kernels: list[tuple[str, int, float]] = dataclasses.field(default_factory=list)

    def passed(self, limit: float) -> bool:
        """Whether all errors are within the limit; not where there are none, nor with a NaN."""
        is_near = bool(self.errors) and all(error <= limit for error in self.errors.values())
        return is_near and not self.notes

    @classmethod
    def read(cls: type[OneContender], fields: dict[str, Any]) -> OneContender:
        """Takes what a file has."""
        kernels = [(name, count, ms) for name, count, ms in fields["kernels"]]
        return cls(**fields | {"kernels": kernels})


@dataclasses.dataclass
class Measured:
    """A shape. `heads` has "products" too."""

    shape: str
    dtype: str
    limit: float
    heads: dict[str, Contender] = dataclasses.field(default_factory=dict)

    def fraction(self, who: str, doing: str) -> float | None:
        """The time of the products alone over that of a head."""
        floor, took = (self.heads[name].ms.get(doing) for name in (PRODUCTS, who))
        return floor / took if floor and took else None

    def passed(self, who: str) -> bool:
        """Whether the results of a head are right."""
        return self.heads[who].passed(self.limit)

    def fields(self) -> dict[str, Any]:
        """What a file has."""
        fractions = {
            who: {doing: self.fraction(who, doing) for doing in self.heads[PRODUCTS].ms}
            for who in self.heads
            if who != PRODUCTS
        }
        return dataclasses.asdict(self) | {"fractions": fractions}

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Measured:
        """Takes what a file has."""
        heads = {who: Contender.read(found) for who, found in fields["heads"].items()}
        return cls(fields["shape"], fields["dtype"], fields["limit"], heads)


def run(
    shape: Shape,
    dtype: torch.dtype,
    heads: Mapping[str, Head],
    passes: Sequence[str],
    meter: Meter,
    *,
    of_tokens: bool = False,
    with_breakdown: bool = False,
) -> Measured:
    """Checks and times the heads of one shape."""
    meter.clean()
    problem = Problem(shape, dtype, meter.device, of_tokens=of_tokens)
    found = Measured(str(shape), str(dtype).removeprefix("torch."), LIMITS[dtype])
    found.heads = {PRODUCTS: Contender()} | {who: Contender() for who in heads}
    exact = problem.exact()
    for who in heads:
        try:
            found.heads[who].errors = _errors(_check(heads[who], problem), exact)
        except Exception as error:  # of any kind: no peer may end the run
            found.heads[who].notes["check"] = said(error)
    del exact
    runs = [who for who in heads if not found.heads[who].notes]
    meter.clean()
    for doing in passes:
        calls: dict[str, Call] = {who: _call(heads[who], problem, doing) for who in runs}
        # Before the times, so that there is memory for the floor's gradient of the logits.
        for who, call in calls.items():
            note_peak(found.heads[who], doing, call, meter)
        grad = problem.gradient_of_logits() if doing != "forward" else None
        products = functools.partial(_products, problem, grad, PASSES[doing])

        def failed(who: str, error: Exception, doing: str = doing) -> None:
            found.heads[who].notes[doing] = said(error)

        for who, ms in meter.medians({PRODUCTS: products, **calls}, failed).items():
            found.heads[who].ms[doing] = ms
        del grad, products
        meter.clean()
    if with_breakdown:
        for who in runs:
            call = _call(heads[who], problem, "step")
            found.heads[who].breakdown, found.heads[who].kernels = breakdown(call, meter)
    return found


def _check(head: Head, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    input, weight = (x.detach().requires_grad_() for x in (problem.input, problem.weight))
    loss = head(input, weight, problem.target)
    return loss.detach(), *torch.autograd.grad(loss, (input, weight))


def _errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, float]:
    names = ("loss", "input", "weight")
    return {
        name: float((got.double() - expected).norm() / expected.norm())
        for name, got, expected in zip(names, found, exact, strict=True)
    }


def _call(head: Head, problem: Problem, doing: str) -> Call:
    input = problem.input.detach().requires_grad_(doing != "forward")
    weight = problem.weight.detach().requires_grad_(doing == "step")

    def call() -> tuple[Any, ...]:
        if doing == "forward":
            with torch.no_grad():
                return (head(input, weight, problem.target),)
        loss = head(input, weight, problem.target)
        loss.backward()
        result = loss.detach(), input.grad, weight.grad
        input.grad = weight.grad = None
        return result

    return call


def _products(problem: Problem, grad: Tensor | None, count: int) -> tuple[Tensor, ...]:
    """The first `count` products of a step."""
    logits = torch.mm(problem.input, problem.weight.t())
    if grad is None or count == 1:
        return (logits,)
    del logits
    grad_input = torch.mm(grad, problem.weight)
    return grad_input, *((torch.mm(grad.t(), problem.input),) if count == 3 else ())


def note_peak(found: Any, doing: str, call: Call, meter: Meter) -> None:
    """Fills in `peak_bytes[doing]` of a contender, or its `notes[doing]`."""
    try:
        call()  # what a first call allocates for good is no part of a step
        meter.clean()
        peak = meter.peak_bytes(call)
    except Exception as error:
        found.notes[doing] = said(error)
        return
    if peak is not None:
        found.peak_bytes[doing] = peak


def breakdown(call: Call, meter: Meter) -> tuple[dict[str, float], list[tuple[str, int, float]]]:
    """Milliseconds by kind of kernel, and the ten longest kernels; of operators on the CPU."""
    activity = torch.profiler.ProfilerActivity.CUDA if meter.cuda else None
    activities = [activity or torch.profiler.ProfilerActivity.CPU]
    for _ in range(2):
        call()
    meter.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        call()
        meter.synchronize()
    kernels = []
    for event in profile.key_averages():
        if meter.cuda and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        took = event.self_device_time_total if meter.cuda else event.self_cpu_time_total
        kernels.append((event.key, event.count, took / 1e3))
    kinds = dict.fromkeys(KINDS, 0.0)
    for name, _, ms in kernels:
        kinds[kind_of(name)] += ms
    kernels.sort(key=lambda kernel: -kernel[2])
    return kinds, [(name[:200], count, ms) for name, count, ms in kernels[:10]]


def kind_of(kernel: str) -> str:
    """The kind of a kernel or an operator, by its name."""
    return next(kind for kind, names in KINDS.items() if re.search(names, kernel))


def said(error: Exception) -> str:
    """An error in one line."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ...")
