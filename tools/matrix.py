"""Does one wheel run everywhere? The CPU tests in a clean environment for each Python and torch.

    python tools/matrix.py dist/lossops-*.whl [--pairs 3.10:2.10 3.13:2.15] [--write docs/matrix.md]

Needs the interpreters on PATH as python3.10 and so on, and some 6 GB for one environment at a time:
torch comes from where pip finds it, mostly a build with CUDA, which then runs without a GPU. Prints
a table, and ends with 1 where a test failed or an environment could not be made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAIRS = (
    *("3.10:2.10", "3.11:2.11", "3.12:2.12", "3.11:2.13", "3.13:2.14", "3.13:2.15"),
    *("3.14:2.14", "3.15:2.15", "3.13t:2.10"),
)
HEADER = "| Python | torch | passed | failed | skipped | minutes |\n|---|---|---|---|---|---|"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LD_PRELOAD")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def must(*command: str | Path) -> str:
    done = run(*command)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}:\n{done.stdout[-2000:]}")
    return done.stdout


def row_of(python: str, torch: str, wheel: Path, folder: Path) -> tuple[str, bool]:
    """The table's row of one environment, and whether all was well."""
    start = time.time()
    interpreter = shutil.which(f"python{python}")
    if interpreter is None:
        return f"| {python} | {torch} | python{python} is not on PATH | | | |", False
    try:
        must(interpreter, "-m", "venv", folder)
        pip = (folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "-q", "install")
        pip += ("--prefer-binary",)  # of what the tests need, the newest may have no wheel here
        must(*pip, f"torch=={torch}.*")
        must(*pip, f"{wheel}[test]")
        report = json.loads(must(folder / "bin/python", "-m", "lossops.info", "--json"))
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return f"| {python} | {torch} | could not be installed | | | |", False
    tests = run(
        *(folder / "bin/python", "-m", "pytest", "-q", "-n", "auto", "--dist=worksteal"),
        *("-p", "no:cacheprovider", "--disable-warnings", "--tb=short", "tests"),
    )
    counts = {
        word: int((re.findall(rf"(\d+) {word}", tests.stdout) or ["0"])[-1])
        for word in ("passed", "failed", "skipped", "error")
    }
    failed = counts["failed"] + counts["error"]
    if tests.returncode != 0:
        print(tests.stdout[-6000:], file=sys.stderr)
    cuda = f" (CUDA {report['torch_cuda']})" if report["torch_cuda"] else ""
    cells = (
        report["python"].split()[0],
        report["torch"] + cuda,
        counts["passed"],
        failed,
        counts["skipped"],
        f"{(time.time() - start) / 60:.1f}",
    )
    return f"| {' | '.join(map(str, cells))} |", tests.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--pairs", nargs="+", default=PAIRS, metavar="PYTHON:TORCH")
    parser.add_argument("--write", type=Path, help="a Markdown file for the table")
    arguments = parser.parse_args()
    wheel = arguments.wheel.resolve()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    title = (
        f"{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB, SHA-256 `{digest}`, "
        f"{datetime.now(timezone.utc):%Y-%m-%d}"
    )
    lines, good = [title, "", *HEADER.split("\n")], True
    print("\n".join(lines), flush=True)
    for pair in arguments.pairs:
        python, torch = pair.split(":")
        with tempfile.TemporaryDirectory(prefix="lossops-matrix-") as folder:
            row, passed = row_of(python, torch, wheel, Path(folder, "env"))
        print(row, flush=True)
        lines.append(row)
        good &= passed
    if arguments.write:
        arguments.write.write_text("\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
