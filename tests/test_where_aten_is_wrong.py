"""The cases of README's "Where PyTorch is wrong": fastnorm is right, ATen's failure is on record.

Each case runs twice: on fastnorm, which must be right, and on ATen as a strict xfail, which turns
into a failure of this suite when PyTorch mends it. Then its line here and in README.md goes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import fresh_process
import pytest
import torch
import torch.nn.functional as F
from reference import composed_layer_norm, random
from torch import Tensor

from fastnorm.functional import layer_norm

Norm = Callable[..., Tensor]
Case = Callable[[Norm], None]

WRONG = pytest.mark.xfail(
    strict=True, raises=(AssertionError, RuntimeError), reason="PyTorch is wrong here"
)


def _double(shape: tuple[int, ...], seed: int) -> Tensor:
    return random(shape, torch.float64, "cpu", seed=seed)


X, W, B, MIX = (_double(s, seed) for seed, s in enumerate([(2, 3), (3,), (3,), (2, 3)]))


def _assert_as_composed(norm: Norm, derivative: Callable[[Norm], Tensor]) -> None:
    expected = derivative(composed_layer_norm)
    torch.testing.assert_close(derivative(norm), expected, rtol=1e-10, atol=1e-10)


def _second(outer: str, inner: str) -> Case:
    """A second derivative for the input, by two transforms of torch.func."""

    def derivative(norm: Norm) -> Tensor:
        def function(x: Tensor) -> Tensor:
            return (norm(x, (3,), W, B) * MIX).sin().sum(0)

        return getattr(torch.func, outer)(getattr(torch.func, inner)(function))(X)

    return lambda norm: _assert_as_composed(norm, derivative)


def _mixed_second_derivative_by_forward_mode(norm: Norm) -> None:
    """d2 y / dx dweight."""

    def derivative(norm: Norm) -> Tensor:
        inner = torch.func.jacfwd(lambda x, w: norm(x, (3,), w, B), argnums=1)
        return torch.func.jacfwd(inner, argnums=0)(X, W)

    _assert_as_composed(norm, derivative)


def _mixed_second_derivative_of_jacobian(norm: Norm) -> None:
    """d2 loss / dx dweight: dloss / dweight comes from a batch of gradients of y."""

    def derivative(norm: Norm) -> Tensor:
        def loss(x: Tensor, w: Tensor) -> Tensor:
            return (norm(x, (3,), w, B) * MIX).sin().sum()

        return torch.func.jacrev(torch.func.jacrev(loss, argnums=1), argnums=0)(X, W)

    _assert_as_composed(norm, derivative)


def _third_reverse(norm: Norm) -> None:
    def derivative(norm: Norm) -> Tensor:
        x = X.clone().requires_grad_()
        value = (norm(x, (3,), W, B) * MIX).sin().sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            value = (gradient.sin() * MIX).sum()
        return gradient.detach()

    _assert_as_composed(norm, derivative)


def _second_reverse_of_bias_without_weight(norm: Norm) -> None:
    """The gradient of bias is the sum of grad_out, so its own for grad_out is one."""
    x, bias, grad_out = (t.clone().requires_grad_() for t in (X, B, MIX))
    y = norm(x, (3,), None, bias)
    (db,) = torch.autograd.grad(y, bias, grad_out, create_graph=True)
    (got,) = torch.autograd.grad(db.sum(), grad_out, allow_unused=True, materialize_grads=True)
    assert got.equal(torch.ones_like(got))


def _weight_gradient_of_one_column(norm: Norm) -> None:
    """A row of one element is its own mean: what it is normalized to, and dw, are zero."""
    x = torch.linspace(0.5e6, 1.7e6, 64)[:, None]
    weight = torch.ones(1, requires_grad=True)
    norm(x, (1,), weight, torch.zeros(1)).sum().backward()
    assert weight.grad.item() == 0


CASES: dict[str, Case] = {
    "forward over forward": _second("jacfwd", "jacfwd"),
    "forward over forward, mixed": _mixed_second_derivative_by_forward_mode,
    "reverse over forward": _second("jacrev", "jacfwd"),
    "reverse over batched reverse, mixed": _mixed_second_derivative_of_jacobian,
    "third order reverse": _third_reverse,
    "second order reverse of a bias without weight": _second_reverse_of_bias_without_weight,
    "weight gradient of one column": _weight_gradient_of_one_column,
}


@pytest.mark.parametrize("case", CASES)
def test_fastnorm_is_right(case: str) -> None:
    CASES[case](layer_norm)


@WRONG
@pytest.mark.parametrize("case", CASES)
def test_aten_is_right(case: str) -> None:
    CASES[case](F.layer_norm)


def test_the_cases_can_be_passed() -> None:
    """By the composed reference: ATen fails them for what it computes."""
    for case in CASES.values():
        case(composed_layer_norm)


# ---- on a GPU -----------------------------------------------------------------------------------


def _bias_without_weight_on_a_gpu(norm: Norm) -> None:
    x = random((100_000, 128), torch.float32, "cuda").requires_grad_()
    bias = torch.zeros(128, device="cuda", requires_grad=True)
    grad_out = random((100_000, 128), torch.float32, "cuda", seed=1)
    dx, db = torch.autograd.grad(norm(x, (128,), None, bias), (x, bias), grad_out)
    expected = grad_out.double().sum(0)
    torch.testing.assert_close(db.double(), expected, rtol=0, atol=1e-3)
    assert dx.isfinite().all()


def _more_than_65536_rows_of_two_dimensions(norm: Norm) -> None:
    """In a process of its own, since ATen's illegal memory access ends that one's use of CUDA."""
    name = "fastnorm.functional" if norm is layer_norm else "torch.nn.functional"
    code = f"""
import torch
from {name} import layer_norm
shape = (8, 16)
x = torch.randn(100_000, *shape, device="cuda", requires_grad=True)
w, b = (torch.ones(shape, device="cuda", requires_grad=True) for _ in range(2))
grad_out = torch.randn(100_000, *shape, device="cuda")
dx, dw, db = torch.autograd.grad(layer_norm(x, shape, w, b), (x, w, b), grad_out)
torch.cuda.synchronize()
expected = grad_out.double().sum(0)
torch.testing.assert_close(db.double(), expected, rtol=0, atol=1e-2)
rows = x.detach().double().flatten(1)
xhat = (rows - rows.mean(1, keepdim=True)) / (rows.var(1, False, keepdim=True) + 1e-5).sqrt()
expected = (grad_out.double().flatten(1) * xhat).sum(0).view(shape)
torch.testing.assert_close(dw.double(), expected, rtol=0, atol=1e-2)
"""
    fresh_process.check(code)


def _beyond_2_to_the_32_elements(norm: Norm) -> None:
    """The last rows are what they are by themselves, in the output and in dx."""
    rows, cols = 8_388_673, 512
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for part in x.split(1 << 20):
        part.normal_(generator=generator)
    x.requires_grad_()
    grad_out = torch.ones(1, cols, dtype=torch.bfloat16, device="cuda").cumsum(1)
    y = norm(x, (cols,))
    (dx,) = torch.autograd.grad(y, x, grad_out.expand(rows, cols))
    last = x.detach()[-64:].double().requires_grad_()
    expected = composed_layer_norm(last, (cols,))
    (expected_dx,) = torch.autograd.grad(expected, last, grad_out.double().expand(64, cols))
    tolerance = {"rtol": 2**-7, "atol": 2**-7}
    torch.testing.assert_close(y[-64:].double(), expected, **tolerance)
    largest = expected_dx.abs().max().item()
    tolerance["atol"] *= largest
    torch.testing.assert_close(dx[-64:].double(), expected_dx, **tolerance)


GPU_CASES: dict[str, Case] = {
    "bias without weight": _bias_without_weight_on_a_gpu,
    "more than 65536 rows of two dimensions": _more_than_65536_rows_of_two_dimensions,
}


@pytest.mark.cuda
@pytest.mark.parametrize("case", GPU_CASES)
def test_fastnorm_is_right_on_a_gpu(case: str) -> None:
    GPU_CASES[case](layer_norm)


@pytest.mark.cuda
@WRONG
@pytest.mark.parametrize("case", GPU_CASES)
def test_aten_is_right_on_a_gpu(case: str) -> None:
    GPU_CASES[case](F.layer_norm)


@pytest.fixture
def _give_memory_back() -> object:
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.cuda
@pytest.mark.large
@pytest.mark.usefixtures("_give_memory_back")
def test_fastnorm_is_right_beyond_2_to_the_32_elements() -> None:
    _beyond_2_to_the_32_elements(layer_norm)


@pytest.mark.cuda
@pytest.mark.large
@WRONG
@pytest.mark.usefixtures("_give_memory_back")
def test_aten_is_right_beyond_2_to_the_32_elements() -> None:
    _beyond_2_to_the_32_elements(F.layer_norm)
