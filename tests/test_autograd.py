"""Gradients of every order and subset, forward mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from reference import SMALL_DTYPES, composed_layer_norm, name_of, ops, random
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from fastnorm.functional import layer_norm

AFFINE = ["both", "weight", "bias", "none"]
SHAPES = [((4, 5), (5,)), ((2, 3, 2), (3, 2)), ((3, 1), (1,)), ((0, 3), (3,)), ((4,), (4,))]
Function = Callable[..., Tensor]


def _leaves(
    shape: Sequence[int], normalized_shape: Sequence[int], affine: str, device: str
) -> list[Tensor | None]:
    """input, weight and bias in float64, the missing ones None."""
    shapes = [shape, normalized_shape, normalized_shape]
    there = [True, affine in ("both", "weight"), affine in ("both", "bias")]
    return [
        random(size, torch.float64, device, seed=seed).requires_grad_() if given else None
        for seed, (size, given) in enumerate(zip(shapes, there))
    ]


@pytest.mark.parametrize("affine", AFFINE)
@pytest.mark.parametrize(("shape", "normalized_shape"), SHAPES, ids=name_of)
def test_gradcheck(
    device: str, shape: tuple[int, ...], normalized_shape: tuple[int, ...], affine: str
) -> None:
    leaves = _leaves(shape, normalized_shape, affine, device)
    empty = 0 in shape
    assert gradcheck(
        lambda x, w, b: layer_norm(x, normalized_shape, w, b),
        leaves,
        check_undefined_grad=True,
        check_batched_grad=not empty,
        check_forward_ad=True,
        check_batched_forward_grad=not empty,
    )


@pytest.mark.parametrize("affine", AFFINE)
@pytest.mark.parametrize(("shape", "normalized_shape"), SHAPES, ids=name_of)
def test_gradgradcheck(
    device: str, shape: tuple[int, ...], normalized_shape: tuple[int, ...], affine: str
) -> None:
    assert gradgradcheck(
        lambda x, w, b: layer_norm(x, normalized_shape, w, b),
        _leaves(shape, normalized_shape, affine, device),
        check_undefined_grad=True,
        check_fwd_over_rev=True,
    )


@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_gradcheck_of_eps(device: str, eps: float) -> None:
    leaves = _leaves((3, 5), (5,), "both", device)
    function = lambda x, w, b: layer_norm(x, (5,), w, b, eps)  # noqa: E731
    assert gradcheck(function, leaves, check_forward_ad=True)
    assert gradgradcheck(function, leaves, check_fwd_over_rev=True)


@pytest.mark.parametrize("mask", list(itertools.product([True, False], repeat=3)), ids=name_of)
@pytest.mark.parametrize("affine", AFFINE)
def test_backward_operator_is_differentiable(
    device: str, affine: str, mask: tuple[bool, bool, bool]
) -> None:
    """layer_norm_backward by itself, each output there or not; mean and rstd follow from input."""
    x, weight, bias = _leaves((3, 4), (4,), affine, device)
    there = [mask[0], mask[1] and weight is not None, mask[2] and bias is not None]
    if not any(there):
        pytest.skip("nothing to differentiate")
    grad_out = random((3, 4), torch.float64, device, seed=3).requires_grad_()

    def backward(grad_out: Tensor, x: Tensor, w: Tensor | None, b: Tensor | None) -> tuple:
        _, mean, rstd = ops.layer_norm_forward(x, [4], w, b, 1e-5, None)
        outputs = ops.layer_norm_backward(grad_out, x, [4], mean, rstd, w, b, 1e-5, mask)
        assert [output is not None for output in outputs] == there
        return tuple(output for output in outputs if output is not None)

    leaves = (grad_out, x, weight, bias)
    assert gradcheck(backward, leaves, check_forward_ad=True, check_undefined_grad=False)


def _relative_error(ours: Tensor, expected: Tensor) -> float:
    return ((ours - expected).norm() / expected.norm().clamp_min(1e-30)).item()


HIGHER_ORDERS = [
    ("jacrev", "jacrev"),
    ("jacfwd", "jacrev"),
    ("jacrev", "jacfwd"),
    ("jacfwd", "jacfwd"),
    ("grad", "jacrev", "jacrev"),
    ("grad", "jacrev", "jacfwd"),
    ("grad", "jacfwd", "jacrev"),
    ("grad", "jacfwd", "jacfwd"),
    ("jacfwd", "jacfwd", "jacfwd"),
]


@pytest.mark.parametrize("transforms", HIGHER_ORDERS, ids="-".join)
@pytest.mark.parametrize("argument", [0, 1], ids=["input", "weight"])
def test_higher_orders_under_torch_func(
    device: str, argument: int, transforms: tuple[str, ...]
) -> None:
    """Second and third derivatives; ATen 2.11's are wrong for most of these."""
    leaves = [t.detach() for t in _leaves((2, 3), (3,), "both", device)]
    mix = random((2, 3), torch.float64, device, seed=7)

    def derivative(norm: Function) -> Tensor:
        def function(value: Tensor) -> Tensor:
            x, w, b = (value if i == argument else leaf for i, leaf in enumerate(leaves))
            y = norm(x, (3,), w, b) * mix
            y = y.sin() * x.cos()
            return y.sum() if transforms[0] == "grad" else y.sum(0)

        for transform in transforms:
            function = getattr(torch.func, transform)(function)
        return function(leaves[argument])

    assert _relative_error(derivative(layer_norm), derivative(composed_layer_norm)) < 1e-12


# torch.func.hessian is jacfwd around jacrev.
@pytest.mark.parametrize("inner", ["jacrev", "jacfwd"])
@pytest.mark.parametrize("outer", ["jacrev", "jacfwd"])
@pytest.mark.parametrize("affine", AFFINE)
def test_hessian(device: str, affine: str, outer: str, inner: str) -> None:
    """All blocks, for input, weight and bias, mixed ones in either order."""
    leaves = [t if t is None else t.detach() for t in _leaves((2, 3), (3,), affine, device)]
    given = tuple(i for i, leaf in enumerate(leaves) if leaf is not None)

    def hessian(norm: Function) -> tuple[tuple[Tensor, ...], ...]:
        def loss(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
            return norm(x, (3,), w, b).sin().sum()

        first = getattr(torch.func, inner)(loss, argnums=given)
        return getattr(torch.func, outer)(first, argnums=given)(*leaves)

    for row, expected_row in zip(hessian(layer_norm), hessian(composed_layer_norm)):
        for block, expected in zip(row, expected_row):
            torch.testing.assert_close(block, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("affine", AFFINE)
def test_third_order_reverse(device: str, affine: str) -> None:
    """grad of grad of grad with respect to all leaves; ATen fails for bias without weight."""
    vectors = [random((4, 5), torch.float64, device, seed=seed) for seed in range(10, 14)]

    def third(norm: Function) -> list[Tensor]:
        leaves = [t for t in _leaves((4, 5), (5,), affine, device) if t is not None]
        given = iter(leaves)
        x = next(given)
        w = next(given) if affine in ("both", "weight") else None
        b = next(given) if affine in ("both", "bias") else None
        value = (norm(x, (5,), w, b).sin() * vectors[0]).sum()
        for order in range(1, 4):
            gradients = torch.autograd.grad(
                value, leaves, create_graph=order < 3, allow_unused=True, materialize_grads=True
            )
            value = sum((g.sin() * vectors[order]).sum() for g in gradients)
        return list(gradients)

    for ours, expected in zip(third(layer_norm), third(composed_layer_norm)):
        assert _relative_error(ours, expected) < 1e-12


def test_forward_over_forward_mixed(device: str) -> None:
    """d2y / dx dw by forward mode alone, in either order."""
    x, w, b = (t.detach() for t in _leaves((3, 4), (4,), "both", device))

    def mixed(norm: Function, first: int) -> Tensor:
        inner = torch.func.jacfwd(lambda x, w: norm(x, (4,), w, b), argnums=first)
        return torch.func.jacfwd(inner, argnums=1 - first)(x, w)

    for first in (0, 1):
        ours, expected = mixed(layer_norm, first), mixed(composed_layer_norm, first)
        assert _relative_error(ours, expected) < 1e-12


def test_dual_numbers(device: str) -> None:
    """forward_ad with tangents of any subset of the leaves."""
    leaves = [t.detach() for t in _leaves((3, 4), (4,), "both", device)]
    for subset in itertools.product([True, False], repeat=3):
        tangents = []
        for norm in (layer_norm, composed_layer_norm):
            with forward_ad.dual_level():
                duals = [
                    forward_ad.make_dual(leaf, leaf.cos()) if dual else leaf
                    for leaf, dual in zip(leaves, subset)
                ]
                tangents.append(forward_ad.unpack_dual(norm(duals[0], (4,), *duals[1:])).tangent)
        if not any(subset):
            assert tangents[0] is None
        else:
            torch.testing.assert_close(*tangents, rtol=1e-12, atol=1e-12)


class _Calls(TorchDispatchMode):
    """Records the arguments of each fastnorm call below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        if func.namespace == "fastnorm":
            self.seen.append((func._opname, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("needed", list(itertools.product([True, False], repeat=3)), ids=name_of)
def test_only_needed_gradients_are_computed(device: str, needed: tuple[bool, bool, bool]) -> None:
    leaves = [
        random(shape, torch.float32, device, seed=i) for i, shape in enumerate([(4, 6), (6,), (6,)])
    ]
    for leaf, need in zip(leaves, needed):
        leaf.requires_grad_(need)
    y = layer_norm(leaves[0], (6,), *leaves[1:])
    assert y.requires_grad == any(needed)
    if not any(needed):
        return
    with _Calls() as calls:
        y.backward(torch.ones_like(y))
    masks = [list(args[8]) for name, args in calls.seen if name == "layer_norm_backward"]
    assert masks == [list(needed)]
    assert [leaf.grad is not None for leaf in leaves] == list(needed)


@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=name_of)
def test_only_asked_gradients_are_computed(device: str, asked: tuple[int, ...]) -> None:
    """All require a gradient, torch.autograd.grad asks for some."""
    leaves = [t.float().detach().requires_grad_() for t in _leaves((4, 6), (6,), "both", device)]
    y = layer_norm(leaves[0], (6,), *leaves[1:])
    with _Calls() as calls:
        torch.autograd.grad(y, [leaves[i] for i in asked], torch.ones_like(y))
    masks = [list(args[8]) for name, args in calls.seen if name == "layer_norm_backward"]
    assert masks == [[i in asked for i in range(3)]]


@pytest.mark.parametrize("out_dtype", [None, *SMALL_DTYPES], ids=name_of)
@pytest.mark.parametrize("parameter_dtype", ["input's", torch.float32], ids=name_of)
@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
def test_gradients_have_the_dtypes_of_their_tensors(
    device: str,
    dtype: torch.dtype,
    parameter_dtype: torch.dtype | str,
    out_dtype: torch.dtype | None,
) -> None:
    parameter_dtype = dtype if isinstance(parameter_dtype, str) else parameter_dtype
    x = random((4, 6), dtype, device).requires_grad_()
    w = random((6,), parameter_dtype, device, seed=1).requires_grad_()
    b = random((6,), parameter_dtype, device, seed=2).requires_grad_()
    y = layer_norm(x, (6,), w, b, out_dtype=out_dtype)
    assert y.dtype == (out_dtype or dtype)
    y.sum().backward()
    for leaf in (x, w, b):
        assert leaf.grad.dtype == leaf.dtype
        assert leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_out_dtype_is_differentiable_twice_and_forward(device: str, out_dtype: torch.dtype) -> None:
    """Against composed operations that cast in the same places, in float32."""
    tolerance = 2e-2 if out_dtype == torch.bfloat16 else 1e-4
    leaves = [t.detach().float() for t in _leaves((4, 6), (6,), "both", device)]

    def derivatives(norm: Function) -> list[Tensor]:
        x, w, b = (leaf.clone().requires_grad_() for leaf in leaves)
        y = norm(x, w, b)
        assert y.dtype == out_dtype
        (dx,) = torch.autograd.grad((y.float().sin()).sum(), x, create_graph=True)
        seconds = torch.autograd.grad(dx.square().sum(), (x, w))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(leaves[0], leaves[0].cos())
            tangent = forward_ad.unpack_dual(norm(dual, *leaves[1:])).tangent
        assert tangent.dtype == out_dtype
        return [dx.detach(), *seconds, tangent.float()]

    ours = derivatives(lambda x, w, b: layer_norm(x, (6,), w, b, out_dtype=out_dtype))
    expected = derivatives(lambda x, w, b: composed_layer_norm(x, (6,), w, b).to(out_dtype))
    for a, b in zip(ours, expected):
        assert _relative_error(a, b) < tolerance


def test_statistics_carry_no_gradient(device: str) -> None:
    x = random((4, 6), torch.float32, device).requires_grad_()
    y, mean, rstd = ops.layer_norm_forward(x, [6], None, None, 1e-5, None)
    assert y.requires_grad
    assert not mean.requires_grad
    assert not rstd.requires_grad
