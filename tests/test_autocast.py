"""Autocast: the dtypes of torch.nn.functional.layer_norm, and what out_dtype changes."""

from __future__ import annotations

import gc

import pytest
import torch
from reference import SMALL_DTYPES, name_of, random

import fastnorm
from fastnorm.functional import layer_norm


@pytest.mark.cuda
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("autocast_dtype", [torch.float16, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
def test_cuda_autocast_gives_float32(
    dtype: torch.dtype, autocast_dtype: torch.dtype, out_dtype: torch.dtype | None
) -> None:
    """As PyTorch does, unless out_dtype says otherwise; gradients keep their tensors' dtypes."""
    x = random((8, 64), dtype, "cuda").requires_grad_()
    w = random((64,), torch.float32, "cuda", seed=1).requires_grad_()
    b = random((64,), torch.float32, "cuda", seed=2).requires_grad_()
    with torch.autocast("cuda", dtype=autocast_dtype):
        y = layer_norm(x, (64,), w, b, out_dtype=out_dtype)
        aten = torch.nn.functional.layer_norm(x, (64,), w, b)
    assert y.dtype == (out_dtype or aten.dtype)
    torch.testing.assert_close(y, aten.to(y.dtype))
    grad_out = random((8, 64), torch.float32, "cuda", seed=3)
    expected = torch.autograd.grad(aten, (x, w, b), grad_out.to(aten.dtype))
    ours = torch.autograd.grad(y, (x, w, b), grad_out.to(y.dtype))
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if y.dtype != torch.float32 else {}
    for leaf, gradient, other in zip((x, w, b), ours, expected):
        assert gradient.dtype == leaf.dtype
        torch.testing.assert_close(gradient, other, **tolerance)


@pytest.mark.cuda
def test_cuda_autocast_of_half_parameters() -> None:
    """bfloat16 rows with float16 parameters are cast as PyTorch casts them."""
    x, w = random((8, 64), torch.bfloat16, "cuda"), random((64,), torch.float16, "cuda", seed=1)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        torch.testing.assert_close(
            layer_norm(x, (64,), w), torch.nn.functional.layer_norm(x, (64,), w)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_cpu_autocast_does_as_pytorch(dtype: torch.dtype) -> None:
    x, w = random((8, 64), dtype, "cpu"), random((64,), torch.float32, "cpu", seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, aten = layer_norm(x, (64,), w), torch.nn.functional.layer_norm(x, (64,), w)
    assert y.dtype == aten.dtype
    torch.testing.assert_close(y, aten)


@pytest.mark.parametrize("out_dtype", SMALL_DTYPES, ids=name_of)
def test_out_dtype_overrides_autocast(device: str, out_dtype: torch.dtype) -> None:
    norm = fastnorm.LayerNorm(64, device=device, out_dtype=out_dtype)
    x = random((8, 64), torch.bfloat16, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = norm(x)
    assert y.dtype == out_dtype
    assert y.equal(norm(x))


def test_autocast_of_float64_stays_float64(device: str) -> None:
    x = random((8, 64), torch.float64, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert layer_norm(x, (64,)).dtype == torch.float64


@pytest.mark.cuda
def test_cuda_autocast_makes_no_float32_copy_of_the_input() -> None:
    """The forward's memory is its float32 result, the backward's dx in the input's dtype."""
    gc.collect()  # else tensors of earlier tests may be freed while memory is measured
    rows, cols = 8192, 1024
    norm = fastnorm.LayerNorm(cols, device="cuda")
    x = random((rows, cols), torch.bfloat16, "cuda").requires_grad_()
    grad_out = torch.ones(rows, cols, device="cuda")
    elements = rows * cols

    def step() -> tuple[int, int]:
        # The thread of the backward may hold what it computed last until it has other work.
        torch.ones(1, device="cuda", requires_grad=True).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = norm(x)
        forward = torch.cuda.max_memory_allocated() - start
        assert y.dtype == torch.float32
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        gradients = torch.autograd.grad(y, (x, *norm.parameters()), grad_out)
        backward = torch.cuda.max_memory_allocated() - start
        assert gradients[0].dtype == torch.bfloat16
        return forward, backward

    step()
    forward, backward = step()
    # A float32 copy would add four bytes an element to either.
    assert 4 * elements <= forward < 4.5 * elements
    assert 2 * elements <= backward < 3 * elements


@pytest.mark.cuda
def test_cuda_autocast_of_a_model() -> None:
    """Linear layers give bfloat16, the norm float32, as with torch.nn.LayerNorm in its place."""
    results = []
    for norm in (fastnorm.LayerNorm, torch.nn.LayerNorm):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), norm(64), torch.nn.Linear(64, 8))
        model.cuda()
        x = random((32, 64), torch.float32, "cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
        results.append([y, *(parameter.grad for parameter in model.parameters())])
    for ours, theirs in zip(*results):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
