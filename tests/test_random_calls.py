"""A few of the calls of random_calls.py, of which tools/fuzz_calls.py makes millions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_random_calls(device: str) -> None:
    script = Path(__file__).with_name("random_calls.py")
    done = subprocess.run(
        [sys.executable, str(script), "1000000000", "4000", device],
        capture_output=True,
        text=True,
        env=os.environ | {"LOSSOPS_CHECK_TARGETS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    *findings, last = map(json.loads, done.stdout.splitlines())
    assert findings == []
    assert sum(last["tally"].values()) == 4000
    assert last["tally"]["value"] > 100, "most calls are meant to be wrong, not all"
