"""The examples, for a few steps: they run, and their runs agree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lossops

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# How many runs each compares.
RUNS = {"char_lm": 3, "distill": 2, "grpo": 2, "regression": 2, "segment": 2}


@pytest.mark.parametrize("name", RUNS)
def test_example(name: str, tmp_path: Path) -> None:
    if not EXAMPLES.is_dir():
        pytest.skip("no examples beside tests/: not a source tree")
    pytest.importorskip("matplotlib")
    package = str(Path(lossops.__file__).resolve().parents[1])
    path = tmp_path / "curves.png"
    done = subprocess.run(
        [
            sys.executable,
            str(EXAMPLES / f"{name}.py"),
            "--device=cpu",
            "--steps=3",
            f"--plot={path}",
        ],
        env={**os.environ, "PYTHONPATH": package},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(
        r"^\| [\w. ]+ \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \| \d+ \|$", done.stdout, re.M
    )
    assert len(rows) == RUNS[name], done.stdout
    apart = re.findall(r"differs by at most ([\d.e+-]+) of", done.stdout)
    assert len(apart) == RUNS[name] - 1
    assert all(float(each) < 1e-5 for each in apart), done.stdout
    assert path.stat().st_size > 0


def test_every_example_is_run() -> None:
    if not EXAMPLES.is_dir():
        pytest.skip("no examples beside tests/: not a source tree")
    found = {path.stem for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text()}
    assert found == RUNS.keys()
