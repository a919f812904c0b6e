"""fastnorm.functional.layer_norm: signature, subclasses, meta and fake tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import DTYPES, SMALL_DTYPES, name_of, ops, random
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import fastnorm
from fastnorm.functional import layer_norm


def test_signature_is_pytorchs_plus_out_dtype() -> None:
    ours = list(inspect.signature(layer_norm).parameters.values())
    theirs = list(inspect.signature(F.layer_norm).parameters.values())
    assert [(p.name, p.default, p.kind) for p in ours[:-1]] == [
        (p.name, p.default, p.kind) for p in theirs
    ]
    # Not keyword-only: TorchScript compiles no function that has such a parameter.
    assert (ours[-1].name, ours[-1].default) == ("out_dtype", None)


def test_every_parameter_and_the_result_are_annotated() -> None:
    signature = inspect.signature(layer_norm)
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_calls_by_position_and_by_keyword(device: str, dtype: torch.dtype) -> None:
    x, w = random((5, 6), dtype, device), random((6,), dtype, device, seed=1)
    expected = ops.layer_norm(x, [6], w, w, 1e-3)
    assert layer_norm(x, [6], w, w, 1e-3).equal(expected)
    assert layer_norm(x, (6,), w, w, 1e-3).equal(expected)
    assert layer_norm(x, x.shape[1:], w, w, 1e-3).equal(expected)
    assert layer_norm(
        input=x, normalized_shape=[6], weight=w, bias=w, eps=1e-3, out_dtype=None
    ).equal(expected)
    assert layer_norm(x, [6]).equal(ops.layer_norm(x, [6], None, None, 1e-5))


class _Logged(Tensor):
    """A subclass that keeps itself and counts what it sees."""

    seen: list[Any] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN206
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["input", "weight", "bias"])
def test_torch_function_subclasses(which: int) -> None:
    """A subclass in any place sees the call and comes back."""
    tensors = [random((5, 6), torch.float32, "cpu"), torch.ones(6), torch.zeros(6)]
    expected = layer_norm(tensors[0], [6], *tensors[1:])
    tensors[which] = tensors[which].as_subclass(_Logged)
    _Logged.seen.clear()
    y = layer_norm(tensors[0], [6], *tensors[1:])
    assert type(y) is _Logged
    assert _Logged.seen
    assert y.as_subclass(Tensor).equal(expected)


def test_parameters_and_buffers_work(device: str) -> None:
    weight = torch.nn.Parameter(torch.ones(6, device=device))
    assert type(layer_norm(random((5, 6), torch.float32, device), [6], weight)) is Tensor


def _results(
    shape: tuple[int, ...],
    normalized_shape: tuple[int, ...],
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    device: str,
    transposed: bool,
) -> list[Tensor | None]:
    x = torch.ones(shape, dtype=dtype, device=device)
    grad_out = torch.ones(shape, dtype=out_dtype or dtype, device=device)
    if transposed:
        x, grad_out = x.transpose(0, -1).contiguous().transpose(0, -1), grad_out.expand(shape)
    weight = torch.ones(normalized_shape, dtype=dtype, device=device)
    outputs = ops.layer_norm_forward(x, normalized_shape, weight, None, 1e-5, out_dtype)
    gradients = ops.layer_norm_backward(
        grad_out, x, normalized_shape, *outputs[1:], weight, weight, 1e-5, [True, True, True]
    )
    some = ops.layer_norm_backward(
        grad_out, x, normalized_shape, *outputs[1:], weight, None, 1e-5, [False, True, True]
    )
    return [*outputs, *gradients, *some]


@pytest.mark.parametrize("mode", ["meta", "fake"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("out_dtype", [None, *SMALL_DTYPES], ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    ("shape", "normalized_shape"),
    [((4, 6), (6,)), ((2, 3, 4), (3, 4)), ((0, 5), (5,)), ((3, 0), (0,)), ((5,), (5,))],
    ids=name_of,
)
def test_meta_and_fake_tensors_are_as_real_ones(
    device: str,
    shape: tuple[int, ...],
    normalized_shape: tuple[int, ...],
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    transposed: bool,
    mode: str,
) -> None:
    if dtype == torch.float64 and out_dtype is not None:
        pytest.skip("float64 has no other out_dtype")
    real = _results(shape, normalized_shape, dtype, out_dtype, device, transposed)
    if mode == "meta":
        shadow = _results(shape, normalized_shape, dtype, out_dtype, "meta", transposed)
    else:
        with FakeTensorMode():
            shadow = _results(shape, normalized_shape, dtype, out_dtype, device, transposed)
    for a, b in zip(real, shadow):
        if a is None:
            assert b is None
            continue
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert a.storage_offset() == b.storage_offset()
        assert b.device.type == ("meta" if mode == "meta" else device)


def test_meta_checks_what_the_kernels_check() -> None:
    x = torch.ones(2, 3, device="meta")
    with pytest.raises(RuntimeError, match="weight"):
        ops.layer_norm(x, [3], torch.ones(3, device="meta", dtype=torch.float64))
    with pytest.raises(RuntimeError, match="out_dtype"):
        ops.layer_norm(x, [3], out_dtype=torch.float64)


PLAIN = [
    lambda x, w, b: (x, (6,), w, b, 1e-5, None),
    lambda x, w, b: (x, [6], None, b, 0.25, torch.bfloat16),
    lambda x, w, b: (x, x.shape[1:], w.detach(), None, 1e-5, torch.float32),
    lambda x, w, b: (x.view(2, 2, 3), [2, 3], None, None, 1e-5, None),
]


@pytest.mark.parametrize("arguments", PLAIN)
def test_the_quick_call_is_the_operator(arguments: Callable[..., tuple], device: str) -> None:
    x = torch.randn(2, 6, device=device, requires_grad=True)
    weight = nn.Parameter(torch.randn(6, device=device))
    bias = torch.randn(6, device=device, requires_grad=True)
    given = arguments(x, weight, bias)
    ours = fastnorm._C.layer_norm(*given)
    theirs = torch.ops.fastnorm.layer_norm(*given[:5], out_dtype=given[5])
    assert ours.equal(theirs)
    assert ours.dtype == theirs.dtype
    assert ours.grad_fn.name() == theirs.grad_fn.name()
    for a, b in zip(*(torch.autograd.grad(y.float().square().sum(), x) for y in (ours, theirs))):
        assert a.equal(b)


class _Subclass(Tensor):
    pass


def test_the_quick_call_leaves_the_rest_to_torch_ops() -> None:
    x, weight = torch.randn(2, 6), torch.ones(6)
    usual = (x, (6,), weight, None, 1e-5, None)
    quick = fastnorm._C.layer_norm
    assert quick(*usual) is not None
    assert quick(x.as_subclass(_Subclass), *usual[1:]) is None
    assert quick(*usual[:2], weight.as_subclass(_Subclass), *usual[3:]) is None
    assert quick(*usual[:4], torch.tensor(1e-5), None) is None
    assert quick(x, torch.tensor([6]), *usual[2:]) is None
    assert quick(x, (2**70,), *usual[2:]) is None
    assert quick(None, *usual[1:]) is None
    assert quick(*usual[:5]) is None

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen: list[Any] = []
    with Mode():
        assert quick(*usual) is None
        layer_norm(x, (6,), weight)
    assert any("layer_norm" in str(function) for function in seen)


def test_errors_of_the_quick_call_are_those_of_torch_ops() -> None:
    x = torch.randn(2, 6)
    for given in ((x, (5,), None, None, 1e-5, None), (x.int(), (6,), None, None, 1e-5, None)):
        raised = []
        for call in (fastnorm._C.layer_norm, torch.ops.fastnorm.layer_norm):
            with pytest.raises(RuntimeError) as error:
                call(*given[:5], *([given[5]] if call is fastnorm._C.layer_norm else []))
            raised.append((type(error.value), str(error.value).splitlines()[0]))
        assert raised[0] == raised[1]
