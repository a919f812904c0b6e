"""The CMake package that comes with Python's: which torch and which requests it accepts.

Against a torch made up of empty files, so that no real one is needed; tests/cpp builds programs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import fastnorm

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake")

TORCH_RELEASE = torch.__version__.split("+")[0]
MAJOR, MINOR, PATCH = (int(part) for part in re.findall(r"\d+", fastnorm.__version__)[:3])


def make_torch(root: Path, version: str, *, cuda: bool = False) -> None:
    """Write a package Torch of this version."""
    package = root / "share" / "cmake" / "Torch"
    package.mkdir(parents=True)
    (root / "lib").mkdir()
    (package / "TorchConfig.cmake").write_text(
        "if(NOT TARGET torch)\n  add_library(torch INTERFACE IMPORTED)\nendif()\n"
        "set_target_properties(torch PROPERTIES CXX_STANDARD 20)\n"
    )
    (package / "TorchConfigVersion.cmake").write_text(
        f"set(PACKAGE_VERSION {version})\n"
        "if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)\n"
        "  set(PACKAGE_VERSION_COMPATIBLE TRUE)\n  set(PACKAGE_VERSION_EXACT TRUE)\nendif()\n"
    )
    if cuda:
        (root / "lib" / "libtorch_cuda.so").touch()


def configure(directory: Path, torch_root: Path, request: str) -> str:
    """Return what CMake says to a project that asks for fastnorm in these words."""
    (directory / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(user LANGUAGES CXX)\n"
        f"find_package({request})\n"
        "if(fastnorm_FOUND)\n"
        "  get_target_property(needs fastnorm::library INTERFACE_COMPILE_FEATURES)\n"
        '  message(STATUS "found fastnorm ${fastnorm_VERSION} with ${needs}")\n'
        "else()\n"
        '  message(STATUS "no fastnorm")\n'
        "endif()\n"
    )
    environment = {name: value for name, value in os.environ.items() if "CUDA" not in name}
    return subprocess.run(
        ["cmake", "-B", directory / "build", "-S", directory, "-Wno-dev",
         f"-DCMAKE_PREFIX_PATH={torch_root};{fastnorm.cmake_prefix_path}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        env=environment,
    ).stdout  # fmt: skip


def test_found_with_the_torch_it_was_built_with(tmp_path: Path) -> None:
    make_torch(tmp_path / "torch", TORCH_RELEASE)
    answer = configure(tmp_path, tmp_path / "torch", "fastnorm REQUIRED")
    assert f"found fastnorm {fastnorm.__version__} with cxx_std_20" in answer


def test_another_torch(tmp_path: Path) -> None:
    """Even another patch release: C++ libraries belong to the torch they were compiled with."""
    major, minor, patch = TORCH_RELEASE.split(".")[:3]
    make_torch(tmp_path / "torch", f"{major}.{minor}.{int(patch[0]) + 1}")
    answer = configure(tmp_path, tmp_path / "torch", "fastnorm REQUIRED")
    assert f'exactly\n  matches requested version "{TORCH_RELEASE}"' in answer
    assert "found fastnorm" not in answer


@pytest.mark.parametrize("compiler_on_path", ["nvcc of an incomplete toolkit", "no nvcc"])
def test_a_cuda_torch_without_a_complete_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler_on_path: str
) -> None:
    make_torch(tmp_path / "torch", TORCH_RELEASE, cuda=True)
    toolkit = tmp_path / "cuda"
    (toolkit / "bin").mkdir(parents=True)
    if compiler_on_path != "no nvcc":
        nvcc = toolkit / "bin" / "nvcc"
        nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
        nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{toolkit / 'bin'}:{os.environ['PATH']}")
    answer = " ".join(configure(tmp_path, tmp_path / "torch", "fastnorm REQUIRED").split())
    if "lacks" not in answer and "none was found" not in answer and "found fastnorm" in answer:
        pytest.skip("this machine has a complete CUDA toolkit, which CMake found")
    assert f"the torch in {tmp_path / 'torch'} is a CUDA build" in answer
    assert "needs a complete CUDA toolkit" in answer
    assert "CPU build of torch" in answer


@pytest.mark.parametrize(
    ("wanted", "accepted"),
    [
        (f"{MAJOR}.{MINOR}", True),
        (fastnorm.__version__, True),
        (f"{fastnorm.__version__} EXACT", True),
        (f"{MAJOR}.{MINOR}...{MAJOR}.{MINOR + 1}", True),
        (f"{MAJOR}.{MINOR}...<{fastnorm.__version__}", False),
        (f"{MAJOR}.{MINOR}.{PATCH + 1}", False),
        (f"{MAJOR}.{MINOR + 1}", False),
        (f"{MAJOR}.{MINOR - 1}", False),
        (f"{MAJOR + 1}.{MINOR}", False),
    ],
)
def test_versions(tmp_path: Path, wanted: str, accepted: bool) -> None:
    """Requests for this minor release, up to this version."""
    make_torch(tmp_path / "torch", TORCH_RELEASE)
    answer = configure(tmp_path, tmp_path / "torch", f"fastnorm {wanted}")
    assert ("found fastnorm" in answer) == accepted
    assert ("no fastnorm" in answer) != accepted
