"""Compiles csrc/, for CPU or for CPU and CUDA. The metadata is in pyproject.toml.

The package gets, beside Python's files:
    lib/libfastnorm.so    the operators, without Python: what C++ programs link to as well
    _C                    the Python module that loads it
    include, lib/cmake    for C++ programs: headers and what find_package(fastnorm) reads
    _build_info.py        what all this was compiled against
CMakeLists.txt compiles the same library where there is no Python.

Environment variables:
    FASTNORM_CUDA         1: build the CUDA kernels or fail; 0: leave them out. Unset: build them
                          when the installed torch is a CUDA build and nvcc is found, GPU or not.
    CUDA_HOME             the CUDA toolkit. Unset: the one that the nvcc on the PATH belongs to.
    TORCH_CUDA_ARCH_LIST  GPU architectures, such as "9.0" or "native" (the GPUs of this machine).
                          Unset: the oldest of each major version that torch was built for.
    MAX_JOBS              parallel compilations. Unset: as many as cores and free memory allow.
    CXX                   the C++ compiler. Unset: c++.
    FASTNORM_SANITIZE     sanitizers to compile in, such as "address,undefined"; see .ci/sanitize.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import setuptools
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
from build_backend import MINIMUM_TORCH, find_installed_torch  # noqa: E402

# No -std=: torch adds the one its headers need. No -gencode: TORCH_CUDA_ARCH_LIST decides.
CXX_FLAGS = [
    "-O3",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fopenmp",  # at::parallel_for, a template, runs serially without
    "-g0",
    "-Wall",
    "-Wextra",
]
# Kernels write their fused multiply-adds out, so that bits do not depend on the compiler's choice.
NVCC_FLAGS = ["-O3", "-fmad=false", "-Xcompiler=-fvisibility=hidden"]
# Kernels of one architecture take a twelfth of their size so. From CUDA 13 on: older drivers do not
# know it.
COMPRESS_FLAG = "--compress-mode=size"
COMPRESSING_CUDA = 13
# No -fopenmp: the OpenMP symbols are found in the library that torch itself loaded, so that there
# is one thread pool.
LINK_FLAGS = ["-Wl,--strip-all"]
# With FASTNORM_SANITIZE: lines in the reports, and a compilation that does not take all day.
SANITIZE_FLAGS = ["-O1", "-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=undefined"]

# Of fastnorm._C; every other source is part of libfastnorm.
PYTHON_SOURCES = ["csrc/python_layer_norm.cpp", "csrc/python_module.cpp"]

MINIMUM_SETUPTOOLS = 77  # the first to know pyproject.toml's `license` and `license-files`
MINIMUM_ARCHITECTURE = 75
BYTES_PER_JOB = 3 * 2**30
GET_TORCH = "https://pytorch.org/get-started"


def fail(message: str) -> NoReturn:
    sys.exit(f"\nfastnorm: {message}\n")


# --- torch ----------------------------------------------------------------------------------------


def import_torch() -> ModuleType | None:
    """Import the torch to build against; None when none is installed."""
    directory = find_installed_torch()
    if directory is None:
        return None
    if directory:
        sys.path.append(directory)  # at the end: the build environment's setuptools comes first
    import torch

    return torch


def minor_release(version: str) -> tuple[int, int]:
    """Return (2, 11) for "2.11.0+cu130"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def check_torch_version(torch: ModuleType) -> None:
    if minor_release(torch.__version__) < minor_release(MINIMUM_TORCH):
        fail(
            f"torch {torch.__version__} is too old; fastnorm needs {MINIMUM_TORCH} or newer.\n"
            f"Install a newer one ({GET_TORCH})."
        )


def torch_requirement(torch: ModuleType | None) -> str:
    """Return what the built package requires: the minor release that it was compiled against."""
    if torch is None:
        return f"torch>={MINIMUM_TORCH}"
    major, minor = minor_release(torch.__version__)
    return f"torch=={major}.{minor}.*"


# --- the CUDA toolkit -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Toolkit:
    home: Path
    nvcc: Path
    version: str  # such as "13.0"

    @property
    def major(self) -> str:
        return self.version.split(".")[0]


def output_of(*command: str | Path) -> str:
    """Run a command and return what it prints on both streams, whatever its exit code."""
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    ).stdout


def find_nvcc() -> Path | None:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            nvcc = Path(home, "bin", "nvcc")
            return nvcc if nvcc.is_file() else None
    if on_path := shutil.which("nvcc"):
        return Path(on_path)
    usual = Path("/usr/local/cuda/bin/nvcc")
    return usual if usual.is_file() else None


def find_toolkit() -> Toolkit | None:
    """Ask nvcc where its toolkit is: the nvcc on the PATH may be a link or a wrapper script."""
    nvcc = find_nvcc()
    if nvcc is None:
        return None
    version = re.search(r"release (\d+\.\d+)", output_of(nvcc, "--version"))
    if version is None:
        return None
    top = re.search(r"^#\$ TOP=(.+)$", output_of(nvcc, "--dryrun", "probe.cu"), re.MULTILINE)
    home = Path(top[1].strip()) if top is not None else nvcc.resolve().parent.parent
    return Toolkit(home.resolve(), nvcc, version[1])


def toolkit_to_build_with(torch: ModuleType, found: Toolkit | None) -> tuple[Toolkit | None, str]:
    """Decide between CPU (None) and CUDA, and say why; fail where neither would be right."""
    wish = os.environ.get("FASTNORM_CUDA", "")
    if wish not in ("", "0", "1"):
        fail(f"FASTNORM_CUDA is {wish!r}; it must be 0, 1 or unset.")
    if wish == "0":
        return None, "FASTNORM_CUDA=0"
    if torch.version.cuda is None:
        if wish == "1":
            fail(
                f"FASTNORM_CUDA=1, but torch {torch.__version__} was built without CUDA.\n"
                f"Install a CUDA build of torch ({GET_TORCH}), or unset FASTNORM_CUDA to build for "
                "CPU."
            )
        return None, f"torch {torch.__version__} was built without CUDA"
    if found is None:
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        looked = f"in {home}/bin" if home else "on the PATH and in /usr/local/cuda/bin"
        if wish == "1":
            fail(
                f"FASTNORM_CUDA=1, but no working nvcc was found {looked}.\n"
                f"Install CUDA toolkit {torch.version.cuda}, which torch {torch.__version__} was "
                "built with, and put its bin directory on the PATH or name its root in CUDA_HOME; "
                "or unset FASTNORM_CUDA to build for CPU."
            )
        return None, f"no working nvcc was found {looked}"
    torch_major = torch.version.cuda.split(".")[0]
    if found.major != torch_major:
        fail(
            f"{found.nvcc} is of CUDA {found.version}, but torch {torch.__version__} was built "
            f"with CUDA {torch.version.cuda}: the major versions must agree.\n"
            f"Name a CUDA {torch_major} toolkit in CUDA_HOME, or install a torch built with CUDA "
            f"{found.major} ({GET_TORCH}), or set FASTNORM_CUDA=0 to build for CPU."
        )
    return found, "torch and nvcc are of the same CUDA major version"


def nvcc_flags(toolkit: Toolkit | None) -> list[str]:
    if toolkit is not None and int(toolkit.major) >= COMPRESSING_CUDA:
        return [*NVCC_FLAGS, COMPRESS_FLAG]
    return NVCC_FLAGS


def default_architecture_list(torch: ModuleType, toolkit: Toolkit) -> str:
    """Return TORCH_CUDA_ARCH_LIST for the GPUs that torch runs on and nvcc compiles for.

    The oldest of each major version, whose code the others run: 8.6 and 8.9 that of 8.0.
    """
    compilable = output_of(toolkit.nvcc, "--list-gpu-code").split()
    oldest: dict[int, int] = {}
    for code in torch._C._cuda_getArchFlags().split():
        match = re.fullmatch(r"sm_(\d+)(\d)", code)
        if match and code in compilable and int(match[1] + match[2]) >= MINIMUM_ARCHITECTURE:
            major, minor = int(match[1]), int(match[2])
            oldest[major] = min(minor, oldest.get(major, minor))
    if not oldest:
        fail(
            f"nvcc {toolkit.version} compiles for none of the architectures that torch "
            f"{torch.__version__} was built for ({torch._C._cuda_getArchFlags().strip()}).\n"
            "Set TORCH_CUDA_ARCH_LIST, for example to 9.0."
        )
    return ";".join(f"{major}.{minor}" for major, minor in sorted(oldest.items())) + "+PTX"


def compiled_architectures(arch_flags: list[str]) -> list[str]:
    """Name what nvcc is asked for: ["sm_90", "compute_90"] for TORCH_CUDA_ARCH_LIST=9.0+PTX."""

    def number(code: str) -> int:
        return int(re.sub(r"\D", "", code))

    codes = [flag.rpartition("code=")[2] for flag in arch_flags]
    for code in codes:
        if number(code) < MINIMUM_ARCHITECTURE:
            fail(
                f"TORCH_CUDA_ARCH_LIST={os.environ['TORCH_CUDA_ARCH_LIST']} asks for {code}; "
                "fastnorm's kernels need 7.5 (Turing) or newer."
            )
    return sorted(codes, key=lambda code: (not code.startswith("sm_"), number(code)))


# --- the build ------------------------------------------------------------------------------------


def default_jobs() -> int:
    jobs = len(os.sched_getaffinity(0))
    meminfo = Path("/proc/meminfo")
    if meminfo.exists() and (free := re.search(r"MemAvailable: +(\d+) kB", meminfo.read_text())):
        jobs = min(jobs, int(free[1]) * 1024 // BYTES_PER_JOB)
    return max(jobs, 1)


def add_ninja_to_path() -> None:
    """Let ninja be found also where the virtual environment that holds it is not activated."""
    if shutil.which("ninja") is None:
        try:
            import ninja
        except ImportError:
            return
        os.environ["PATH"] += os.pathsep + ninja.BIN_DIR


def check_tools() -> None:
    compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
    if shutil.which(compiler) is None:
        fail(
            f"no C++ compiler: {compiler} was not found.\n"
            "Install one (Debian, Ubuntu: apt install g++) or name yours in CXX."
        )
    if shutil.which("ninja") is None:
        fail("ninja, which runs the compilers, was not found. Install it: pip install ninja")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        fail(
            f"Python.h is not in {sysconfig.get_path('include')}.\n"
            "Install this Python's headers (Debian, Ubuntu: apt install python3-dev)."
        )


def version() -> str:
    text = (ROOT / "csrc" / "include" / "fastnorm" / "version.h").read_text()
    match = re.search(r'#define FASTNORM_VERSION "(.+)"', text)
    assert match is not None
    return match[1]


def library_sources(with_cuda: bool) -> list[str]:
    suffixes = {".cpp", ".cu"} if with_cuda else {".cpp"}
    paths = sorted(path for path in Path("csrc").rglob("*") if path.suffix in suffixes)
    paths = [path for path in paths if str(path) not in PYTHON_SOURCES]
    stems = [path.with_suffix("") for path in paths]
    for stem in stems:
        if stems.count(stem) > 1:  # the object files would overwrite each other
            fail(f"{stem}.cpp and {stem}.cu: sources of one directory need different names.")
    return [str(path) for path in paths]


def sanitize_flags() -> list[str]:
    sanitize = os.environ.get("FASTNORM_SANITIZE")
    return [f"-fsanitize={sanitize}", *SANITIZE_FLAGS] if sanitize else []


def system_headers(with_cuda: bool) -> list[str]:
    """As system headers, torch's raise none of the warnings that fastnorm's own sources are for."""
    paths = cpp_extension.include_paths("cuda" if with_cuda else "cpu")
    return [flag for path in paths for flag in ("-isystem", path)]


torch = import_torch()
toolkit = find_toolkit() if torch is not None else None
add_ninja_to_path()
if torch is not None:
    if toolkit is not None:
        os.environ["CUDA_HOME"] = str(toolkit.home)  # read when cpp_extension is imported
    from torch.utils import cpp_extension


class BuildFastnorm(build_ext if torch is None else cpp_extension.BuildExtension):
    """Compiles libfastnorm and fastnorm._C and writes beside them what belongs to them.

    All decisions are taken in `run`: the commands that do not compile (sdist, egg_info) need
    neither torch nor compilers.
    """

    def run(self) -> None:
        if torch is None:
            fail(
                "there is no torch to compile against.\n"
                "Run `pip install .` without --no-build-isolation, which fetches one, or install "
                f"torch first ({GET_TORCH})."
            )
        check_torch_version(torch)
        check_tools()
        self.chosen_toolkit, reason = toolkit_to_build_with(torch, toolkit)
        self.architectures: list[str] = []
        os.environ.setdefault("MAX_JOBS", str(default_jobs()))
        if self.chosen_toolkit is not None:
            if not os.environ.get("TORCH_CUDA_ARCH_LIST"):
                arch_list = default_architecture_list(torch, self.chosen_toolkit)
                os.environ["TORCH_CUDA_ARCH_LIST"] = arch_list
            self.architectures = compiled_architectures(cpp_extension._get_cuda_arch_flags())
            devices = f"CPU and CUDA {self.chosen_toolkit.version}, {' '.join(self.architectures)}"
        else:
            devices = f"CPU alone, as {reason}"
        print(
            f"fastnorm {version()}: building for {devices}; against torch {torch.__version__}; "
            f"MAX_JOBS={os.environ['MAX_JOBS']}",
            flush=True,
        )
        if self.editable_mode:  # else in a directory that is removed with all objects
            own = build(self.distribution)
            own.ensure_finalized()
            self.build_temp = own.build_temp
        self.build_temp += f"-torch-{torch.__version__}"  # objects of another torch are of no use
        library, module = self.extensions
        vars(library).update(vars(self.configured_library()))
        vars(module).update(vars(self.configured_module()))
        package = Path(self.get_ext_fullpath("fastnorm._C")).parent
        (package / "lib").mkdir(parents=True, exist_ok=True)
        super().run()
        self.write_build_info(package / "_build_info.py")
        shutil.copytree("csrc/include", package / "include", dirs_exist_ok=True)
        self.write_cmake_package(package / "lib" / "cmake" / "fastnorm")

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.endswith("libfastnorm"):  # not a Python module, so without Python's ABI tag
            return str(Path(*fullname.split("."))) + ".so"
        return super().get_ext_filename(fullname)

    def build_extension(self, extension: setuptools.Extension) -> None:
        directory = self.build_temp  # one each: ninja keeps its records there
        self.build_temp = str(Path(directory, extension.name.rpartition(".")[2]))
        try:
            super().build_extension(extension)
        finally:
            self.build_temp = directory

    def configured_library(self) -> setuptools.Extension:
        with_cuda = self.chosen_toolkit is not None
        make = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension
        include_dirs = [str(ROOT / "csrc"), str(ROOT / "csrc" / "include")]
        extension = make(
            "fastnorm.lib.libfastnorm",
            library_sources(with_cuda),
            define_macros=[("FASTNORM_WITH_CUDA", None)] if with_cuda else [],
            extra_compile_args={
                "cxx": [*CXX_FLAGS, *system_headers(with_cuda), *sanitize_flags()],
                "nvcc": nvcc_flags(self.chosen_toolkit),
            },
            extra_link_args=[
                *(sanitize_flags() or LINK_FLAGS),
                "-Wl,-soname,libfastnorm.so",
                *(f"-Wl,-rpath,{path}" for path in self.library_search_path()),
            ],
        )
        extension.libraries.remove("torch_python")  # for programs without Python
        # Without torch's headers: kernels know nothing of torch, and where the same torch lies
        # elsewhere, as from one pip to the next, they need not be compiled anew.
        extension.include_dirs = include_dirs
        return extension

    def configured_module(self) -> setuptools.Extension:
        return setuptools.Extension(
            "fastnorm._C",
            PYTHON_SOURCES,
            language="c++",
            include_dirs=[str(ROOT / "csrc"), str(ROOT / "csrc" / "include")],
            extra_compile_args={
                "cxx": [*CXX_FLAGS, *system_headers(with_cuda=False), *sanitize_flags()]
            },
            library_dirs=[
                str(Path(self.build_lib, "fastnorm", "lib")),
                *cpp_extension.library_paths(),
            ],
            libraries=["fastnorm", "torch_python", "torch_cpu", "c10"],
            extra_link_args=[*(sanitize_flags() or LINK_FLAGS), "-Wl,-rpath,$ORIGIN/lib"],
        )

    def library_search_path(self) -> list[str]:
        """Return where libfastnorm looks for torch and CUDA when no Python has loaded them.

        An installed one looks beside its own package, wherever that lies: the torch that pip
        builds with may be a temporary one.
        """
        site_packages = Path(torch.__file__).parents[1] if self.inplace else "$ORIGIN/../.."
        directories = ["torch/lib"]
        if self.chosen_toolkit is not None:
            directories += [f"nvidia/cu{self.chosen_toolkit.major}/lib", "nvidia/cuda_runtime/lib"]
        return [f"{site_packages}/{directory}" for directory in directories]

    def write_build_info(self, path: Path) -> None:
        cuda = self.chosen_toolkit.version if self.chosen_toolkit is not None else None
        path.write_text(
            '"""What this fastnorm was compiled against. Written by setup.py."""\n\n'
            f"FASTNORM = {version()!r}\n"
            f"TORCH = {str(torch.__version__)!r}\n"
            f"CUDA = {cuda!r}\n"
            f"CUDA_ARCHITECTURES = {self.architectures!r}\n"
        )

    def write_cmake_package(self, directory: Path) -> None:
        values = {
            "FASTNORM_VERSION": version(),
            "FASTNORM_TORCH_VERSION": re.match(r"\d+\.\d+\.\d+", torch.__version__)[0],
            "FASTNORM_WITH_CUDA": "OFF" if self.chosen_toolkit is None else "ON",
        }
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copy("cmake/fastnormTorch.cmake", directory)
        for template in Path("cmake").glob("*.in"):
            text = re.sub(r"@(\w+)@", lambda match: values[match[1]], template.read_text())
            (directory / template.stem).write_text(text)


if int(setuptools.__version__.split(".")[0]) < MINIMUM_SETUPTOOLS:
    fail(
        f"setuptools {setuptools.__version__} is too old. "
        f'Upgrade it: pip install "setuptools>={MINIMUM_SETUPTOOLS}"'
    )

setuptools.setup(
    version=version(),
    install_requires=[torch_requirement(torch), "tqdm"],
    ext_modules=[  # configured when they are built; the module is linked to the library
        setuptools.Extension("fastnorm.lib.libfastnorm", sources=[]),
        setuptools.Extension("fastnorm._C", sources=[]),
    ],
    cmdclass={"build_ext": BuildFastnorm},
)
