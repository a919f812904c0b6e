"""torch.library.opcheck on the three operators: schema, autograd, fake tensors, dynamic shapes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from reference import name_of, ops, random
from torch import Tensor

SHAPES = [((4, 6), (6,)), ((2, 3, 4), (3, 4)), ((2, 0, 4), (4,)), ((5,), (5,)), ((3, 1), (1,))]
AFFINE = ["both", "weight", "bias", "none"]
# Half a second for each operator of each: every shape, and the first one without parameters.
PROBLEMS = [(*shapes, "both") for shapes in SHAPES] + [(*SHAPES[0], which) for which in AFFINE[1:]]
MIXTURES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float64, torch.float64),
]


def _tensors(
    shape: tuple[int, ...],
    normalized_shape: tuple[int, ...],
    affine: str,
    mixture: tuple[torch.dtype, torch.dtype],
    device: str,
    requires_grad: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dtype, parameter_dtype = mixture
    x = random(shape, dtype, device).requires_grad_(requires_grad)
    weight, bias = (
        random(normalized_shape, parameter_dtype, device, seed=seed).requires_grad_(requires_grad)
        if affine in ("both", which)
        else None
        for seed, which in enumerate(("weight", "bias"), 1)
    )
    return x, weight, bias


def _opcheck(operator: Any, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
    results = torch.library.opcheck(operator.default, args, kwargs)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "requires_grad"])
@pytest.mark.parametrize(("shape", "normalized_shape", "affine"), PROBLEMS, ids=name_of)
def test_forward(
    device: str,
    shape: tuple[int, ...],
    normalized_shape: tuple[int, ...],
    affine: str,
    requires_grad: bool,
) -> None:
    x, weight, bias = _tensors(shape, normalized_shape, affine, MIXTURES[0], device, requires_grad)
    _opcheck(ops.layer_norm, (x, normalized_shape, weight, bias, 1e-5))
    _opcheck(ops.layer_norm_forward, (x, normalized_shape, weight, bias, 1e-5, None))


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "requires_grad"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("mixture", MIXTURES[:3], ids=name_of)
def test_forward_of_mixed_dtypes(
    device: str,
    mixture: tuple[torch.dtype, torch.dtype],
    out_dtype: torch.dtype | None,
    requires_grad: bool,
) -> None:
    x, weight, bias = _tensors((4, 6), (6,), "both", mixture, device, requires_grad)
    _opcheck(ops.layer_norm, (x, [6], weight, bias, 1e-5), {"out_dtype": out_dtype})
    _opcheck(ops.layer_norm_forward, (x, [6], weight, bias, 1e-5, out_dtype))


@pytest.mark.parametrize("mask", list(itertools.product([True, False], repeat=3)), ids=name_of)
@pytest.mark.parametrize("affine", AFFINE)
def test_backward(device: str, affine: str, mask: tuple[bool, bool, bool]) -> None:
    _check_backward((4, 6), (6,), affine, mask, MIXTURES[0], device, gradients=(True,))


@pytest.mark.parametrize("affine", AFFINE)
def test_backward_of_transposed_tensors(device: str, affine: str) -> None:
    mask = (True, True, True)
    _check_backward((4, 6), (6,), affine, mask, MIXTURES[0], device, transposed=True)


@pytest.mark.parametrize(
    ("shape", "normalized_shape", "mixture"),
    [(*shapes, MIXTURES[0]) for shapes in SHAPES] + [(*SHAPES[0], other) for other in MIXTURES[1:]],
    ids=name_of,
)
def test_backward_of_shapes_and_dtypes(
    device: str,
    shape: tuple[int, ...],
    normalized_shape: tuple[int, ...],
    mixture: tuple[torch.dtype, torch.dtype],
) -> None:
    _check_backward(shape, normalized_shape, "both", (True, True, True), mixture, device)


def _check_backward(
    shape: tuple[int, ...],
    normalized_shape: tuple[int, ...],
    affine: str,
    mask: tuple[bool, bool, bool],
    mixture: tuple[torch.dtype, torch.dtype],
    device: str,
    transposed: bool = False,
    gradients: tuple[bool, ...] = (False, True),
) -> None:
    for requires_grad in gradients:
        x, weight, bias = _tensors(shape, normalized_shape, affine, mixture, device, False)
        grad_out = random(shape, mixture[0], device, seed=3)
        if transposed:
            x, grad_out = (t.t().contiguous().t() for t in (x, grad_out))
        _, mean, rstd = ops.layer_norm_forward(x, normalized_shape, weight, bias, 1e-5, None)
        for leaf in (grad_out, x, weight):
            if leaf is not None:
                leaf.requires_grad_(requires_grad)
        _opcheck(
            ops.layer_norm_backward,
            (grad_out, x, normalized_shape, mean, rstd, weight, bias, 1e-5, mask),
        )


def test_compliance_is_declared() -> None:
    """What opcheck verifies, the operators promise."""
    for operator in (ops.layer_norm, ops.layer_norm_forward, ops.layer_norm_backward):
        assert torch.Tag.pt2_compliant_tag in operator.default.tags


def test_schemas() -> None:
    schemas = {
        ops.layer_norm: "(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, "
        "Tensor? bias=None, float eps=1e-05, *, ScalarType? out_dtype=None) -> Tensor",
        ops.layer_norm_forward: "(Tensor input, SymInt[] normalized_shape, Tensor? weight, "
        "Tensor? bias, float eps, ScalarType? out_dtype) "
        "-> (Tensor output, Tensor mean, Tensor rstd)",
        ops.layer_norm_backward: "(Tensor grad_out, Tensor input, SymInt[] normalized_shape, "
        "Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, float eps, bool[3] output_mask) "
        "-> (Tensor dx, Tensor dw, Tensor db)",
    }
    for operator, arguments in schemas.items():
        expected = torch._C.parse_schema(operator.default.name() + arguments)
        assert operator.default._schema == expected
