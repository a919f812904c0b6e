"""Loads fastnorm._C and libfastnorm, or says why they cannot be loaded and what mends it.

A compiled extension runs only with the torch (major.minor) and the CUDA major version that it was
compiled against; with others the loader reports an undefined symbol, or worse, nothing.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import torch

_REBUILD = "To rebuild fastnorm for this environment, run in its source tree:\n    pip install ."


def _release(version: str) -> str:
    """Return "2.11" for "2.11.0+cu130", "2.16" for "2.16.0.dev20261101+cu132"."""
    return ".".join(version.split(".")[:2])


def _major(version: str) -> str:
    return version.split(".")[0]


def mismatch(
    built_torch: str, built_cuda: str | None, torch_version: str, torch_cuda: str | None
) -> str | None:
    """Return what keeps a fastnorm built for the former from running with the latter, or None.

    `built_cuda` is None for a build without CUDA, which runs with any torch of its release.
    """
    if _release(built_torch) != _release(torch_version):
        return f"it was compiled against torch {built_torch}, and this is torch {torch_version}."
    if built_cuda is None:
        return None
    if torch_cuda is None:
        return (
            f"it was compiled for CUDA {built_cuda}, and this torch {torch_version} was built "
            "without CUDA."
        )
    if _major(built_cuda) != _major(torch_cuda):
        return (
            f"it was compiled for CUDA {built_cuda}, and this torch {torch_version} was built with "
            f"CUDA {torch_cuda}."
        )
    return None


def _missing() -> str:
    here = Path(__file__).parent
    found = ", ".join(sorted(path.name for path in here.glob("_C.*.so")))
    if found:
        release = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"its compiled part in {here} is for another Python than this {release}: {found}."
    return f"its compiled part is missing in {here}, which looks like a source tree never built."


def other_library(own: Path, mappings: str) -> str | None:
    """Return the path of another libfastnorm than `own` in this process, by `/proc/self/maps`.

    A process holds one libfastnorm: the loader gives every program and module that asks for the
    name the one that was loaded first.
    """
    for line in mappings.splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.endswith("/libfastnorm.so") and path != str(own):
            return path
    return None


def _foreign_library() -> str | None:
    try:
        mappings = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    return other_library(Path(__file__).resolve().parent / "lib" / "libfastnorm.so", mappings)


def _error(problem: str, remedy: str = _REBUILD) -> ImportError:
    return ImportError(f"fastnorm cannot be imported: {problem}\n{remedy}", name="fastnorm")


def _foreign(path: str, difference: str) -> ImportError:
    return _error(
        f"the C++ library that this process loaded before, {path}, {difference}.",
        "A process can hold only one. Build the C++ code that brings it with the library of this "
        "package:\n    cmake -B build -DCMAKE_PREFIX_PATH="
        f'"{Path(torch.__file__).parent};{Path(__file__).resolve().parent}"',
    )


def load_extension() -> ModuleType:
    """Import fastnorm._C, which loads the library that registers the operators.

    Raises:
        ImportError: fastnorm was not built, or was built for another torch, CUDA or Python, or the
            process already holds a libfastnorm that differs.
    """
    try:
        build_info = importlib.import_module("fastnorm._build_info")
    except ModuleNotFoundError:
        raise _error(_missing()) from None
    problem = mismatch(
        build_info.TORCH, build_info.CUDA, str(torch.__version__), torch.version.cuda
    )
    if problem is not None:
        raise _error(problem)
    try:
        module = importlib.import_module("fastnorm._C")
    except ModuleNotFoundError:
        raise _error(_missing()) from None
    except ImportError as error:
        foreign = _foreign_library()
        if foreign is not None:
            raise _foreign(foreign, f"does not fit this package ({error})") from error
        raise _error(
            f"its compiled part cannot be loaded beside torch {torch.__version__} ({error})."
        ) from error
    loaded = module.build_info()
    lacks_cuda = build_info.CUDA is not None and loaded["cuda"] is None
    if loaded["version"] != build_info.FASTNORM or lacks_cuda:
        raise _foreign(
            _foreign_library() or "libfastnorm.so",
            f"is fastnorm {loaded['version']}{' without CUDA' if lacks_cuda else ''}, "
            f"and this package is {build_info.FASTNORM}{' with CUDA' if lacks_cuda else ''}",
        )
    return module
