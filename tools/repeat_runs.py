"""Do losses and gradients have the same bits each time? Many runs of each, in many ways.

    python tools/repeat_runs.py [--device cpu|cuda] [--runs 1000] [--calls 10000]

Every loss, dtype and reduction, with a layout for each kernel of cross entropy. On CUDA half of the
runs take turns on 4 streams, and a captured graph is replayed as well; on the CPU the number of
threads changes from run to run. Then 8 threads take `calls` steps each at
the same time, the losses in turn. Ends with 1 where a bit differs.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from suite import DTYPES, bits_of
from torch import Tensor

import lossops

Loss = Callable[[Tensor], Tensor]
STREAMS = 4
THREADS = 8


def cases(device: str) -> Iterator[tuple[str, Loss, Tensor]]:
    def indices(classes: int, *shape: int) -> Tensor:
        return torch.randint(classes, shape, device=device)

    cross_entropy = lossops.cross_entropy
    for dtype in DTYPES:

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        rows = normal(64, 1000)
        weight, probabilities = normal(1000).abs(), normal(64, 1000).abs()
        weighted = functools.partial(
            cross_entropy, target=indices(1000, 64), weight=weight, label_smoothing=0.1
        )
        losses = (
            ("mse_loss", functools.partial(lossops.mse_loss, target=normal(64, 1000)), rows),
            ("kl_div", functools.partial(lossops.kl_div, target=probabilities), rows),
            ("cross_entropy", functools.partial(cross_entropy, target=indices(1000, 64)), rows),
            ("weighted and smoothed", weighted, rows),
            ("probabilities", functools.partial(cross_entropy, target=probabilities), rows),
            (
                "images",
                functools.partial(cross_entropy, target=indices(21, 4, 32, 32)),
                normal(4, 21, 32, 32),
            ),
            (
                "10 classes",
                functools.partial(cross_entropy, target=indices(10, 4096)),
                normal(4096, 10),
            ),
            (
                "50257 classes",
                functools.partial(cross_entropy, target=indices(50257, 64)),
                normal(64, 50257),
            ),
            (
                "262144 classes",
                functools.partial(cross_entropy, target=indices(262144, 4)),
                normal(4, 262144),
            ),
        )
        for name, loss, x in losses:
            for reduction in ("none", "mean", "sum", *(["batchmean"] * (name == "kl_div"))):
                yield f"{name} {dtype} {reduction}", functools.partial(loss, reduction=reduction), x


def both(loss: Loss, x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    value = loss(leaf)
    (gradient,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
    return value.detach(), gradient


def differing_runs_cuda(loss: Loss, x: Tensor, runs: int) -> int:
    expected = [bits_of(tensor).clone() for tensor in both(loss, x)]

    def differs(actual: tuple[Tensor, Tensor]) -> Tensor:
        pairs = zip(actual, expected, strict=True)
        return torch.stack([(bits_of(a) != e).any() for a, e in pairs]).any()

    found = [differs(both(loss, x)) for _ in range(runs // 2)]
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    torch.cuda.synchronize()
    for run in range(runs - runs // 2):
        with torch.cuda.stream(streams[run % STREAMS]):
            found.append(differs(both(loss, x)))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        both(loss, x)  # what is set up once is not captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both(loss, x)
    for _ in range(runs // 10):
        graph.replay()
        found.append(differs(captured))
    return int(torch.stack(found).sum())


def differing_runs_cpu(loss: Loss, x: Tensor, runs: int) -> int:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = [bits_of(tensor).clone() for tensor in both(loss, x)]
        found = 0
        for run in range(runs):
            torch.set_num_threads(1 + run % 8)
            actual = both(loss, x)
            pairs = zip(actual, expected, strict=True)
            found += not all(torch.equal(bits_of(a), e) for a, e in pairs)
        return found
    finally:
        torch.set_num_threads(threads)


def differing_calls_of_threads(device: str, calls: int) -> int:
    """Of steps of each loss in fp32, from THREADS threads; on CUDA each has its own stream."""
    wanted_names = {
        f"{loss} {torch.float32} mean" for loss in ("mse_loss", "kl_div", "cross_entropy")
    }
    losses = [(loss, x) for name, loss, x in cases(device) if name in wanted_names]
    expected = [[bits_of(tensor).clone() for tensor in both(loss, x)] for loss, x in losses]
    if device == "cuda":
        torch.cuda.synchronize()

    def work(_: int) -> int:
        own = torch.cuda.Stream() if device == "cuda" else None
        found = torch.zeros((), dtype=torch.int64, device=device)
        with torch.cuda.stream(own):
            for call in range(calls):
                which = call % len(losses)
                actual = both(*losses[which])
                for tensor, wanted in zip(actual, expected[which], strict=True):
                    found += (bits_of(tensor) != wanted).any()
        return int(found)

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(work, range(THREADS)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=10_000, help="of each of the 8 threads")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    differing_runs = differing_runs_cuda if arguments.device == "cuda" else differing_runs_cpu
    count = failed = 0
    for name, loss, x in cases(arguments.device):
        different = differing_runs(loss, x, arguments.runs)
        count += 1
        if different:
            failed += 1
            print(f"{name}: {different} runs differ from the first", flush=True)
    print(f"{count} cases, {arguments.runs} runs each on {arguments.device}: {failed} differ")
    different = differing_calls_of_threads(arguments.device, arguments.calls)
    print(f"{THREADS} threads, {arguments.calls} calls each: {different} tensors differ")
    return int(failed > 0 or different > 0)


if __name__ == "__main__":
    sys.exit(main())
