"""Millions of random, mostly wrong calls: `tests/random_calls.py` in one process after another.

    python tools/fuzz_calls.py [--calls N] [--seed S] [--device cpu|cuda] [--batch N]

A process makes `--batch` calls. Each line that it reports is a finding. Its death is a finding too,
and the next process goes on behind the call that did it. Each finding is printed with its seed.
Ends with 1 where there is any.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "random_calls.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first call")
    parser.add_argument("--batch", type=int, default=50_000, help="calls of a child process")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    start = time.time()
    tally: Counter[str] = Counter()
    findings = []
    seed, end = options.seed, options.seed + options.calls
    while seed < end:
        count = min(options.batch, end - seed)
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(seed), str(count), options.device],
            capture_output=True,
            text=True,
            errors="replace",
            env=os.environ | {"LOSSOPS_CHECK_TARGETS": "1"},
            check=False,
        )
        for line in done.stdout.splitlines():
            record = json.loads(line)
            if "tally" in record:
                tally.update(record["tally"])
            else:
                findings.append(record)
        if done.returncode == 0:
            seed += count
        else:
            numbers = re.findall(r"\r(\d+)", done.stderr)
            last = int(numbers[-1]) if numbers else seed
            rest = done.stderr[done.stderr.rfind(str(last)) :][-500:]
            findings.append({"seed": last, "wrong": f"died: {done.returncode}", "message": rest})
            tally["died"] += 1
            seed = last + 1
    for record in findings:
        print(json.dumps(record))
    kinds = Counter(record["wrong"] for record in findings)
    seconds = time.time() - start
    print(f"{options.calls} calls on {options.device} in {seconds:.0f} s: {dict(tally)}")
    print(f"{len(findings)} findings {dict(kinds) if kinds else ''}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
