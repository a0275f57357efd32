"""What the last full run of the tests on a GPU showed, and for which sources.

`tests/conftest.py` writes gpu_report.json at the end of such a run; `python tests/gpu_report.py
--check` says whether the file describes the sources that are there. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPORT = Path(__file__).resolve().with_name("gpu_report.json")

# Not tools/: nothing there decides what the tests on a GPU compute, and a change of a release tool
# or of the table of planted faults should not ask for another run on one.
SOURCE_FOLDERS = ("csrc", "src", "tests")
SOURCE_FILES = ("setup.py",)  # the compiler's flags, the architectures
IGNORED_FOLDERS = frozenset({"__pycache__", "build", "dist", "CMakeFiles"})
IGNORED_SUFFIXES = frozenset({".pyc", ".pyo", ".so", ".o", ".a", ".egg-info", ".dist-info"})


def source_files(root: Path) -> Iterator[Path]:
    """The files that a report describes: no build outputs, no dotfiles, not the report itself."""
    yield from (path for name in SOURCE_FILES if (path := root / name).is_file())
    for folder in SOURCE_FOLDERS:
        for parent, folders, files in os.walk(root / folder):
            folders[:] = [name for name in folders if not _ignored(name)]
            for name in files:
                path = Path(parent, name)
                if not _ignored(name) and path.relative_to(root) != Path("tests", REPORT.name):
                    yield path


def _ignored(name: str) -> bool:
    return (
        name.startswith(".")
        or name in IGNORED_FOLDERS
        or os.path.splitext(name)[1] in IGNORED_SUFFIXES
    )


def sources_digest(root: Path = ROOT) -> str:
    """SHA-256 over the sorted relative paths and the contents of the sources under `root`."""
    whole = hashlib.sha256()
    by_name = {path.relative_to(root).as_posix(): path for path in source_files(root)}
    for name in sorted(by_name):
        # Fixed-length digests keep the end of a path apart from the start of its contents.
        whole.update(hashlib.sha256(name.encode()).digest())
        whole.update(hashlib.sha256(by_name[name].read_bytes()).digest())
    return whole.hexdigest()


def check(root: Path = ROOT, report: Path = REPORT) -> tuple[bool, str]:
    """Whether `report` describes the sources under `root` and shows no failure, and why."""
    try:
        found: dict[str, Any] = json.loads(report.read_text())
        tests = found["tests"]
        passed, failed, skipped = tests["passed"], tests["failed"], tests["skipped"]
        described, where = found["sources_sha256"], f"{found['device']}, {found['date']}"
    except FileNotFoundError:
        return False, f"no GPU report: {report.name} does not exist"
    except (ValueError, KeyError, TypeError) as error:
        return False, f"{report.name} is not a GPU report: {type(error).__name__}: {error}"
    counts = f"{passed} passed, {failed} failed, {skipped} skipped on {where}"
    if described != sources_digest(root):
        return False, f"the GPU report is for other sources than these ({counts})"
    if failed != 0 or passed == 0:
        return False, f"the GPU report shows failures: {counts}"
    return True, f"the GPU report describes these sources: {counts}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument(
        "--check",
        action="store_true",
        help="exit with 0 only if the report describes these sources and shows no failure",
    )
    action.add_argument("--digest", action="store_true", help="print the digest of the sources")
    arguments = parser.parse_args()
    if arguments.digest:
        print(sources_digest())
        return 0
    good, answer = check()
    print(answer)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
