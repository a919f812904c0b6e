"""torch.func.vmap: the batching rules, alone and under and over the other transforms."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator

import pytest
import torch
from reference import ARITHMETIC_UNITS, SMALL_DTYPES, accumulation_dtype, name_of, ops, random
from torch import Tensor
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import fastnorm
from fastnorm.functional import layer_norm

SAMPLES = 3
ARGUMENTS = ("input", "weight", "bias")
# Every subset of the arguments that has a sample dimension.
BATCHED = [
    subset for size in (1, 2, 3) for subset in itertools.combinations(ARGUMENTS, size)
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_warning_of_a_slow_path(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """PyTorch raises it as a Python warning, or prints it where it is called from C++ alone."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="There is a performance drop")
        yield
    torch.set_warn_always(always)
    assert "performance drop" not in capfd.readouterr().err


class Calls(TorchDispatchMode):
    """Counts fastnorm's operators that reach the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        if func.namespace == "fastnorm":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def _arguments(
    batched: tuple[str, ...], dtype: torch.dtype, device: str, rows: tuple[int, ...] = (4, 5)
) -> tuple[list[Tensor], tuple[int | None, ...]]:
    """input, weight and bias; the last dimension is the samples' where the seed is odd."""
    values, dims = [], []
    for seed, name in enumerate(ARGUMENTS):
        shape = (*rows, 2, 6) if name == "input" else (2, 6)
        value = random((SAMPLES, *shape), dtype, device, seed=seed, shift=0.5)
        if name not in batched:
            values.append(value[0])
            dims.append(None)
        else:
            values.append(value.movedim(0, -1).contiguous() if seed % 2 else value)
            dims.append(-1 if seed % 2 else 0)
    return values, tuple(dims)


def _one_by_one(function, arguments, dims):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """What vmap(function, dims) means."""
    results = [
        function(*(v if d is None else v.select(d, i) for v, d in zip(arguments, dims)))
        for i in range(SAMPLES)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results)
    return tuple(torch.stack(parts) for parts in zip(*results))


def _assert_as_exact(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """As near the float64 result as the plain calls, but for units in the last place."""
    assert got.dtype == plain.dtype
    assert got.shape == plain.shape
    units = ARITHMETIC_UNITS if got.dtype == torch.float64 else 1
    rounding = units * torch.finfo(got.dtype).eps * exact.abs().max()
    error = (plain.double() - exact).abs().max()
    assert (got.double() - exact).abs().max() <= error + rounding


@pytest.mark.parametrize("dtype", [*SMALL_DTYPES, torch.float64], ids=name_of)
@pytest.mark.parametrize("batched", BATCHED, ids="-".join)
def test_forward(device: str, batched: tuple[str, ...], dtype: torch.dtype) -> None:
    arguments, dims = _arguments(batched, dtype, device)

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return layer_norm(x, (2, 6), w, b)

    with Calls() as calls:
        got = vmap(function, dims)(*arguments)
    assert calls.names == ["layer_norm_forward"], "one kernel for all samples"
    plain = _one_by_one(function, arguments, dims)
    if batched == ("input",):
        assert torch.equal(got, plain), "rows are rows"
    exact = _one_by_one(function, [value.double() for value in arguments], dims)
    _assert_as_exact(got, plain, exact)


@pytest.mark.parametrize("out_dtype", SMALL_DTYPES, ids=name_of)
@pytest.mark.parametrize("batched", BATCHED, ids="-".join)
def test_out_dtype(device: str, batched: tuple[str, ...], out_dtype: torch.dtype) -> None:
    arguments, dims = _arguments(batched, torch.bfloat16, device)

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return layer_norm(x, (2, 6), w, b, out_dtype=out_dtype)

    exact = _one_by_one(
        lambda x, w, b: layer_norm(x, (2, 6), w, b), [v.double() for v in arguments], dims
    )
    got = vmap(function, dims)(*arguments)
    _assert_as_exact(got, _one_by_one(function, arguments, dims), exact)


@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
def test_missing_parameters(device: str, affine: str) -> None:
    (x, w, b), _ = _arguments(ARGUMENTS, torch.float32, device)
    weight = w if affine in ("both", "weight") else None
    bias = b if affine in ("both", "bias") else None
    dims = (0, None if weight is None else -1, None if bias is None else 0)
    got = vmap(lambda x, w, b: layer_norm(x, (2, 6), w, b), dims)(x, weight, bias)
    for i in range(SAMPLES):
        w_i = None if weight is None else weight.select(-1, i)
        b_i = None if bias is None else bias[i]
        torch.testing.assert_close(got[i], layer_norm(x[i], (2, 6), w_i, b_i))


@pytest.mark.parametrize("rows", [(), (4, 5)], ids=["one row", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=name_of)
@pytest.mark.parametrize("batched", BATCHED, ids="-".join)
def test_gradients_of_each_sample(
    device: str, batched: tuple[str, ...], dtype: torch.dtype, rows: tuple[int, ...]
) -> None:
    """vmap(grad): one kernel each way and one for xhat, of which every sample's own dw is made."""
    arguments, dims = _arguments(batched, dtype, device, rows)

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return layer_norm(x, (2, 6), w, b).to(accumulation_dtype(dtype)).square().sum()

    function = grad(loss, argnums=(0, 1, 2))
    with Calls() as calls:
        got = vmap(function, dims)(*arguments)
    assert calls.names == ["layer_norm_forward", "layer_norm_backward", "layer_norm_forward"]
    plain = _one_by_one(function, arguments, dims)
    exact = _one_by_one(
        grad(lambda *a: layer_norm(a[0], (2, 6), a[1], a[2]).square().sum(), argnums=(0, 1, 2)),
        [value.double() for value in arguments],
        dims,
    )
    for got_one, plain_one, exact_one in zip(got, plain, exact):
        if dtype == torch.bfloat16:
            # y is rounded before it is squared, in both ways but not always to the same side.
            torch.testing.assert_close(got_one, plain_one, rtol=4e-2, atol=4e-2)
        else:
            _assert_as_exact(got_one, plain_one, exact_one)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_nested(device: str, argument: str) -> None:
    """vmap(vmap): over samples of the input outside, over another argument's inside."""
    x = random((SAMPLES, 4, 6), torch.float64, device)
    others = random((2, 6), torch.float64, device, seed=1)
    fixed = random((6,), torch.float64, device, seed=2)

    def function(x: Tensor, other: Tensor) -> Tensor:
        if argument == "input":
            return layer_norm(x + other, (6,), fixed)
        w, b = (other, fixed) if argument == "weight" else (fixed, other)
        return layer_norm(x, (6,), w, b)

    got = vmap(vmap(function, (None, 0)), (0, None))(x, others)
    expected = torch.stack([torch.stack([function(a, o) for o in others]) for a in x])
    torch.testing.assert_close(got, expected)


def test_gradient_of_vmap(device: str) -> None:
    """Reverse mode through a batched call, to the second order."""
    (x, w, b), dims = _arguments(ARGUMENTS, torch.float64, device, (4,))
    leaves = [value.requires_grad_() for value in (x, w, b)]

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return vmap(lambda *a: layer_norm(a[0], (2, 6), a[1], a[2]), dims)(x, w, b)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("batched", BATCHED, ids="-".join)
def test_forward_mode(device: str, batched: tuple[str, ...]) -> None:
    """jvp of vmap and vmap of jvp."""
    arguments, dims = _arguments(batched, torch.float64, device)
    tangents = tuple(torch.randn_like(value) for value in arguments)

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return layer_norm(x, (2, 6), w, b)

    outside = jvp(vmap(function, dims), tuple(arguments), tangents)
    inside = vmap(lambda p, t: jvp(function, p, t), (dims, dims))(tuple(arguments), tangents)
    for i in range(SAMPLES):
        sample = [
            tuple(v if d is None else v.select(d, i) for v, d in zip(values, dims))
            for values in (arguments, tangents)
        ]
        for got, expected in zip(zip(outside, inside), jvp(function, *sample)):
            torch.testing.assert_close(got[0][i], expected)
            torch.testing.assert_close(got[1][i], expected)


def test_jacobians(device: str) -> None:
    """jacrev, which batches cotangents, and jacfwd, which batches tangents."""
    x, w, b = (random(s, torch.float64, device, seed=i) for i, s in enumerate([(2, 6), (6,), (6,)]))

    def function(*arguments: Tensor) -> Tensor:
        return layer_norm(arguments[0], (6,), arguments[1], arguments[2])

    reverse = jacrev(function, argnums=(0, 1, 2))(x, w, b)
    forward = jacfwd(function, argnums=(0, 1, 2))(x, w, b)
    aten = jacrev(lambda *a: torch.nn.functional.layer_norm(a[0], (6,), a[1], a[2]), (0, 1, 2))
    for got, also, expected in zip(reverse, forward, aten(x, w, b)):
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(also, expected)


def test_batched_cotangents(device: str) -> None:
    """vmap over vjp with one input for all cotangents."""
    x, w = random((4, 6), torch.float32, device), random((6,), torch.float32, device, seed=1)
    cotangents = random((SAMPLES, 4, 6), torch.float32, device, seed=2)
    _, pull = vjp(lambda x, w: layer_norm(x, (6,), w), x, w)
    for got, expected in zip(vmap(pull)(cotangents), zip(*(pull(c) for c in cotangents))):
        torch.testing.assert_close(got, torch.stack(expected))


def test_an_ensemble_of_modules(device: str) -> None:
    """The parameters of several modules as samples, by functional_call."""
    modules = [fastnorm.LayerNorm(6, device=device) for _ in range(SAMPLES)]
    for seed, module in enumerate(modules):
        module.load_state_dict(
            {
                "weight": random((6,), torch.float32, device, seed=seed),
                "bias": random((6,), torch.float32, device, seed=seed + 10),
            }
        )
    parameters, buffers = stack_module_state(modules)
    x = random((4, 6), torch.float32, device)
    got = vmap(lambda p, x: functional_call(modules[0], (p, buffers), (x,)), (0, None))(
        parameters, x
    )
    torch.testing.assert_close(got, torch.stack([module(x) for module in modules]))


def test_compile(device: str) -> None:
    """One graph of vmap and of per-sample gradients."""
    x, w = random((SAMPLES, 4, 6), torch.float32, device), random((6,), torch.float32, device)

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        def loss(w: Tensor, x: Tensor) -> Tensor:
            return layer_norm(x, (6,), w).square().sum()

        return vmap(lambda x: layer_norm(x, (6,), w))(x), vmap(grad(loss), (None, 0))(w, x)

    torch._dynamo.reset()
    for got, expected in zip(torch.compile(function, fullgraph=True)(x, w), function(x, w)):
        torch.testing.assert_close(got, expected)


def test_the_operator_itself(device: str) -> None:
    """torch.ops.fastnorm.layer_norm, as C++ code calls it."""
    x = random((SAMPLES, 4, 6), torch.float32, device)
    assert torch.equal(vmap(lambda x: ops.layer_norm(x, [6]))(x), ops.layer_norm(x, [6]))
