"""Property-based tests: any problem against float64, any nonsense answered by an exception.

The profile `quick` runs in the suite; `long` is for `python tests/property_report.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import reference
import strategies
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from reference import check_backward, check_forward, ops
from strategies import Problem, problems
from torch import Tensor

import fastnorm

examples = {"against float64": 0, "nonsense": 0}


@pytest.fixture(scope="module", autouse=True)
def _log() -> Iterator[None]:
    """Writes what was tried to the file that FASTNORM_PROPERTIES_LOG names."""
    reference.worst.clear()
    yield
    if path := os.environ.get("FASTNORM_PROPERTIES_LOG"):
        log = {
            "examples": examples,
            "worst": {what: asdict(w) for what, w in sorted(reference.worst.items())},
        }
        Path(path).write_text(json.dumps(log))


def _same_bits(ours: Tensor, other: Tensor) -> bool:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
    return ours.dtype == other.dtype and ours.view(integers).equal(other.view(integers))


@given(problem=problems())
def test_against_float64(device: str, problem: Problem) -> None:
    """Output, statistics and gradients; then the same bits out of autograd."""
    examples["against float64"] += 1
    event(f"values: {problem.values}")
    x, grad_out = problem.input(device), problem.grad_out(device)
    weight, bias = problem.weight(device), problem.bias(device)
    shape, eps = problem.normalized_shape, problem.eps
    before = [t.clone() for t in (x, grad_out)]

    y, _, _ = check_forward(
        x, shape, weight, bias, eps, problem.out_dtype, out_of_range=problem.out_of_range
    )
    mask = problem.output_mask
    gradients = check_backward(
        grad_out, x, shape, weight, bias, eps, mask,
        out_dtype=problem.out_dtype, out_of_range=problem.out_of_range,
    )  # fmt: skip
    for t, old in zip((x, grad_out), before):
        assert torch.equal(t.nan_to_num(), old.nan_to_num()), "an argument was changed"

    leaves = [
        None if t is None else t.detach().requires_grad_(asked)
        for t, asked in zip((x, weight, bias), mask)
    ]
    out = fastnorm.functional.layer_norm(
        leaves[0], list(shape), leaves[1], leaves[2], eps, problem.out_dtype
    )
    assert _same_bits(out.detach(), y)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    if wanted:
        results = torch.autograd.grad(out, wanted, grad_out)
        for ours, expected in zip(results, (g for g in gradients if g is not None)):
            assert _same_bits(ours, expected)


# --- nonsense -------------------------------------------------------------------------------------

ANY_DTYPE = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
ANY_SIZE = st.sampled_from([0, 1, 2, 3, 3, 4, 4, 5])
ANY_SHAPE = st.lists(ANY_SIZE, max_size=4).map(tuple)
ANY_EPS = st.floats(allow_nan=True, allow_infinity=True)
HOSTILE_SIZE = ANY_SIZE | st.sampled_from([-1, -(2**63), 2**31, 2**62, 2**63 - 1])
REFUSALS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)


@st.composite
def _tensors(draw: st.DrawFn, near: tuple[int, ...]) -> dict[str, Any]:
    """Mostly of the shape and dtype that would be right."""
    return {
        "shape": draw(st.just(near) | st.just(near) | ANY_SHAPE),
        "dtype": draw(st.just(torch.float32) | st.just(torch.float32) | st.sampled_from(ANY_DTYPE)),
        "meta": draw(st.integers(0, 30)) == 0,
    }


@st.composite
def _nonsense(draw: st.DrawFn) -> dict[str, Any]:
    leading, normalized = draw(ANY_SHAPE), draw(ANY_SHAPE)
    statistics = (*leading, *[1] * len(normalized))
    return {
        "normalized_shape": draw(st.just(list(normalized)) | st.lists(HOSTILE_SIZE, max_size=5)),
        "input": draw(_tensors((*leading, *normalized))),
        "grad_out": draw(_tensors((*leading, *normalized))),
        "mean": draw(_tensors(statistics)),
        "rstd": draw(_tensors(statistics)),
        "weight": draw(st.none() | _tensors(normalized)),
        "bias": draw(st.none() | _tensors(normalized)),
        "eps": draw(ANY_EPS),
        "out_dtype": draw(st.none() | st.sampled_from(ANY_DTYPE)),
        "mask": draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
    }


def _made(what: dict[str, Any] | None, device: str) -> Tensor | None:
    if what is None:
        return None
    target = "meta" if what["meta"] else device
    return torch.ones(what["shape"], device=target).to(what["dtype"])


@given(call=_nonsense())
def test_nonsense(device: str, call: dict[str, Any]) -> None:
    """Shapes and dtypes are not trusted: an exception, or a result of the right shape."""
    examples["nonsense"] += 1
    names = ("input", "grad_out", "mean", "rstd", "weight", "bias")
    x, grad_out, mean, rstd, weight, bias = (_made(call[name], device) for name in names)
    shape, eps = call["normalized_shape"], call["eps"]
    try:
        outputs = ops.layer_norm_forward(x, shape, weight, bias, eps, call["out_dtype"])
    except REFUSALS:
        event("forward: refused")
    else:
        event("forward: ran")
        assert outputs[0].shape == x.shape
        assert x.shape[x.dim() - len(shape) :] == tuple(shape)
    try:
        dx, dw, db = ops.layer_norm_backward(
            grad_out, x, shape, mean, rstd, weight, bias, eps, call["mask"]
        )
    except REFUSALS:
        event("backward: refused")
        return
    event("backward: ran")
    for asked, gradient, like in zip(call["mask"], (dx, dw, db), (x, weight, bias)):
        if asked and like is not None:
            assert gradient.shape == like.shape
        else:
            assert gradient is None
    if device == "cuda":
        torch.cuda.synchronize()


def test_layouts_are_what_they_say() -> None:
    """Each layout keeps the shape, and all but the expanded and overlapping ones the values."""
    t = torch.randn(4, 3, 6)
    for name, lay in strategies.LAYOUTS.items():
        laid = lay(t, 2)
        assert laid.shape == t.shape, name
        if not name.startswith(("expanded", "overlapping")):
            assert laid.equal(t), name
