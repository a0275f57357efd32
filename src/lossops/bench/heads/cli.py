"""The part of the command line that is about heads: `--heads`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .. import files, page
from ..meter import Meter
from . import measure, plot
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
    about = files.about(device) | {"of_tokens": options.tokens}
    print(files.heading(about))
    for who, reason in options.reasons.items():
        if reason is not None:
            print(f"without {who}: {reason}")
    # float32 has no sums of another dtype.
    ours = OURS if options.dtype == torch.bfloat16 else OURS[:1]
    there = TOKEN_HEADS if options.tokens else HEADS
    heads = {who: there[who] for who in (*ours, *options.peers)}
    for mib in options.workspaces:
        heads[f"ours {mib}"] = with_workspace(mib, of_tokens=options.tokens)
    print(f"{_titles(heads, options.tokens)}\n")
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
    about["seconds"] = round(time.monotonic() - started)
    if options.output:
        files.save(options.output, about | {"heads": [one.fields() for one in found]})
    return close(about, found, options.plot)


def read(fields: dict[str, Any]) -> tuple[dict[str, Any], list[Measured]]:
    """Takes what a file has. Raises ValueError where it is something else."""
    return files.read(fields, "heads", Measured.read)


def show(about: dict[str, Any], found: Sequence[Measured], picture: str | None) -> int:
    """Prints again what `run` printed, and draws it."""
    print(files.heading(about))
    heads = [who for who in found[0].heads if who != PRODUCTS]
    print(f"{_titles(heads, about.get('of_tokens', False))}\n")
    for one in found:
        print(render(one), end="\n\n")
    return close(about, found, picture)


def close(about: dict[str, Any], found: Sequence[Measured], picture: str | None) -> int:
    """The last lines, then the picture. 1 when a result of ours is wrong, else 0."""
    print(f"{about.get('seconds')} s")
    ours = [(one, who) for one in found for who in OURS if who in one.heads]
    wrong = [f"{one.shape} {who}" for one, who in ours if not one.passed(who)]
    print(f"FAILED: {', '.join(wrong)}" if wrong else "All checks passed.")
    if picture and page.available():
        plot.draw(about, found, picture)
    return int(bool(wrong))


def _titles(heads: Iterable[str], of_tokens: bool) -> str:
    titles = TITLES | (TOKEN_TITLES if of_tokens else {})
    lines = []
    for who in heads:
        workspace = f"ours with a workspace of {who.removeprefix('ours ')} MiB"
        lines.append(f"{who}: {titles.get(who, workspace)}")
    return "\n".join(lines)


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
