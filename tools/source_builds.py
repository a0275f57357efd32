"""Does the source build wherever it should? Each way of pip's, from a clean environment.

    python tools/source_builds.py [--only 'editable*' ...] [--cuda-home FOLDER] [--write FILE.md]

Copies the sources and makes a virtual environment for each way, without the variables of this
process (but pip's own, CC, CXX and MAX_JOBS), builds, installs, and calls the losses from another
folder. Ways with CUDA compile for TORCH_CUDA_ARCH_LIST, 9.0 by default; no GPU is needed. Two ways
have to fail, and say why. Prints a table, and ends with 1 where anything went otherwise, or where a
way that --only names could not be gone here.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
HEADER = "| way | CUDA compiler | result | minutes |\n|---|---|---|---|"
SYSTEM_PATH = "/usr/bin:/bin"
TORCH = "torch==2.13.0"  # as in pyproject.toml; the newest one has to be fetched with its CUDA
OLDEST_TORCH = "torch==2.10.*"
TOOLS = ("setuptools>=77", "ninja")
# As in .github/workflows/test.yml.
PYPI_CUDA = (
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
)

SMOKE = """
import pathlib, torch, lossops, torch.nn.functional as F
x = torch.randn(64, 33, requires_grad=True)
t, p = torch.randint(33, (64,)), torch.randn(64, 33).softmax(1)
for ours, theirs, target in (
    (lossops.cross_entropy, F.cross_entropy, t),
    (lossops.mse_loss, F.mse_loss, p),
    (lambda i, q: lossops.kl_div(i.log_softmax(1), q, reduction="batchmean"),
     lambda i, q: F.kl_div(i.log_softmax(1), q, reduction="batchmean"), p),
):
    values = [loss(x, target) for loss in (ours, theirs)]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*(torch.autograd.grad(value, x)[0] for value in values))
print(pathlib.Path(lossops.__file__).resolve())
"""


class Way(NamedTuple):
    """A way to build and install from source, and what has to come of it."""

    name: str
    install: tuple[str, ...]  # arguments of pip install; SDIST stands for the archive
    before: tuple[str, ...] = (TORCH,)  # what the environment has by then
    cuda: str = "off"  # off, none, system or pypi
    asked: str = "auto"  # LOSSOPS_CUDA, where CUDA is not off
    fails_with: str = ""  # a pattern of the message, where it has to fail


NO_ISOLATION = ("--no-build-isolation", ".")
WAYS = [
    Way("isolated", (".",)),
    Way("isolated, no nvcc", (".",), cuda="none"),
    Way("no isolation", NO_ISOLATION, (TORCH, *TOOLS)),
    Way("no isolation, the oldest torch", NO_ISOLATION, (OLDEST_TORCH, *TOOLS)),
    Way("editable", ("-e", ".")),
    Way("editable, no isolation", ("--no-build-isolation", "-e", "."), (TORCH, *TOOLS)),
    Way("sdist", ("SDIST",), (TORCH, "build")),
    Way("sdist, no isolation", ("--no-build-isolation", "SDIST"), (TORCH, *TOOLS, "build")),
    Way(
        "no isolation, nvcc demanded",
        NO_ISOLATION,
        (TORCH, *TOOLS),
        cuda="none",
        asked="1",
        fails_with="LOSSOPS_CUDA=1, but no working nvcc was found",
    ),
    Way(
        "no isolation, no torch",
        NO_ISOLATION,
        TOOLS,
        fails_with="building needs torch>=2.10, and importing it failed",
    ),
    Way("isolated, system CUDA", (".",), cuda="system"),
    Way(
        "editable, no isolation, system CUDA",
        ("--no-build-isolation", "-e", "."),
        (TORCH, *TOOLS),
        "system",
    ),
    Way("no isolation, PyPI's CUDA", NO_ISOLATION, (TORCH, *TOOLS, *PYPI_CUDA), "pypi", "1"),
]


def copy_sources(folder: Path) -> None:
    """The files that git knows, or all that are no build's, where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
    else:
        junk = shutil.ignore_patterns(
            "build", "dist", ".venv*", "*.so", "*.egg-info", "__pycache__"
        )
        shutil.copytree(ROOT, folder, ignore=junk, dirs_exist_ok=True)


def system_cuda(given: Path | None) -> Path | None:
    """The folder of the toolkit whose nvcc is on PATH, or the given one."""
    if given is not None:
        return given
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    dry_run = subprocess.run(
        [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"^#\$ TOP=(.+)$", dry_run.stderr, re.MULTILINE)
    return Path(os.path.abspath(found[1])) if found else None


class Failure(Exception):
    """A command that ended with another code than 0, or a result that is not as it has to be."""


def build(way: Way, folder: Path, cuda_home: Path | None) -> str:
    """Goes the way in this empty folder, and says what came of it."""
    tree, env_folder, home = folder / "tree", folder / "env", folder / "home"
    for new in (tree, home):
        new.mkdir()
    copy_sources(tree)
    kept = ("CC", "CXX", "MAX_JOBS")
    env = {k: v for k, v in os.environ.items() if k in kept or k.startswith("PIP_")}
    env |= {"HOME": str(home), "PATH": f"{env_folder}/bin:{SYSTEM_PATH}", "LANG": "C.UTF-8"}
    env["TORCH_CUDA_ARCH_LIST"] = os.environ.get("TORCH_CUDA_ARCH_LIST") or "9.0"
    env["LOSSOPS_CUDA"] = "0" if way.cuda == "off" else way.asked
    if way.cuda == "system":
        env["CUDA_HOME"] = str(cuda_home)
    python = env_folder / "bin/python"

    def run(*command: str | Path, cwd: Path = tree) -> subprocess.CompletedProcess[str]:
        words = [str(part) for part in command]
        done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Failure(f"{' '.join(words)}\n{done.stdout[-6000:]}{done.stderr[-6000:]}")
        return done

    pip = (python, "-m", "pip", "--disable-pip-version-check", "install")
    run(sys.executable, "-m", "venv", env_folder)
    run(*pip, "--quiet", *way.before)
    arguments = way.install
    if "SDIST" in arguments:
        isolation = () if "--no-build-isolation" not in arguments else ("--no-isolation",)
        run(python, "-m", "build", "--sdist", *isolation, ".")
        [archive] = (tree / "dist").glob("*.tar.gz")
        shutil.move(archive, folder)
        arguments = tuple(str(folder / archive.name) if a == "SDIST" else a for a in arguments)
    try:
        pip_run = run(*pip, "--verbose", *arguments, cwd=home if "SDIST" in way.install else tree)
    except Failure as failure:
        said = re.search(f"lossops: .*{re.escape(way.fails_with)}", str(failure))
        if way.fails_with and said:
            return f"fails as it has to: `{way.fails_with}`"
        raise
    if way.fails_with:
        raise Failure("it has to fail, and did not")
    loud = "NO CUDA COMPILER FOUND" in pip_run.stdout + pip_run.stderr
    if loud != (way.cuda == "none"):
        raise Failure(f"the warning about a missing nvcc was {'' if loud else 'not '}given")

    where = Path(run(python, "-c", SMOKE, cwd=home).stdout.split()[-1])
    parent = tree if "-e" in way.install else env_folder
    if parent.resolve() not in where.parents:
        raise Failure(f"lossops is imported from {where}, not from {parent}")
    report = json.loads(run(python, "-m", "lossops.info", "--json", cwd=home).stdout)
    version = report["build"]["cuda"]
    if report["load_error"] or (version is None) == (way.cuda in ("system", "pypi")):
        raise Failure(f"lossops.info: {report['load_error']}, CUDA {version}")
    size = f"{report['library_size'] / 1e6:.1f} MB"
    if version is None:
        return f"runs, CPU only, {size}"
    return f"runs, CUDA {version} for {report['build']['cuda_archs']}, {size}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names of ways")
    parser.add_argument("--cuda-home", type=Path, help="the system's CUDA; else nvcc's on PATH")
    parser.add_argument("--write", type=Path, help="a Markdown file for the table")
    parser.add_argument("--list", action="store_true", help="only name the ways")
    arguments = parser.parse_args()
    ways = [w for w in WAYS if any(fnmatch.fnmatch(w.name, p) for p in arguments.only)]
    if arguments.list or not ways:
        print("\n".join(way.name for way in WAYS))
        return 0 if arguments.list else 2
    cuda_home = system_cuda(arguments.cuda_home)
    lines, good = HEADER.split("\n"), True
    print(HEADER, flush=True)
    for way in ways:
        start = time.time()
        if way.cuda == "system" and cuda_home is None:
            result = "not run: no nvcc here"
        elif way.cuda in ("none", "pypi") and shutil.which("nvcc", path=SYSTEM_PATH):
            result = f"not run: there is an nvcc in {SYSTEM_PATH}"
        else:
            with tempfile.TemporaryDirectory(prefix="lossops-source-") as folder:
                try:
                    result = build(way, Path(folder), cuda_home)
                except Failure as failure:
                    print(f"{way.name}: {failure}", file=sys.stderr)
                    result, good = "FAILED", False
        good &= not result.startswith("not run") or "*" in arguments.only
        compiler = {"off": "switched off", "none": "none", "pypi": "PyPI's packages"}
        cells = (way.name, compiler.get(way.cuda, "the system's"), result)
        lines.append(f"| {' | '.join(cells)} | {(time.time() - start) / 60:.1f} |")
        print(lines[-1], flush=True)
    if arguments.write:
        arguments.write.write_text("\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
