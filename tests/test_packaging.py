"""The wheel and the source tree: one file for every torch, one list of sources, one version."""

from __future__ import annotations

import ast
import email
import importlib
import importlib.util
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
import release_checks
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
    assert named == there


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
        if path.name != "bindings.cpp":
            wrong = [name for name in included if re.match(r"(torch|ATen|c10)/", name)]
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


@pytest.fixture(scope="module")
def abi_audit() -> ModuleType:
    """tests/abi_audit.py, where what it needs is installed (torch-abi-audit: Python 3.11 on)."""
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
    done = run_python(str(ROOT / "tests" / "abi_audit.py"), str(bad), str(LIBRARY))
    assert done.returncode == 1
    assert set(done.stderr.splitlines()) == {
        "bad.so: _ZN3c104warnERKNS_7WarningE is C++ of torch, which changes with every release",
        "bad.so: PyErr_Clear is Python's",
        "bad.so: needs libc10.so",
        "bad.so: does not need libtorch.so, which brings the current-stream function",
        f"bad.so: has the search path {folder}",
    }


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


# --- the release --------------------------------------------------------------------------------


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
        shutil.copy(source_file(name), tmp_path)
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
        ("setup.py", "pyproject.toml", "LICENSE", "csrc/bindings.cpp", "tests"), b""
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
    assert release_checks.wanted_archs(source_file("setup.py").parent)[-1] == "12.0"


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
