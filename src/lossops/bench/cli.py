"""The command line."""

from __future__ import annotations

import argparse
import fnmatch
import functools
import importlib.util
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import info
from . import files, page, plot
from .cases import ALL, PEERS
from .compiled import cli as compiled_steps
from .compiled.problems import PEERS as COMPILED_PEERS
from .drawn import cli as drawn
from .drawn.peers import PEERS as DRAWN_PEERS
from .heads import cli as heads
from .heads.problems import PEERS as HEAD_PEERS
from .meter import Meter, Progress, measure_bandwidths, measure_overheads, measure_plain
from .report import Compiled, Report, Result, Small, render
from .run import count_launches, run_case, run_compiled, run_small


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next((line for line in file if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name.split(':')[-1].strip()} ({torch.get_num_threads()} threads)"


# What matplotlib writes without further packages.
PICTURES = (".png", ".svg", ".pdf", ".jpg")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line, and settles what it leaves open."""
    parser = argparse.ArgumentParser(
        prog="python -m lossops.bench",
        description="Checks the losses against float64 and times them against their peers.",
    )
    parser.add_argument("--quick", action="store_true", help="only the three reference problems")
    parser.add_argument(
        "--cases", nargs="+", metavar="GLOB", help="only these, as 'ce-bf16-*', 'small-*'"
    )
    parser.add_argument("--list", action="store_true", help="prints the names of the cases")
    parser.add_argument("--peers", metavar="LIST", help=f"of {','.join(DRAWN_PEERS)}; or none")
    parser.add_argument("--device", help="cuda, cuda:1, cpu; default: cuda where there is one")
    parser.add_argument(
        "--output", metavar="FILE.json", help="writes all numbers there, and FILE.png beside it"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draws the numbers there (or .svg)")
    parser.add_argument(
        "--from", dest="source", metavar="FILE.json", help="measures nothing: shows a file again"
    )
    drawn.add_arguments(parser)
    heads.add_arguments(parser)
    compiled_steps.add_arguments(parser)
    options = parser.parse_args(arguments)
    options.drawn = options.random is not None or bool(options.spec)
    asked = {
        "--random and --spec": options.drawn,
        "--heads": options.heads is not None,
        "--compiled": options.compiled is not None,
    }
    given = [flag for flag, is_given in asked.items() if is_given]
    options.has_cases = not given
    if len(given) > 1:
        parser.error(f"{given[1]} does not go together with {given[0]}")

    # Before the minutes that a run takes.
    for flag, file in ("--output", options.output), ("--plot", options.plot):
        if file and not Path(file).resolve().parent.is_dir():
            parser.error(f"{flag} {file}: there is no folder {Path(file).resolve().parent}")
        if file and Path(file).is_dir():
            parser.error(f"{flag} {file} is a folder")
    if options.plot is None and options.output:
        options.plot = str(Path(options.output).with_suffix(".png"))
    if options.plot and Path(options.plot).suffix.lower() not in PICTURES:
        parser.error(f"--plot {options.plot}: pictures are {', '.join(PICTURES)}")
    if options.source:
        if options.output:
            parser.error("--from reads a file that --output wrote; it takes --plot")
        return options

    try:
        options.device = torch.device(
            options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        )
        # "cuda" becomes the current device, by its number.
        options.device = torch.empty(0, device=options.device).device
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {options.device}: {error}")
    if options.device.type not in ("cpu", "cuda"):
        parser.error(f"--device {options.device}: lossops runs on cpu and cuda")
    cuda = options.device.type == "cuda"
    if cuda:
        options.device = torch.device("cuda", options.device.index or 0)
        torch.cuda.set_device(options.device)

    known = list(PEERS)
    if options.drawn:
        known = list(DRAWN_PEERS)
    elif options.heads is not None:
        known = list(HEAD_PEERS)
    elif options.compiled is not None:
        known = list(COMPILED_PEERS)
    if options.peers is None and options.heads is not None:
        options.peers = heads.default_peers(cuda, options.tokens)
    elif options.peers is None and options.compiled is not None:
        options.peers = ["torch"]
    elif options.peers is None:
        options.peers = ["eager", "compile"] if cuda or not options.quick else ["eager"]
        if options.drawn and not cuda:
            options.peers = ["eager"]  # each call would be compiled anew
        elif cuda and not options.quick:
            options.peers = known
    else:
        options.peers = [who for who in options.peers.split(",") if who not in ("", "none")]
    if unknown := set(options.peers) - set(known):
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if options.drawn:
        drawn.settle(parser, options)
        return options
    if options.heads is not None:
        heads.settle(parser, options)
        return options
    if options.compiled is not None:
        compiled_steps.settle(parser, options)
        return options
    options.absent = [who for who in options.peers if not importlib.util.find_spec(PEERS[who])]
    options.peers = [who for who in options.peers if who not in options.absent]

    names = {
        case.name(options.device): case
        for case in ALL
        if (case.quick or not options.quick)
        and (options.cases or options.list or not case.extra)
        and (cuda or case.cpu_shape is not None)
    }
    globs = options.cases or ["*"]
    options.cases = [
        case for name, case in names.items() if any(fnmatch.fnmatch(name, glob) for glob in globs)
    ]
    if not options.cases:
        parser.error(f"no case matches {' '.join(globs)}; there are {', '.join(names)}")
    return options


def measure(options: argparse.Namespace) -> Report:
    """Runs all that was chosen."""
    device, peers = options.device, options.peers
    chosen = {
        section: [case for case in options.cases if case.section == section]
        for section in ("cases", "size", "small", "compiled")
    }
    timed = [*chosen["cases"], *chosen["size"]]
    started = time.monotonic()
    progress = Progress(3 + 4 * len(timed) + len(chosen["small"]) + len(chosen["compiled"]))
    meter = Meter(device)
    progress.advance("bandwidth")
    rates = measure_bandwidths(meter)

    results: list[Result] = []
    for case in timed:
        meter.clean()
        # On the CPU the C++ compiler would take most of the run.
        skipped = "compile" if case.section == "size" and not meter.cuda else ""
        whos = [who for who in peers if who != skipped]
        results.append(run_case(case, whos, meter, progress))
    meter.clean()
    compiled: list[Compiled] = []
    for case in chosen["compiled"]:
        compiled.append(run_compiled(case, peers, meter, progress))
        meter.clean()
    small: list[Small] = [run_small(case, peers, meter, progress) for case in chosen["small"]]
    # Again, so that a device that was slow or busy at first does not make the floor easy.
    progress.advance("bandwidth")
    for kind, again in measure_bandwidths(meter).items():
        rates[kind] = {who: max(rate, again[who]) for who, rate in rates[kind].items()}
    if meter.cuda:
        for case, found in zip(chosen["small"], small, strict=True):
            count_launches(case, found, meter)
    progress.advance("launches")
    overheads = measure_overheads(meter)
    plain = functools.cache(functools.partial(measure_plain, meter))  # many are of one size
    for result in results:
        progress.advance(f"{result.name}: plain kernels")
        result.plain_ms = plain(result.input_bytes, result.moved_bytes)
    progress.close()

    bandwidth = {kind: max(rates[kind].values()) for kind in rates}
    for result in results:
        result.set_floor(bandwidth)
    environment = info.collect()
    about = files.about(device_name(device)) | {
        "driver": environment["driver"],
        "seconds": round(time.monotonic() - started),
        "environment": environment,
    }
    count = len(chosen["cases"])
    cases, sizes = results[:count], results[count:]
    return Report(about, peers, bandwidth, rates, cases, sizes, small, compiled, overheads)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark. 1 when a result of ours is wrong or missing, else 0."""
    options = parse(arguments)
    shows: Callable[[str | None], int] | None = None
    if options.source:
        try:
            shows = _reader(files.load(options.source))
        except (OSError, ValueError) as error:
            print(f"--from {options.source}: {error}", file=sys.stderr)
            return 2
    elif options.list and options.has_cases:
        print("\n".join(case.name(options.device) for case in options.cases))
        return 0
    if options.plot and not page.available() and not options.drawn:
        print(f"{page.MISSING}: {options.plot} is not drawn.", file=sys.stderr)
        if options.source:
            return 2
    if shows:
        return shows(options.plot)
    device = device_name(options.device)
    if options.drawn:
        return drawn.run(options, device)
    if options.heads is not None:
        return heads.run(options, device)
    if options.compiled is not None:
        return compiled_steps.run(options, device)
    print(files.heading(files.about(device)), flush=True)
    report = measure(options)
    if options.output:
        report.save(options.output)
    return _show(report, options.plot, options.absent)


def _reader(fields: dict[str, Any]) -> Callable[[str | None], int]:
    """Shows what a file has, by the kind of its run. Raises ValueError for other files."""
    if "heads" in fields:
        return functools.partial(heads.show, *heads.read(fields))
    if "goals" in fields:
        return functools.partial(compiled_steps.show, *compiled_steps.read(fields))
    if "draws" in fields:
        raise ValueError("it has calls drawn at random, which only the run itself prints")
    report = Report.read(fields)

    def show(picture: str | None) -> int:
        print(files.heading(report.about))
        return _show(report, picture)

    return show


def _show(report: Report, picture: str | None, absent: Sequence[str] = ()) -> int:
    """Prints a run of the cases below its first line, and draws it."""
    bandwidth = report.bandwidth_gb_per_s
    print(f"memory: reads {bandwidth['read']:.0f} GB/s, copies {bandwidth['copy']:.0f} GB/s")
    if overheads := report.overhead_us:
        listed = ", ".join(f"{us:.1f} with {count}" for count, us in overheads.items())
        print(f"a call that moves no data, microseconds by kernels: {listed} (not in the floor)")
    print()
    print(render(report))
    if absent:
        print(f"\nNot installed: {', '.join(absent)}")
    failed = [outcome.name for outcome in report.outcomes if not outcome.passed]
    print(f"\nFAILED: {', '.join(failed)}" if failed else "\nAll checks passed.")
    if picture and page.available():
        plot.draw(report, picture)
    return 1 if failed else 0
