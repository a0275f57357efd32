"""Errors against float64, lossops' beside torch's: the table of docs/reliability.md.

    python tools/measure_accuracy.py [--device cuda] [--elements 28]

Units are units in the last place of the exact result (of the result's dtype). Ends with 1 where a
bound does not hold; its row says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from suite import HALF_TYPES, ulp
from torch import Tensor

import lossops

CHUNK = 1 << 24
# Of cross entropy: units, and the share of gradients that may be beyond them.
UNITS = 4
BEYOND = 1e-5


class Row(NamedTuple):
    what: str
    ours: str
    theirs: str
    holds: bool


def units(actual: Tensor, exact: Tensor) -> Tensor:
    return (actual.double() - exact).abs() / ulp(exact, actual.dtype)


def gradient(loss: Callable[..., Tensor], x: Tensor, *args: Tensor, **options: object) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    loss(leaf, *args, **options).backward()
    assert leaf.grad is not None
    return leaf.grad


class Tally:
    """The worst of many errors, and how many are beyond UNITS."""

    def __init__(self) -> None:
        self.worst = 0.0
        self.beyond = 0
        self.seen = 0

    def add(self, errors: Tensor) -> None:
        self.worst = max(self.worst, errors.max().item())
        self.beyond += int((errors > UNITS).sum())
        self.seen += errors.numel()

    def __str__(self) -> str:
        return f"{self.worst:.1f} units; above {UNITS}: {self.beyond} of {self.seen:.1e}"

    def holds(self) -> bool:
        return self.beyond <= BEYOND * self.seen


def cross_entropy_gradients(device: str, elements: int) -> Iterator[Row]:
    for classes in (2, 10, 100, 1000, 32000):
        for spread in (1.0, 8.0, 20.0):
            tallies = {name: (Tally(), Tally()) for name in ("other classes", "the class index")}
            rows = max(1, min(elements, CHUNK) // classes)
            for _ in range(max(1, elements // CHUNK)):
                x = spread * torch.randn(rows, classes, device=device)
                t = torch.randint(classes, (rows,), device=device)
                exact = torch.softmax(x.double(), 1)
                at_index = torch.zeros_like(x, dtype=torch.bool).scatter_(1, t[:, None], True)
                others = ~at_index & (exact > 1e-30)
                # 1 - softmax(x)_t, from the other classes
                rest = exact.masked_fill(at_index, 0).sum(1, keepdim=True)
                exact = torch.where(at_index, -rest, exact)
                for tally, loss in ((0, lossops.cross_entropy), (1, F.cross_entropy)):
                    errors = units(gradient(loss, x, t, reduction="sum"), exact)
                    tallies["other classes"][tally].add(errors[others])
                    tallies["the class index"][tally].add(errors[at_index & (exact < -1e-30)])
            for name, (ours, theirs) in tallies.items():
                yield Row(
                    f"gradient of cross entropy at {name}, {classes} classes, normal times "
                    f"{spread:g}, float32",
                    str(ours),
                    f"{theirs.worst:.3g} units",
                    ours.holds(),
                )


def sums(device: str, elements: int) -> Iterator[Row]:
    bound = 2

    def row(what: str, ours: Tensor, theirs: Tensor, exact: float, size: float) -> Row:
        errors = [abs(x.double().item() - exact) / size * 2**23 for x in (ours, theirs)]
        shown = (f"{error:.2f}" for error in errors)
        return Row(f"sum of {what}, {elements:.2g} elements", *shown, errors[0] <= bound)

    x, t = (torch.rand(elements, device=device).clamp_(min=1e-6) for _ in range(2))
    exact = sum(
        (a.double() - b.double()).square().sum().item()
        for a, b in zip(x.split(CHUNK), t.split(CHUNK), strict=True)
    )
    squared = [loss(x, t, reduction="sum") for loss in (lossops.mse_loss, F.mse_loss)]
    yield row("MSE, float32, times 2^-23", *squared, exact, exact)
    x.log_()
    exact = sizes = 0.0
    for a, b in zip(x.split(CHUNK), t.split(CHUNK), strict=True):
        terms = torch.special.xlogy(b.double(), b.double()).sub_(b.double() * a.double())
        exact += terms.sum().item()
        sizes += terms.abs_().sum().item()
    divergences = [loss(x, t, reduction="sum") for loss in (lossops.kl_div, F.kl_div)]
    yield row("KL, float32, of the terms' sizes, times 2^-23", *divergences, exact, sizes)


def cross_entropy_losses(device: str, elements: int) -> Iterator[Row]:
    for classes in (10, 1000, 32000):
        x = 3 * torch.randn(max(1, min(elements, CHUNK) // classes), classes, device=device)
        t = torch.randint(classes, (len(x),), device=device)
        exact = F.cross_entropy(x.double(), t, reduction="none")
        ours, theirs = (
            units(loss(x, t, reduction="none"), exact).max().item()
            for loss in (lossops.cross_entropy, F.cross_entropy)
        )
        yield Row(
            f"losses of cross entropy, {classes} classes, normal times 3, float32",
            f"{ours:.1f} units",
            f"{theirs:.1f} units",
            ours <= max(theirs, UNITS),
        )


def rounded_right(device: str, elements: int) -> Iterator[Row]:
    bound = 0.999
    for dtype in HALF_TYPES:
        n = min(elements, CHUNK)
        x = torch.randn(n, device=device).to(dtype)
        t = torch.rand(n, device=device).to(dtype)
        for name, ours, theirs in (
            ("MSE", lossops.mse_loss, F.mse_loss),
            ("KL", lossops.kl_div, F.kl_div),
        ):
            exact = theirs(x.double(), t.double(), reduction="none").to(dtype)
            shares = [
                (loss(x, t, reduction="none") == exact).double().mean().item()
                for loss in (ours, theirs)
            ]
            shown = (f"{share:.4%}" for share in shares)
            yield Row(f"losses of {name} rounded correctly, {dtype}", *shown, shares[0] >= bound)


def converging_distillation(device: str) -> Iterator[Row]:
    bound = 0.002
    teacher = 3 * torch.randn(4096, 1000, device=device)
    student = (teacher + 0.01 * torch.randn_like(teacher)).bfloat16()
    p, t = student.softmax(1), teacher.bfloat16().softmax(1)

    def of_probabilities(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, target: loss(x, target, reduction="sum", log_input=False)

    def of_log(x: Tensor, target: Tensor) -> Tensor:
        return F.kl_div(x.log(), target, reduction="sum")

    exact = -t.double() / p.double()
    errors = [
        ((gradient(loss, p, t).double() - exact).norm() / exact.norm()).item()
        for loss in (of_probabilities(lossops.kl_div), of_log)
    ]
    yield Row(
        "gradient of KL of probabilities, bfloat16 student near its teacher, 2-norm",
        *(f"{error:.3%}" for error in errors),
        errors[0] <= bound,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--elements", type=int, default=24, help="log2 of the longest sum")
    arguments = parser.parse_args()
    device, elements = arguments.device, 1 << arguments.elements
    torch.manual_seed(0)
    print("| | lossops | torch |\n|---|---|---|")
    failed = 0
    for rows in (
        cross_entropy_gradients(device, min(elements, 1 << 28)),
        cross_entropy_losses(device, elements),
        sums(device, elements),
        rounded_right(device, elements),
        converging_distillation(device),
    ):
        for row in rows:
            failed += not row.holds
            verdict = "" if row.holds else " **too much**"
            print(f"| {row.what} | {row.ours}{verdict} | {row.theirs} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
