"""The tools of a release: what the checks and the audit of the ABI accept, and what they find."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("release_checks", reason="no tools/ beside tests/: not a source tree")

import release_checks
import torch

import lossops

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = Path(lossops.__file__).resolve().with_name("_C.so")
CUDA_VERSION = json.loads(torch.ops.lossops.build_info())["cuda"]


# --- the audit of the ABI -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def abi_audit() -> ModuleType:
    """tools/abi_audit.py, where what it needs is installed (torch-abi-audit: Python 3.11 on)."""
    pytest.importorskip("elftools")
    pytest.importorskip("torch_abi_audit")
    return importlib.import_module("abi_audit")


def test_library_keeps_to_the_stable_abi(abi_audit: ModuleType) -> None:
    """Neither Python, nor a CUDA runtime, nor C++ of torch; every function is in torch 2.10."""
    imports = abi_audit.imports_of(LIBRARY)
    names = {symbol.name for symbol in imports.symbols}
    assert names >= {"torch_call_dispatcher", "aoti_torch_get_data_ptr", "memcpy"}
    assert "libtorch.so" in imports.needed
    assert abi_audit.faults_of(imports) == []


@pytest.mark.parametrize(
    ("name", "version", "weak", "fault"),
    [
        ("_ZN3c1019UndefinedTensorImpl10_singletonE", "", False, "C\\+\\+ of torch"),
        ("_ZN2at4_ops10empty_like4callE", "", True, "C\\+\\+ of torch"),
        ("PyErr_SetString", "", False, "is Python's"),
        ("_Py_Dealloc", "", True, "is Python's"),
        ("aoti_torch_get_current_cuda_stream", "", False, "must be weak"),
        ("torch_exception_get_what", "", True, "came with torch 2.13.0"),
        ("aoti_torch_never_heard_of", "", False, "not in the stable ABI"),
        ("cudaLaunchKernel", "libcudart.so.12", False, "unknown library"),
        ("cublasCreate_v2", "", False, "not in the stable ABI"),
        ("pthread_create", "GLIBC_2.34", False, "newer than manylinux_2_28"),
        ("_ZSt28__throw_bad_array_new_lengthv", "GLIBCXX_3.4.29", False, "newer than manylinux"),
    ],
)
def test_audit_finds_a_symbol(
    name: str, version: str, weak: bool, fault: str, abi_audit: ModuleType
) -> None:
    symbol = abi_audit.Symbol(name, version, weak)
    imports = abi_audit.Imports([symbol], ["libtorch.so"], [])
    [found] = abi_audit.faults_of(imports, manylinux=True)
    assert name in found and re.search(fault, found), found


def test_audit_finds_a_library_and_a_search_path(abi_audit: ModuleType) -> None:
    def faults(*needed: str, path: str = "") -> list[str]:
        imports = abi_audit.Imports([], list(needed), [path] if path else [])
        return abi_audit.faults_of(imports)

    assert faults("libtorch.so", "libc.so.6", "ld-linux-aarch64.so.1") == []
    for name in ("libc10.so", "libcudart.so.12", "libpython3.12.so.1.0", "libtorch_cuda.so"):
        assert faults("libtorch.so", name) == [f"needs {name}"]
    assert "does not need libtorch.so" in faults("libc.so.6")[0]
    assert faults("libtorch.so", path="$ORIGIN/../torch/lib") == [
        "has the search path $ORIGIN/../torch/lib"
    ]


def test_audit_of_a_real_library_that_is_at_fault(abi_audit: ModuleType, tmp_path: Path) -> None:
    """A library that was linked against c10 the common way, through the script itself."""
    source = tmp_path / "bad.cpp"
    source.write_text(
        "namespace c10 { class Warning; void warn(const Warning&); }\n"
        'extern "C" void PyErr_Clear();\n'
        'extern "C" void* bad(c10::Warning& w) { c10::warn(w); PyErr_Clear(); return &w; }\n'
    )
    folder = Path(torch.__file__).parent / "lib"
    bad = tmp_path / "bad.so"
    command = ["c++", "-shared", "-fPIC", source, "-o", bad, f"-L{folder}", "-lc10"]
    subprocess.run([*command, f"-Wl,-rpath,{folder}"], check=True)
    script = ROOT / "tools" / "abi_audit.py"
    done = subprocess.run(
        [sys.executable, script, bad, LIBRARY], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert set(done.stderr.splitlines()) == {
        "bad.so: _ZN3c104warnERKNS_7WarningE is C++ of torch, which changes with every release",
        "bad.so: PyErr_Clear is Python's",
        "bad.so: needs libc10.so",
        "bad.so: does not need libtorch.so, which brings the current-stream function",
        f"bad.so: has the search path {folder}",
    }


# --- what a release is made of --------------------------------------------------------------------


def release_tree(folder: Path, version: str, changelog: str) -> Path:
    (folder / "src/lossops").mkdir(parents=True)
    (folder / "src/lossops/_version.py").write_text(f'__version__ = "{version}"\n')
    (folder / "CHANGELOG.md").write_text(
        "# Changelog\n\n" + changelog + "\n## [0.9.0] - 2020-01-01\n\n- x\n"
    )
    (folder / "CITATION.cff").write_text(f"cff-version: 1.2.0\nversion: {version}\n")
    return folder


@pytest.mark.parametrize(
    ("tag", "changelog", "fault"),
    [
        ("v1.2.3", "## [1.2.3] - 2027-05-06\n\n### Added\n\n- Something.\n", None),
        ("v1.2.4", "## [1.2.3] - 2027-05-06\n\n- Something.\n", "the tag is v1.2.4, the version"),
        ("1.2.3", "## [1.2.3] - 2027-05-06\n\n- Something.\n", "the tag is 1.2.3, the version"),
        ("v1.2.3", "## [1.2.30] - 2027-05-06\n\n- Something.\n", "has no section"),
        ("v1.2.3", "## [1.2.3] - unreleased\n\n- Something.\n", "has no date, but 'unreleased'"),
        ("v1.2.3", "## [1.2.3] - 2027-05-06\n\n### Added\n", "is empty"),
    ],
)
def test_release_needs_a_version_and_a_changelog(
    tag: str, changelog: str, fault: str | None, tmp_path: Path
) -> None:
    faults = release_checks.faults_of_tag(tag, release_tree(tmp_path, "1.2.3", changelog))
    if fault is None:
        assert faults == []
    else:
        [found] = faults
        assert fault in found


def test_release_needs_its_version_in_the_citation(tmp_path: Path) -> None:
    tree = release_tree(tmp_path, "1.2.3", "## [1.2.3] - 2027-05-06\n\n- Something.\n")
    (tree / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.2\n")
    assert release_checks.faults_of_tag("v1.2.3", tree) == [
        "CITATION.cff does not name the version 1.2.3"
    ]


def metadata_with(description: str, *, repository: bool = True) -> str:
    url = "Project-URL: Repository, https://example.org/lossops\n" if repository else ""
    return f"Name: lossops\n{url}Description-Content-Type: text/markdown\n\n{description}\n"


@pytest.mark.parametrize(
    ("description", "target"),
    [
        ("[a page](docs/faq.md)", "docs/faq.md"),
        ("[a folder](<docs/>) and [PyPI](https://pypi.org)", "docs/"),
        ("[an anchor](#use)", "#use"),
        ("![a picture](docs/h200.png)", "docs/h200.png"),
        ("[![a picture](h200.png)](https://pypi.org)", "h200.png"),
        ("see [faq]\n\n[faq]: docs/faq.md\n", "docs/faq.md"),
        ('<p>\n<img width="50" src="docs/h200.png">\n</p>', "docs/h200.png"),
        ("[code `x`](docs/faq.md)", "docs/faq.md"),
    ],
)
def test_release_has_no_relative_links(description: str, target: str) -> None:
    assert release_checks.faults_of_description("it", metadata_with(description)) == [
        f"it has a link to {target}"
    ]


def test_release_may_have_links_and_code() -> None:
    text = "[a](https://pypi.org/x.md) <a@example.org> `[b](c)`\n\n```python\nx[0](y)\n```\n"
    assert release_checks.faults_of_description("it", metadata_with(text)) == []
    [fault] = release_checks.faults_of_description("it", metadata_with(text, repository=False))
    assert "names no Repository" in fault
    assert release_checks.faults_of_description("it", "Name: lossops\n\n")[0].endswith("Markdown")


@pytest.mark.parametrize("has_address", [False, True])
def test_readme_on_pypi(has_address: bool, tmp_path: Path) -> None:
    """Relative links of the README lead into the repository, of which the address is known."""
    pytest.importorskip("setuptools", minversion="77")
    for name in ("setup.py", "README.md", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src/lossops", tmp_path / "src/lossops", ignore=lambda *_: ["_C.so"])
    project = tmp_path / "pyproject.toml"
    text = re.sub(r"^\[project\.urls\]\n(.+\n)*", "", project.read_text(), flags=re.MULTILINE)
    address = "https://example.org/lossops"
    urls = f'[project.urls]\nRepository = "{address}"\n' if has_address else ""
    project.write_text(f"{text}\n{urls}")
    command = [sys.executable, "setup.py", "--quiet", "egg_info"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    metadata = (tmp_path / "src/lossops.egg-info/PKG-INFO").read_text()
    faults = release_checks.faults_of_description("it", metadata)
    if has_address:
        assert faults == []
        assert f"({address}/blob/v{lossops.__version__}/docs/performance.md)" in metadata
        assert f"]({address}/raw/v{lossops.__version__}/docs/benchmarks/h200.png)" in metadata
    else:
        assert "it names no Repository: [project.urls] in pyproject.toml" in faults
        assert "it has a link to docs/performance.md" in faults


def make_sdist(folder: Path, description: str = "Losses.") -> Path:
    path = folder / "lossops-1.2.3.tar.gz"
    files = dict.fromkeys(
        ("setup.py", "pyproject.toml", "LICENSE", "csrc/bindings.cpp", "tests", "tools"), b""
    )
    files["PKG-INFO"] = metadata_with(description).encode()
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"lossops-1.2.3/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def make_wheel(
    folder: Path,
    name: str,
    size: int = 100,
    *,
    tag: str = "",
    more: str = "",
    description: str = "Losses.",
) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("lossops/_C.so", os.urandom(size))
        tag = tag or path.stem.split("-", 2)[2]
        wheel.writestr("lossops-1.2.3.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        wheel.writestr("lossops-1.2.3.dist-info/METADATA", metadata_with(description))
        if more:
            wheel.writestr(more, b"")
    return path


def test_release_is_one_wheel_a_platform_and_the_sdist(tmp_path: Path) -> None:
    tree = release_tree(tmp_path, "1.2.3", "")
    names = [
        f"lossops-1.2.3-py3-none-manylinux_2_28_{machine}.whl" for machine in ("x86_64", "aarch64")
    ]
    sdist = make_sdist(tmp_path)

    def faults(*paths: Path) -> list[str]:
        return release_checks.faults_of_files(list(paths), tree)

    wheels = [make_wheel(tmp_path, name) for name in names]
    assert faults(*wheels, sdist) == []
    assert faults(*wheels) == ["lossops-1.2.3.tar.gz is missing"]
    assert faults(wheels[0], sdist) == [f"{names[1]} is missing"]
    more = make_wheel(tmp_path, "lossops-1.2.3-cp311-cp311-manylinux_2_28_x86_64.whl")
    assert faults(*wheels, sdist, more) == [f"{more.name} is too many"]
    make_sdist(tmp_path, "[Losses](docs/index.md).")
    assert faults(*wheels, sdist) == ["lossops-1.2.3.tar.gz has a link to docs/index.md"]
    make_sdist(tmp_path)
    make_wheel(tmp_path, names[0], description="![Losses](docs/x.png)")
    assert faults(*wheels, sdist) == [f"{names[0]} has a link to docs/x.png"]
    make_wheel(tmp_path, names[0], 10_000_000)
    assert re.search(r"x86_64.whl has 10,\d{3},\d{3} bytes", faults(*wheels, sdist)[0])
    make_wheel(tmp_path, names[0], tag="py3-none-linux_x86_64")
    assert "has the tags py3-none-linux_x86_64 inside" in faults(*wheels, sdist)[0]
    make_wheel(tmp_path, names[0], more="lossops.libs/libcudart.so.12")
    assert faults(*wheels, sdist) == [
        f"{names[0]} has lossops.libs/libcudart.so.12",
        f"{names[0]} has other libraries than lossops/_C.so",
    ]


def test_release_has_the_architectures_of_setup() -> None:
    assert release_checks.wanted_archs()[-1] == "12.0"


@pytest.mark.skipif(not CUDA_VERSION, reason="needs a lossops that was built with CUDA")
def test_listed_architectures_are_in_the_file() -> None:
    """What lossops.info says is what was asked of the compiler; cuobjdump says what is there."""
    try:
        machine_code, ptx = release_checks.code_in(LIBRARY)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    said = json.loads(torch.ops.lossops.build_info())["cuda_archs"].split(";")
    assert machine_code == {arch.removesuffix("+PTX") for arch in said}
    assert ptx == {arch.removesuffix("+PTX") for arch in said if arch.endswith("+PTX")}
