"""ONNX: export through fastnorm.onnx.translation_table, and what onnxruntime makes of it.

An export takes a second or so: each test exports one module that holds all of its cases.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import DTYPES, SMALL_DTYPES, name_of, ops, random
from torch import Tensor, nn

import fastnorm
from fastnorm.functional import layer_norm

MISSING = [
    name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None
]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.filterwarnings("ignore"),  # the exporter's own
]

EPS = 2.0**-10  # a float32, as which ONNX keeps it


class Cases(nn.Module):
    """Several functions of one input and of a weight and a bias, in `dtype`.

    Input and results are float32 (or float64): NumPy has no bfloat16.
    """

    def __init__(
        self,
        functions: list[Callable[[Tensor, Tensor, Tensor], Tensor]],
        normalized_shape: tuple[int, ...],
        dtype: torch.dtype,
        parameter_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.functions = functions
        self.dtype = dtype
        for seed, name in enumerate(("weight", "bias"), 1):
            value = random(normalized_shape, parameter_dtype, "cpu", seed=seed)
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        x = input.to(self.dtype)
        results = [function(x, self.weight, self.bias) for function in self.functions]
        return tuple(y if y.dtype == torch.float64 else y.float() for y in results)


def _export(module: nn.Module, x: Tensor) -> Any:
    """The ONNX model, its first dimension dynamic."""
    program = torch.onnx.export(
        module.eval(),
        (x,),
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch", min=2)},),
        custom_translation_table=fastnorm.onnx.translation_table(),
        verbose=False,
    )
    assert program is not None
    return program.model_proto


def _run(model: Any, x: Tensor) -> list[Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    [argument] = session.get_inputs()
    return [torch.from_numpy(array) for array in session.run(None, {argument.name: x.numpy()})]


def _norms(model: Any) -> list[Any]:
    """The LayerNormalization nodes; all nodes are standard ones."""
    assert all(node.domain in ("", "ai.onnx") for node in model.graph.node)
    return [node for node in model.graph.node if node.op_type == "LayerNormalization"]


def _inputs(node: Any) -> list[bool]:
    """Whether X, Scale and B are there."""
    return [bool(name) for name in (*node.input, "", "")[:3]]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_round_trip(dtype: torch.dtype) -> None:
    """One LayerNormalization a call, in the tensors' own dtype; another batch agrees."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shape = (3, 4)
    module = Cases(
        [
            lambda x, w, b: layer_norm(x, shape, w, b, EPS),
            lambda x, w, b: layer_norm(x, shape, w, None, EPS),
            lambda x, w, b: layer_norm(x, shape, None, b, EPS),
            lambda x, w, b: layer_norm(x, shape, eps=EPS),
            lambda x, w, b: layer_norm(x, shape[1:], eps=EPS),
        ],
        shape,
        dtype,
        dtype,
    )
    model = _export(module, torch.ones(4, *shape, dtype=wide))
    norms = _norms(model)
    assert len(norms) == 5
    casts = 0 if dtype == wide else 1 + 5
    assert [node.op_type for node in model.graph.node].count("Cast") == casts
    attributes = [{a.name: a for a in node.attribute} for node in norms]
    assert [a["axis"].i for a in attributes] == [-2, -2, -2, -2, -1]
    assert {a["epsilon"].f for a in attributes} == {EPS}
    assert [_inputs(node) for node in norms] == [
        [True, True, b] for b in (True, False, True, False, False)
    ]

    x = random((7, *shape), wide, "cpu", seed=9, shift=0.5)
    try:
        results = _run(model, x)
    except Exception as error:
        if dtype == torch.bfloat16 and "NOT_IMPLEMENTED" in str(error):
            pytest.skip("this onnxruntime has no bfloat16 on the CPU")
        raise
    units = torch.finfo(dtype).eps  # one in the last place: roundings to either side
    for got, expected in zip(results, module(x)):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=units, atol=8 * torch.finfo(wide).eps)


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
def test_mixed_dtypes(dtype: torch.dtype) -> None:
    """float32 parameters, any input, any result: float32 inside, whatever is outside."""
    out_dtypes = [None, *SMALL_DTYPES]
    module = Cases(
        # Another eps each: the exporter merges equal calls.
        [
            lambda x, w, b, eps=i * EPS, o=o: layer_norm(x, (6,), w, b, eps, o)
            for i, o in enumerate(out_dtypes, 1)
        ],
        (6,),
        dtype,
        torch.float32,
    )
    model = _export(module, torch.ones(4, 6))
    assert len(_norms(model)) == len(out_dtypes)
    assert {node.op_type for node in model.graph.node} <= {"Cast", "LayerNormalization"}
    x = random((7, 6), torch.float32, "cpu", seed=9, shift=0.5)
    for got, expected, out_dtype in zip(_run(model, x), module(x), out_dtypes):
        units = torch.finfo(out_dtype or dtype).eps
        torch.testing.assert_close(got, expected, rtol=units, atol=1e-6)


def test_statistics_and_models() -> None:
    """layer_norm_forward's output, mean and rstd are the node's; modules lie inside models."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(6, 8), fastnorm.LayerNorm(8), nn.GELU(), fastnorm.LayerNorm(8, bias=False)
            )

        def forward(self, input: Tensor) -> tuple[Tensor, ...]:
            return self.layers(input), *ops.layer_norm_forward(input, [6], None, None, 1e-5, None)

    module = Model()
    model = _export(module, torch.ones(4, 2, 6))
    assert len(_norms(model)) == 3
    x = random((5, 2, 6), torch.float32, "cpu", shift=0.5)
    results = _run(model, x)
    assert len(results) == 4
    for got, expected in zip(results, module(x)):
        torch.testing.assert_close(got, expected)


def test_without_onnxscript_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"pip install 'fastnorm\[onnx\]'"):
        fastnorm.onnx.translation_table()
