"""`python -m lossops.bench`: the losses checked against float64 and timed against their peers.

A loss is bound by memory, so its time is held against the least that the device could need:

    forward floor = bytes of the inputs / read bandwidth
    step floor    = bytes of the inputs and of the gradient / copy bandwidth

that is, each input read once and the gradient written once.

Both bandwidths are measured in the same run, and so is every peer: absolute times do not carry
over from one machine, or one day, to the next.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import gc
import importlib
import importlib.util
import json
import math
import platform
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import functional, info
from ._version import __version__

# Takes (input, target) and the keyword `reduction`, as torch.nn.functional does.
Loss = Callable[..., Tensor]
Shape = tuple[int, ...]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# The largest error that passes, as `relative_error` counts it: the spacing of the half types; for
# fp32 some 80 of it, what an exponential or a difference of logarithms may cost torch too.
LIMITS = {"fp32": 1e-5, "fp16": 2.0**-10, "bf16": 2.0**-7}
# Name -> package that must be importable.
PEERS = {"eager": "torch", "compile": "torch", "liger": "liger_kernel", "quack": "quack"}


def _spread(shape: Shape, low: float, high: float, device: torch.device) -> Tensor:
    """One factor a row. On data that is alike everywhere a kernel that reads wrong rows passes."""
    return torch.linspace(low, high, shape[0], device=device).view(-1, *[1] * (len(shape) - 1))


def _values(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    input = torch.rand(shape, device=device).mul_(_spread(shape, 0.25, 0.75, device))
    return input, torch.rand(shape, device=device)


def _distributions(shape: Shape, device: torch.device, logs: str = "") -> tuple[Tensor, Tensor]:
    input = torch.randn(shape, device=device).mul_(_spread(shape, 0.25, 0.75, device))
    input = input.log_softmax(-1) if "input" in logs else input.softmax(-1)
    target = torch.randn(shape, device=device).mul_(_spread(shape, 0.75, 0.25, device))
    return input, target.log_softmax(-1) if "target" in logs else target.softmax(-1)


def _classes(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    logits = torch.randn(shape, device=device).mul_(_spread(shape, 0.5, 2.0, device))
    return logits, torch.randint(shape[1], (shape[0], *shape[2:]), device=device)


def _package(module: str, name: str, input: Tensor, target: Tensor, **options: Any) -> Tensor:
    return getattr(importlib.import_module(module), name)(input, target, **options)


def _log_first(loss: Loss, input: Tensor, target: Tensor, **options: Any) -> Tensor:
    return loss(torch.log(input), target, **options)


_liger = functools.partial(_package, "liger_kernel.transformers.functional")
_liger_kl = functools.partial(_liger, "liger_kl_div")
_quack_ce = functools.partial(_package, "quack.cross_entropy", "cross_entropy")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A loss with its arguments: its data, and how we and the others compute it."""

    title: str
    reduction: str
    inputs: Callable[[Shape, torch.device], tuple[Tensor, Tensor]]
    ours: Loss
    torch: Loss
    packages: dict[str, Loss] = dataclasses.field(default_factory=dict)


PROBLEMS = {
    "mse": Problem("MSE", "mean", _values, functional.mse_loss, F.mse_loss),
    "kl-probs": Problem(
        "KL, probabilities",
        "batchmean",
        _distributions,
        functools.partial(functional.kl_div, log_input=False),
        functools.partial(_log_first, F.kl_div),
        {"liger": functools.partial(_log_first, _liger_kl)},
    ),
    "kl-log": Problem(
        "KL, log input",
        "batchmean",
        functools.partial(_distributions, logs="input"),
        functional.kl_div,
        F.kl_div,
        {"liger": _liger_kl},
    ),
    "kl-log-target": Problem(
        "KL, log both",
        "batchmean",
        functools.partial(_distributions, logs="input target"),
        functools.partial(functional.kl_div, log_target=True),
        functools.partial(F.kl_div, log_target=True),
        {"liger": functools.partial(_liger_kl, log_target=True)},
    ),
    "ce": Problem(
        "Cross entropy",
        "mean",
        _classes,
        functional.cross_entropy,
        F.cross_entropy,
        {"liger": functools.partial(_liger, "liger_cross_entropy"), "quack": _quack_ce},
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem at a size; the CPU gets a smaller one, still beyond its caches."""

    problem: str
    dtype: str
    cuda_shape: Shape
    cpu_shape: Shape = (4096, 4096)
    quick: bool = False

    def shape(self, device: torch.device) -> Shape:
        return self.cuda_shape if device.type == "cuda" else self.cpu_shape

    def name(self, device: torch.device) -> str:
        return f"{self.problem}-{self.dtype}-{'x'.join(map(str, self.shape(device)))}"


CASES = (
    Case("mse", "fp32", (32768, 32768), quick=True),
    Case("mse", "fp16", (32768, 32768)),
    Case("mse", "bf16", (32768, 32768)),
    Case("kl-probs", "fp32", (16384, 16384), quick=True),
    Case("kl-probs", "fp16", (16384, 16384)),
    Case("kl-probs", "bf16", (16384, 16384)),
    Case("kl-log", "fp32", (16384, 16384)),
    Case("kl-log", "fp16", (16384, 16384)),
    Case("kl-log", "bf16", (16384, 16384)),
    Case("kl-log-target", "fp32", (16384, 16384)),
    Case("kl-log-target", "fp16", (16384, 16384)),
    Case("kl-log-target", "bf16", (16384, 16384)),
    Case("ce", "fp32", (32768, 4096), (8192, 4096), quick=True),
    Case("ce", "fp16", (32768, 4096), (8192, 4096)),
    Case("ce", "bf16", (16384, 32768), (1024, 32768)),
    Case("ce", "bf16", (8192, 131072), (256, 131072)),
    Case("ce", "bf16", (4096, 262144), (128, 262144)),
    # vocabularies whose rows are not aligned
    Case("ce", "bf16", (16384, 50257), (512, 50257)),
    Case("ce", "bf16", (8192, 151937), (256, 151937)),
    Case("ce", "fp32", (32768, 1001), (16384, 1001)),
    # few classes
    Case("ce", "fp32", (4194304, 10), (1048576, 10)),
    Case("ce", "fp32", (1048576, 100), (131072, 100)),
    Case("ce", "fp32", (262144, 1000), (16384, 1000)),
    # images
    Case("ce", "fp32", (16, 21, 512, 512), (2, 21, 512, 512)),
    Case("ce", "fp16", (16, 21, 512, 512), (2, 21, 512, 512)),
)


@dataclasses.dataclass
class Times:
    """What one contender took: medians by "forward" and "step", empty where it has no such loss."""

    ms: dict[str, float] = dataclasses.field(default_factory=dict)
    peak_bytes: int | None = None  # of a step, on CUDA, beyond what is there before it
    note: str | None = None  # what went wrong


@dataclasses.dataclass
class Result:
    """A case, checked and timed. `times` has "ours" and the peers."""

    name: str
    problem: str
    dtype: str
    shape: Shape
    input_bytes: int
    gradient_bytes: int
    limit: float
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    times: dict[str, Times] = dataclasses.field(default_factory=dict)
    floor_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    passed: bool = False

    def set_floor(self, bandwidth: dict[str, float]) -> None:
        moved = self.input_bytes + self.gradient_bytes
        self.floor_ms["forward"] = self.input_bytes / bandwidth["read"] / 1e6
        self.floor_ms["step"] = moved / bandwidth["copy"] / 1e6


class Progress:
    """A bar on stderr: redrawn in place on a terminal, else a line at every tenth."""

    def __init__(self, total: int) -> None:
        self.done, self.total, self.tenths = 0, total, -1
        self.terminal = sys.stderr.isatty()

    def advance(self, label: str) -> None:
        """Starts the next piece of work."""
        share = self.done / self.total
        self.done += 1
        if self.terminal:
            bar = ("#" * int(24 * share)).ljust(24, ".")
            print(f"\r[{bar}] {share:4.0%} {label[:60]}\033[K", end="", file=sys.stderr, flush=True)
        elif int(10 * share) > self.tenths:
            self.tenths = int(10 * share)
            print(f"{share:4.0%} {label}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


class Meter:
    """Times calls on one device, with cold caches."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.warm_ups, self.fewest, self.seconds = (5, 10, 0.4) if self.cuda else (2, 7, 1.2)
        # Many times any cache; ones, because fresh zeros can all be one page of memory.
        self.other_data = torch.ones(1 << 27 if self.cuda else 1 << 26, device=device)

    def medians(
        self, calls: dict[str, Callable[[], object]], failed: Callable[[str, Exception], None]
    ) -> dict[str, float]:
        """Median milliseconds of each call.

        The calls take turns, so that a drift of the device hits all of them, and in both orders, so
        that what a call leaves behind does too.
        """
        calls = dict(calls)
        samples: dict[str, list[Callable[[], float]]] = {name: [] for name in calls}
        started = time.perf_counter()
        for turn in range(self.warm_ups + 100):
            if turn == self.warm_ups:
                started = time.perf_counter()
            spent = time.perf_counter() - started
            if turn >= self.warm_ups + self.fewest and spent > self.seconds * len(calls):
                break
            for name, call in list(calls.items())[:: 1 if turn % 2 else -1]:
                try:
                    # By reading: lines left dirty would be written back in the call's time.
                    self.other_data.amax()
                    sample = self._sample(call)
                except Exception as error:  # of any kind: no peer may end the run
                    failed(name, error)
                    del calls[name]
                    continue
                if turn >= self.warm_ups:
                    samples[name].append(sample)
            self.synchronize()
        return {name: statistics.median(sample() for sample in samples[name]) for name in calls}

    def _sample(self, call: Callable[[], object]) -> Callable[[], float]:
        # What the call returns is freed after its time ends.
        if not self.cuda:
            before = time.perf_counter()
            result = call()
            elapsed = 1e3 * (time.perf_counter() - before)
            del result
            return lambda: elapsed
        # The device is still busy with the cache when the host gets here, and with the first large
        # kernel after it: launches stay out of the time between the events.
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = call()
        end.record()
        del result
        return lambda: float(start.elapsed_time(end))

    def peak_bytes(self, call: Callable[[], object]) -> int | None:
        """The most that `call` allocates at a time, result included."""
        if not self.cuda:
            return None
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        return int(torch.cuda.max_memory_allocated(self.device) - before)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def clean(self) -> None:
        """Gives unused memory back."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


def measure_bandwidths(meter: Meter) -> dict[str, dict[str, float]]:
    """GB/s of simple readers and copiers; a copy counts the bytes read and the bytes written.

    The fastest of each is the device's bandwidth.
    """
    size = 1 << 28
    if meter.cuda:
        memory = torch.cuda.get_device_properties(meter.device).total_memory
        size = min(1 << 32, 1 << int(math.log2(memory / 16)))
    source = torch.rand(size // 4, device=meter.device)
    copy = torch.empty_like(source)
    left, right = source.chunk(2)
    calls: dict[str, dict[str, Callable[[], object]]] = {
        "read": {
            "sum": source.sum,
            "sum of float64": source.view(torch.float64).sum,
            "max": source.amax,
            "dot": lambda: torch.dot(left, right),
        },
        "copy": {
            "copy": lambda: copy.copy_(source),
            "negate": lambda: torch.neg(source, out=copy),
        },
    }

    def failed(name: str, error: Exception) -> None:
        raise RuntimeError(f"the bandwidth cannot be measured by {name}") from error

    rates = {}
    for kind, moved in (("read", size), ("copy", 2 * size)):
        medians = meter.medians(calls[kind], failed)
        rates[kind] = {name: moved / ms / 1e6 for name, ms in medians.items()}
    return rates


def relative_error(got: Tensor, expected: Tensor, smallest: float) -> Tensor:
    """Largest |got - expected| / (|expected| + mean |expected| + smallest); NaN stays NaN.

    The mean allows for terms that cancel to almost nothing; `smallest`, the smallest normal number
    of the result's dtype, for those that it cannot hold to full precision.
    """
    size = expected.abs()
    return ((got.double() - expected).abs() / (size + size.mean() + smallest)).max()


def check(problem: Problem, input: Tensor, target: Tensor) -> tuple[dict[str, float], float]:
    """Errors of our value, losses by element, and gradient; and the value in float64.

    torch computes them in float64 by chunks of rows, so that memory stays bounded. The gradient is
    checked as a training step has it, and scaled up: that of a mean can vanish in a half type.
    """
    smallest = torch.finfo(input.dtype).smallest_normal
    rows = input.size(0)
    count = rows if problem.reduction == "batchmean" else target.numel()
    scale = 2.0 ** min(15, int(math.log2(count)))

    leaf = input.detach().requires_grad_()
    loss = problem.ours(leaf, target, reduction=problem.reduction)
    loss.backward()
    again = problem.ours(leaf, target, reduction=problem.reduction)
    (scaled,) = torch.autograd.grad(again, leaf, torch.full_like(again, scale))

    total = size = torch.zeros((), dtype=torch.float64, device=input.device)
    elements, gradients = [], []
    chunk = max(1, (1 << (25 if input.is_cuda else 21)) * rows // input.numel())
    for first in range(0, rows, chunk):
        part = slice(first, first + chunk)
        x = input[part].double().requires_grad_()
        t = target[part].double() if target.is_floating_point() else target[part]
        terms = problem.torch(x, t, reduction="none")
        terms.sum().backward()
        terms, gradient = terms.detach(), x.grad / count
        total, size = total + terms.sum(), size + terms.abs().sum()
        ours = problem.ours(input[part], target[part], reduction="none")
        elements.append(relative_error(ours, terms, smallest))
        gradients.append(relative_error(leaf.grad[part], gradient, smallest))
        gradients.append(relative_error(scaled[part], gradient * scale, smallest))

    value = (loss.detach().double() - total / count).abs() / (size / count + smallest)
    errors = {"value": value, "elements": torch.stack(elements), "gradient": torch.stack(gradients)}
    return {name: float(error.max()) for name, error in errors.items()}, float(total / count)


def contender(problem: Problem, who: str) -> Callable[[Tensor, Tensor], Tensor] | None:
    """How `who` computes the reduced loss; None where there is no such loss."""
    known = {"ours": problem.ours, "eager": problem.torch, "compile": problem.torch}
    loss, reduction = (known | problem.packages).get(who), problem.reduction
    if loss is None:
        return None

    def reduced(input: Tensor, target: Tensor) -> Tensor:
        return loss(input, target, reduction=reduction)

    return torch.compile(reduced, dynamic=False) if who == "compile" else reduced


def run_case(case: Case, peers: Sequence[str], meter: Meter, progress: Progress) -> Result:
    """Checks and times one case."""
    problem, name = PROBLEMS[case.problem], case.name(meter.device)
    progress.advance(f"{name}: check")
    torch.manual_seed(0)
    shape, dtype = case.shape(meter.device), DTYPES[case.dtype]
    input, target = problem.inputs(shape, meter.device)
    input, target = input.to(dtype), target.to(dtype) if target.is_floating_point() else target
    moved = input.nbytes + target.nbytes
    limit = LIMITS[case.dtype]
    result = Result(name, case.problem, case.dtype, shape, moved, input.nbytes, limit)
    result.times = {who: Times() for who in ("ours", *peers)}

    broken = set()

    def failed(who: str, error: Exception) -> None:
        broken.add(who)
        result.times[who].note = f"{doing}: {_said(error)}"

    doing, expected = "check", math.nan
    try:
        result.errors, expected = check(problem, input, target)
    except Exception as error:
        failed("ours", error)
    meter.clean()

    calls: dict[str, dict[str, Callable[[], Any]]] = {"forward": {}, "step": {}}
    for who in result.times:
        loss = contender(problem, who)
        if loss is None:
            continue
        # Liger-Kernel writes the gradient over the logits: a package gets a copy of its own.
        own = input.clone() if who in problem.packages else input
        calls["forward"][who] = functools.partial(loss, own, target)
        calls["step"][who] = functools.partial(_step, loss, own.detach().requires_grad_(), target)

    doing = "value"
    for who, call in calls["forward"].items():
        try:
            value = float(call())
        except Exception as error:
            failed(who, error)
        else:
            if not (abs(value - expected) <= 0.01 * abs(expected) or math.isnan(expected)):
                result.times[who].note = f"gives {value:.6g} where float64 gives {expected:.6g}"
    for doing in calls:
        progress.advance(f"{name}: {doing}")
        sound = {who: call for who, call in calls[doing].items() if who not in broken}
        for who, ms in meter.medians(sound, failed).items():
            result.times[who].ms[doing] = ms
    for who, times in result.times.items():
        if "step" in times.ms:
            times.peak_bytes = meter.peak_bytes(calls["step"][who])
    right = [error <= result.limit for error in result.errors.values()]  # False for NaN
    result.passed = bool(right) and all(right) and result.times["ours"].note is None
    torch.compiler.reset()
    return result


def _step(loss: Callable[[Tensor, Tensor], Tensor], leaf: Tensor, target: Tensor) -> Tensor | None:
    loss(leaf, target).backward()
    gradient, leaf.grad = leaf.grad, None
    return gradient


def _said(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ...")


def render(results: Sequence[Result], peers: Sequence[str]) -> str:
    """The table for people, at most 100 columns wide."""
    cuda = any(result.times["ours"].peak_bytes is not None for result in results)
    head = "".join(f"{peer:>9}" for peer in peers) + (f"{'peak MiB':>9}" if cuda else "")
    lines = [
        "floor: the least time that the memory bandwidth allows, over our time; 1.00 is the limit.",
        "peers: their time over ours; above 1.00x lossops is faster. step: forward and backward.",
        "",
        f"{'case':<21}{'pass':<8}{'ms':>9}{'floor':>6}{head}  max error",
    ]
    notes: list[str] = []
    for result in results:
        marks = dict.fromkeys(result.times, "")
        for who, times in result.times.items():
            if times.note:
                label = "lossops" if who == "ours" else who
                notes.append(f"[{len(notes) + 1}] {label}, {result.name}: {times.note}")
                marks[who] = f"[{len(notes)}]"
        ours = result.times["ours"]
        title = PROBLEMS[result.problem].title
        shape = "x".join(map(str, result.shape))
        for doing, label in ("forward", title), ("step", f"  {result.dtype} {shape}"):
            ms = ours.ms.get(doing)
            line = f"{label:<21}{doing:<8}"
            line += f"{marks['ours'] or '-':>9}" if ms is None else f"{ms:>9.3f}"
            line += f"{'-' if ms is None else format(result.floor_ms[doing] / ms, '.2f'):>6}"
            for peer in peers:
                theirs = result.times[peer].ms.get(doing)
                ratio = "" if ms is None or theirs is None else f"{theirs / ms:.2f}x"
                line += f"{ratio + marks[peer] or '-':>9}"
            if cuda:
                peak = ours.peak_bytes if doing == "step" else None
                line += f"{'' if peak is None else format(peak / 2**20, '.0f'):>9}"
            if doing == "step":
                worst = sorted(result.errors.values(), key=lambda error: (error != error, error))
                line += "  ok" if result.passed else "  BAD"
                line += f" {worst[-1]:.0e}" if worst else ""
            lines.append(line.rstrip())
    lines += [""] * bool(notes)
    lines += [textwrap.fill(note, 100, subsequent_indent="    ") for note in notes]
    return "\n".join(lines)


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next((line for line in file if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name.split(':')[-1].strip()} ({torch.get_num_threads()} threads)"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line, and settles what it leaves open."""
    parser = argparse.ArgumentParser(
        prog="python -m lossops.bench",
        description="Checks the losses against float64 and times them against their peers.",
    )
    parser.add_argument("--quick", action="store_true", help="only the three reference problems")
    parser.add_argument("--cases", nargs="+", metavar="GLOB", help="only these, as 'ce-bf16-*'")
    parser.add_argument("--peers", metavar="LIST", help=f"of {','.join(PEERS)}; or none")
    parser.add_argument("--device", help="cuda, cuda:1, cpu; default: cuda where there is one")
    parser.add_argument("--output", metavar="FILE.json", help="writes all numbers there")
    options = parser.parse_args(arguments)

    try:
        options.device = torch.device(
            options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        )
        # "cuda" becomes the current device, by its number.
        options.device = torch.empty(0, device=options.device).device
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {options.device}: {_said(error)}")
    if options.device.type not in ("cpu", "cuda"):
        parser.error(f"--device {options.device}: lossops runs on cpu and cuda")
    cuda = options.device.type == "cuda"
    if cuda:
        options.device = torch.device("cuda", options.device.index or 0)
        torch.cuda.set_device(options.device)

    if options.peers is None:
        options.peers = ["eager", "compile"] if cuda or not options.quick else ["eager"]
        if cuda and not options.quick:
            options.peers = list(PEERS)
    else:
        options.peers = [who for who in options.peers.split(",") if who not in ("", "none")]
    if unknown := set(options.peers) - set(PEERS):
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    options.absent = [who for who in options.peers if not importlib.util.find_spec(PEERS[who])]
    options.peers = [who for who in options.peers if who not in options.absent]

    names = {case.name(options.device): case for case in CASES if case.quick or not options.quick}
    globs = options.cases or ["*"]
    options.cases = [
        case for name, case in names.items() if any(fnmatch.fnmatch(name, glob) for glob in globs)
    ]
    if not options.cases:
        parser.error(f"no case matches {' '.join(globs)}; there are {', '.join(names)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark. 1 when a result of ours is wrong or missing, else 0."""
    options = parse(arguments)
    device, cases, peers = options.device, options.cases, options.peers
    name = device_name(device)
    print(f"lossops {__version__} on {name}, torch {torch.__version__}", flush=True)

    progress = Progress(2 + 3 * len(cases))
    meter = Meter(device)
    progress.advance("bandwidth")
    rates = measure_bandwidths(meter)
    results = []
    for case in cases:
        meter.clean()
        results.append(run_case(case, peers, meter, progress))
    meter.clean()
    # Again, so that a device that was slow or busy at first does not make the floor easy.
    progress.advance("bandwidth")
    for kind, again in measure_bandwidths(meter).items():
        rates[kind] = {who: max(rate, again[who]) for who, rate in rates[kind].items()}
    progress.close()

    bandwidth = {kind: max(rates[kind].values()) for kind in rates}
    for result in results:
        result.set_floor(bandwidth)
    print(f"memory: reads {bandwidth['read']:.0f} GB/s, copies {bandwidth['copy']:.0f} GB/s\n")
    print(render(results, peers))
    if options.absent:
        print(f"\nNot installed: {', '.join(options.absent)}")
    failed = [result.name for result in results if not result.passed]
    print(f"\nFAILED: {', '.join(failed)}" if failed else "\nAll results agree with float64.")
    if options.output:
        environment = info.collect()
        report = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "device": name,
            "driver": environment["driver"],
            "torch": str(torch.__version__),
            "lossops": __version__,
            "bandwidth_gb_per_s": bandwidth,
            "bandwidths_gb_per_s": rates,
            "cases": [dataclasses.asdict(result) for result in results],
            "environment": environment,
        }
        with open(options.output, "w") as file:
            json.dump(report, file, indent=2)
            file.write("\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
