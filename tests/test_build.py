"""What was built, the version, and the checks when fastnorm is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fastnorm
import fastnorm._C
from fastnorm import _build_info, _checks


def test_build_info() -> None:
    info = fastnorm._C.build_info()
    assert {
        "version", "torch", "cuda", "cuda_architectures", "compiler", "instruction_set",
    } <= set(info)  # fmt: skip
    assert info["torch"] == torch.__version__.split("+")[0]
    assert isinstance(info["compiler"], str)
    assert info["compiler"]
    assert isinstance(info["instruction_set"], str)
    assert info["instruction_set"]
    if info["cuda"] is None:
        assert info["cuda_architectures"] == []
    else:
        assert info["cuda"].split(".")[0] == torch.version.cuda.split(".")[0]
        assert info["cuda_architectures"]
        for architecture in info["cuda_architectures"]:
            assert architecture.startswith(("sm_", "compute_"))


def test_version_is_the_same_everywhere() -> None:
    assert fastnorm.__version__ == fastnorm._C.build_info()["version"]
    try:
        installed = importlib.metadata.version("fastnorm")
    except importlib.metadata.PackageNotFoundError:
        return  # built in place
    assert installed == fastnorm.__version__


def test_typed_marker_is_installed() -> None:
    assert (Path(fastnorm.__file__).parent / "py.typed").is_file()


def test_import_alone_gives_the_operators() -> None:
    """In a fresh process, and without loading what only other features need."""
    program = (
        "import sys, fastnorm, torch\n"
        "print(torch.ops.fastnorm.layer_norm(torch.ones(2, 3), [3]).sum().item())\n"
        "heavy = {'torch.onnx', 'torch._dynamo', 'torch._inductor', 'torch.distributed.tensor'}\n"
        "plain = set(sys.modules)\n"
        "print(sorted(heavy & plain))\n"
    )
    found = importlib.util.find_spec("fastnorm").submodule_search_locations[0]
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, cwd=Path(found).parent, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    plain = subprocess.run(
        [sys.executable, "-c", "import sys, torch; torch.ones(2, 3).sum()\n"
         "print(sorted({'torch.onnx', 'torch._dynamo', 'torch._inductor', "
         "'torch.distributed.tensor'} & set(sys.modules)))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    total, loaded = result.stdout.splitlines()
    assert float(total) == 0.0
    assert loaded == plain.stdout.strip()


@pytest.mark.parametrize(
    ("built", "installed"),
    [
        (("2.11.0", None), ("2.11.0", None)),
        (("2.11.0", None), ("2.11.1+cu130", "13.0")),
        (("2.11.0+cu130", "13.0"), ("2.11.1+cu130", "13.0")),
        (("2.11.0+cu130", "13.0"), ("2.11.0+cu132", "13.2")),
        (("2.16.0.dev20261101", None), ("2.16.0.dev20261102+cpu", None)),
    ],
)
def test_a_torch_that_fits(built: tuple, installed: tuple) -> None:
    assert _checks.mismatch(*built, *installed) is None


@pytest.mark.parametrize(
    ("built", "installed", "words"),
    [
        (("2.11.0", None), ("2.13.0", None), ["torch 2.11.0", "torch 2.13.0"]),
        (("2.1.0", None), ("2.11.0", None), ["torch 2.1.0", "torch 2.11.0"]),
        (("2.11.0", "13.0"), ("3.11.0", "13.0"), ["2.11.0", "3.11.0"]),
        (("2.11.0", "13.0"), ("2.11.0", "12.8"), ["CUDA 13.0", "CUDA 12.8"]),
        (("2.11.0", "13.0"), ("2.11.0+cpu", None), ["CUDA 13.0", "without CUDA"]),
    ],
)
def test_a_torch_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, built: tuple, installed: tuple, words: list[str]
) -> None:
    """The import fails with both versions and the command that mends it."""
    torch_version, cuda = built
    fake = SimpleNamespace(FASTNORM=fastnorm.__version__, TORCH=torch_version, CUDA=cuda)
    monkeypatch.setitem(sys.modules, "fastnorm._build_info", fake)
    monkeypatch.setattr(torch, "__version__", installed[0])
    monkeypatch.setattr(torch.version, "cuda", installed[1])
    with pytest.raises(ImportError) as raised:
        _checks.load_extension()
    for word in (*words, "pip install ."):
        assert word in str(raised.value)


def test_a_tree_that_was_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastnorm._build_info", None)
    with pytest.raises(ImportError, match="pip install"):
        _checks.load_extension()


def test_an_extension_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastnorm._C", None)
    with pytest.raises(ImportError, match="pip install"):
        _checks.load_extension()


def test_what_was_recorded_is_what_was_compiled() -> None:
    info = fastnorm._C.build_info()
    assert _build_info.TORCH.split("+")[0] == info["torch"]
    assert (_build_info.CUDA is None) == (info["cuda"] is None)
    assert info["version"] == _build_info.FASTNORM


def test_what_cpp_programs_need_is_installed() -> None:
    """tests/cpp builds programs with it."""
    package = Path(fastnorm.cmake_prefix_path)
    assert (package / "lib" / "libfastnorm.so").is_file()
    for header in ("fastnorm.h", "layer_norm.h", "nn.h", "version.h", "export.h"):
        assert (package / "include" / "fastnorm" / header).is_file()
    for file in ("Config", "ConfigVersion", "Torch"):
        text = (package / "lib" / "cmake" / "fastnorm" / f"fastnorm{file}.cmake").read_text()
        assert re.search(r"@\w+@", text) is None  # no placeholder is left


OWN = Path("/here/fastnorm/lib/libfastnorm.so")
MAPPINGS = """\
5600a000-5600b000 r--p 00000000 fe:00 12 /usr/bin/python3.12
7f00a000-7f00b000 r-xp 00000000 fe:00 34 {}
7f00c000-7f00d000 rw-p 00000000 00:00 0
"""


def test_another_library_in_the_process_is_found() -> None:
    other = "/a program's/lib/libfastnorm.so"
    assert _checks.other_library(OWN, MAPPINGS.format(other)) == other
    assert _checks.other_library(OWN, MAPPINGS.format(OWN)) is None
    assert _checks.other_library(OWN, MAPPINGS.format("/usr/lib/libc.so.6")) is None


@pytest.mark.parametrize(
    ("built", "words"),
    [
        ({"FASTNORM": "9.9.0"}, [f"is fastnorm {fastnorm.__version__}", "this package is 9.9.0"]),
        ({"CUDA": "13.0"}, ["without CUDA", "with CUDA"]),
    ],
)
def test_a_library_of_another_build_was_loaded_before(
    monkeypatch: pytest.MonkeyPatch, built: dict[str, str], words: list[str]
) -> None:
    """As when a C++ program brings its own libfastnorm into the process."""
    recorded = {"FASTNORM": fastnorm.__version__, "TORCH": torch.__version__, "CUDA": None}
    monkeypatch.setitem(sys.modules, "fastnorm._build_info", SimpleNamespace(**(recorded | built)))
    monkeypatch.setattr(torch.version, "cuda", built.get("CUDA"))
    without_cuda = fastnorm._C.build_info() | {"cuda": None}
    monkeypatch.setattr(fastnorm._C, "build_info", lambda: without_cuda)
    with pytest.raises(ImportError) as raised:
        _checks.load_extension()
    for word in (*words, "libfastnorm.so", "CMAKE_PREFIX_PATH"):
        assert word in str(raised.value)


@pytest.mark.skipif(_build_info.CUDA is not None, reason="built with CUDA")
def test_cuda_kernels_of_a_build_without_cuda() -> None:
    """What a call with CUDA tensors reaches: the dispatcher's entry, asked for without a GPU."""
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    op = torch.ops.fastnorm.layer_norm_forward.default
    with pytest.raises(
        NotImplementedError, match=r"without CUDA.*\n?.*FASTNORM_CUDA=1 pip install"
    ):
        op.redispatch(cuda, torch.ones(2, 3), [3], None, None, 1e-5, None)
