"""A program in two processes, by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lossops


def run_two_ranks(program: Path, timeout: int, gpus: bool = False) -> str:
    """What two ranks of the program print, on the CPU or on a GPU each. The test fails if they do,
    or wait."""
    package = str(Path(lossops.__file__).resolve().parents[1])
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node=2", program.name),
        ],
        cwd=program.parent,
        env={
            **os.environ,
            **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        try:
            printed, _ = launcher.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            launcher.terminate()  # and it its ranks, as it would not if it were killed
            printed, _ = launcher.communicate()
            pytest.fail(f"the ranks wait for each other:\n{printed}")
    assert launcher.returncode == 0, printed
    return printed
