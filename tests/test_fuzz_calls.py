"""A few of the calls that fuzz_calls.py makes by the million."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_fuzz_calls(device: str) -> None:
    script = Path(__file__).with_name("fuzz_calls.py")
    done = subprocess.run(
        [sys.executable, str(script), "--calls=4000", "--seed=1000000000", f"--device={device}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "4000 calls" in done.stdout
