"""Where nobody differentiates, layer_norm on a CUDA device makes y alone. Wherever somebody may,
and for whoever looks on, it is layer_norm_forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import check_forward, ops, random
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastnorm
from fastnorm.functional import layer_norm


class _Operators(TorchDispatchMode):
    """The names of the operators that arrive here."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def _arguments(device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random((33, 65), torch.float32, device, shift=0.3),
        random((65,), torch.float32, device, seed=1),
        random((65,), torch.float32, device, seed=2),
    )


def _allocations(call: Callable[[], object]) -> int:
    call()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    return torch.cuda.memory_stats()["allocation.all.allocated"] - before


@pytest.mark.cuda
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_makes_y_alone(mode: Callable[[], torch.no_grad]) -> None:
    x, weight, bias = _arguments("cuda")
    module = fastnorm.LayerNorm(65, device="cuda")
    calls: list[Callable[[], Tensor]] = [
        lambda: ops.layer_norm(x, [65], weight, bias),
        lambda: ops.layer_norm(x, [65]),
        lambda: layer_norm(x, [65], weight, bias),
        lambda: module(x),
        lambda: module(x.clone().requires_grad_()),
    ]
    with mode():
        copy = _allocations(lambda: x.clone().requires_grad_())
        assert [_allocations(call) for call in calls] == [1, 1, 1, 1, 1 + copy]
        assert _allocations(lambda: ops.layer_norm_forward(x, [65], weight, bias, 1e-5, None)) == 3
        check_forward(x, [65], weight, bias)


@pytest.mark.cuda
def test_makes_y_alone_of_tensors_without_gradient() -> None:
    x, weight, bias = _arguments("cuda")
    assert _allocations(lambda: ops.layer_norm(x, [65], weight, bias)) == 1
    assert _allocations(lambda: ops.layer_norm(x, [65], weight.requires_grad_(), bias)) == 3


def test_whoever_requires_a_gradient_gets_it(device: torch.device) -> None:
    given = _arguments(device)
    for which in range(3):
        arguments = [tensor.detach().requires_grad_(i == which) for i, tensor in enumerate(given)]
        x, weight, bias = arguments
        y = ops.layer_norm(x, [65], weight, bias)
        assert y.requires_grad
        (grad,) = torch.autograd.grad(y.square().sum(), arguments[which])
        expected = torch.nn.functional.layer_norm(x, [65], weight, bias).square().sum()
        torch.testing.assert_close(grad, *torch.autograd.grad(expected, arguments[which]))
        with torch.no_grad():
            assert not ops.layer_norm(x, [65], weight, bias).requires_grad


@pytest.mark.parametrize("which", range(3))
def test_tangents_without_gradient(device: torch.device, which: int) -> None:
    """Forward mode goes on where reverse mode is off."""
    given = _arguments(device)
    tangent = torch.ones_like(given[which])

    def derive(function: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad(), torch.autograd.forward_ad.dual_level():
            x, weight, bias = (
                torch.autograd.forward_ad.make_dual(tensor, tangent) if i == which else tensor
                for i, tensor in enumerate(given)
            )
            return torch.autograd.forward_ad.unpack_dual(function(x, [65], weight, bias)).tangent

    expected = derive(torch.nn.functional.layer_norm)
    torch.testing.assert_close(derive(ops.layer_norm), expected, rtol=1e-4, atol=1e-4)


def test_whoever_looks_on_sees_the_primitive(device: torch.device) -> None:
    x, weight, bias = _arguments(device)
    with torch.no_grad(), _Operators() as operators:
        ops.layer_norm(x, [65], weight, bias)
    assert operators.names == ["fastnorm::layer_norm_forward"]


def test_transforms_without_gradient(device: torch.device) -> None:
    x, weight, bias = _arguments(device)
    with torch.no_grad():
        expected = ops.layer_norm(x, [65], weight, bias)
        batched = torch.vmap(lambda row: ops.layer_norm(row, [65], weight, bias))(x)
        torch.testing.assert_close(batched, expected, rtol=0, atol=0)
        gradient = torch.func.grad(lambda w: ops.layer_norm(x, [65], w, bias).sum())(weight)
    torch.testing.assert_close(gradient, ((expected - bias) / weight).sum(0), rtol=1e-3, atol=1e-3)


def test_parameters_elsewhere_are_refused(device: torch.device) -> None:
    x, weight, bias = _arguments(device)
    elsewhere = torch.device("meta")
    with torch.no_grad(), pytest.raises((RuntimeError, NotImplementedError)):
        ops.layer_norm(x, [65], weight.to(elsewhere), bias)
