"""What has to hold before a release is uploaded, in three parts, each an exit code of 0 or 1.

    python tools/release_checks.py tag v0.1.0      # the version, in CHANGELOG.md and CITATION.cff
    python tools/release_checks.py files dist/*    # one wheel a platform and the sdist, no more,
                                                   # and no link to nowhere on PyPI
    python tools/release_checks.py archs           # the machine code of the installed library

The last one needs `cuobjdump`, on PATH or from the package nvidia-cuda-cuobjdump.
"""

from __future__ import annotations

import argparse
import ast
import email
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MACHINES = ("aarch64", "x86_64")
LARGEST_WHEEL = 10_000_000
SDIST_HAS = ("setup.py", "pyproject.toml", "LICENSE", "csrc/bindings.cpp", "tests", "tools")


def version_of(root: Path) -> str:
    text = (root / "src/lossops/_version.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if not found:
        raise ValueError("src/lossops/_version.py names no version")
    return found[1]


def is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def faults_of_tag(tag: str, root: Path = ROOT) -> list[str]:
    version = version_of(root)
    faults = [] if tag == f"v{version}" else [f"the tag is {tag}, the version {version}"]
    if f"\nversion: {version}\n" not in (root / "CITATION.cff").read_text():
        faults.append(f"CITATION.cff does not name the version {version}")
    changelog = (root / "CHANGELOG.md").read_text()
    section = re.search(
        rf"^## \[{re.escape(version)}\] - (.+)\n((?:(?!## \[).*\n?)*)", changelog, re.MULTILINE
    )
    if not section:
        return [*faults, f"CHANGELOG.md has no section '## [{version}] - DATE'"]
    if not is_date(section[1]):
        faults.append(f"the section of {version} in CHANGELOG.md has no date, but {section[1]!r}")
    if not re.search(r"^- \S", section[2], re.MULTILINE):
        faults.append(f"the section of {version} in CHANGELOG.md is empty")
    return faults


# Targets of links and images: inline, by reference, and in HTML.
LINK = re.compile(
    r"\]\(\s*<?([^)\s>]*)|^ {0,3}\[[^]]+\]:\s*<?([^\s>]+)|\b(?:href|src)\s*=\s*[\"']([^\"']*)",
    re.MULTILINE,
)


def faults_of_description(name: str, metadata: str) -> list[str]:
    """What PyPI would show of METADATA or PKG-INFO and lead nowhere: all that is not an address."""
    message = email.message_from_string(metadata)
    faults = []
    if message["Description-Content-Type"] != "text/markdown":
        faults.append(f"{name} has no description in Markdown")
    urls = [line.partition(",")[0] for line in message.get_all("Project-URL") or []]
    if "Repository" not in urls:
        faults.append(f"{name} names no Repository: [project.urls] in pyproject.toml")
    text = re.sub(r"^(```|~~~).*?^\1", "", message.get_payload(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(`+)[^`]+\1", "", text)
    targets = ["".join(groups) for groups in LINK.findall(text)]
    return faults + [
        f"{name} has a link to {target or 'nothing'}"
        for target in targets
        if not re.match(r"https?://|mailto:", target)
    ]


def faults_of_wheel(path: Path) -> list[str]:
    faults = []
    if path.stat().st_size >= LARGEST_WHEEL:
        faults.append(f"{path.name} has {path.stat().st_size:,} bytes")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        [folder] = {name.partition("/")[0] for name in names if name.endswith(".dist-info/WHEEL")}
        tags = re.findall(r"^Tag: (\S+)", wheel.read(f"{folder}/WHEEL").decode(), re.MULTILINE)
        faults += faults_of_description(path.name, wheel.read(f"{folder}/METADATA").decode())
    if {path.stem.split("-", 2)[2]} != set(tags):
        faults.append(f"{path.name} has the tags {', '.join(tags)} inside")
    faults += [
        f"{path.name} has {name}"
        for name in names
        if not re.match(r"lossops(/|-[^/]+\.dist-info/)", name)
    ]
    if [name for name in names if ".so" in Path(name).name] != ["lossops/_C.so"]:
        faults.append(f"{path.name} has other libraries than lossops/_C.so")
    return faults


def faults_of_files(paths: list[Path], root: Path = ROOT) -> list[str]:
    version = version_of(root)
    wheels = {f"lossops-{version}-py3-none-manylinux_2_28_{machine}.whl" for machine in MACHINES}
    sdist = f"lossops-{version}.tar.gz"
    there = {path.name for path in paths}
    faults = [f"{name} is missing" for name in sorted({*wheels, sdist} - there)]
    faults += [f"{name} is too many" for name in sorted(there - {*wheels, sdist})]
    for path in paths:
        if path.name in wheels:
            faults += faults_of_wheel(path)
        elif path.name == sdist:
            with tarfile.open(path) as archive:
                packed = {name.partition("/")[2] for name in archive.getnames()}
                about = archive.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
                assert about is not None
                faults += faults_of_description(sdist, about.read().decode())
            faults += [f"{sdist} lacks {name}" for name in SDIST_HAS if name not in packed]
            faults += [f"{sdist} has {name}" for name in sorted(packed) if name.endswith(".so")]
    return faults


def code_in(library: Path) -> tuple[set[str], set[str]]:
    """The architectures of the machine code and of the PTX in a library, as 9.0."""
    patterns = ("nvidia/cu*/bin/cuobjdump", "nvidia/cuda_cuobjdump/bin/cuobjdump")
    packaged = [p for entry in sys.path for pattern in patterns for p in Path(entry).glob(pattern)]
    program = shutil.which("cuobjdump") or next(map(str, packaged), None)
    if program is None:
        raise FileNotFoundError("no cuobjdump: pip install nvidia-cuda-cuobjdump")

    def listed(option: str) -> set[str]:
        command = [program, option, str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = re.findall(r"\.sm_(\d+)(\d)\.(?:cubin|ptx)", done.stdout)
        return {f"{major}.{minor}" for major, minor in found}

    return listed("--list-elf"), listed("--list-ptx")


def wanted_archs(root: Path = ROOT) -> list[str]:
    """DEFAULT_CUDA_ARCHS of setup.py."""
    for node in ast.parse((root / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DEFAULT_CUDA_ARCHS":
            return list(ast.literal_eval(node.value))
    raise ValueError("setup.py has no DEFAULT_CUDA_ARCHS")


def faults_of_archs() -> list[str]:
    command = [sys.executable, "-m", "lossops.info", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    said = report["build"]["cuda_archs"].split(";")
    machine_code, ptx = code_in(Path(report["library"]))
    print(
        f"lossops.info: {';'.join(said)}; in the file: {sorted(machine_code, key=float)}, PTX {ptx}"
    )
    faults = []
    if {arch.removesuffix("+PTX") for arch in said} != machine_code:
        faults.append("lossops.info and the file differ in machine code")
    if {arch.removesuffix("+PTX") for arch in said if arch.endswith("+PTX")} != ptx:
        faults.append("lossops.info and the file differ in PTX")
    if machine_code != set(wanted_archs()):
        faults.append(f"a release has {', '.join(wanted_archs())}")
    if ptx != {wanted_archs()[-1]}:
        faults.append(f"a release has PTX for {wanted_archs()[-1]}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("tag").add_argument("tag")
    parts.add_parser("files").add_argument("paths", nargs="+", type=Path)
    parts.add_parser("archs")
    arguments = parser.parse_args()
    if arguments.part == "tag":
        faults = faults_of_tag(arguments.tag)
    elif arguments.part == "files":
        faults = faults_of_files(arguments.paths)
    else:
        faults = faults_of_archs()
    for fault in faults:
        print(fault, file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
