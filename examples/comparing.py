"""What the examples share: training runs with torch's loss and with lossops', side by side."""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

CLASSES_CUDA = 32768  # of a language model

Loss = Callable[..., Tensor]
# model, batch, loss function -> loss
Step = Callable[[torch.nn.Module, tuple[Tensor, ...], Loss], Tensor]


@dataclass
class Run:
    values: list[float]  # a loss or a reward for each step
    milliseconds: float  # of a step, median
    # On a GPU, the peak of its memory. On the CPU, that of a step, beyond model and optimizer.
    peak_mib: float
    model: torch.nn.Module  # trained


def parse(
    description: str | None,
    *,
    steps_cpu: int,
    steps_cuda: int,
    what: str = "loss",
    modes: bool = True,
    classes_cpu: int | None = None,
    more: Callable[[argparse.ArgumentParser], object] = lambda _: None,
) -> argparse.Namespace:
    """The options of an example, whose docstring is the description.

    modes: whether it can be compiled and run under autocast. classes_cpu: the fewest classes of a
    language model, and its classes on the CPU. more: adds options of its own.
    """
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"Prints for each run the first and the last {what}, the median time of a training\n"
        "step in milliseconds, and a peak of memory in MiB: on a GPU of the run, on the CPU of a\n"
        "step beyond model and optimizer. The time leaves out the first quarter of the steps. The\n"
        "runs differ by rounding only, which a training may amplify. lossops must be installed,\n"
        "or built in a clone with PYTHONPATH=src.",
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
        help=f"training steps of each run (default: {steps_cuda} on cuda, {steps_cpu} on cpu)",
    )
    if modes:
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
    if classes_cpu is not None:
        parser.add_argument(
            "--classes",
            type=int,
            metavar="N",
            help=f"classes of the model (default: {CLASSES_CUDA} on cuda, {classes_cpu} on cpu)",
        )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help=f"write a picture of the {what} curves, as curves.png; needs matplotlib "
        "(default: none)",
    )
    more(parser)
    options = parser.parse_args()
    on_cuda = options.device.startswith("cuda")
    if options.steps is None:
        options.steps = steps_cuda if on_cuda else steps_cpu
    if classes_cpu is not None:
        options.classes = options.classes or (CLASSES_CUDA if on_cuda else classes_cpu)
        if options.classes < classes_cpu:
            parser.error(f"--classes must be at least {classes_cpu}")
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def forward(batch: tuple[Tensor, ...]) -> Tensor:
        autocast = torch.autocast(options.device.split(":")[0], torch.bfloat16)
        with autocast if options.autocast else contextlib.nullcontext():
            return step(model, batch, loss)

    if options.compile:
        forward = torch.compile(forward)

    def training_step(batch: tuple[Tensor, ...]) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        value = forward(batch)
        value.backward()
        optimizer.step()
        return value.detach()

    return timed(model, training_step, batches, options)


def timed(
    model: torch.nn.Module,
    training_step: Callable[[tuple[Tensor, ...]], Tensor],
    batches: list[tuple[Tensor, ...]],
    options: argparse.Namespace,
) -> Run:
    """Runs the steps of a model, whose values are the run's. On the CPU the last runs twice."""
    cuda = options.device.startswith("cuda")
    values, times = [], []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for batch in batches:
        start = time.perf_counter()
        values.append(training_step(batch))
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    if cuda:
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        peak = cpu_peak_mib(lambda: training_step(batches[-1]))
    late = times[len(times) // 4 :]  # past the warm-up
    return Run([x.item() for x in values], 1e3 * statistics.median(late), peak, model)


def cpu_peak_mib(call: Callable[[], object]) -> float:
    """The largest memory that torch's allocator held during the call, beyond that ahead of it."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda event: float(event["ts"])):
        held += change["args"]["Bytes"]
        peak = max(peak, held)
    return peak / 2**20


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
    report(title, runs, options)
    return runs


def report(
    title: str, runs: dict[str, Run], options: argparse.Namespace, what: str = "loss"
) -> None:
    """Prints the table of the runs, and draws them if the options say so."""
    curves = [torch.tensor(run.values) for run in runs.values()]
    print(f"{title}, {len(curves[0])} steps on {options.device}, torch {torch.__version__}")
    print(f"| run | first {what} | last {what} | ms a step | peak MiB |")
    print("|---|---|---|---|---|")
    for name, run in runs.items():
        ends = f"{run.values[0]:.4f} | {run.values[-1]:.4f}"
        print(f"| {name} | {ends} | {run.milliseconds:.2f} | {run.peak_mib:.0f} |")
    for name, curve in list(zip(runs, curves, strict=True))[1:]:
        apart = ((curves[0] - curve).abs() / curves[0].abs().clamp(min=1e-12)).max().item()
        print(f"{name}: the {what} differs by at most {apart:.1e} of the first run's")
    if options.plot:
        plot(title, runs, options.plot, what)


def plot(title: str, runs: dict[str, Run], path: Path, what: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    styles = (("-", 4.0), ("--", 1.5), (":", 1.5))
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for (name, run), (style, width) in zip(runs.items(), styles, strict=False):
        label = f"{name}: {run.milliseconds:.1f} ms a step, {run.peak_mib:.0f} MiB"
        axes.plot(run.values, style, linewidth=width, label=label)
    axes.set(title=title, xlabel="step", ylabel=what)
    axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")
