"""What the examples share: one training run with torch's loss, one with lossops', side by side."""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

Loss = Callable[..., Tensor]
# model, batch, loss function -> loss
Step = Callable[[torch.nn.Module, tuple[Tensor, ...], Loss], Tensor]


@dataclass
class Run:
    losses: list[float]
    milliseconds: float  # of a step, median
    peak_mib: float | None  # of GPU memory
    model: torch.nn.Module  # trained


def parse(
    description: str | None,
    *,
    steps_cpu: int,
    steps_cuda: int,
    more: Callable[[argparse.ArgumentParser], object] = lambda _: None,
) -> argparse.Namespace:
    """The options of an example, whose docstring is the description. more: adds its own."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog="Prints for each loss function the first and the last loss, the median time of a\n"
        "training step in milliseconds and, on a GPU, the peak of GPU memory in MiB. The time\n"
        "leaves out the first quarter of the steps. The losses differ by rounding only, which a\n"
        "training may amplify. lossops must be installed, or built in a clone with PYTHONPATH=src.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where to train: cpu, cuda or cuda:N (default here: %(default)s); "
        "the model and the batches are larger on cuda",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"training steps with each loss (default: {steps_cuda} on cuda, {steps_cpu} on cpu)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the model and the loss by torch.compile (default: no)",
    )
    parser.add_argument(
        "--autocast",
        action="store_true",
        help="run the model and the loss under bfloat16 autocast (default: no, float32)",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="write a picture of the loss curves, as curves.png; needs matplotlib (default: none)",
    )
    more(parser)
    options = parser.parse_args()
    if options.steps is None:
        options.steps = steps_cuda if options.device.startswith("cuda") else steps_cpu
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    return options


def train(
    model: torch.nn.Module,
    batches: list[tuple[Tensor, ...]],
    step: Step,
    loss: Loss,
    options: argparse.Namespace,
) -> Run:
    model = copy.deepcopy(model)
    cuda = options.device.startswith("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def forward(batch: tuple[Tensor, ...]) -> Tensor:
        autocast = torch.autocast(options.device.split(":")[0], torch.bfloat16)
        with autocast if options.autocast else contextlib.nullcontext():
            return step(model, batch, loss)

    if options.compile:
        forward = torch.compile(forward)
    losses, times = [], []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for batch in batches:
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        value = forward(batch)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
    late = times[len(times) // 4 :]  # past the warm-up
    return Run([x.item() for x in losses], 1e3 * statistics.median(late), peak, model)


def compare(
    title: str,
    model: torch.nn.Module,
    batches: Iterator[tuple[Tensor, ...]],
    step: Step,
    losses: dict[str, Loss],
    options: argparse.Namespace,
) -> dict[str, Run]:
    """Trains a copy of the model with each loss on the same batches, and prints the table."""
    data = list(batches)
    runs = {name: train(model, data, step, loss, options) for name, loss in losses.items()}
    print(f"{title}, {len(data)} steps on {options.device}, torch {torch.__version__}")
    print("| loss function | first loss | last loss | ms a step | peak MiB |")
    print("|---|---|---|---|---|")
    for name, run in runs.items():
        peak = "-" if run.peak_mib is None else f"{run.peak_mib:.0f}"
        first, last = run.losses[0], run.losses[-1]
        print(f"| {name} | {first:.4f} | {last:.4f} | {run.milliseconds:.2f} | {peak} |")
    curves = [torch.tensor(run.losses) for run in runs.values()]
    apart = ((curves[0] - curves[1]).abs() / curves[0].abs().clamp(min=1e-12)).max().item()
    print(f"the loss curves differ by at most {apart:.1e} of their values")
    if options.plot:
        plot(title, runs, options.plot)
    return runs


def plot(title: str, runs: dict[str, Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for (name, run), (style, width) in zip(runs.items(), (("-", 4.0), ("--", 1.5)), strict=True):
        axes.plot(
            run.losses, style, linewidth=width, label=f"{name}, {run.milliseconds:.1f} ms a step"
        )
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")
