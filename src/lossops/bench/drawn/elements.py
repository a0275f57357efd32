"""Calls of elementwise losses: their draws, operands, bytes, and checks against float64."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Collection, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import functional
from ..cases import DTYPES, Loss
from ..run import relative_error
from .spec import MIB, Bounds, Spec, log_uniform

# Of the largest operand.
MIB_OF_OPERAND = (128.0, 1024.0)

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

FAMILIES = {
    "contiguous": "contiguous operands",
    "permuted": "permuted dimensions, both operands alike",
    "padded": "rows of a larger stride, aligned or not",
    "shifted": "x[:, :-1] beside y[:, 1:]",
    "broadcast": "target lacks some of the dimensions",
    "expanded": "input lacks some of the dimensions",
    "mixed": "two dtypes",
    "many": "four and more dimensions that do not merge",
    "transposed": "one of the two is transposed",
}


@dataclasses.dataclass(frozen=True)
class ElementDraw(Spec):
    """One call: a loss, its operands' shapes, layouts and dtypes, and what is asked of it."""

    kind: ClassVar[str] = "elements"
    choices: ClassVar[dict[str, Collection[str]]] = {
        "family": FAMILIES,
        "loss": LOSSES,
        "dtypes": DTYPES,
        "reduction": ("mean", "sum", "batchmean", "none"),
        "gradients": ("input", "target", "both"),
    }

    shape: tuple[int, ...]
    loss: str
    dtypes: tuple[str, str]
    reduction: str = "mean"
    gradients: str = "input"
    data: int = 0

    @property
    def nbytes(self) -> int:
        """Of the largest operand."""
        return math.prod(self.shape) * max(DTYPES[dtype].itemsize for dtype in self.dtypes)

    @property
    def group(self) -> str:
        """Where percentiles count it."""
        return f"{self.kind}/{self.family}"


def draw(source: random.Random, family: str, bounds: Bounds) -> ElementDraw:
    """The next call of a family. It depends on `source` and `bounds` alone, not on the device."""
    least, most = bounds.mib or MIB_OF_OPERAND
    dtypes = (source.choice(list(DTYPES)),) * 2
    if family == "mixed":
        dtypes = tuple(source.sample(list(DTYPES), 2))  # type: ignore[assignment]
    size = max(DTYPES[dtype].itemsize for dtype in dtypes)
    elements = int(log_uniform(source, least * MIB, most * MIB)) // size
    loss = source.choice(list(LOSSES))
    reductions = ["none", "mean", "sum", *["batchmean"] * loss.startswith("kl")]
    return ElementDraw(
        family=family,
        loss=loss,
        shape=_shape(source, family, elements),
        dtypes=dtypes,
        reduction=source.choice(reductions),
        gradients=source.choice(["input", "input", "target", "both"]),
        data=source.randrange(1 << 31),
    )


def _shape(source: random.Random, family: str, elements: int) -> tuple[int, ...]:
    ndim = source.randint(4, 6) if family == "many" else source.randint(2, 4)
    inner = [
        int(log_uniform(source, 8, min(8192, elements ** (1 / ndim) * 16))) for _ in range(ndim - 1)
    ]
    while math.prod(inner) > elements // 2:
        widest = inner.index(max(inner))
        inner[widest] = max(2, inner[widest] // 2)
    return (max(2, elements // math.prod(inner)), *inner)


def operands(draw: ElementDraw, device: torch.device) -> tuple[Tensor, Tensor]:
    """Input and target, as views of what they were drawn in."""
    source = random.Random(draw.data)
    torch.manual_seed(draw.data)
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
    if draw.family == "permuted":
        return permuted(0, shuffled), permuted(1, shuffled)
    if draw.family == "transposed":
        turned = [*straight[:-2], straight[-1], straight[-2]]
        orders = [straight, turned]
        source.shuffle(orders)
        return permuted(0, orders[0]), permuted(1, orders[1])
    if draw.family == "padded":
        no = [0] * ndim
        extra = [*no[1:], source.choice([1, 7, -draw.shape[-1] % 64 or 64])]
        return part(0, extra, no), part(1, extra, no)
    if draw.family == "shifted":
        no, one = [0] * ndim, [0] * (ndim - 1) + [1]
        return part(0, one, no), part(1, one, one)
    if draw.family == "many":
        # Every dimension but the first is a part of a larger one, so that none of them merge.
        no = [0] * ndim
        extra = [0, *[source.randint(1, 2) for _ in draw.shape[1:]]]
        return part(0, extra, no), part(1, extra, no)
    if draw.family in ("broadcast", "expanded"):
        lacking = source.sample(straight, source.randint(1, max(1, ndim - 2)))
        fewer = [1 if dim in lacking else size for dim, size in enumerate(draw.shape)]
        small = draw.family == "expanded"
        return values(fewer if small else draw.shape, 0), values(draw.shape if small else fewer, 1)
    return values(draw.shape, 0), values(draw.shape, 1)


def moved_bytes(draw: ElementDraw, input: Tensor, target: Tensor, losses: Tensor) -> dict[str, int]:
    """The least that must move: {"read", "written"} of a forward pass, and {"step"}.

    "none": forward writes the losses, and backward reads the operands again, and `grad_output`; but
    not an input of logarithms for its own gradient alone, which does not depend on it.
    """
    read = input.nbytes + target.nbytes
    gradients = (draw.gradients != "target") * input.nbytes + (
        draw.gradients != "input"
    ) * target.nbytes
    if draw.reduction == "none":
        is_unread = LOSSES[draw.loss][2] and draw.gradients == "input"
        step = 2 * (read + losses.nbytes) + gradients - is_unread * input.nbytes
        return {"read": read, "written": losses.nbytes, "step": step}
    return {"read": read, "written": 0, "step": read + gradients}


def error(
    draw: ElementDraw,
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
    errors = [
        _error(got.detach(), right)
        for got, right in zip([value, *gradients], expected, strict=True)
    ]
    worst = float(torch.stack([error.double() for error in errors]).max())
    return math.inf if math.isnan(worst) else worst


def _error(got: Tensor, right: Tensor) -> Tensor:
    """relative_error(), where sums may overflow a half type: then infinity is right.

    Near the largest number of the dtype a rounding decides which of the two it is.
    """
    limits = torch.finfo(got.dtype)
    if right.abs().amax() > limits.max:
        overflows = right.abs() > 1.01 * limits.max
        if bool((overflows & (got.double() != right.sign() * torch.inf)).any()):
            return torch.full((), torch.inf, device=got.device)
        got, right = (x.clamp(-limits.max, limits.max) for x in (got, right))
    return relative_error(got, right, limits.smallest_normal)
