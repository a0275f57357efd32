"""The wheel and the source tree: one file for every torch, one list of sources, one version."""

from __future__ import annotations

import ast
import email
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lossops

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(lossops.__file__).resolve().parent
LIBRARY = PACKAGE / "_C.so"
CUDA_VERSION = json.loads(torch.ops.lossops.build_info())["cuda"]


def source_file(name: str) -> Path:
    path = ROOT / name
    if not path.is_file():
        pytest.skip(f"no {name} beside tests/: not a source tree")
    return path


def run_python(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ)
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), env.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, env=env
    )


# --- the source tree ----------------------------------------------------------------------------


def lists_of_setup() -> dict[str, list[str]]:
    """The module-level lists of strings of setup.py."""
    found = {}
    for node in ast.parse(source_file("setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def list_of_cmake(name: str) -> list[str]:
    text = re.sub(r"#.*", "", source_file("CMakeLists.txt").read_text())
    match = re.search(rf"\bset\(\s*{name}\s+([^)]*)\)", text)
    assert match, f"CMakeLists.txt has no set({name} ...)"
    return match[1].replace('"', "").replace("${CMAKE_CURRENT_SOURCE_DIR}/", "").split()


@pytest.mark.parametrize("kind", ["CPU", "CUDA"])
def test_source_lists_are_equal(kind: str) -> None:
    ours = lists_of_setup()[f"{kind}_SOURCES"]
    assert sorted(list_of_cmake(f"LOSSOPS_{kind}_SOURCES")) == sorted(ours)


# What `nvcc --list-gpu-code` prints, the names with letters left out.
TOOLKITS = {
    "12.4": "50 52 53 60 61 62 70 72 75 80 86 87 89 90",
    "12.8": "50 52 53 60 61 62 70 72 75 80 86 87 89 90 100 101 120",
    "12.9": "50 52 53 60 61 62 70 72 75 80 86 87 89 90 100 101 103 120 121",
    "13.0": "75 80 86 87 88 89 90 100 103 110 120 121",
}


@pytest.mark.parametrize("version", TOOLKITS)
def test_flags_follow_the_toolkit(version: str, tmp_path: Path) -> None:
    """Before 12.9 as drivers from 525 on can read; what a compiler does not know is left out."""
    spec = importlib.util.spec_from_file_location("lossops_setup", source_file("setup.py"))
    assert spec and spec.loader
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\nprintf 'sm_%s\\n' " + TOOLKITS[version] + "\n")
    nvcc.chmod(0o755)
    toolkit = setup.Toolkit(tmp_path, version, None)
    by_size = ["--compress-mode=size", "-DLOSSOPS_COMPRESSED_BY_SIZE"]
    flags = by_size if version in ("12.9", "13.0") else ["-Xfatbin=-compress-all"]
    assert setup.compression_flags(toolkit) == flags
    archs = "7.5 8.0 9.0" if version == "12.4" else "7.5 8.0 9.0 10.0 12.0"
    assert setup.default_archs(toolkit) == f"{archs}+PTX".split()


def test_source_lists_name_every_source() -> None:
    lists = lists_of_setup()
    named = {*lists["BINDING_SOURCES"], *lists["CPU_SOURCES"], *lists["CUDA_SOURCES"]}
    there = {
        path.relative_to(ROOT).as_posix()
        for pattern in ("*.cpp", "*.cu")
        for path in (ROOT / "csrc").rglob(pattern)
        if (ROOT / "csrc" / "tests") not in path.parents
    }
    together = "csrc/kernels/all_kernels.cu"
    assert there - named == {together}
    includes = re.findall(r'^#include "(.+)"$', source_file(together).read_text(), re.M)
    assert [f"csrc/{path}" for path in includes] == lists["CUDA_SOURCES"]


def test_every_package_is_packed() -> None:
    match = re.search(r"^packages = (\[.*\])$", source_file("pyproject.toml").read_text(), re.M)
    assert match
    source = ROOT / "src"
    there = {path.parent.relative_to(source) for path in source.rglob("__init__.py")}
    assert sorted(ast.literal_eval(match[1])) == sorted(".".join(path.parts) for path in there)


def code_of(path: Path) -> str:
    """C++ without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


def c_sources() -> list[Path]:
    source_file("setup.py")
    found = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cuh", ".cpp", ".cu")]
    assert found
    return found


def test_includes_point_downwards() -> None:
    """Only the bindings include torch; the losses' mathematics includes neither torch nor CUDA."""
    for path in c_sources():
        folder = path.relative_to(ROOT / "csrc").parts[0]
        included = re.findall(r'#\s*include\s*[<"]([^>"]+)[>"]', code_of(path))
        if folder not in ("bindings.cpp", "bindings"):
            wrong = [name for name in included if re.match(r"(torch|ATen|c10|bindings)/", name)]
            assert not wrong, f"{path} includes {wrong}"
        if folder in ("losses", "cpu"):
            wrong = [name for name in included if re.match(r"(cuda|cub/|thrust/|kernels/)", name)]
            assert not wrong, f"{path} includes {wrong}"
        if folder == "losses":
            wrong = [name for name in included if re.match(r"(\.\./)?(cpu|kernels)/", name)]
            assert not wrong, f"{path} includes {wrong}"


def test_no_atomics_and_no_synchronisation() -> None:
    """Float atomics make results change; a synchronisation cannot be captured in a graph."""
    forbidden = re.compile(
        r"\batomic(Add|Sub|CAS|Exch)\b|cuda(Device|Stream|Event)Synchronize|"
        r"\bcudaMemcpy\b|\bcudaMalloc\b|\bcudaFree\b"
    )
    for path in c_sources():
        if "tests" in path.relative_to(ROOT / "csrc").parts:
            continue
        match = forbidden.search(code_of(path))
        assert match is None, f"{path} has {match[0]}"


def test_version_is_one() -> None:
    text = source_file("src/lossops/_version.py").read_text()
    match = re.search(r'__version__ = "([^"]+)"', text)
    assert match
    assert lossops.__version__ == match[1]
    for path in (ROOT / "setup.py", ROOT / "pyproject.toml", *(ROOT / "src").rglob("*.py")):
        if path.name == "_version.py":
            continue
        assert match[1] not in path.read_text(), f"{path} names the version too"


# --- the library --------------------------------------------------------------------------------


def test_library_is_the_only_one() -> None:
    assert sorted(p.name for p in PACKAGE.rglob("*.so")) == ["_C.so"]
    assert (PACKAGE / "py.typed").is_file()


def test_build_info() -> None:
    build = json.loads(torch.ops.lossops.build_info())
    assert set(build) >= {"cuda", "cuda_archs", "compiler", "torch_target"}
    assert build["torch_target"] == "2.10"
    assert build["compiler"]
    if build["cuda"] is not None:
        assert re.fullmatch(r"\d+\.\d+", build["cuda"])
        assert re.search(r"\d+\.\d", build["cuda_archs"])


# --- the wheel ----------------------------------------------------------------------------------


def dist_info(name: str) -> str:
    found = sorted(PACKAGE.parent.glob("lossops-*.dist-info"))
    if not found:
        pytest.skip("lossops is not installed from a wheel")
    return (found[0] / name).read_text()


def test_wheel_metadata() -> None:
    metadata = email.message_from_string(dist_info("METADATA"))
    assert metadata["Name"] == "lossops"
    assert metadata["Version"] == lossops.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "BSD-3-Clause"
    needed = [r for r in metadata.get_all("Requires-Dist") or [] if "extra ==" not in r]
    assert [r.replace(" ", "") for r in needed] == ["torch>=2.10"]


def test_wheel_fits_every_python() -> None:
    wheel = email.message_from_string(dist_info("WHEEL"))
    assert wheel["Root-Is-Purelib"] == "false"
    for tag in wheel.get_all("Tag"):
        assert re.fullmatch(r"py3-none-\w+", tag)
        assert not tag.endswith("-any")


def test_wheel_contents() -> None:
    files = [line.split(",")[0] for line in dist_info("RECORD").splitlines()]
    packaged = {Path(name).name for name in files if name.startswith("lossops/")}
    assert packaged >= {"__init__.py", "_C.so", "functional.py", "nn.py", "py.typed"}
    assert "lossops/_ops/losses.py" in files
    assert "lossops/bench/__main__.py" in files
    for name in files:
        assert name.startswith(("lossops/", "lossops-")), f"{name} is outside the package"


# --- the workflows --------------------------------------------------------------------------------


def test_actions_are_pinned() -> None:
    """By the full hash of a commit, with the version beside it; and one hash for each action."""
    folder = source_file("setup.py").parent / ".github" / "workflows"
    if not folder.is_dir():
        pytest.skip("no workflows beside tests/: a source archive")
    pins: dict[str, set[str]] = {}
    for path in folder.glob("*.yml"):
        for line in re.findall(r"^.*\buses:.*$", path.read_text(), re.MULTILINE):
            if "uses: ./" in line:
                continue
            match = re.search(r"uses: ([\w./-]+)@([0-9a-f]{40} # v\d+(\.\d+)*)$", line)
            assert match, f"{path.name}: {line.strip()}"
            pins.setdefault(match[1], set()).add(match[2])
    assert pins
    assert [name for name, found in pins.items() if len(found) > 1] == []


# --- what a user meets --------------------------------------------------------------------------


def test_info() -> None:
    done = run_python("-m", "lossops.info")
    assert done.returncode == 0, done.stderr
    text = done.stdout.lower()
    for needed in (
        lossops.__version__,
        str(torch.__version__),
        "python",
        "cuda",
        "architectures",
        "driver",
        "device",
        "load error",
    ):
        assert needed.lower() in text, f"{needed!r} is not in the report:\n{done.stdout}"
    build = json.loads(torch.ops.lossops.build_info())
    if build["cuda"]:
        assert build["cuda"] in text
        assert build["cuda_archs"].lower() in text
    if torch.cuda.is_available():
        assert torch.cuda.get_device_name(0).lower() in text


def without_library(folder: Path) -> Path:
    """A copy of the package that has lost its library; returns what to put on the path."""
    shutil.copytree(PACKAGE, folder / "lossops", ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    return folder


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_library_that_cannot_load(damage: str, tmp_path: Path) -> None:
    """`import lossops` says why and what to do; so does the report, without failing."""
    path = without_library(tmp_path)
    if damage == "damaged":
        (path / "lossops" / "_C.so").write_bytes(b"not a library")
    done = run_python("-c", "import lossops", path=path)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert "_C.so" in done.stderr
    assert re.search(r"install", done.stderr, re.IGNORECASE), done.stderr
    report = run_python("-m", "lossops.info", path=path)
    assert report.returncode == 0, report.stderr
    assert lossops.__version__ in report.stdout
    assert re.search(r"load error:\s+\S*ImportError|load error:.*_C\.so", report.stdout, re.DOTALL)


FAKE_DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { *version = 11040; return 0; }
int cuGetProcAddress_v2(const char* name, void** found, int version, unsigned long flags,
                        void* how) {
  *found = strcmp(name, "cuDriverGetVersion") == 0      ? (void*)cuDriverGetVersion
           : strcmp(name, "cuInit") == 0                ? (void*)cuInit
           : strncmp(name, "cuGetProcAddress", 16) == 0 ? (void*)cuGetProcAddress_v2
                                                        : 0;
  return *found ? 0 : 500;
}
"""


@pytest.mark.skipif(not CUDA_VERSION, reason="needs a lossops that was built with CUDA")
@pytest.mark.parametrize("driver", ["old", "none"])
def test_driver_that_cannot_be_used(
    driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence with the versions and the remedy; the operators say it where they are called."""
    source = tmp_path / "driver.c"
    source.write_text(FAKE_DRIVER if driver == "old" else "")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    done = run_python("-m", "lossops.info", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    if driver == "none":
        assert report["cuda_problem"] == "no NVIDIA driver is found"
    else:
        toolkit = tuple(map(int, CUDA_VERSION.split(".")))
        oldest = "580" if toolkit >= (13, 0) else "550.54" if toolkit >= (12, 9) else "525"
        assert report["cuda_problem"] == (
            f"the NVIDIA driver knows CUDA 11.4 and lossops is built with CUDA {CUDA_VERSION}: "
            f"update the driver to {oldest} or newer"
        )


def test_import_without_torch() -> None:
    done = run_python("-c", "import sys; sys.modules['torch'] = None; import lossops")
    assert done.returncode == 1
    assert "torch cannot be imported" in done.stderr
    assert "pip install 'torch>=2.10'" in done.stderr


def test_import_is_quiet_and_light() -> None:
    """No output, no warning, no CUDA context, no compiler imported."""
    program = (
        "import sys, warnings; warnings.simplefilter('error', UserWarning)\n"
        "import torch; before = set(sys.modules)\n"
        "import lossops\n"
        "assert not torch.cuda.is_initialized()\n"
        "new = {n.split('.')[0] for n in set(sys.modules) - before} | set()\n"
        "assert not new & {'triton', 'numpy', 'setuptools'}, new\n"
        "assert 'torch._inductor' not in set(sys.modules) - before\n"
    )
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_import_loads_one_file_and_asks_no_network(tmp_path: Path) -> None:
    """The packaged library, by its absolute path, from wherever Python was started."""
    for decoy in ("_C.so", "lossops/_C.so"):
        (tmp_path / decoy).parent.mkdir(exist_ok=True)
        (tmp_path / decoy).write_bytes(b"not a library")
    program = (
        "import sys, torch\n"
        "loaded, network, ran = [], [], []\n"
        "def audit(event, arguments):\n"
        "    if event == 'ctypes.dlopen': loaded.append(arguments[0])\n"
        "    if event.startswith('socket.') or event == 'urllib.Request': network.append(event)\n"
        "    if event in ('subprocess.Popen', 'os.system', 'os.exec'): ran.append(event)\n"
        "sys.addaudithook(audit)\n"
        "import lossops, lossops.info\n"
        "lossops.mse_loss(torch.ones(3), torch.zeros(3))\n"
        "assert not network and not ran, (network, ran)\n"
        "from lossops import _extension\n"
        "assert [str(path) for path in loaded] == [str(_extension.path())], loaded\n"
        "assert _extension.path().is_absolute()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(tmp_path),
            "PYTHONPATH": str(Path(lossops.__file__).resolve().parents[1]),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda
def test_environment_switches_the_check_of_targets_on() -> None:
    program = (
        "import torch, lossops\n"
        "x = torch.zeros(2, 3, device='cuda')\n"
        "t = torch.tensor([0, 9], device='cuda')\n"
        "try:\n"
        "    print(lossops.cross_entropy(x, t).item())\n"
        "except IndexError as error:\n"
        "    print('IndexError', error)\n"
    )
    for value, expected in (("1", "IndexError"), ("0", "nan"), ("", "nan")):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "LOSSOPS_CHECK_TARGETS": value},
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


def test_library_runs_without_a_visible_gpu() -> None:
    """The same file, on a machine that has a CUDA torch and no GPU, or neither."""
    program = (
        "import torch, lossops\n"
        "assert not torch.cuda.is_available()\n"
        "print(lossops.mse_loss(torch.ones(3), torch.zeros(3)).item())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1.0"


def test_integrations_are_imported_on_demand() -> None:
    """Their packages are no requirements of lossops."""
    code = (
        "import sys, lossops; names = ('lossops.integrations', 'transformers', 'trl', 'peft'); "
        "assert not [name for name in names if name in sys.modules]"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
