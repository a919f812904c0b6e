"""TorchScript: script, trace, freeze, save and load, with gradients; the lite interpreter."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import fresh_process
import pytest
import torch
from reference import name_of, random
from torch import Tensor, nn

import fastnorm
from fastnorm.functional import layer_norm

pytestmark = [
    pytest.mark.skipif(
        sys.version_info >= (3, 14), reason="TorchScript is not supported by Python 3.14 and newer"
    ),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Lite Interpreter is deprecated"),
]

CONFIGURATIONS = [{}, {"bias": False}, {"elementwise_affine": False}, {"eps": 1e-3}]


def _config_name(configuration: dict[str, object]) -> str:
    return "-".join(f"{key}={value}" for key, value in configuration.items()) or "default"


def _filled(norm: fastnorm.LayerNorm) -> fastnorm.LayerNorm:
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    return norm


def _saved_and_loaded(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


def _gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_(), *module.parameters()]
    loss = module(leaves[0]).float().square().sum()
    return list(torch.autograd.grad(loss, leaves))


def test_the_function_scripts(device: str) -> None:
    scripted = torch.jit.script(layer_norm)
    x, w = random((5, 6), torch.float32, device), random((6,), torch.float32, device, seed=1)
    assert scripted(x, [6], w).equal(layer_norm(x, [6], w))
    assert scripted(x, [6], w, w, 1e-3, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=_config_name)
@pytest.mark.parametrize("way", ["script", "trace", "freeze"])
def test_scripted_traced_and_frozen(
    device: str, way: str, configuration: dict[str, object], out_dtype: torch.dtype | None
) -> None:
    """Each as it is and saved and loaded: the operator, its results and its gradients."""
    norm = _filled(fastnorm.LayerNorm(6, **configuration, out_dtype=out_dtype)).to(device)
    x = random((5, 6), torch.float32, device)
    module = torch.jit.trace(norm, x) if way == "trace" else torch.jit.script(norm)
    if way == "freeze":
        module = torch.jit.freeze(module.eval())
    expected = norm(x)
    for program in (module, _saved_and_loaded(module)):
        assert "fastnorm::layer_norm" in str(program.inlined_graph)
        assert program(x).equal(expected)
        assert program(x).dtype == expected.dtype
        other = random((9, 6), torch.float32, device, seed=5)
        assert program(other).equal(norm(other)), "another batch than the traced one"
        gradients = _gradients(program, x)
        assert len(gradients) == 1 + len(list(program.parameters()))
        for ours, eager in zip(gradients, _gradients(norm, x)):
            torch.testing.assert_close(ours, eager)


LOAD = """
import sys
import torch
import fastnorm
folder = sys.argv[1]
module = torch.jit.load(f"{folder}/module.pt")
x, y, *gradients = torch.load(f"{folder}/expected.pt")
x.requires_grad_()
result = module(x)
assert result.equal(y)
result.square().sum().backward()
for got, expected in zip([x.grad, *(p.grad for p in module.parameters())], gradients, strict=True):
    torch.testing.assert_close(got, expected)
print("loaded")
"""


@pytest.mark.parametrize("way", ["script", "trace"])
def test_load_in_a_fresh_process(tmp_path: Path, way: str) -> None:
    """Where no Python module of the model exists, with gradients."""
    norm = _filled(fastnorm.LayerNorm(6))
    x = random((5, 6), torch.float32, "cpu")
    module = torch.jit.script(norm) if way == "script" else torch.jit.trace(norm, x)
    module.save(str(tmp_path / "module.pt"))
    torch.save([x, norm(x).detach(), *_gradients(norm, x)], tmp_path / "expected.pt")
    assert fresh_process.check(LOAD, tmp_path) == "loaded\n"


def test_lite_interpreter(tmp_path: Path) -> None:
    try:
        from torch.jit.mobile import _load_for_lite_interpreter
    except ImportError:
        pytest.skip(f"torch {torch.__version__} has no lite interpreter")
    scripted = torch.jit.script(_filled(fastnorm.LayerNorm((3, 4))))
    if not hasattr(scripted, "_save_for_lite_interpreter"):
        pytest.skip(f"torch {torch.__version__} saves nothing for the lite interpreter")
    file = str(tmp_path / "module.ptl")
    scripted._save_for_lite_interpreter(file)
    x = random((5, 3, 4), torch.float32, "cpu")
    assert _load_for_lite_interpreter(file)(x).equal(scripted(x))
