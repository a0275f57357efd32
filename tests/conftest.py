"""Devices, seeds and clean-up for every test; the report of a full run on a GPU."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import platform
import random
import subprocess
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch starts its threads: they would spin while they wait, which on a machine that has
# other work to do makes a small test take fifty times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# torch.compile keeps compiled graphs on disk and finds them again by an operator's name: it would
# run one that was made for another build of lossops.
os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
# The workers of pytest-xdist share the cores, and what a test starts inherits its worker's part.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else a pool of all the cores

import gpu_report
import pytest
import torch

import lossops

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent


def _why_no_cuda() -> str | None:
    """Why nothing can be tested on a GPU here, or None if it can."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if json.loads(torch.ops.lossops.build_info())["cuda"] is None:
        return "needs a lossops that was built with CUDA"
    return None


NO_CUDA = _why_no_cuda()
DEVICES = ("cpu",) if NO_CUDA else ("cpu", "cuda")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: runs on a GPU only")
    config.addinivalue_line("markers", "gpus(count): needs that many GPUs")
    config.addinivalue_line("markers", "gpu_memory(gib): on a GPU, needs so much of it free")
    config.stash[_RUN] = Run()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", DEVICES)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cuda") and NO_CUDA:
            item.add_marker(pytest.mark.skip(reason=NO_CUDA))
        gpus = item.get_closest_marker("gpus")
        if gpus and not NO_CUDA and torch.cuda.device_count() < gpus.args[0]:
            item.add_marker(pytest.mark.skip(reason=f"needs {gpus.args[0]} GPUs"))


@pytest.fixture(autouse=True)
def _same_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test draws the same numbers alone as in a full run, and leaves no setting behind."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)
    threads = torch.get_num_threads()
    yield
    lossops.check_targets(False)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    if not NO_CUDA:
        torch.cuda.set_sync_debug_mode("default")
        if torch.cuda.memory_reserved() > 2**28:  # other processes may need it
            torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _gpu_memory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Tests that need much memory take turns: a GPU has room for one, not for one a worker."""
    marker = request.node.get_closest_marker("gpu_memory")
    on_cpu = "device" in request.fixturenames and request.getfixturevalue("device") == "cpu"
    if marker is None or on_cpu:
        yield
        return
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent  # that of all workers
    with open(folder / "gpu_memory.lock", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        (gib,) = marker.args
        if torch.cuda.mem_get_info()[0] < gib * 2**30:
            pytest.skip(f"needs {gib} GiB of free GPU memory")
        yield
        torch.cuda.empty_cache()


@pytest.fixture
def quick_meters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark takes one sample of each time."""
    from lossops.bench.meter import Meter

    original = Meter.__init__

    def quick(self: Meter, device: torch.device) -> None:
        original(self, device)
        self.warm_ups, self.fewest, self.seconds = 1, 1, 0.0

    monkeypatch.setattr(Meter, "__init__", quick)


# --- the GPU report -----------------------------------------------------------------------------


class Run:
    """What the report needs to know of the run."""

    def __init__(self) -> None:
        self.start = time.time()
        self.counts = dict.fromkeys(("passed", "failed", "skipped", "xfailed"), 0)
        self.skip_reasons: set[str] = set()
        self.incomplete = False
        self.started = 0
        # What each process that collects tests found: this one, or the workers of pytest-xdist.
        self.collected: set[int | None] = set()


_RUN = pytest.StashKey[Run]()
_current: list[Run] = []


def pytest_sessionstart(session: pytest.Session) -> None:
    _current[:] = [session.config.stash[_RUN]]


def pytest_deselected(items: list[pytest.Item]) -> None:
    for run in _current:
        run.incomplete |= bool(items)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    for run in _current:
        run.incomplete |= report.failed


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for run in _current:
        run.started += report.when == "setup"
        if report.failed:  # in the test, its set-up or its clean-up
            run.counts["failed"] += 1
        elif report.skipped and hasattr(report, "wasxfail"):
            run.counts["xfailed"] += 1
        elif report.skipped:
            run.counts["skipped"] += 1
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "unknown"
            run.skip_reasons.add(str(reason).removeprefix("Skipped: "))
        elif report.when == "call":
            run.counts["passed"] += 1


def size_of_whole_suite(session: pytest.Session, run: Run) -> int | None:
    """How many tests this process collected, if they are all that there are."""
    everything = {str(TESTS), str(ROOT)}
    files = {item.path for item in session.items}
    whole = (
        not run.incomplete
        and not session.config.option.collectonly
        and {str(Path(argument).resolve()) for argument in session.config.args} <= everything
        and files >= set(TESTS.glob("test_*.py"))
    )
    return len(session.items) if whole else None


@pytest.hookimpl(optionalhook=True)  # known where pytest-xdist is
def pytest_testnodedown(node: Any) -> None:
    """A worker is done. One that crashed has no output."""
    for run in _current:
        run.collected.add(getattr(node, "workeroutput", {}).get("size_of_whole_suite"))


def gpu_report_of(run: Run) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)
        driver = done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = "unknown"
    build = json.loads(torch.ops.lossops.build_info())
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver,
        "torch": str(torch.__version__),
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "lossops": lossops.__version__,
        "lossops_cuda": build["cuda"],
        "lossops_cuda_archs": build["cuda_archs"],
        "tests": run.counts,
        "skip_reasons": sorted(run.skip_reasons),
        "duration_seconds": round(time.time() - run.start, 1),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "sources_sha256": gpu_report.sources_digest(ROOT),
    }


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    run = config.stash[_RUN]
    _current.clear()
    to_the_end = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not (
        session.shouldstop or session.shouldfail
    )
    if not config.pluginmanager.hasplugin("dsession"):  # where the workers collect
        run.collected = {size_of_whole_suite(session, run) if to_the_end else None}
    if hasattr(config, "workeroutput"):  # of a worker; who started it writes the report
        (config.workeroutput["size_of_whole_suite"],) = run.collected
        return
    # Each test once: a worker may have taken tests with it, and --dist=each runs all by all.
    if NO_CUDA or not to_the_end or run.collected != {run.started}:
        return
    path = Path(os.environ.get("LOSSOPS_GPU_REPORT") or gpu_report.REPORT)
    path.write_text(json.dumps(gpu_report_of(run), indent=2) + "\n")
