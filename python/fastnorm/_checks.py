"""Loads fastnorm._C, or says why it cannot be loaded and what mends it.

A compiled extension runs only with the torch (major.minor) and the CUDA major version that it was
compiled against; with others the loader reports an undefined symbol, or worse, nothing.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
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


def _error(problem: str) -> ImportError:
    return ImportError(f"fastnorm cannot be imported: {problem}\n{_REBUILD}", name="fastnorm")


def _is_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


def _check_that_operators_are_free() -> None:
    """PyTorch ends the process when a second library defines the same operators."""
    if not torch._C._dispatch_has_kernel("fastnorm::layer_norm"):
        return
    spec = importlib.util.find_spec("fastnorm._C")
    if spec is not None and spec.origin is not None and not _is_loaded(spec.origin):
        raise ImportError(
            f"fastnorm cannot be imported from {Path(__file__).parent}: another fastnorm has "
            "already defined its operators in this process. Import one of the two only.",
            name="fastnorm",
        )


def load_extension() -> ModuleType:
    """Import fastnorm._C, which registers the operators.

    Raises:
        ImportError: fastnorm was not built, or was built for another torch, CUDA or Python, or
            this process holds another fastnorm already.
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
    _check_that_operators_are_free()
    try:
        return importlib.import_module("fastnorm._C")
    except ModuleNotFoundError:
        raise _error(_missing()) from None
    except ImportError as error:
        raise _error(
            f"its compiled part does not fit torch {torch.__version__} as installed here ({error})."
        ) from error
