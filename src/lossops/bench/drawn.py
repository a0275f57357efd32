"""Shapes and layouts drawn at random, so that nobody tunes to a list: `--random SEED --count N`."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from .cases import DTYPES, Loss
from .meter import Meter, Progress
from .run import LIMITS, relative_error

MIB = 1 << 20
# The least and the most bytes of the largest operand.
SIZES = {"cuda": (128 * MIB, 1024 * MIB), "cpu": (8 * MIB, 64 * MIB)}

# Loss -> ours, torch's, whether input and target hold logarithms.
LOSSES: dict[str, tuple[Loss, Loss, bool, bool]] = {
    "mse": (functional.mse_loss, F.mse_loss, False, False),
    "kl-log": (functional.kl_div, F.kl_div, True, False),
    "kl-log-target": (
        functools.partial(functional.kl_div, log_target=True),
        functools.partial(F.kl_div, log_target=True),
        True,
        True,
    ),
    "kl-probs": (
        functools.partial(functional.kl_div, log_input=False),
        lambda input, target, **options: F.kl_div(input.log(), target, **options),
        False,
        False,
    ),
}

LAYOUTS = (
    "contiguous",
    "permuted",  # both operands alike
    "padded",  # rows of a larger stride, aligned or not
    "shifted",  # x[:, :-1] beside y[:, 1:]
    "broadcast",  # target lacks some of the dimensions
    "expanded",  # the same, of input
    "mixed",  # two dtypes
    "many",  # four and more dimensions that do not merge
    "transposed",  # one of the two
)


@dataclasses.dataclass(frozen=True)
class Draw:
    """One call: a loss, its operands' shapes, layouts and dtypes, and what is asked of it."""

    seed: int
    loss: str
    layout: str
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    reduction: str
    gradients: str  # "input", "target" or "both"

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return (
            f"{self.loss} {self.layout} {shape} {'/'.join(self.dtypes)} {self.reduction} "
            f"grad {self.gradients}"
        )


def draws(seed: int, count: int, device: torch.device) -> Iterator[Draw]:
    """The same for the same seed."""
    source = random.Random(seed)
    least, most = SIZES[device.type]
    for number in range(count):
        layout = LAYOUTS[number % len(LAYOUTS)]
        dtypes = (source.choice(list(DTYPES)),) * 2
        if layout == "mixed":
            dtypes = tuple(source.sample(list(DTYPES), 2))  # type: ignore[assignment]
        size = max(DTYPES[dtype].itemsize for dtype in dtypes)
        elements = int(math.exp(source.uniform(math.log(least), math.log(most)))) // size
        loss = source.choice(list(LOSSES))
        reductions = ["none", "mean", "sum", *["batchmean"] * loss.startswith("kl")]
        yield Draw(
            seed=source.randrange(1 << 31),
            loss=loss,
            layout=layout,
            shape=_shape(source, layout, elements),
            dtypes=dtypes,
            reduction=source.choice(reductions),
            gradients=source.choice(["input", "input", "target", "both"]),
        )


def _shape(source: random.Random, layout: str, elements: int) -> tuple[int, ...]:
    ndim = source.randint(4, 6) if layout == "many" else source.randint(2, 4)
    inner = [
        int(math.exp(source.uniform(math.log(8), math.log(min(8192, elements ** (1 / ndim) * 16)))))
        for _ in range(ndim - 1)
    ]
    while math.prod(inner) > elements // 2:
        widest = inner.index(max(inner))
        inner[widest] = max(2, inner[widest] // 2)
    return (max(2, elements // math.prod(inner)), *inner)


def operands(draw: Draw, device: torch.device) -> tuple[Tensor, Tensor]:
    """Input and target, as views of what they were drawn in."""
    source = random.Random(draw.seed)
    torch.manual_seed(draw.seed)
    _, _, *logs = LOSSES[draw.loss]
    ndim = len(draw.shape)

    def values(shape: Sequence[int], which: int) -> Tensor:
        found = torch.rand(shape, device=device, dtype=torch.float32).clamp_(min=2**-10)
        return (found.log_() if logs[which] else found).to(DTYPES[draw.dtypes[which]])

    def permuted(which: int, order: Sequence[int]) -> Tensor:
        stored = values([draw.shape[dim] for dim in order], which)
        return stored.permute([order.index(dim) for dim in range(ndim)])

    def part(which: int, extra: Sequence[int], first: Sequence[int]) -> Tensor:
        whole = values([a + b for a, b in zip(draw.shape, extra, strict=True)], which)
        return whole[tuple(slice(a, a + b) for a, b in zip(first, draw.shape, strict=True))]

    straight = list(range(ndim))
    shuffled = source.sample(straight, ndim)
    if draw.layout == "permuted":
        return permuted(0, shuffled), permuted(1, shuffled)
    if draw.layout == "transposed":
        turned = [*straight[:-2], straight[-1], straight[-2]]
        orders = [straight, turned]
        source.shuffle(orders)
        return permuted(0, orders[0]), permuted(1, orders[1])
    if draw.layout == "padded":
        no = [0] * ndim
        extra = [*no[1:], source.choice([1, 7, -draw.shape[-1] % 64 or 64])]
        return part(0, extra, no), part(1, extra, no)
    if draw.layout == "shifted":
        no, one = [0] * ndim, [0] * (ndim - 1) + [1]
        return part(0, one, no), part(1, one, one)
    if draw.layout == "many":
        # Every dimension but the first is a part of a larger one, so that none of them merge.
        no = [0] * ndim
        extra = [0, *[source.randint(1, 2) for _ in draw.shape[1:]]]
        return part(0, extra, no), part(1, extra, no)
    if draw.layout in ("broadcast", "expanded"):
        lacking = source.sample(straight, source.randint(1, max(1, ndim - 2)))
        fewer = [1 if dim in lacking else size for dim, size in enumerate(draw.shape)]
        small = draw.layout == "expanded"
        return values(fewer if small else draw.shape, 0), values(draw.shape if small else fewer, 1)
    return values(draw.shape, 0), values(draw.shape, 1)


@dataclasses.dataclass
class Measured:
    """A draw, checked and timed: milliseconds by pass and contender, and the floor's."""

    draw: Draw
    ms: dict[str, dict[str, float]]
    floor_ms: dict[str, float]
    error: float
    passed: bool
    notes: dict[str, str]

    def fraction(self, doing: str) -> float | None:
        ours = self.ms.get(doing, {}).get("ours")
        return None if ours is None else self.floor_ms[doing] / ours

    def ahead(self, doing: str) -> dict[str, float]:
        """Each peer's time over ours."""
        of = self.ms.get(doing, {})
        return {who: ms / of["ours"] for who, ms in of.items() if who != "ours" and "ours" in of}


def _bytes(draw: Draw, input: Tensor, target: Tensor, loss: Tensor) -> dict[str, int]:
    """The least that must move. "none": forward writes the losses, and backward reads all again."""
    read = input.nbytes + target.nbytes
    written = (draw.gradients != "target") * input.nbytes + (
        draw.gradients != "input"
    ) * target.nbytes
    if draw.reduction == "none":
        return {"forward": read + loss.nbytes, "step": 2 * (read + loss.nbytes) + written}
    return {"forward": read, "step": read + written}


def measure(
    draw: Draw, peers: Sequence[str], meter: Meter, bandwidth: dict[str, float]
) -> Measured:
    """Checks a draw against float64, and times it."""
    ours, by_torch, *_ = LOSSES[draw.loss]
    input, target = operands(draw, meter.device)
    leaves = [
        tensor.detach().requires_grad_(draw.gradients in (name, "both"))
        for name, tensor in (("input", input), ("target", target))
    ]
    notes: dict[str, str] = {}

    def failed(who: str, error: Exception) -> None:
        notes[who] = f"{type(error).__name__}: {error}".splitlines()[0][:160]

    contenders: dict[str, Callable[..., Tensor]] = {}
    for who in ("ours", *peers):
        loss = functools.partial(ours if who == "ours" else by_torch, reduction=draw.reduction)
        contenders[who] = torch.compile(loss, dynamic=False) if who == "compile" else loss

    with torch.no_grad():
        value = contenders["ours"](input, target)
    grad_output = torch.rand_like(value) if draw.reduction == "none" else None

    def forward(who: str) -> Any:
        with torch.no_grad():
            return contenders[who](input, target)

    def step(who: str) -> Any:
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        return torch.autograd.grad(contenders[who](*leaves), wanted, grad_output)

    error = _error(draw, value, step("ours"), leaves, grad_output, by_torch)
    moved = _bytes(draw, input, target, value)
    reads_only = draw.reduction != "none"
    floor = {
        "forward": moved["forward"] / bandwidth["read" if reads_only else "copy"] / 1e6,
        "step": moved["step"] / bandwidth["copy"] / 1e6,
    }
    ms = {
        doing: meter.medians({who: functools.partial(call, who) for who in contenders}, failed)
        for doing, call in (("forward", forward), ("step", step))
    }
    if "compile" in peers:
        torch.compiler.reset()
    # The half types' spacing, and for a sum of their gradients what rounding adds.
    limit = max(LIMITS[dtype] for dtype in draw.dtypes) * 2
    return Measured(draw, ms, floor, error, error <= limit and "ours" not in notes, notes)


def _error(
    draw: Draw,
    value: Tensor,
    gradients: Sequence[Tensor],
    leaves: Sequence[Tensor],
    grad_output: Tensor | None,
    by_torch: Loss,
) -> float:
    """The largest error of the value and the gradients against float64."""
    exact = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    loss = by_torch(*exact, reduction=draw.reduction)
    wanted = [leaf for leaf in exact if leaf.requires_grad]
    weights = None if grad_output is None else grad_output.double()
    expected = [loss.detach(), *torch.autograd.grad(loss, wanted, weights)]
    errors = []
    for got, right in zip([value, *gradients], expected, strict=True):
        limits = torch.finfo(got.dtype)
        if right.numel() == 1 and right.abs() > limits.max:  # a sum that overflows a half type
            right = right.sign() * torch.inf
            errors.append(torch.where(got.detach().double() == right, 0.0, torch.inf).max())
        else:
            errors.append(relative_error(got.detach(), right, limits.smallest_normal))
    worst = float(torch.stack([error.double() for error in errors]).max())
    return math.inf if math.isnan(worst) else worst


def run(
    seed: int, count: int, peers: Sequence[str], meter: Meter, bandwidth: dict[str, float]
) -> list[Measured]:
    """Measures `count` draws of a seed."""
    meter.warm_ups, meter.fewest, meter.seconds = (3, 7, 0.03) if meter.cuda else (1, 5, 0.2)
    progress = Progress(count)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: of shapes that broadcast, of reduction="mean"
        for draw in draws(seed, count, meter.device):
            progress.advance(str(draw))
            found.append(measure(draw, peers, meter, bandwidth))
            meter.clean()
    progress.close()
    return found


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def render(found: Sequence[Measured], peers: Sequence[str]) -> str:
    """Percentiles by layout, the worst twenty, and where a peer is ahead by more than 2 %."""
    heads = "".join(f"{part:>8}" for part in ("worst", "5 %", "median")) * 2
    lines = [f"{'fraction of the floor':<22}{'n':>4}{'forward':>24}{'step':>24}"]
    lines.append(f"{'':<26}{heads}")
    layouts = [layout for layout in LAYOUTS if any(one.draw.layout == layout for one in found)]
    groups = [("all", list(found))]
    groups.append(("but transposed", [m for m in found if m.draw.layout != "transposed"]))
    groups += [(layout, [m for m in found if m.draw.layout == layout]) for layout in layouts]
    for name, group in groups:
        line = f"{name:<22}{len(group):>4}"
        for doing in ("forward", "step"):
            values = [value for one in group if (value := one.fraction(doing)) is not None]
            if not values:
                line += f"{'-':>24}"
                continue
            shown = (min(values), _percentile(values, 0.05), statistics.median(values))
            line += "".join(f"{value:>8.2f}" for value in shown)
        lines.append(line)

    passes = [(one, doing) for one in found for doing in ("forward", "step")]
    timed = [(value, one, doing) for one, doing in passes if (value := one.fraction(doing))]
    lines += ["", "the worst twenty: fraction, pass, draw, peers' time over ours"]
    for value, one, doing in sorted(timed, key=lambda item: item[0])[:20]:
        others = " ".join(f"{who} {ratio:.2f}" for who, ratio in one.ahead(doing).items())
        lines.append(f"{value:.2f} {doing:<8} {one.draw}  {others}")
    behind = [
        (ratio, who, one, doing)
        for one, doing in passes
        for who, ratio in one.ahead(doing).items()
        if ratio < 0.98
    ]
    lines += ["", f"a peer is ahead by more than 2 %: {len(behind)} of {len(timed)} passes"]
    for ratio, who, one, doing in sorted(behind, key=lambda item: item[0])[:20]:
        lines.append(f"{ratio:.2f} {who} {doing} {one.draw}")
    wrong = [one for one in found if not one.passed]
    lines += ["", f"wrong: {len(wrong)}"]
    lines += [f"{one.draw}: error {one.error:.2g} {one.notes.get('ours', '')}" for one in wrong]
    return "\n".join(lines)


def save(path: str, about: dict[str, Any], found: Sequence[Measured]) -> None:
    """All numbers, as JSON."""
    with open(path, "w") as file:
        json.dump(about | {"draws": [dataclasses.asdict(one) for one in found]}, file, indent=1)
        file.write("\n")
