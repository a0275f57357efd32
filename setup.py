"""Builds the wheel: one shared library against the LibTorch stable ABI.

Everything that is static is in pyproject.toml. Read from the environment:

  LOSSOPS_CUDA          auto (default): CUDA when a working nvcc is found, else CPU only.
                        1: CUDA, or fail. 0: CPU only.
  CUDA_HOME             the toolkit to use; else the nvcc on PATH; else the nvcc of the
                        `nvidia-cuda-nvcc` package in this environment.
  TORCH_CUDA_ARCH_LIST  GPU architectures, as "8.0;9.0+PTX" or "native" (the GPUs of this machine).
  MAX_JOBS              how many compilers run at a time.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent

# CMakeLists.txt names the same files; tests/test_packaging.py holds the lists equal.
BINDING_SOURCES = [
    "csrc/bindings.cpp",
    "csrc/bindings/arguments.cpp",
    "csrc/bindings/cross_entropy.cpp",
    "csrc/bindings/cross_entropy_problem.cpp",
    "csrc/bindings/dtypes.cpp",
    "csrc/bindings/elementwise.cpp",
    "csrc/bindings/elementwise_problem.cpp",
    "csrc/bindings/launch.cpp",
    "csrc/bindings/scale.cpp",
    "csrc/bindings/tensors.cpp",
    "csrc/bindings/tokens.cpp",
]
# Without CUDA: the CPU backend, and what decides for the CUDA backend.
CPU_SOURCES = [
    "csrc/cpu/cross_entropy.cpp",
    "csrc/cpu/elementwise.cpp",
    "csrc/cpu/scale.cpp",
    "csrc/cpu/tokens.cpp",
    "csrc/kernels/rows/policy.cpp",
    "csrc/kernels/rows/policy_report.cpp",
]
CUDA_SOURCES = [
    "csrc/kernels/class_index/few_classes.cu",
    "csrc/kernels/class_index/float_rows.cu",
    "csrc/kernels/class_index/float_tiles.cu",
    "csrc/kernels/class_index/half_rows.cu",
    "csrc/kernels/class_index/tiles.cu",
    "csrc/kernels/elements/elementwise.cu",
    "csrc/kernels/grid/driver.cu",
    "csrc/kernels/grid/grid_reduce.cu",
    "csrc/kernels/rows/cross_entropy.cu",
    "csrc/kernels/rows/index_gradients.cu",
    "csrc/kernels/rows/long_rows.cu",
    "csrc/kernels/rows/plane_gradients.cu",
    "csrc/kernels/rows/plane_rows.cu",
    "csrc/kernels/rows/plane_words.cu",
    "csrc/kernels/rows/probability_rows.cu",
    "csrc/kernels/rows/row_states.cu",
    "csrc/kernels/rows/side_by_side_rows.cu",
    "csrc/kernels/rows/soft_planes.cu",
    "csrc/kernels/rows/soft_tiles.cu",
    "csrc/kernels/rows/split_rows.cu",
    "csrc/kernels/rows/staged_rows.cu",
    "csrc/kernels/rows/token_rows.cu",
    "csrc/kernels/rows/two_pass_rows.cu",
    "csrc/kernels/scale.cu",
]
# All of them in one, whose machine code packs better. It is compiled for several architectures; for
# one, as while developing, each file is, and again only if it changed.
ALL_KERNELS = "csrc/kernels/all_kernels.cu"

# The architectures of a released wheel, and the only place that names them. Those which the
# compiler at hand does not know are left out; the newest one left also gets PTX. Machine code runs
# on every device of the same major version that is not older: 8.6 and 8.9 take that of 8.0, whose
# own would be 2 MB more.
DEFAULT_CUDA_ARCHS = ["7.5", "8.0", "9.0", "10.0", "12.0"]

# torch 2.10: the oldest release whose stable ABI has all that the bindings use.
TORCH_TARGET_VERSION = "0x020a000000000000"

COMMON_FLAGS = ["-std=c++17", f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
# Of the code around the kernels, which only launches them: 0.1 MB less of a wheel than -O3. It says
# nothing about the kernels, which nvcc always compiles for speed.
LAUNCH_FLAGS = ["-Os"]
# These two let loops vectorise and change no result. Nothing of -ffast-math beyond them: the
# losses depend on NaN, infinity and the order of additions.
MATH_FLAGS = ["-fno-math-errno", "-fno-trapping-math"]
VISIBILITY_FLAGS = ["-fvisibility=hidden", "-fvisibility-inlines-hidden"]
# Of the CPU's code, where the compiler knows it, as GCC does. Loops whose strides are 1 are written
# as such, so none needs a second version for that: 11 KB of the wheel.
SIZE_FLAGS = ["-fno-version-loops-for-strides"]

LINK_FLAGS = [
    # CUDA builds of torch export copies of some functions of libstdc++, without versions: found
    # there first, they would be wanted without one.
    "-Wl,--no-as-needed",
    "-lstdc++",
    # libtorch.so as a NEEDED entry, although no symbol of it is used by name: where torch has
    # CUDA, it brings libtorch_cuda.so into scope, and with it the current-stream function.
    "-ltorch",
    "-Wl,--as-needed",
    "-Wl,--exclude-libs,ALL",
    "-Wl,--strip-all",
]


class BuildError(SystemExit):
    """An error for the person who builds: its text is printed, without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"lossops: {message}")


class Toolkit(NamedTuple):
    """A CUDA toolkit that compiles."""

    home: Path
    version: str
    library_dir: Path | None


def say(*lines: str) -> None:
    for line in lines:
        print(f"lossops: {line}", file=sys.stderr, flush=True)


def output_of(*command: str | Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise OSError(f"{command[0]} failed: {done.stdout.strip() or 'no output'}")
    return done.stdout


def nvcc_candidates() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            yield Path(home, "bin", "nvcc")
    if on_path := shutil.which("nvcc"):
        yield Path(on_path)
    for entry in sys.path:
        for pattern in ("nvidia/cu[0-9]*/bin/nvcc", "nvidia/cuda_nvcc/bin/nvcc"):
            yield from sorted(Path(entry or ".").glob(pattern), reverse=True)


def toolkit_of(nvcc: Path) -> Toolkit:
    """The toolkit that `nvcc` belongs to, or OSError saying what it lacks."""
    # nvcc may be a script or a link outside its toolkit, so its own word comes first.
    dry_run = output_of(nvcc, "--dryrun", "-E", "-x", "cu", os.devnull)
    homes = [Path(top) for top in re.findall(r"^#\$ TOP=(.+)$", dry_run, re.MULTILINE)]
    homes.append(nvcc.parent.parent)
    for home in homes:
        if (home / "bin/nvcc").exists() and (home / "include/cuda_runtime.h").exists():
            break
    else:
        raise OSError(
            f"{nvcc} has no include/cuda_runtime.h beside it (is nvidia-cuda-runtime missing?)"
        )
    home = Path(os.path.abspath(home))

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cu")
        source.write_text("__global__ void probe(float* x) { *x = 0; }\n")
        output_of(home / "bin/nvcc", "-c", source, "-o", source.with_suffix(".o"))

    release = re.search(r"release (\d+\.\d+)", output_of(nvcc, "--version"))
    if release is None:
        raise OSError(f"{nvcc} --version names no release")
    folders = [home / "lib64", home / "lib", *home.glob("targets/*/lib")]
    library_dir = next((f for f in folders if (f / "libcudart_static.a").exists()), None)
    return Toolkit(home, release[1], library_dir)


def find_toolkit() -> Toolkit | None:
    """The CUDA toolkit to build with, or None for a build without CUDA."""
    wanted = os.environ.get("LOSSOPS_CUDA", "").strip().lower() or "auto"
    if wanted not in ("auto", "0", "1"):
        raise BuildError(f"LOSSOPS_CUDA must be auto, 1 or 0, not {wanted!r}")
    if wanted == "0":
        say("CUDA is switched off (LOSSOPS_CUDA=0): building for the CPU only")
        return None

    faults = []
    for nvcc in nvcc_candidates():
        if not nvcc.is_file():
            faults.append(f"{nvcc} does not exist")
            continue
        try:
            return toolkit_of(nvcc)
        except OSError as error:
            faults.append(str(error))
    if not faults:
        faults.append("looked in CUDA_HOME, on PATH and for the package nvidia-cuda-nvcc")
    if wanted == "1":
        raise BuildError("LOSSOPS_CUDA=1, but no working nvcc was found:\n  " + "\n  ".join(faults))
    bar = "*" * 78
    say(
        bar,
        "NO CUDA COMPILER FOUND: building for the CPU ONLY. CUDA tensors will be refused.",
        *faults,
        "Set CUDA_HOME or put nvcc on PATH for a CUDA build, LOSSOPS_CUDA=0 to silence this.",
        bar,
    )
    return None


def known_archs(toolkit: Toolkit) -> set[str]:
    codes = output_of(toolkit.home / "bin/nvcc", "--list-gpu-code").split()
    return {f"{code[3:-1]}.{code[-1]}" for code in codes}


def default_archs(toolkit: Toolkit) -> list[str]:
    known = known_archs(toolkit)
    archs = [arch for arch in DEFAULT_CUDA_ARCHS if arch in known]
    if not archs:
        raise BuildError(f"CUDA {toolkit.version} knows none of {', '.join(DEFAULT_CUDA_ARCHS)}")
    archs[-1] += "+PTX"
    return archs


def native_archs(toolkit: Toolkit) -> list[str]:
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        archs = sorted(set(output_of(*query).split()), key=float)
    except (OSError, ValueError) as error:
        raise BuildError(
            f"TORCH_CUDA_ARCH_LIST=native, but the GPUs cannot be asked: {error}"
        ) from None
    # A GPU newer than the compiler runs the newest PTX that the compiler makes.
    return archs if known_archs(toolkit).issuperset(archs) else default_archs(toolkit)


def cuda_archs(toolkit: Toolkit) -> str:
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(",", ";").replace(" ", ";")
    archs = [arch for arch in listed.split(";") if arch]
    if archs == ["native"]:
        archs = native_archs(toolkit)
    return ";".join(archs or default_archs(toolkit))


def knows_flag(flag: str) -> bool:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    try:
        output_of(*compiler, "-Werror", flag, "-E", "-x", "c++", os.devnull)
    except OSError:
        return False
    return True


def compression_flags(toolkit: Toolkit) -> list[str]:
    """How machine code is packed. The best way, a third smaller, needs driver 550.54 (CUDA 12.4).

    Every driver that runs what is built with CUDA 13 has it. Released wheels, of CUDA 12.9, ask for
    it too (driver.cu, by the macro, tells users); with an older toolkit drivers from 525 on do.
    """
    version = tuple(map(int, toolkit.version.split(".")))
    if version < (12, 9):
        return ["-Xfatbin=-compress-all"]
    return ["--compress-mode=size", "-DLOSSOPS_COMPRESSED_BY_SIZE"]


def plain_extension() -> Any:
    """The extension as metadata and sdist need it: its files, without torch."""
    from setuptools import Extension

    return Extension("lossops._C", BINDING_SOURCES + CPU_SOURCES + CUDA_SOURCES, depends=headers())


def headers() -> list[str]:
    found = [*ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/**/*.cuh")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def torch_extension() -> Any:
    """The extension as it is compiled."""
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        raise BuildError(
            f"building needs torch>=2.10, and importing it failed: {error}\n"
            "  Leave out --no-build-isolation, or install torch first."
        ) from None
    if not sys.platform.startswith("linux"):
        raise BuildError(f"only Linux is supported, not {sys.platform}")

    cxx_flags = [
        "-O3",
        *COMMON_FLAGS,
        *MATH_FLAGS,
        *VISIBILITY_FLAGS,
        *filter(knows_flag, SIZE_FLAGS),
        f"-ffile-prefix-map={ROOT}=.",
    ]
    options: dict[str, Any] = {
        "include_dirs": [str(ROOT / "csrc")],
        "depends": [*headers(), *CUDA_SOURCES],  # ALL_KERNELS includes the sources of kernels
        "extra_link_args": LINK_FLAGS,
    }
    toolkit = find_toolkit()
    if toolkit is None:
        options["extra_compile_args"] = {"cxx": cxx_flags}
        extension = cpp_extension.CppExtension(
            "lossops._C", BINDING_SOURCES + CPU_SOURCES, **options
        )
        extension.libraries = []
        return extension

    archs = cuda_archs(toolkit)
    num_archs = len(archs.split(";"))
    threads = min(num_archs, int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0))))
    say(f"building with CUDA {toolkit.version} from {toolkit.home} for {archs}")
    # torch builds for its own CUDA, and not at all beside a CPU-only torch. This build depends on
    # neither: it takes the toolkit that was found, and toolkit_of has seen it compile.
    torch.version.cuda = toolkit.version
    cpp_extension.CUDA_HOME = str(toolkit.home)
    os.environ["TORCH_CUDA_ARCH_LIST"] = archs
    os.environ["TORCH_DONT_CHECK_COMPILER_ABI"] = "1"
    options["extra_compile_args"] = {
        "cxx": [
            *cxx_flags,
            "-DLOSSOPS_WITH_CUDA",
            f'-DLOSSOPS_CUDA_VERSION="{toolkit.version}"',
            f'-DLOSSOPS_CUDA_ARCHS="{archs}"',
        ],
        "nvcc": [
            *COMMON_FLAGS,
            f"-Xcompiler={','.join([*LAUNCH_FLAGS, *MATH_FLAGS, *VISIBILITY_FLAGS])}",
            *compression_flags(toolkit),
            *([f"--threads={threads}"] if num_archs > 1 else []),
        ],
    }
    if toolkit.library_dir is not None:
        options["library_dirs"] = [str(toolkit.library_dir)]
    kernels = [ALL_KERNELS] if num_archs > 1 else CUDA_SOURCES
    extension = cpp_extension.CUDAExtension(
        "lossops._C", BINDING_SOURCES + CPU_SOURCES + kernels, **options
    )
    # torch's list names libcudart.so and libtorch_cuda.so, which would tie the file to one CUDA
    # and keep it from loading beside a torch without CUDA.
    extension.libraries = ["cudart_static", "rt", "dl"]
    return extension


def build_command() -> Any:
    from torch.utils.cpp_extension import BuildExtension

    class BuildStableExtension(BuildExtension):
        def get_libraries(self, ext: Any) -> list[str]:
            # setuptools may add libpython, which the file does not use.
            return list(ext.libraries)

    return BuildStableExtension.with_options(no_python_abi_suffix=True)


def wheel_command() -> Any:
    try:
        from setuptools.command.bdist_wheel import bdist_wheel
    except ImportError:
        raise BuildError(
            "building needs setuptools>=77: pip install --upgrade setuptools, "
            "or leave out --no-build-isolation"
        ) from None

    class AnyPythonWheel(bdist_wheel):
        def get_tag(self) -> tuple[str, str, str]:
            # torch.ops loads the file; Python never imports it. So no Python version, no ABI.
            return "py3", "none", super().get_tag()[2]

    return AnyPythonWheel


def long_description() -> str:
    """README.md as PyPI shows it, where links and images need whole addresses.

    They lead to this version's files in the Repository of [project.urls], once there is one.
    """
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    repository = re.search(r'^Repository = "(.+)"$', project, re.MULTILINE)
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/lossops/_version.py").read_text())
    if repository is None or version is None:
        return readme
    image, link = (f"{repository[1]}/{kind}/v{version[1]}/" for kind in ("raw", "blob"))
    relative = r"(?![a-z]+:|#)(?=[^)\s]+\))"
    readme = re.sub(rf"(!\[[^]]*\]\(){relative}", rf"\g<1>{image}", readme)
    return re.sub(rf"(\]\(){relative}", rf"\g<1>{link}", readme)


def main() -> None:
    from setuptools import setup

    options: dict[str, Any] = {
        "long_description": long_description(),
        "long_description_content_type": "text/markdown",
        "ext_modules": [plain_extension()],
        "cmdclass": {"bdist_wheel": wheel_command()},
    }
    compiling = {"build", "build_ext", "bdist_wheel", "install", "develop", "editable_wheel"}
    if not compiling.isdisjoint(sys.argv):
        options["ext_modules"] = [torch_extension()]
        options["cmdclass"]["build_ext"] = build_command()
    setup(**options)


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
