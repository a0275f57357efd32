"""Finds and loads the compiled library, and says what is wrong when it cannot be loaded.

Nothing here imports torch before `load()` does, so that `python -m lossops.info` works without it.
"""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path
from typing import Any

MINIMUM_TORCH = (2, 10)

# Why the last `load()` failed; None before it and after a load that worked.
load_error: str | None = None

loaded = False

# A library's operators go with it.
_kept: list[Any] = []


def path() -> Path:
    """Where the compiled library is, or would be."""
    return Path(__file__).resolve().with_name("_C.so")


def reporting() -> bool:
    """Whether this process is starting `python -m lossops.info`.

    Python imports the package before it runs a module of it, and the report is wanted most where
    that import raises. While Python looks for the module, sys.argv[0] is "-m".
    """
    named = ("lossops.info", "-mlossops.info")
    return sys.argv[:1] == ["-m"] and any(argument in named for argument in sys.orig_argv)


def load() -> None:
    """Loads the library and with it `torch.ops.lossops`.

    Raises:
        ImportError: the library cannot be loaded. The message says why and what to do.
    """
    global load_error, loaded
    if loaded:
        return
    try:
        _load()
    except ImportError as error:
        load_error = str(error)
        raise
    load_error = None
    loaded = True


def _load() -> None:
    try:
        import torch
    except ImportError as error:
        raise _failure(
            f"torch cannot be imported ({error})",
            "Install torch 2.10 or newer: pip install 'torch>=2.10'.",
        ) from error

    found = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    if found and (int(found[1]), int(found[2])) < MINIMUM_TORCH:
        raise _failure(
            f"torch {torch.__version__} is too old; the oldest that works is 2.10",
            "Update torch: pip install --upgrade 'torch>=2.10'.",
        )

    library = path()
    if not library.is_file():
        if (library.parents[2] / "setup.py").is_file():
            raise _failure(
                f"{library} does not exist: this is a source checkout that has not been built",
                "Build and install it with 'pip install .' in the checkout, "
                "or leave its src/ folder out of PYTHONPATH to use an installed lossops.",
            )
        raise _failure(
            f"{library} does not exist: the installation is incomplete",
            "Reinstall: pip install --force-reinstall --no-deps lossops.",
        )

    try:
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError) as error:
        cause = str(error.__cause__ or error)  # torch hides the dynamic linker's words in the cause
        reason = cause if str(library) in cause else f"{library}: {cause}"
        raise _failure(reason, _advice(cause, str(torch.__version__))) from error
    _define_operators(torch)


def _define_operators(torch: Any) -> None:
    """Defines the operators, whose kernels the library has registered.

    Without the tag, compilers copy an operand whose strides are not those that it had when the
    program was traced. The kernels read all strides.
    """
    library = torch.library.Library("lossops", "FRAGMENT")
    for schema in torch.ops.lossops.schemas().splitlines():
        library.define(schema, tags=(torch.Tag.flexible_layout,))
    _kept.append(library)


def _advice(error: str, torch_version: str) -> str:
    if missing := re.search(r"undefined symbol: (\S+)", error):
        return (
            f"torch {torch_version} lacks {missing[1]}, which every torch from 2.10 on should "
            "have. Check that only one torch is installed and that LD_LIBRARY_PATH and LD_PRELOAD "
            "bring in no other libtorch; else report this."
        )
    if re.search(r"GLIBC(XX)?_[\d.]+' not found", error):
        return (
            "This system's C or C++ library is older than the wheel needs (glibc 2.28). "
            "Build lossops here: pip install --no-binary lossops lossops."
        )
    if "wrong ELF class" in error or "invalid ELF header" in error or "ELF file" in error:
        return (
            f"The file is for another platform than this one ({platform.platform()}), or damaged. "
            "Reinstall: pip install --force-reinstall --no-deps lossops."
        )
    if found := re.search(r"(\S+): cannot open shared object file", error):
        return f"The dynamic linker does not find {found[1]}. Reinstalling torch usually brings it."
    return "Reinstall: pip install --force-reinstall --no-deps lossops."


def _failure(reason: str, advice: str) -> ImportError:
    return ImportError(
        f"lossops cannot load its compiled library.\n"
        f"  Why: {reason}\n"
        f"  What to do: {advice}\n"
        f"  For a bug report, add the output of: python -m lossops.info",
        name="lossops._C",
        path=str(path()),
    )
