"""Distillation, a small classifier learns from a large one: F.kl_div beside lossops.kl_div.

    python examples/distill.py [--device cuda] [--compile] [--autocast] [--plot curves.png]

Trains the same student twice on the same batches, once with each loss, and compares them. The
teacher first learns which of several random points is nearest. The student then learns the
teacher's probabilities, softened by a temperature (Hinton, Vinyals and Dean, arXiv:1503.02531).
There are 32000 classes on a GPU and 100 on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from comparing import Loss, compare, parse
from torch import Tensor

import lossops

TEMPERATURE = 2.0
FEATURES = 16


def mlp(width: int, classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, width), torch.nn.ReLU(), torch.nn.Linear(width, classes)
    )


def taught(classes: int, rows: int, device: str) -> torch.nn.Module:
    """The teacher."""
    points = torch.randn(classes, FEATURES, device=device)
    model = mlp(1024, classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        x = torch.randn(rows, FEATURES, device=device)
        nearest = torch.cdist(x, points).argmin(1)
        optimizer.zero_grad()
        lossops.cross_entropy(model(x), nearest).backward()
        optimizer.step()
    return model


def batches(
    teacher: torch.nn.Module, steps: int, rows: int, device: str
) -> Iterator[tuple[Tensor, ...]]:
    for _ in range(steps):
        x = torch.randn(rows, FEATURES, device=device)
        with torch.no_grad():
            yield x, (teacher(x) / TEMPERATURE).softmax(1)


def step(model: torch.nn.Module, batch: tuple[Tensor, ...], loss: Loss) -> Tensor:
    student = (model(batch[0]) / TEMPERATURE).log_softmax(1)
    return TEMPERATURE**2 * loss(student, batch[1])


def main() -> None:
    options = parse(__doc__, steps_cpu=200, steps_cuda=30)
    torch.manual_seed(0)
    large = options.device.startswith("cuda")
    classes, rows = (32000, 2048) if large else (100, 512)
    teacher = taught(classes, rows, options.device)
    losses = {
        "F.kl_div": functools.partial(F.kl_div, reduction="batchmean"),
        "lossops.kl_div": functools.partial(lossops.kl_div, reduction="batchmean"),
    }
    compare(
        f"Distillation, {classes} classes",
        mlp(64, classes).to(options.device),
        batches(teacher, options.steps, rows, options.device),
        step,
        losses,
        options,
    )


if __name__ == "__main__":
    main()
