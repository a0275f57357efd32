"""The checks against float64, and the kinds of measurement: a case, a small input, a whole step."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .cases import DTYPES, PROBLEMS, Case, Data, Loss, Problem
from .meter import Call, Meter, Progress
from .report import Compiled, Outcome, Result, Small, Times

# The largest error that passes, as `relative_error` counts it: the spacing of the half types; for
# fp32 some 80 of it, what an exponential or a difference of logarithms may cost torch too.
LIMITS = {"fp32": 1e-5, "fp16": 2.0**-10, "bf16": 2.0**-7}
# How far a peer may be from us, in its value and in its gradient, before the table says so: each
# rounds in its own places, so this tells another result from the same one and no more.
PEER_LIMITS = {"value": 0.01, "gradient": 0.05}
# Steps of training, and how near their losses must be: rounding at other places moves the weights.
STEPS = 4
STEPS_LIMIT = 0.02


def relative_error(
    got: Tensor, expected: Tensor, smallest: float, rounding: Tensor | float = 0.0
) -> Tensor:
    """Largest |got - expected| / (|expected| + mean |expected| + smallest); NaN stays NaN.

    The mean allows for terms that cancel to almost nothing; `smallest`, the smallest normal number
    of the result's dtype, for those that it cannot hold to full precision. An error up to
    `rounding`, one number for each result, does not count.
    """
    size = expected.abs()
    off = ((got.double() - expected).abs() - rounding).clamp(min=0)
    return (off / (size + size.mean() + smallest)).max()


def check(problem: Problem, data: Data) -> tuple[dict[str, float], float]:
    """Errors of our value, losses by element, and gradient; and the value in float64.

    torch computes them in float64 by chunks of rows, so that memory stays bounded. The gradient is
    checked as a training step has it, and scaled up: that of a mean can vanish in a half type.
    """
    input, target, options = data.input, data.target, data.options
    smallest = torch.finfo(input.dtype).smallest_normal
    rows = input.size(0)
    divisor = data.divisor(problem.reduction)
    scale = 2.0 ** min(15, max(0, int(math.log2(divisor))))

    leaf = input.detach().requires_grad_()
    loss = problem.ours(leaf, target, reduction=problem.reduction, **options)
    loss.backward()
    again = problem.ours(leaf, target, reduction=problem.reduction, **options)
    (scaled,) = torch.autograd.grad(again, leaf, torch.full_like(again, scale))

    total = size = torch.zeros((), dtype=torch.float64, device=input.device)
    elements, gradients = [], []
    chunk = max(1, (1 << (25 if input.is_cuda else 21)) * rows // input.numel())
    for first in range(0, rows, chunk):
        part = slice(first, first + chunk)
        exact, ours = data.rows(part).to(torch.float64), data.rows(part)
        x = exact.input.requires_grad_()
        terms = problem.torch(x, exact.target, reduction="none", **exact.options)
        terms.sum().backward()
        terms, gradient = terms.detach(), x.grad / divisor
        total, size = total + terms.sum(), size + terms.abs().sum()
        got = problem.ours(ours.input, ours.target, reduction="none", **options)
        elements.append(relative_error(got, terms, smallest))
        gradients.append(relative_error(leaf.grad[part], gradient, smallest))
        gradients.append(relative_error(scaled[part], gradient * scale, smallest))

    value = (loss.detach().double() - total / divisor).abs() / (size / divisor + smallest)
    errors = {"value": value, "elements": torch.stack(elements), "gradient": torch.stack(gradients)}
    return {name: float(error.max()) for name, error in errors.items()}, float(total / divisor)


def run_case(case: Case, peers: Sequence[str], meter: Meter, progress: Progress) -> Result:
    """Checks and times one case."""
    problem, name = PROBLEMS[case.problem], case.name(meter.device)
    progress.advance(f"{name}: check")
    data = case.data(meter.device)
    result = Result(
        **_outcome(case, meter),
        input_bytes=data.bytes_read,
        gradient_bytes=data.bytes_of_gradient,
        times={who: Times() for who in ("ours", *peers)},
    )
    broken = set()

    def failed(who: str, error: Exception) -> None:
        broken.add(who)
        result.times[who].note = f"{doing}: {_said(error)}"

    doing, expected = "check", math.nan
    try:
        result.errors, expected = check(problem, data)
    except Exception as error:
        failed("ours", error)
    meter.clean()

    calls: dict[str, dict[str, Callable[[], Any]]] = {"forward": {}, "step": {}}
    for who in result.times:
        loss = problem.contender(who)
        if loss is None:
            continue
        # Liger-Kernel writes the gradient over the logits, so a package gets copies of its own.
        # From then on it reads gradients where there were logits: finite, and as many.
        copy = torch.clone if who in problem.packages else torch.detach
        arguments = (data.target, data.options)
        calls["forward"][who] = functools.partial(_forward, loss, copy(data.input), *arguments)
        leaf = copy(data.input).requires_grad_()
        calls["step"][who] = functools.partial(_step, loss, leaf, *arguments)

    doing = "value"
    for who, call in calls["forward"].items():
        try:
            value = float(call())
        except Exception as error:
            failed(who, error)
        else:
            limit = PEER_LIMITS["value"] * abs(expected)
            if not (abs(value - expected) <= limit or math.isnan(expected)):
                result.times[who].note = f"gives {value:.6g} where float64 gives {expected:.6g}"
    for doing in calls:
        progress.advance(f"{name}: {doing}")
        sound = {who: call for who, call in calls[doing].items() if who not in broken}
        if doing == "step":
            sound = _check_gradients(sound, result, failed)
        for who, ms in meter.medians(sound, failed).items():
            result.times[who].ms[doing] = ms
    for who, times in result.times.items():
        if "step" in times.ms:
            times.peak_bytes = meter.peak_bytes(calls["step"][who])
    result.passed = result.fits() and result.times["ours"].note is None
    torch.compiler.reset()
    return result


def _check_gradients(
    calls: dict[str, Callable[[], Any]],
    result: Result,
    failed: Callable[[str, Exception], None],
) -> dict[str, Callable[[], Any]]:
    """Notes a peer whose gradient is not ours, which `check` has seen; leaves out what raises."""
    sound: dict[str, Callable[[], Any]] = {}
    ours = None
    for who, call in calls.items():
        try:
            gradient = call()
            if who == "ours":
                ours = gradient
            elif ours is not None and gradient is None:
                result.times[who].note = "has no gradient"
            elif ours is not None:
                share = _difference(gradient, ours)
                if not share <= PEER_LIMITS["gradient"] and result.times[who].note is None:
                    result.times[who].note = f"its gradient is off by {share:.2g} of the largest"
        except Exception as error:
            failed(who, error)
        else:
            sound[who] = call
    return sound


def _difference(theirs: Tensor, ours: Tensor) -> float:
    """Largest difference over the largest gradient, or over what the dtype can hold."""
    smallest = torch.finfo(ours.dtype).smallest_normal
    largest = ours.abs().amax().double()
    return float((theirs.to(ours.dtype) - ours).abs().amax().double() / (largest + smallest))


def run_small(case: Case, peers: Sequence[str], meter: Meter, progress: Progress) -> Small:
    """The wall time and the device's time of one small input, beside eager torch."""
    problem = PROBLEMS[case.problem]
    progress.advance(case.name(meter.device))
    data = case.data(meter.device)
    small = Small(**_outcome(case, meter))
    try:
        small.errors, _ = check(problem, data)
        whos = ("ours", *(who for who in peers if who == "eager"))
        leaf = data.input.detach().requires_grad_()
        passes: dict[str, dict[str, Call]] = {"forward": {}, "forward, grad": {}, "step": {}}
        for who in whos:
            loss = problem.contender(who)
            assert loss is not None
            rest = (data.target, data.options)
            passes["forward"][who] = functools.partial(_forward, loss, data.input, *rest)
            passes["forward, grad"][who] = functools.partial(_forward, loss, leaf, *rest)
            passes["step"][who] = functools.partial(_step, loss, leaf, *rest)
        small.us = {doing: meter.small(calls) for doing, calls in passes.items()}
    except Exception as error:
        small.note = _said(error)
    small.passed = small.fits() and small.note is None
    return small


def count_launches(case: Case, small: Small, meter: Meter) -> None:
    """Fills in `small.launches`; apart from `run_small`, as the profiler slows what comes after."""
    problem, data = PROBLEMS[case.problem], case.data(meter.device)
    for doing, times in small.us.items():
        for who in times:
            loss = problem.contender(who)
            assert loss is not None
            leaf = data.input.detach().requires_grad_(doing != "forward")
            call = functools.partial(
                _step if doing == "step" else _forward, loss, leaf, data.target, data.options
            )
            try:
                call()
                small.launches.setdefault(doing, {})[who] = meter.launches(call)
            except Exception:  # a profiler that does not work is no fault of a loss
                return


def run_compiled(case: Case, peers: Sequence[str], meter: Meter, progress: Progress) -> Compiled:
    """A training step by torch.compile with our loss, and the same step with torch's."""
    progress.advance(case.name(meter.device))
    compiled = Compiled(**_outcome(case, meter) | {"limit": STEPS_LIMIT})
    calls: dict[str, Callable[[], Any]] = {}

    def failed(who: str, error: Exception) -> None:
        calls.pop(who, None)
        compiled.times[who].note = _said(error)

    for who in ("ours", "compile", "eager"):
        if who == "compile" and who not in peers:
            continue
        compiled.times[who] = Times()
        try:
            step = _training_step(case, who, meter.device)
            compiled.losses[who] = [float(step()) for _ in range(STEPS)]
            calls[who] = step
        except Exception as error:
            failed(who, error)
    ours = compiled.losses.get("ours", [])
    for who, losses in compiled.losses.items():
        if who != "ours" and ours:
            pairs = zip(ours, losses, strict=True)
            differences = [abs(a - b) / abs(b) if b else math.inf for a, b in pairs]
            # max() would pass over a NaN.
            compiled.errors[who] = (
                math.nan if any(map(math.isnan, differences)) else max(differences)
            )
    timed = {who: call for who, call in calls.items() if who == "ours" or who in peers}
    for who, ms in meter.medians(timed, failed).items():
        compiled.times[who].ms["step"] = ms
    compiled.passed = compiled.fits() and compiled.times["ours"].note is None
    torch.compiler.reset()
    return compiled


def _training_step(case: Case, who: str, device: torch.device) -> Callable[[], Tensor]:
    """A linear layer, the loss, backward and SGD; all of it compiled, except for "eager"."""
    problem, dtype = PROBLEMS[case.problem], DTYPES[case.dtype]
    batch, features, outputs = case.shape(device)
    torch.manual_seed(0)
    target = problem.inputs((batch, outputs), device).to(dtype).target
    x = torch.randn(batch, features, device=device).to(dtype)
    layer = torch.nn.Linear(features, outputs, device=device, dtype=dtype)
    # Such that a few steps change the loss well beyond its rounding, and it still falls: the means
    # and the probabilities are of order 1 / outputs.
    rate = 1.0 if case.problem == "ce" else outputs / 8
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate)
    loss: Loss = problem.ours if who == "ours" else problem.torch
    takes_logs = case.problem == "kl-log"

    def forward(x: Tensor, target: Tensor) -> Tensor:
        output = layer(x)
        output = output.log_softmax(-1) if takes_logs else output
        return loss(output, target, reduction=problem.reduction)

    update: Callable[[], object] = optimizer.step
    if who != "eager":
        forward = torch.compile(forward, fullgraph=True, dynamic=False)
        update = torch.compile(update)

    def step() -> Tensor:
        value = forward(x, target)
        value.backward()
        update()
        optimizer.zero_grad()
        return value.detach()

    return step


def _outcome(case: Case, meter: Meter) -> dict[str, Any]:
    """The fields that every `Outcome` starts with."""
    name, shape = case.name(meter.device), case.shape(meter.device)
    return vars(Outcome(name, case.problem, case.dtype, shape, LIMITS[case.dtype]))


def _forward(loss: Loss, input: Tensor, target: Tensor, options: dict[str, Any]) -> Tensor:
    return loss(input, target, **options)


def _step(loss: Loss, leaf: Tensor, target: Tensor, options: dict[str, Any]) -> Tensor | None:
    loss(leaf, target, **options).backward()
    gradient, leaf.grad = leaf.grad, None
    return gradient


def _said(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ...")
