"""The part of the command line that is about heads: `--heads`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from datetime import datetime, timezone

import torch

from ..._version import __version__
from ..meter import Meter
from . import measure
from .measure import PASSES, PRODUCTS, Contender, Measured
from .problems import (
    CPU_SHAPES,
    CUDA_SHAPES,
    HEADS,
    MIB,
    OURS,
    PEERS,
    SLOW_TO_START,
    TITLES,
    TOKEN_HEADS,
    TOKEN_SHAPES,
    TOKEN_TITLES,
    Shape,
    why_absent,
    with_workspace,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `settle` and `run` read."""
    group = parser.add_argument_group("heads: a linear layer and cross entropy, instead of losses")
    group.add_argument(
        "--heads",
        nargs="*",
        metavar="TOKENSxFEATURESxCLASSES",
        help=f"times heads of these shapes; default: {', '.join(CUDA_SHAPES)}, "
        f"on the CPU {', '.join(CPU_SHAPES)}. --peers takes {','.join(PEERS)}",
    )
    group.add_argument(
        "--passes",
        nargs="+",
        default=list(PASSES),
        choices=PASSES,
        help="step; frozen: a step with a weight that needs no gradient; forward: without autograd",
    )
    group.add_argument(
        "--tokens",
        action="store_true",
        help="log-probabilities and entropies of tokens instead of cross entropy; default: "
        f"{', '.join(TOKEN_SHAPES)}",
    )
    group.add_argument(
        "--workspaces", nargs="+", type=int, default=[], metavar="MIB", help="ours with these too"
    )
    group.add_argument(
        "--breakdown", action="store_true", help="profiles a step: the time by kind of kernel"
    )


def settle(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Reads the shapes and looks for the peers, so that a mistake ends the run at once."""
    is_cuda = options.device.type == "cuda"
    try:
        of_cuda = TOKEN_SHAPES if options.tokens else CUDA_SHAPES
        texts = options.heads or (of_cuda if is_cuda else CPU_SHAPES)
        options.heads = [Shape.parse(text) for text in texts]
    except ValueError as error:
        parser.error(f"--heads {error}")
    options.dtype = torch.bfloat16 if is_cuda else torch.float32
    if min(options.workspaces, default=1) < 1:
        parser.error("--workspaces: numbers above 0")
    there = TOKEN_HEADS if options.tokens else HEADS
    options.reasons = {
        who: why_absent(who) if who in there else "has no such head" for who in options.peers
    }
    options.peers = [who for who in options.peers if options.reasons[who] is None]


def default_peers(is_cuda: bool, of_tokens: bool) -> list[str]:
    """Those that start at once. The CPU has not much time for the others."""
    if not is_cuda:
        return ["eager"]
    there = TOKEN_HEADS if of_tokens else HEADS
    return [who for who in PEERS if who in there and who not in SLOW_TO_START]


def run(options: argparse.Namespace, device: str) -> int:
    """Measures the shapes. 1 when a result of ours is wrong, else 0."""
    print(f"lossops {__version__} on {device}, torch {torch.__version__}, {options.dtype}")
    for who, reason in options.reasons.items():
        if reason is not None:
            print(f"without {who}: {reason}")
    # float32 has no sums of another dtype.
    ours = OURS if options.dtype == torch.bfloat16 else OURS[:1]
    there = TOKEN_HEADS if options.tokens else HEADS
    heads = {who: there[who] for who in (*ours, *options.peers)}
    titles = TITLES | (TOKEN_TITLES if options.tokens else {})
    for who in heads:
        print(f"{who}: {titles[who]}")
    for mib in options.workspaces:
        heads[f"ours {mib}"] = with_workspace(mib, of_tokens=options.tokens)
        print(f"ours {mib}: ours with a workspace of {mib} MiB")
    print()
    started = time.monotonic()
    meter = Meter(options.device)
    found = []
    for shape in options.heads:
        one = measure.run(
            shape,
            options.dtype,
            heads,
            options.passes,
            meter,
            of_tokens=options.tokens,
            with_breakdown=options.breakdown,
        )
        found.append(one)
        print(render(one), end="\n\n", flush=True)
    seconds = round(time.monotonic() - started)
    print(f"{seconds} s")
    if options.output:
        about = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "device": device,
            "torch": str(torch.__version__),
            "lossops": __version__,
            "seconds": seconds,
            "of_tokens": options.tokens,
        }
        save(options.output, about, found)
    wrong = [f"{one.shape} {who}" for one in found for who in ours if not one.passed(who)]
    print(f"FAILED: {', '.join(wrong)}" if wrong else "All checks passed.")
    return int(bool(wrong))


def save(path: str, about: dict[str, object], found: Sequence[Measured]) -> None:
    """Writes all numbers as JSON."""
    heads = [
        dataclasses.asdict(one)
        | {"fractions": {who: _fractions(one, who) for who in one.heads if who != PRODUCTS}}
        for one in found
    ]
    with open(path, "w") as file:
        json.dump(about | {"heads": heads}, file, indent=2)
        file.write("\n")


def _fractions(one: Measured, who: str) -> dict[str, float | None]:
    return {doing: one.fraction(who, doing) for doing in one.heads[PRODUCTS].ms}


def render(one: Measured) -> str:
    """The table of a shape: ms, fraction of the products, MiB; then errors and notes."""
    passes = list(one.heads[PRODUCTS].ms)
    titles = "".join(f"{f'{doing}: ms, fraction, MiB':>30}" for doing in passes)
    lines = [f"{one.shape} {one.dtype}", f"{'':12}{titles}   error of dX, dW"]
    for who, found in one.heads.items():
        cells = "".join(_cell(one, who, doing) for doing in passes)
        errors = [f"{found.errors[key]:.1e}" for key in ("input", "weight") if found.errors]
        lines.append(f"{who:12}{cells}   {' '.join(errors)}".rstrip())
    for who, found in one.heads.items():
        lines += [f"{who}, {doing}: {note}" for doing, note in found.notes.items()]
        if who in OURS and found.errors and not one.passed(who):
            lines.append(f"{who}: WRONG, errors {found.errors}")
        lines += _breakdown(who, found)
    return "\n".join(lines)


def _cell(one: Measured, who: str, doing: str) -> str:
    found = one.heads[who]
    if doing not in found.ms:
        return f"{'-':>30}"
    fraction, peak = one.fraction(who, doing), found.peak_bytes.get(doing)
    peak_text = "-" if peak is None else f"{peak / MIB:.0f}"
    return f"{found.ms[doing]:12.2f} {fraction or 0:8.3f} {peak_text:>8}"


def _breakdown(who: str, found: Contender) -> list[str]:
    if not found.breakdown:
        return []
    parts = ", ".join(f"{kind} {ms:.2f}" for kind, ms in found.breakdown.items())
    lines = [f"{who}, a step in ms: {parts}"]
    lines += [f"  {ms:8.3f} ms {count:5} x {name[:100]}" for name, count, ms in found.kernels]
    return lines
