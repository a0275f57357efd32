"""Does the library ask only for what every torch from 2.10 on, and every Linux, has?

    python tools/abi_audit.py [dist/lossops-*.whl | _C.so] [--manylinux]

Reads the dynamic section of the compiled library (by default the installed one) and ends with 1 if
it wants anything but torch's stable C functions that torch 2.10 has, versioned symbols of the C and
C++ libraries, and the weak symbols listed here, or if it needs another library, or carries a search
path. With --manylinux, or for a wheel so named, those versions must be in manylinux_2_28. Needs
pyelftools and torch-abi-audit, which knows since which torch each C function exists.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
from elftools.elf.sections import SymbolTableSection

TORCH = (2, 10, 0)

# Null where nothing defines them, which their callers ask first.
WEAK = {
    "aoti_torch_get_current_cuda_stream",  # a torch without CUDA has none
    "torch_exception_get_what_without_backtrace",  # since 2.13: better error messages
    "_ITM_deregisterTMCloneTable",  # the start files of every shared library
    "_ITM_registerTMCloneTable",
    "__gmon_start__",
    "__cxa_finalize",
}

NEEDED = re.compile(
    r"libtorch\.so|libstdc\+\+\.so\.6|libgcc_s\.so\.1|lib(c|m)\.so\.6|"
    r"lib(dl|rt)\.so\.[12]|libpthread\.so\.0|ld-linux-(x86-64\.so\.2|aarch64\.so\.1)"
)

# The newest versions that auditwheel's policy manylinux_2_28 allows.
MANYLINUX_2_28 = {
    "GLIBC": (2, 28),
    "GLIBCXX": (3, 4, 24),
    "CXXABI": (1, 3, 11),
    "GCC": (7, 0, 0),
}


class Symbol(NamedTuple):
    """An undefined symbol; its version is as GLIBC_2.17, or empty."""

    name: str
    version: str
    weak: bool


class Imports(NamedTuple):
    """What a shared library wants from others."""

    symbols: list[Symbol]
    needed: list[str]
    search_paths: list[str]


def imports_of(path: Path) -> Imports:
    with path.open("rb") as file:
        elf = ELFFile(file)
        versions, of_symbol, names = {}, None, None
        needed, search_paths = [], []
        for section in elf.iter_sections():
            if isinstance(section, GNUVerNeedSection):
                for _, auxiliaries in section.iter_versions():
                    versions.update({aux["vna_other"]: aux.name for aux in auxiliaries})
            elif isinstance(section, GNUVerSymSection):
                of_symbol = section
            elif isinstance(section, SymbolTableSection) and section.name == ".dynsym":
                names = section
            elif isinstance(section, DynamicSection):
                for tag in section.iter_tags():
                    if tag.entry.d_tag == "DT_NEEDED":
                        needed.append(tag.needed)
                    elif tag.entry.d_tag == "DT_RPATH":
                        search_paths.append(tag.rpath)
                    elif tag.entry.d_tag == "DT_RUNPATH":
                        search_paths.append(tag.runpath)
        if names is None:
            raise ValueError(f"{path} has no dynamic symbols")
        symbols = []
        for index, symbol in enumerate(names.iter_symbols()):
            if symbol.name and symbol["st_shndx"] == "SHN_UNDEF":
                number = of_symbol.get_symbol(index)["ndx"] if of_symbol else None
                version = versions.get(number, "")
                weak = symbol["st_info"]["bind"] == "STB_WEAK"
                symbols.append(Symbol(symbol.name, version, weak))
    return Imports(symbols, needed, search_paths)


def fault_of(symbol: Symbol, shims: dict[str, tuple[int, int, int]], manylinux: bool) -> str | None:
    """Why this symbol may not be wanted, or None."""
    name, version, weak = symbol
    if weak and name in WEAK:
        return None
    if name in WEAK and not version:
        return f"{name} must be weak"
    if name in shims:
        since = shims[name]
        if since <= TORCH:
            return None
        return f"{name} came with torch {'.'.join(map(str, since))}"
    if version:
        family, _, number = version.partition("_")
        if family not in MANYLINUX_2_28:
            return f"{name}@{version} is of an unknown library"
        if manylinux and tuple(map(int, number.split("."))) > MANYLINUX_2_28[family]:
            return f"{name}@{version} is newer than manylinux_2_28"
        return None
    if re.match(r"_?Py[A-Z_]", name):
        return f"{name} is Python's"
    if re.search(r"\d(at|c10|torch)\d", name):
        return f"{name} is C++ of torch, which changes with every release"
    return f"{name} is not in the stable ABI"


def faults_of(imports: Imports, *, manylinux: bool = False) -> list[str]:
    """What is wrong with a library that wants these."""
    from torch_abi_audit.torch_versions import stable_shim_versions

    shims = stable_shim_versions()
    found = [fault for s in imports.symbols if (fault := fault_of(s, shims, manylinux))]
    found += [f"needs {name}" for name in imports.needed if not NEEDED.fullmatch(name)]
    if "libtorch.so" not in imports.needed:
        found.append("does not need libtorch.so, which brings the current-stream function")
    found += [f"has the search path {path}" for path in imports.search_paths]
    return found


def audit(path: Path, manylinux: bool) -> list[str]:
    """Prints a line about a library, or about the one of a wheel, and returns its faults."""
    if path.suffix != ".whl":
        imports = imports_of(path)
    else:
        manylinux |= "manylinux" in path.name
        with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as folder:
            libraries = [name for name in wheel.namelist() if ".so" in Path(name).name]
            if libraries != ["lossops/_C.so"]:
                return [f"has the libraries {libraries} instead of lossops/_C.so alone"]
            imports = imports_of(Path(wheel.extract(libraries[0], folder)))
    ours = [s.name for s in imports.symbols if s.name.startswith(("torch_", "aoti_torch_"))]
    others = len(imports.symbols) - len(ours)
    newest: dict[str, tuple[int, ...]] = {}
    for symbol in imports.symbols:
        family, _, number = symbol.version.partition("_")
        if number:
            version = tuple(map(int, number.split(".")))
            newest[family] = max(newest.get(family, ()), version)
    print(
        f"{path.name}: {len(ours)} functions of torch's stable ABI, {others} other symbols; newest "
        + ", ".join(f"{f} {'.'.join(map(str, v))}" for f, v in sorted(newest.items()))
        + f"; needs {', '.join(imports.needed)}"
    )
    return faults_of(imports, manylinux=manylinux)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="wheels or libraries")
    parser.add_argument("--manylinux", action="store_true", help="hold to manylinux_2_28")
    arguments = parser.parse_args()
    files = arguments.files
    if not files:
        from lossops import _extension

        files = [_extension.path()]
    bad = False
    for path in files:
        for fault in audit(path, arguments.manylinux):
            print(f"{path.name}: {fault}", file=sys.stderr)
            bad = True
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
