"""The arithmetic of the CUDA forward's moments, compiled for the CPU, on rows that are hard for it.

csrc/cuda/moments.cuh as it is, in a warp of which each lane is a fiber (tests/cuda_moments). What
the kernels do around it is tested on a GPU; whether its sums keep what they must needs none.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import Reference, assert_no_worse_than_aten, aten_forward, forward_reference, random
from torch import Tensor

from fastnorm import _C

ROOT = Path(__file__).parent.parent
MOMENTS = ROOT / "csrc" / "cuda" / "moments.cuh"
EPS = 1e-5
# Columns, and whether rows are of a 16-bit type, whose chunks have eight columns.
WIDTHS = [
    (5, False), (6, False), (7, False), (8, False), (40, False), (64, False), (76, False),
    (100, False), (300, False), (1000, False), (4097, False), (12_289, False),
    (8, True), (24, True), (40, True), (56, True), (72, True), (136, True), (256, True),
    (512, True), (1000, True), (1151, True), (4096, True), (8199, True), (20_480, True),
    (27_001, True),
]  # fmt: skip

Moments = Callable[[Tensor, bool], tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def moments() -> Moments:
    """Mean and rstd of rows, by the kernel that the plan has for such rows on an H200."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or not MOMENTS.exists():
        pytest.skip("needs a C++ compiler and fastnorm's sources")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in (MOMENTS, *(ROOT / "tests" / "cuda_moments").iterdir()):
            shutil.copy(source, folder)  # beside each other, so that includes find the stand-in
        library = folder / "moments.so"
        subprocess.run(
            [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC",
             f"-I{MOMENTS.parent}", "moments.cpp", "-o", library],
            cwd=folder, check=True,
        )  # fmt: skip
        take = ctypes.CDLL(str(library)).take_moments
    take.restype = ctypes.c_bool

    def moments_of(x: Tensor, is_16_bit: bool) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        rows, cols = x.shape
        columns = 8 if is_16_bit else 4
        dtype = "bfloat16" if is_16_bit else "float32"
        aligned = cols % columns == 0
        plan = _C.plan("forward", rows, cols, dtype, aligned=aligned)
        if plan["kernel"] == "elements":  # which has no chunks; they are for a y of another dtype
            plan = _C.plan("forward", rows, cols, dtype, aligned=aligned, y_as_x=False)
        assert plan["kernel"] in ("short_rows", "rows")
        by_blocks = plan["kernel"] == "rows"
        result = torch.full((rows, 2), float("nan"))
        assert take(
            by_blocks, 32 if by_blocks else plan["threads_per_row"], plan["chunks_per_thread"],
            columns, ctypes.c_void_p(x.data_ptr()), rows, cols, ctypes.c_float(EPS),
            ctypes.c_void_p(result.data_ptr()),
        ), f"moments.cpp has not this shape: {plan}"  # fmt: skip
        mean, rstd = (column.contiguous() for column in result.split(1, dim=1))
        return mean, rstd

    return moments_of


def _check(moments: Moments, x: Tensor, is_16_bit: bool) -> tuple[Tensor, Tensor]:
    """Mean and rstd have no larger errors than ATen's."""
    if is_16_bit:
        x = x.bfloat16().float()
    ours = moments(x, is_16_bit)
    aten = aten_forward(x, x.shape[1:], None, None, EPS)[1:]
    references: tuple[Reference, ...] = forward_reference(x, x.shape[1:], None, None, EPS)[1:]
    for what, got, theirs, reference in zip(("mean", "rstd"), ours, aten, references):
        assert_no_worse_than_aten(what, got, theirs, reference, torch.float32, torch.float32)
    return ours


@pytest.mark.parametrize(("cols", "is_16_bit"), WIDTHS)
def test_ordinary_rows(moments: Moments, cols: int, is_16_bit: bool) -> None:
    x = random((17, cols), torch.float32, "cpu")
    _check(moments, x, is_16_bit)
    _check(moments, x + 100, is_16_bit)
    _check(moments, x * 1e15, is_16_bit)
    _check(moments, x + (1e6 if not is_16_bit else 1e3), is_16_bit)


@pytest.mark.parametrize(("cols", "is_16_bit"), WIDTHS)
def test_first_columns_that_mislead(moments: Moments, cols: int, is_16_bit: bool) -> None:
    x = random((17, cols), torch.float32, "cpu")
    for first in (1, 4, 8, 16, 129):
        odd = x.clone()
        odd[:, :first] += 1000.0
        _check(moments, odd, is_16_bit)


@pytest.mark.parametrize(("cols", "is_16_bit"), WIDTHS)
def test_subnormal_rows(moments: Moments, cols: int, is_16_bit: bool) -> None:
    _check(moments, random((40, cols), torch.float32, "cpu", scale=3e-39), is_16_bit)


@pytest.mark.parametrize(("cols", "is_16_bit"), WIDTHS)
def test_equal_columns(moments: Moments, cols: int, is_16_bit: bool) -> None:
    """Exactly their mean, and no variance."""
    values = torch.tensor([[0.0], [3.0], [-0.1], [1e37]])
    mean, rstd = moments(values.repeat(1, cols), is_16_bit)
    assert mean.equal(values)
    assert (rstd == torch.tensor(EPS).rsqrt()).all()


@pytest.mark.parametrize("scale", [1e30, 3e36])
@pytest.mark.parametrize(("cols", "is_16_bit"), WIDTHS)
def test_a_variance_beyond_float32(
    moments: Moments, cols: int, is_16_bit: bool, scale: float
) -> None:
    """rstd is zero then, and not NaN, and the mean is what it was."""
    x = random((17, cols), torch.float32, "cpu", scale=scale)
    mean, rstd = moments(x, is_16_bit)
    assert (rstd == 0).all()
    reference = forward_reference(x, [cols], None, None, EPS)[1]
    aten = aten_forward(x, [cols], None, None, EPS)[1]
    assert_no_worse_than_aten("mean", mean, aten, reference, torch.float32, torch.float32)


@pytest.mark.parametrize(("cols", "is_16_bit"), WIDTHS)
def test_what_is_not_finite(moments: Moments, cols: int, is_16_bit: bool) -> None:
    """An infinity is the mean, two of them and a NaN leave none; other rows are as without them."""
    places = sorted({0, 3, cols // 2, cols - 1})
    x = random((4 * len(places), cols), torch.float32, "cpu")
    expected = moments(x, is_16_bit)
    for i, place in enumerate(places):
        x[4 * i, place] = float("inf")
        x[4 * i + 1, place] = float("nan")
        x[4 * i + 2, place] = float("inf")
        x[4 * i + 2, (place + 1) % cols] = float("-inf")
    mean, rstd = moments(x, is_16_bit)
    assert mean[0::4].isposinf().all()
    assert mean[1::4].isnan().all()
    assert mean[2::4].isnan().all()
    for kind in range(3):
        assert rstd[kind::4].isnan().all()
    assert mean[3::4].equal(expected[0][3::4])
    assert rstd[3::4].equal(expected[1][3::4])
