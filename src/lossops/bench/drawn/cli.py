"""The part of the command line that is about drawn calls: `--random` and `--spec`."""

from __future__ import annotations

import argparse
import os

from .. import files
from ..meter import Meter, measure_bandwidths
from . import elements, measure, peers, rows, tables
from .spec import Bounds

HOPPER = "LOSSOPS_DISABLE_HOPPER"  # of the library: 1 leaves out the kernels for Hopper


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `settle` and `run` read."""
    group = parser.add_argument_group("calls drawn at random, instead of the cases")
    group.add_argument(
        "--random",
        type=int,
        metavar="SEED",
        help="draws shapes, layouts and arguments; a new seed each time",
    )
    group.add_argument("--count", type=int, default=100, help="how many calls are drawn")
    group.add_argument(
        "--families",
        nargs="+",
        default=["*"],
        metavar="GLOB",
        help=f"only these, as 'rows/*' or rows/padded: {', '.join(measure.families())}",
    )
    group.add_argument(
        "--mib",
        nargs=2,
        type=float,
        metavar=("LEAST", "MOST"),
        help="size of the logits, or of the largest operand; default: "
        f"{'{:g} {:g}'.format(*rows.MIB_OF_LOGITS)} for rows, "
        f"{'{:g} {:g}'.format(*elements.MIB_OF_OPERAND)} for elements",
    )
    group.add_argument(
        "--classes",
        nargs=2,
        type=int,
        default=Bounds().classes,
        metavar=("LEAST", "MOST"),
        help="classes of a row; default: %(default)s",
    )
    group.add_argument("--brief", action="store_true", help="prints the tables alone")
    group.add_argument(
        "--spec", nargs="+", metavar="CALL", help="measures these calls, as a table printed them"
    )


def settle(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Reads the calls and checks the bounds, so that a mistake ends the run at once."""
    least, most = options.mib or (1, 1)
    if not 0 < least <= most:
        parser.error(f"--mib {least:g} {most:g}: two numbers above 0, the smaller one first")
    if not 2 <= options.classes[0] <= options.classes[1]:
        parser.error("--classes: two numbers from 2 on, the smaller one first")
    if options.count < 1:
        parser.error(f"--count {options.count}: 1 or more")
    options.families = measure.families(options.families)
    if not options.families:
        parser.error(f"--families: none matches; there are {', '.join(measure.families())}")
    if options.spec:
        try:
            options.calls = [measure.spec(text) for text in options.spec]
        except ValueError as error:
            parser.error(f"--spec {error}")
    else:
        bounds = Bounds(options.mib and tuple(options.mib), tuple(options.classes))
        draws = measure.draws(options.random, options.count, options.families, bounds)
        options.calls = list(draws)
    options.reasons = {who: peers.why_absent(who) for who in options.peers}
    options.peers = [who for who in options.peers if options.reasons[who] is None]


def run(options: argparse.Namespace, device: str) -> int:
    """Measures the calls. 1 when a result of ours is wrong, else 0."""
    seed = "" if options.spec else f", seed {options.random}"
    about = files.about(device)
    print(f"{files.heading(about)}{seed}")
    hopper = os.environ.get(HOPPER)
    print(f"{HOPPER} is {'not set' if hopper is None else hopper}")
    if not options.spec:
        print(f"{len(options.calls)} calls of {', '.join(options.families)}")
    for who, reason in options.reasons.items():
        if reason is not None:
            print(f"without {who}: {reason}")
    meter = Meter(options.device)
    rates = measure_bandwidths(meter)
    bandwidth = {kind: max(of.values()) for kind, of in rates.items()}
    print(f"memory: reads {bandwidth['read']:.0f} GB/s, copies {bandwidth['copy']:.0f} GB/s\n")
    found = measure.run(options.calls, options.peers, meter, bandwidth)
    if len(found) < len(options.calls):
        print(f"interrupted after {len(found)} calls")
    if options.spec:
        print("\n\n".join(tables.detail(one) for one in found))
    else:
        print(tables.render(found, options.brief))
    if options.output:
        about |= {HOPPER: hopper, "seed": options.random, "bandwidth_gb_per_s": bandwidth}
        tables.save(options.output, about, found)
    return int(not all(one.passed for one in found))
