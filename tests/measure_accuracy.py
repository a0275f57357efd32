"""Errors against float64, lossops' beside torch's: the table of docs/reliability.md.

    python tests/measure_accuracy.py [--device cuda] [--elements 28]

Units are units in the last place of the exact result (of the result's dtype).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from numerics import HALF_TYPES, ulp
from torch import Tensor

import lossops

CHUNK = 1 << 24


def units(actual: Tensor, exact: Tensor) -> Tensor:
    return (actual.double() - exact).abs() / ulp(exact, actual.dtype)


def gradient(loss: Callable[..., Tensor], x: Tensor, *args: Tensor, **options: object) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    loss(leaf, *args, **options).backward()
    assert leaf.grad is not None
    return leaf.grad


def cross_entropy_gradients(device: str, elements: int) -> Iterator[tuple[str, str, str]]:
    for classes in (10, 100, 1000, 32000):
        for spread in (1.0, 8.0, 20.0):
            worst, above, worst_of_torch, seen = 0.0, 0, 0.0, 0
            rows = max(1, min(elements, CHUNK) // classes)
            for _ in range(max(1, elements // CHUNK)):
                x = spread * torch.randn(rows, classes, device=device)
                t = torch.randint(classes, (rows,), device=device)
                exact = torch.softmax(x.double(), 1)
                others = torch.ones_like(x, dtype=torch.bool).scatter_(1, t[:, None], False)
                others &= exact > 1e-30
                ours = units(gradient(lossops.cross_entropy, x, t, reduction="sum"), exact)[others]
                theirs = units(gradient(F.cross_entropy, x, t, reduction="sum"), exact)[others]
                worst = max(worst, ours.max().item())
                worst_of_torch = max(worst_of_torch, theirs.max().item())
                above += int((ours > 4).sum())
                seen += ours.numel()
            yield (
                f"gradient of cross entropy, {classes} classes, normal times {spread:g}, float32",
                f"{worst:.1f} units; above 4: {above} of {seen:.1e}",
                f"{worst_of_torch:.1f} units",
            )


def relative(actual: Tensor, exact: float) -> str:
    return f"{abs(actual.double().item() - exact) / abs(exact) * 2**23:.2f}"


def sums(device: str, elements: int) -> Iterator[tuple[str, str, str]]:
    x, t = (torch.rand(elements, device=device).clamp_(min=1e-6) for _ in range(2))
    exact = sum(
        (a.double() - b.double()).square().sum().item()
        for a, b in zip(x.split(CHUNK), t.split(CHUNK), strict=True)
    )
    yield (
        f"sum of MSE, {elements:.2g} elements, float32, times 2^-23",
        relative(lossops.mse_loss(x, t, reduction="sum"), exact),
        relative(F.mse_loss(x, t, reduction="sum"), exact),
    )
    x.log_()
    exact = sizes = 0.0
    for a, b in zip(x.split(CHUNK), t.split(CHUNK), strict=True):
        terms = torch.special.xlogy(b.double(), b.double()).sub_(b.double() * a.double())
        exact += terms.sum().item()
        sizes += terms.abs_().sum().item()

    def error(actual: Tensor) -> str:
        return f"{abs(actual.double().item() - exact) / sizes * 2**23:.2f}"

    yield (
        f"sum of KL, {elements:.2g} elements, float32, of the terms' sizes, times 2^-23",
        error(lossops.kl_div(x, t, reduction="sum")),
        error(F.kl_div(x, t, reduction="sum")),
    )


def cross_entropy_losses(device: str, elements: int) -> Iterator[tuple[str, str, str]]:
    for classes in (10, 1000, 32000):
        x = 3 * torch.randn(max(1, min(elements, CHUNK) // classes), classes, device=device)
        t = torch.randint(classes, (len(x),), device=device)
        exact = F.cross_entropy(x.double(), t, reduction="none")
        yield (
            f"losses of cross entropy, {classes} classes, normal times 3, float32",
            f"{units(lossops.cross_entropy(x, t, reduction='none'), exact).max().item():.1f} units",
            f"{units(F.cross_entropy(x, t, reduction='none'), exact).max().item():.1f} units",
        )


def rounded_right(device: str, elements: int) -> Iterator[tuple[str, str, str]]:
    for dtype in HALF_TYPES:
        n = min(elements, CHUNK)
        x = torch.randn(n, device=device).to(dtype)
        t = torch.rand(n, device=device).to(dtype)
        for name, ours, theirs in (
            ("MSE", lossops.mse_loss, F.mse_loss),
            ("KL", lossops.kl_div, F.kl_div),
        ):
            exact = theirs(x.double(), t.double(), reduction="none").to(dtype)

            right = [(loss(x, t, reduction="none") == exact) for loss in (ours, theirs)]
            shares = [f"{same.double().mean().item():.4%}" for same in right]
            yield f"losses of {name} rounded correctly, {dtype}", *shares


def converging_distillation(device: str) -> Iterator[tuple[str, str, str]]:
    teacher = 3 * torch.randn(4096, 1000, device=device)
    student = (teacher + 0.01 * torch.randn_like(teacher)).bfloat16()
    p, t = student.softmax(1), teacher.bfloat16().softmax(1)

    def of_probabilities(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, target: loss(x, target, reduction="sum", log_input=False)

    def of_log(x: Tensor, target: Tensor) -> Tensor:
        return F.kl_div(x.log(), target, reduction="sum")

    exact = -t.double() / p.double()

    def error(actual: Tensor) -> str:
        return f"{((actual.double() - exact).norm() / exact.norm()).item():.3%}"

    yield (
        "gradient of KL of probabilities, bfloat16 student near its teacher, 2-norm",
        error(gradient(of_probabilities(lossops.kl_div), p, t)),
        error(gradient(of_log, p, t)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--elements", type=int, default=24, help="log2 of the longest sum")
    arguments = parser.parse_args()
    device, elements = arguments.device, 1 << arguments.elements
    torch.manual_seed(0)
    print("| | lossops | torch |\n|---|---|---|")
    for rows in (
        cross_entropy_gradients(device, min(elements, 1 << 28)),
        cross_entropy_losses(device, elements),
        sums(device, elements),
        rounded_right(device, elements),
        converging_distillation(device),
    ):
        for what, ours, theirs in rows:
            print(f"| {what} | {ours} | {theirs} |", flush=True)


if __name__ == "__main__":
    main()
