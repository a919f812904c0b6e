"""PyTorch's own samples and error inputs: OpInfo and ModuleInfo of the installed torch.

Each sample runs fastnorm and ATen on the same arguments, forward and backward.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from reference import DTYPES, accumulation_dtype, check_backward, check_forward, name_of, ops
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import fastnorm


def _native(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return ops.layer_norm_forward(input, normalized_shape, weight, bias, eps, None)


def _with_fastnorm(name: str) -> OpInfo:
    """A copy of PyTorch's OpInfo that calls fastnorm."""
    info = copy.copy(
        next(info for info in op_db if info.name == name and not info.variant_test_name)
    )
    info.op = fastnorm.functional.layer_norm if name == "nn.functional.layer_norm" else _native
    info.name = f"fastnorm.{name}"
    return info


OPS = [_with_fastnorm("nn.functional.layer_norm"), _with_fastnorm("native_layer_norm")]
MODULE = next(info for info in module_db if info.module_cls is torch.nn.LayerNorm)


def _op_name(info: OpInfo) -> str:
    return info.name


def _arguments(sample: SampleInput) -> tuple[Tensor, Any, Tensor | None, Tensor | None, float]:
    given = dict(zip(("normalized_shape", "weight", "bias", "eps"), sample.args)) | sample.kwargs
    return (
        sample.input,
        given["normalized_shape"],
        given.get("weight"),
        given.get("bias"),
        given.get("eps", 1e-5),
    )


def test_every_dtype_of_pytorch_is_supported() -> None:
    for info in OPS:
        assert set(info.dtypes) == set(DTYPES)


@pytest.mark.parametrize("noncontiguous", [False, True], ids=["", "noncontiguous"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("info", OPS, ids=_op_name)
def test_samples(device: str, info: OpInfo, dtype: torch.dtype, noncontiguous: bool) -> None:
    count = 0
    for sample in info.sample_inputs(device, dtype):
        sample = sample.noncontiguous() if noncontiguous else sample
        input, normalized_shape, weight, bias, eps = _arguments(sample)
        outputs = check_forward(input, normalized_shape, weight, bias, eps)
        check_backward(input.cos(), input, normalized_shape, weight, bias, eps)
        result = info.op(sample.input, *sample.args, **sample.kwargs)
        result = result[0] if isinstance(result, tuple) else result
        assert torch.equal(result.nan_to_num(7.0), outputs[0].nan_to_num(7.0))
        count += 1
    assert count >= 6


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("info", OPS, ids=_op_name)
def test_gradients_of_samples_reach_their_leaves(
    device: str, info: OpInfo, dtype: torch.dtype
) -> None:
    for sample in info.sample_inputs(device, dtype, requires_grad=True):
        result = info.op(sample.input, *sample.args, **sample.kwargs)
        result = result[0] if isinstance(result, tuple) else result
        leaves = [t for t in (sample.input, *sample.args) if isinstance(t, Tensor)]
        for leaf, gradient in zip(leaves, torch.autograd.grad(result.sum(), leaves)):
            assert gradient.dtype == leaf.dtype
            assert gradient.shape == leaf.shape


@pytest.mark.parametrize("info", OPS, ids=_op_name)
def test_numpy_reference(device: str, info: OpInfo) -> None:
    """PyTorch's NumPy reference, in the tolerance of its own test."""
    count = 0
    for sample in info.sample_inputs(device, torch.float64):
        arguments = sample.numpy()
        expected = info.ref(arguments.input, *arguments.args, **arguments.kwargs)
        got = info.op(sample.input, *sample.args, **sample.kwargs)
        got, expected = (v if isinstance(v, tuple) else (v,) for v in (got, expected))
        for ours, reference in zip(got, expected):
            reference = torch.as_tensor(reference, dtype=torch.float64)
            torch.testing.assert_close(
                ours.cpu(), reference.reshape(ours.shape), rtol=1e-7, atol=1e-7, equal_nan=True
            )
        count += 1
    assert count >= 6


def test_error_inputs(device: str) -> None:
    info = OPS[1]
    count = 0
    for error in info.error_inputs(device):
        sample = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex):
            info.op(sample.input, *sample.args, **sample.kwargs)
        count += 1
    assert count >= 3


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_module_samples(device: str, dtype: torch.dtype, training: bool) -> None:
    """The module beside torch.nn.LayerNorm: same outputs, same gradients, within rounding."""
    samples = MODULE.module_inputs_func(
        MODULE, device=device, dtype=dtype, requires_grad=True, training=training
    )
    assert len(samples) >= 7
    for sample in samples:
        args, kwargs = sample.constructor_input.args, sample.constructor_input.kwargs
        norm = fastnorm.LayerNorm(*args, **kwargs, device=device, dtype=dtype).train(training)
        (x,) = sample.forward_input.args
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.normal_()
        y = norm(x)
        expected = check_forward(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)[0]
        assert y.equal(expected)
        assert y.dtype == dtype
        leaves = [x, *norm.parameters()]
        grad_out = x.detach().sin()
        gradients = torch.autograd.grad(y, leaves, grad_out)
        likely = check_backward(
            grad_out, x, norm.normalized_shape, norm.weight, norm.bias, norm.eps
        )
        for ours, direct in zip(gradients, [g for g in likely if g is not None]):
            assert ours.equal(direct)
    assert accumulation_dtype(dtype) in (torch.float32, torch.float64)
