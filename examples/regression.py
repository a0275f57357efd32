"""A regression, an autoencoder of signals: F.mse_loss beside lossops.mse_loss.

    python examples/regression.py [--device cuda] [--compile] [--autocast] [--plot curves.png]

Trains the same model twice on the same batches, once with each loss, and compares them. The signals
are sums of sines, sampled at 16384 points on a GPU and at 1024 on the CPU. The model learns to
return its input. The 20 steps that it takes on a GPU by default are too few to learn anything: they
compare time and memory, and the loss may rise.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from comparing import Loss, compare, parse
from torch import Tensor

import lossops


def batches(steps: int, rows: int, points: int, device: str) -> Iterator[tuple[Tensor, ...]]:
    at = torch.linspace(0, 2 * torch.pi, points, device=device)
    for _ in range(steps):
        phases = 2 * torch.pi * torch.rand(rows, 1, device=device)
        sizes = torch.randn(rows, 3, 1, device=device)
        signal = torch.zeros(rows, points, device=device)
        for i in range(3):
            signal += sizes[:, i] * torch.sin((i + 1) * at + phases)
        yield (signal,)


def step(model: torch.nn.Module, batch: tuple[Tensor, ...], loss: Loss) -> Tensor:
    return loss(model(batch[0]), batch[0])


def main() -> None:
    options = parse(__doc__, steps_cpu=200, steps_cuda=20)
    torch.manual_seed(0)
    large = options.device.startswith("cuda")
    points, rows = (16384, 8192) if large else (1024, 256)
    model = torch.nn.Sequential(
        torch.nn.Linear(points, 64), torch.nn.GELU(), torch.nn.Linear(64, points)
    ).to(options.device)
    compare(
        f"Autoencoder of signals, {points} points",
        model,
        batches(options.steps, rows, points, options.device),
        step,
        {"F.mse_loss": F.mse_loss, "lossops.mse_loss": lossops.mse_loss},
        options,
    )


if __name__ == "__main__":
    main()
