"""Planted faults: mistakes that the suite must find, each built into a copy and tested there.

    python tools/planted_faults.py [--only GLOB ...] [--all] [--cuda] [--list] [--keep]

The faults are those of fault_table.py. Each changes the lines that a marker in the sources marks
(fault_markers.py), so code can move with its marker; where table and markers do not fit, the script
says so and ends, as a test of the suite does. The tests named beside a fault are those that should
fail, few enough that a run of the table takes minutes; `--all` runs the whole suite for each fault.
A fault that no test notices is a gap in the suite, and ends the script with 1, as a failure without
any fault does. One that can change no result has no place here.

The files that git tracks are copied to a temporary folder, which `--keep` leaves behind, and built
there for the CPU by setup.py: once, with little optimisation, and then only what includes the file
with the fault. Needs what `make test` installs: torch, setuptools, ninja, pytest. The next fault is
compiled while one is tested, so two cores are used.

`--cuda` adds the faults of csrc/kernels/. They take nvcc and a GPU, TORCH_CUDA_ARCH_LIST (default:
the GPUs of this machine) and minutes each; without a GPU they are listed as not run.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from fault_markers import Fault, marks_in, planted, problems_of
from fault_table import FAULTS

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = Path("src/lossops/_C.so")
# Of a run of some of the tests. One that hangs is noticed, too.
TIME_LIMIT_SECONDS = 1800


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    if text.count(old) != 1:
        sys.exit(f"planted_faults: {old!r} occurs {text.count(old)} times in {path.name}")
    path.write_text(text.replace(old, new))


def plant(tree: Path, fault: Fault) -> tuple[Path, str]:
    """Writes the fault into a copy of the sources. Returns the file, and what it was."""
    mark = marks_in(tree)[0][fault.marker]
    path = tree / mark.path
    original = path.read_text()
    path.write_text(planted(original, mark, fault))
    return path, original


def tracked_files() -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return [Path(name) for name in names if name and (ROOT / name).is_file()]


def copy_sources(folder: Path) -> None:
    for path in tracked_files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)


class Builder:
    """Builds the library, without a fault and with one: from the same objects each time."""

    def __init__(self, folder: Path, cuda: bool) -> None:
        self.folder = folder
        self.cuda = cuda
        self.tree = folder / "tree"
        self.clean = folder / "clean"
        self.environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # ninja
            "LOSSOPS_CUDA": "1" if cuda else "0",
            "CFLAGS": f"{os.environ.get('CFLAGS', '')} -g0",
            "CXXFLAGS": f"{os.environ.get('CXXFLAGS', '')} -g0",
        }
        if cuda:
            self.environment.setdefault("TORCH_CUDA_ARCH_LIST", "native")
        else:
            self.environment["MAX_JOBS"] = "1"

    def build_clean(self) -> Path:
        copy_sources(self.tree)
        # A third of the compiler's time. The device code's optimisation is another option.
        replaced(self.tree / "setup.py", '"-O3"', '"-O1"')
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() if self.cuda else 2))
        library = self.run("clean", {"MAX_JOBS": jobs})
        shutil.move(self.tree, self.clean)
        return library

    def build(self, fault: Fault) -> Path:
        # With times of files, by which ninja tells what is to be compiled again.
        shutil.copytree(self.clean, self.tree, symlinks=True)
        try:
            plant(self.tree, fault)
            return self.run(f"fault{FAULTS.index(fault)}")
        finally:
            shutil.rmtree(self.tree)

    def run(self, name: str, more: dict[str, str] | None = None) -> Path:
        done = subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--inplace"],
            cwd=self.tree,
            env=self.environment | (more or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the build failed ({name}):\n{done.stdout[-6000:]}")
        library = self.folder / f"{name}.so"
        shutil.move(self.tree / LIBRARY, library)
        return library


# The builds with faults are optimised less, and their stack frames are larger.
NEED_OPTIMISATION = ("tests/test_robustness.py::test_threads_with_small_stacks",)
# Finds that the sources are not those of the table, which of a planted fault is no news.
CHECK_OF_THE_TABLE = "tests/test_planted_faults.py"


class Outcome(NamedTuple):
    killed: bool
    by: str
    seconds: float


def run_tests(tree: Path, tests: Iterable[str], options: Iterable[str]) -> Outcome:
    """Runs tests until one fails. Anything but tests that pass or fail is an error."""
    start = time.time()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [f"--deselect={test}" for test in NEED_OPTIMISATION]
    command += [f"--ignore={CHECK_OF_THE_TABLE}", *options]
    try:
        done = subprocess.run(
            [*command, *(f"tests/{test}" for test in tests)],
            cwd=tree,
            env=os.environ
            | {
                "PYTHONPATH": str(tree / "src"),
                "PYTHONDONTWRITEBYTECODE": "1",  # two faults a second would share a .pyc
                "LOSSOPS_GPU_REPORT": str(tree / "gpu_report.json"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIME_LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(True, "a test that does not end", time.time() - start)
    seconds = time.time() - start
    if done.returncode == 0:
        return Outcome(False, "", seconds)
    if done.returncode < 0:
        where = re.search(r"in (test_\w+)", done.stdout)
        name = signal.Signals(-done.returncode).name
        return Outcome(True, f"{name} in {where[1] if where else 'a test'}", seconds)
    failed = re.search(r"^FAILED tests/(.+?)( - |$)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or failed is None:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-6000:]}")
    return Outcome(True, failed[1], seconds)


def has_gpu() -> bool:
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def tests_of(faults: Iterable[Fault], everything: bool) -> list[str]:
    if everything:
        return [""]
    tests = {test for fault in faults for test in fault.tests.split()}
    return sorted(test for test in tests if test.split("::")[0] not in tests - {test})


def run_faults(faults: list[Fault], folder: Path, everything: bool, cuda: bool) -> int:
    """Tests the copy without a fault, then with each. Returns how many survived."""
    builder = Builder(folder / "build", cuda)
    tree = folder / "tested"
    copy_sources(tree)
    options = ["-k", "cuda"] if cuda else []

    def test(library: Path, tests: list[str]) -> Outcome:
        shutil.copy2(library, tree / LIBRARY)
        return run_tests(tree, tests, options)

    start = time.time()
    clean = builder.build_clean()
    print(f"built without a fault in {time.time() - start:.0f} s", flush=True)
    outcome = test(clean, tests_of(faults, everything))
    if outcome.killed:
        sys.exit(f"planted_faults: without a fault, {outcome.by} fails")
    print(f"tested without a fault in {outcome.seconds:.0f} s", flush=True)

    survivors = 0
    marks, _ = marks_in(ROOT)
    compiled = {fault.name for fault in faults if marks[fault.marker].compiled}
    pool = ThreadPoolExecutor(1)
    try:
        libraries: dict[str, Future[Path]] = {
            fault.name: pool.submit(builder.build, fault)
            for fault in faults
            if fault.name in compiled
        }
        # Meanwhile those without a build.
        for fault in sorted(faults, key=lambda fault: fault.name in compiled):
            path, original = plant(tree, fault)
            try:
                library = libraries[fault.name].result() if fault.name in compiled else clean
                outcome = test(library, tests_of([fault], everything))
            except RuntimeError as error:
                outcome = Outcome(False, str(error), 0)
            path.write_text(original)
            survivors += not outcome.killed
            verdict = f"killed by {outcome.by}" if outcome.killed else f"SURVIVED {outcome.by}"
            print(f"{fault.name:<72} {outcome.seconds:5.1f} s  {verdict}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="faults by name")
    parser.add_argument("--all", action="store_true", help="the whole suite for each fault")
    parser.add_argument("--cuda", action="store_true", help="the faults of csrc/kernels/ too")
    parser.add_argument("--list", action="store_true", help="print the faults and their tests")
    parser.add_argument("--keep", action="store_true", help="leave the copies behind")
    options = parser.parse_args()
    if problems := problems_of(FAULTS, ROOT):
        sys.exit("\n".join(problems))
    chosen = [f for f in FAULTS if any(fnmatch.fnmatch(f.name, glob) for glob in options.only)]
    if not chosen:
        parser.error(f"no fault is called {options.only!r}")
    if options.list:
        marks, _ = marks_in(ROOT)
        for fault in chosen:
            print(f"{fault.name:<72} {marks[fault.marker].place}: {fault.tests}")
        return 0

    start = time.time()
    runs = {False: [fault for fault in chosen if not fault.cuda]}
    not_run = [fault for fault in chosen if fault.cuda]
    if options.cuda and not_run and has_gpu():
        runs[True] = not_run
        not_run = []
    folder = Path(tempfile.mkdtemp(prefix="planted-faults-"))
    survivors = tested = 0
    try:
        for cuda, faults in runs.items():
            if faults:
                place = folder / ("cuda" if cuda else "cpu")
                survivors += run_faults(faults, place, options.all, cuda)
                tested += len(faults)
    finally:
        if options.keep:
            print(f"the copies are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    for fault in not_run:
        reason = "there is no GPU" if options.cuda else "needs --cuda and a GPU"
        print(f"{fault.name:<72} not run: {reason}")
    print(f"{tested} faults in {time.time() - start:.0f} s: {survivors} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
