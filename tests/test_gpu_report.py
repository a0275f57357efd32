"""The GPU report: what it describes, what its check says, when a run writes it.

Also what conftest.py does for tests that run in several processes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_report
import pytest

TESTS = Path(__file__).resolve().parent


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small source tree."""
    for name, text in {
        "csrc/a.cpp": "a",
        "csrc/kernels/b.cu": "b",
        "src/lossops/__init__.py": "c",
        "tests/test_a.py": "d",
        "README.md": "not described",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def report_of(root: Path, **changes: Any) -> dict[str, Any]:
    return {
        "device": "a GPU",
        "date": "2026-01-01 00:00 UTC",
        "tests": {"passed": 10, "failed": 0, "skipped": 1, "xfailed": 0},
        "sources_sha256": gpu_report.sources_digest(root),
        **changes,
    }


def answer(root: Path, report: Any) -> tuple[bool, str]:
    path = root / "tests" / "gpu_report.json"
    path.write_text(report if isinstance(report, str) else json.dumps(report))
    return gpu_report.check(root, path)


@pytest.mark.parametrize(
    "name",
    [
        "tests/gpu_report.json",
        "tests/__pycache__/test_a.pyc",
        "src/lossops/_C.so",
        "src/lossops/x.pyc",
        "src/lossops.egg-info/PKG-INFO",
        "csrc/build/a.o",
        "csrc/.clang-format",
        "tests/.cache/x",
        "docs/design.md",
        "tools/matrix.py",
    ],
)
def test_digest_ignores_what_is_not_source(tree: Path, name: str) -> None:
    before = gpu_report.sources_digest(tree)
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("anything")
    assert gpu_report.sources_digest(tree) == before


def test_digest_changes_with_contents_names_and_places(tree: Path) -> None:
    digests = [gpu_report.sources_digest(tree)]
    (tree / "csrc/a.cpp").write_text("changed")
    digests.append(gpu_report.sources_digest(tree))
    (tree / "csrc/a.cpp").rename(tree / "csrc/c.cpp")
    digests.append(gpu_report.sources_digest(tree))
    (tree / "csrc/c.cpp").rename(tree / "src/c.cpp")
    digests.append(gpu_report.sources_digest(tree))
    (tree / "tests/new.py").write_text("")
    digests.append(gpu_report.sources_digest(tree))
    (tree / "tests/test_a.py").unlink()
    digests.append(gpu_report.sources_digest(tree))
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 64 for digest in digests)


def test_digest_does_not_depend_on_the_place_of_the_tree(tree: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    before = gpu_report.sources_digest(tree)
    for folder in gpu_report.SOURCE_FOLDERS:
        (elsewhere / folder).parent.mkdir(parents=True, exist_ok=True)
        (tree / folder).rename(elsewhere / folder)
    assert gpu_report.sources_digest(elsewhere) == before


def test_check_accepts_a_report_of_these_sources(tree: Path) -> None:
    good, text = answer(tree, report_of(tree))
    assert good
    assert "10 passed, 0 failed, 1 skipped on a GPU" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sources_sha256": "0" * 64}, "other sources"),
        ({"tests": {"passed": 10, "failed": 1, "skipped": 0}}, "1 failed"),
        ({"tests": {"passed": 0, "failed": 0, "skipped": 9}}, "0 passed"),
        ({"tests": {}}, "not a GPU report"),
        ({"tests": None}, "not a GPU report"),
    ],
)
def test_check_refuses_other_reports(tree: Path, changes: dict[str, Any], expected: str) -> None:
    good, text = answer(tree, report_of(tree, **changes))
    assert not good
    assert expected in text
    assert "\n" not in text


@pytest.mark.parametrize("report", ["", "[]", "{}", "null", "not JSON"])
def test_check_refuses_what_is_no_report(tree: Path, report: str) -> None:
    good, text = answer(tree, report)
    assert not good
    assert "not a GPU report" in text


def test_check_refuses_a_missing_report(tree: Path) -> None:
    good, text = gpu_report.check(tree, tree / "tests" / "gpu_report.json")
    assert not good
    assert "does not exist" in text


def test_command_agrees_and_is_quick() -> None:
    """With nothing but the standard library, in well under the five seconds that it may take.

    Of a processor's time: what else runs on the machine does not count.
    """
    good, text = gpu_report.check()
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(TESTS / "gpu_report.py"), "--check"],
        capture_output=True,
        text=True,
    )
    after = os.times()
    assert after.children_user + after.children_system < 5 + sum(before[2:4])
    assert done.returncode == (0 if good else 1), done.stderr
    assert done.stdout.strip() == text


SMALL_SUITE = {
    "test_one.py": "def test_a(): pass\ndef test_b(device): pass\n",
    "test_two.py": "import pytest\n"
    "def test_c(): pass\n"
    "@pytest.mark.skip(reason='a reason')\ndef test_d(): pass\n",
}

# Stand-ins for the modules that conftest.py imports: a machine with a GPU, and a quick start.
STAND_INS = {
    "torch.py": """
from types import SimpleNamespace
__version__ = "2.99"
def properties(index):
    with open("reports.txt", "a") as file:  # each report asks once
        file.write("report\\n")
    return SimpleNamespace(name="a GPU", major=9, minor=0)
version = SimpleNamespace(cuda="13.0")
ops = SimpleNamespace(lossops=SimpleNamespace(
    build_info=lambda: '{"cuda": "13.0", "cuda_archs": "9.0+PTX"}'))
cuda = SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: 1,
    set_sync_debug_mode=lambda mode: None,
    get_device_properties=properties,
    memory_reserved=lambda: 0,
    mem_get_info=lambda: (2**30, 2**30),
    empty_cache=lambda: None,
)
manual_seed = set_num_threads = use_deterministic_algorithms = lambda value: None
get_num_threads = lambda: 1
""",
    "lossops.py": """
__version__ = "9.9"
check_targets = lambda enabled: None
""",
}


TWO = ("-n", "2")
needs_xdist = pytest.mark.skipif(find_spec("xdist") is None, reason="needs pytest-xdist")


def name_of(arguments: object) -> str:
    return " ".join(arguments) or "nothing" if isinstance(arguments, tuple) else str(arguments)


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ((), True),
        (("tests",), True),
        (("tests", "-p", "no:xdist"), True),
        (("tests", "-k", "test_a"), False),
        (("tests/test_one.py::test_a",), False),
        (("tests", "--deselect", "tests/test_one.py::test_a"), False),
        (("tests", "--ignore", "tests/test_one.py"), False),
        (("tests", "--collect-only"), False),
        *(
            pytest.param((*TWO, *arguments), written, marks=needs_xdist)
            for arguments, written in (
                ((), True),
                (("tests", "--dist", "worksteal"), True),
                (("tests", "--dist", "each"), False),
                (("tests", "--deselect", "tests/test_one.py::test_a"), False),
                (("tests/test_one.py",), False),
            )
        ),
    ],
    ids=name_of,
)
def test_written_by_full_runs_only(
    tmp_path: Path, arguments: tuple[str, ...], written: bool
) -> None:
    report = run_small_suite(tmp_path, arguments)
    assert (report is not None) == written
    if report is None:
        return
    # test_b runs on both devices
    assert report["tests"] == {"passed": 4, "failed": 0, "skipped": 1, "xfailed": 0}
    assert report["skip_reasons"] == ["a reason"]
    assert report["device"] == "a GPU"
    assert report["sources_sha256"] == gpu_report.sources_digest(tmp_path)
    assert (report["torch"], report["torch_cuda"], report["lossops"]) == ("2.99", "13.0", "9.9")
    for name in ("driver", "python", "date", "duration_seconds"):
        assert report[name] is not None
    assert gpu_report.check(tmp_path, tmp_path / "report.json")[0]


per_processes = pytest.mark.parametrize(
    "processes", [(), pytest.param(TWO, marks=needs_xdist)], ids=name_of
)


@per_processes
def test_failures_are_reported(tmp_path: Path, processes: tuple[str, ...]) -> None:
    broken = {
        "test_one.py": "import pytest\n"
        "@pytest.fixture\ndef bad(): raise ValueError\n"
        "def test_a(): assert False\n"
        "def test_b(bad): pass\n"
        "def test_c(): pass\n"
        "@pytest.mark.xfail(reason='known')\ndef test_d(): assert False\n"
    }
    report = run_small_suite(tmp_path, ("tests", *processes), broken)
    assert report is not None
    assert report["tests"] == {"passed": 1, "failed": 2, "skipped": 0, "xfailed": 1}
    assert not gpu_report.check(tmp_path, tmp_path / "report.json")[0]
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    assert run_small_suite(stopped, ("tests", "-x", *processes), broken) is None


@per_processes
def test_errors_of_collection_are_not_overlooked(
    tmp_path: Path, processes: tuple[str, ...]
) -> None:
    """In a class, where other tests of the file are collected and pass."""
    files = {
        "test_one.py": "import pytest\n"
        "def test_a(): pass\n"
        "class TestOther:\n"
        "    @pytest.mark.parametrize('unknown', [1])\n"
        "    def test_b(self): pass\n"
    }
    arguments = ("tests", "--continue-on-collection-errors", *processes)
    assert run_small_suite(tmp_path, arguments, files, said="1 passed") is None


@needs_xdist
def test_a_worker_that_crashes(tmp_path: Path) -> None:
    """Its test is run no more, all others are; but nobody knows what it had left to say."""
    crash = {"test_three.py": "import os\ndef test_e(): os._exit(0)\n"}
    said = "1 failed, 4 passed, 1 skipped"
    assert run_small_suite(tmp_path, ("tests", *TWO), SMALL_SUITE | crash, said=said) is None


@needs_xdist
def test_workers_that_do_not_collect_the_same(tmp_path: Path) -> None:
    files = {
        "test_three.py": "import os\n"
        "def test_e(): pass\n"
        "if os.environ['PYTEST_XDIST_WORKER'] == 'gw1':\n"
        "    def test_f(): pass\n"
    }
    said = "Different tests were collected"
    assert run_small_suite(tmp_path, ("tests", *TWO), SMALL_SUITE | files, said=said) is None


@needs_xdist
def test_workers_share_the_cores(tmp_path: Path) -> None:
    files = {
        "test_one.py": "import os\n"
        "def test_a(): assert int(os.environ['OMP_NUM_THREADS']) == "
        "max(1, len(os.sched_getaffinity(0)) // 2)\n"
    }
    assert run_small_suite(tmp_path, ("tests", *TWO), files, said="1 passed") is not None


@needs_xdist
def test_memory_of_the_gpu_is_taken_in_turns(tmp_path: Path) -> None:
    """By two workers that each have a test which asks for all there is; on the CPU they meet."""
    test = """
import time, pytest
def note(what):
    with open("order.txt", "a+") as file:
        file.write(what)
        file.seek(0)
        return file.read()
@pytest.mark.gpu_memory(1)
def test_large(device):
    note("(" if device == "cuda" else "[")
    if device == "cpu":
        until = time.monotonic() + 30
        while note("").count("[") < 2:
            assert time.monotonic() < until, "the other worker waits"
            time.sleep(0.01)
    else:
        time.sleep(0.5)
        note(")")
@pytest.mark.gpu_memory(2)
def test_too_large(): pass
"""
    files = {"test_one.py": test, "test_two.py": test}
    report = run_small_suite(tmp_path, ("tests", *TWO, "--dist", "loadfile"), files)
    assert report is not None
    assert report["tests"] == {"passed": 4, "failed": 0, "skipped": 2, "xfailed": 0}
    assert report["skip_reasons"] == ["needs 2 GiB of free GPU memory"]
    assert (tmp_path / "order.txt").read_text() == "[[()()"


def run_small_suite(
    root: Path,
    arguments: tuple[str, ...],
    files: dict[str, str] | None = None,
    *,
    said: str = "",
) -> dict[str, Any] | None:
    """Runs a suite of a few tests under this suite's conftest.py; returns its report."""
    tests = root / "tests"
    tests.mkdir()
    for name, text in {**STAND_INS, **(files or SMALL_SUITE)}.items():
        (tests / name).write_text(text)
    for name in ("conftest.py", "gpu_report.py"):
        (tests / name).write_text((TESTS / name).read_text())
    (root / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    path = root / "report.json"
    # as if no pytest ran this one
    own = re.compile("PYTEST_|OMP_NUM_THREADS|TORCHINDUCTOR_COMPILE_THREADS")
    environment = {name: value for name, value in os.environ.items() if not own.match(name)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=root,
        env={**environment, "LOSSOPS_GPU_REPORT": str(path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1, 2, 5), done.stdout + done.stderr
    assert said in done.stdout, done.stdout + done.stderr
    reports = root / "reports.txt"
    written = len(reports.read_text().splitlines()) if reports.exists() else 0
    assert written == path.exists(), f"{written} processes wrote a report"
    return json.loads(path.read_text()) if path.exists() else None
