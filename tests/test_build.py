"""What was built, the version, and the checks when fastnorm is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
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
    fake = SimpleNamespace(TORCH=torch_version, CUDA=cuda)
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
