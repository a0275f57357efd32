"""`python -m lossops.info [--json]`: what a bug report needs. With --plan: see `_plan.py`.

It works, and exits with 0, also where `import lossops` raises: see `_extension.reporting`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import platform
import subprocess
import sys
from typing import Any

from . import _extension, _plan
from ._version import __version__


def collect() -> dict[str, Any]:
    """Everything that the report shows, as plain data. Absent things are None."""
    report: dict[str, Any] = {
        "lossops": __version__,
        "python": sys.version.replace("\n", " "),
        "executable": sys.executable,
        "platform": platform.platform(),
    }
    report.update(_torch())
    report.update(_library())
    report.update(_devices())
    return report


def _torch() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:
        return {"torch": None, "torch_cuda": None, "torch_error": _said(error)}
    return {"torch": str(torch.__version__), "torch_cuda": torch.version.cuda}


def _library() -> dict[str, Any]:
    file = _extension.path()
    report: dict[str, Any] = {"library": str(file)}
    if file.is_file():
        contents = file.read_bytes()
        report["library_size"] = len(contents)
        report["library_sha256"] = hashlib.sha256(contents).hexdigest()

    if _extension.loaded:
        return report | _load()
    # In a process of its own: a damaged library can bring the process down.
    child = subprocess.run(
        [sys.executable, "-m", "lossops.info", "--load"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    try:
        report.update(json.loads(child.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        printed = child.stdout.strip() or "it printed nothing"
        report["load_error"] = f"loading ended the process (status {child.returncode}): {printed}"
    return report


def _load() -> dict[str, Any]:
    try:
        _extension.load()
        import torch

        build = json.loads(torch.ops.lossops.build_info())
        problem = torch.ops.lossops.cuda_problem()
        importlib.import_module("lossops.functional")
    except Exception as error:
        return {"load_error": _said(error)}
    return {"load_error": None, "build": build, "cuda_problem": problem or None}


def _devices() -> dict[str, Any]:
    report: dict[str, Any] = {"driver": _driver(), "devices": []}
    try:
        import torch

        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            report["devices"].append(
                {
                    "name": device.name,
                    "capability": f"{device.major}.{device.minor}",
                    "memory_gib": round(device.total_memory / 2**30, 1),
                }
            )
    except Exception as error:
        report["devices_error"] = _said(error)
    return report


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    try:
        with open("/proc/driver/nvidia/version") as file:
            return file.readline().strip()
    except OSError:
        return None


def text(report: dict[str, Any]) -> str:
    """The report for people: one `name: value` a line."""
    if report["torch"] is None:
        torch_line = f"not importable: {report['torch_error']}"
    else:
        torch_line = f"{report['torch']} ({_cuda(report['torch_cuda'])})"
    library = report["library"]
    if "library_sha256" not in report:
        library += " (missing)"
    lines = [
        ("lossops", report["lossops"]),
        ("python", f"{report['python']} at {report['executable']}"),
        ("platform", report["platform"]),
        ("torch", torch_line),
        ("library", library),
    ]
    if "library_sha256" in report:
        lines.append(("  size", f"{report['library_size']:,} bytes"))
        lines.append(("  sha256", report["library_sha256"]))
    if build := report.get("build"):
        lines.append(("  built with", f"{_cuda(build.get('cuda'))}, {build.get('compiler')}"))
        lines.append(("  architectures", build.get("cuda_archs") or "none (CPU only)"))
        lines.append(("  needs torch", f">= {build.get('torch_target')}"))
        lines.append(("  CUDA", report["cuda_problem"] or "can be used"))
    lines.append(("driver", report["driver"] or "no NVIDIA driver found"))
    for index, device in enumerate(report["devices"]):
        capability, memory = device["capability"], device["memory_gib"]
        lines.append(
            (f"device {index}", f"{device['name']}, capability {capability}, {memory} GiB")
        )
    if not report["devices"]:
        lines.append(("devices", report.get("devices_error", "no CUDA device visible to torch")))
    lines.append(("load error", report["load_error"] or "none"))
    width = max(len(name) for name, _ in lines) + 1
    return "\n".join(f"{name + ':':<{width}} {value}" for name, value in lines)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _cuda(version: str | None) -> str:
    return f"CUDA {version}" if version else "no CUDA"


def main() -> int:
    """Prints the report."""
    parser = argparse.ArgumentParser(prog="python -m lossops.info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    _plan.add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.load:
        print(json.dumps(_load()))
        return 0
    if arguments.plan or arguments.plan_table:
        try:
            print(_plan.answer(arguments))
        except (ValueError, RuntimeError) as error:
            parser.error(str(error))
        return 0
    report = collect()
    print(json.dumps(report, indent=2) if arguments.json else text(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
