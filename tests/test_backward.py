"""Backward against float64 over widths, row counts, dtypes and masks."""

from __future__ import annotations

import itertools

import pytest
import torch
from reference import DTYPES, SMALL_DTYPES, check_backward, name_of, random
from test_forward import WIDTHS, rows_for

MASKS = list(itertools.product([True, False], repeat=3))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", WIDTHS)
def test_widths(device: str, cols: int, dtype: torch.dtype) -> None:
    rows = rows_for(cols)
    x = random((rows, cols), dtype, device, shift=0.5)
    grad_out = random((rows, cols), dtype, device, seed=3)
    weight = random((cols,), dtype, device, seed=1)
    bias = random((cols,), dtype, device, seed=2)
    check_backward(grad_out, x, [cols], weight, bias)


@pytest.mark.parametrize(
    ("cols", "dtype"),
    [(300_000, torch.float32), (300_000, torch.bfloat16), (5_000_000, torch.float32)],
    ids=name_of,
)
def test_very_wide_rows(device: str, cols: int, dtype: torch.dtype) -> None:
    rows = 3 if cols < 1_000_000 else 2
    x = random((rows, cols), dtype, device, shift=0.5)
    grad_out = random((rows, cols), dtype, device, seed=3)
    weight = random((cols,), dtype, device, seed=1)
    check_backward(grad_out, x, [cols], weight, weight)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 65_535, 65_536, 65_537, 131_073])
@pytest.mark.parametrize("cols", [1, 5, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_row_counts(device: str, rows: int, cols: int, dtype: torch.dtype) -> None:
    x = random((rows, cols), dtype, device)
    grad_out = random((rows, cols), dtype, device, seed=3)
    weight = random((cols,), dtype, device, seed=1)
    bias = random((cols,), dtype, device, seed=2)
    check_backward(grad_out, x, [cols], weight, bias)


@pytest.mark.parametrize("mask", MASKS, ids=name_of)
@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
@pytest.mark.parametrize("shape", [(70, 48), (9, 1500)], ids=name_of)
def test_masks(
    device: str, shape: tuple[int, int], affine: str, mask: tuple[bool, bool, bool]
) -> None:
    """What is not asked for is undefined, and leaving it out changes nothing else."""
    cols = shape[1]
    x, grad_out = random(shape, torch.float32, device), random(shape, torch.float32, device, seed=3)
    weight = (
        random((cols,), torch.float32, device, seed=1) if affine in ("both", "weight") else None
    )
    bias = random((cols,), torch.float32, device, seed=2) if affine in ("both", "bias") else None
    check_backward(grad_out, x, [cols], weight, bias, output_mask=mask)


@pytest.mark.parametrize("grad_dtype", SMALL_DTYPES, ids=name_of)
@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
@pytest.mark.parametrize("parameters", ["input's", "float32", "float32 weight", "float32 bias"])
@pytest.mark.parametrize("shape", [(133, 64), (5, 1001)], ids=name_of)
def test_mixed_dtypes(
    device: str,
    shape: tuple[int, int],
    parameters: str,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
) -> None:
    wide_weight, wide_bias = "weight" in parameters, "bias" in parameters
    if parameters == "float32":
        wide_weight = wide_bias = True
    cols = shape[1]
    x = random(shape, dtype, device)
    grad_out = random(shape, grad_dtype, device, seed=3)
    weight = random((cols,), torch.float32 if wide_weight else dtype, device, seed=1)
    bias = random((cols,), torch.float32 if wide_bias else dtype, device, seed=2)
    check_backward(grad_out, x, [cols], weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", [64, 1000])
def test_large_mean(device: str, cols: int, dtype: torch.dtype) -> None:
    shift = 1e4 if dtype == torch.float16 else 1e6
    x = random((17, cols), dtype, device, scale=shift * 1e-6, shift=shift)
    grad_out = random((17, cols), dtype, device, seed=3)
    weight = random((cols,), dtype, device, seed=1)
    check_backward(grad_out, x, [cols], weight, weight)


@pytest.mark.parametrize("magnitude", [1e15, 1e-30])
@pytest.mark.parametrize("cols", [64, 1000])
def test_extreme_magnitudes(device: str, cols: int, magnitude: float) -> None:
    x = random((9, cols), torch.float32, device, scale=magnitude)
    grad_out = random((9, cols), torch.float32, device, seed=3)
    weight = random((cols,), torch.float32, device, seed=1)
    for gradient in check_backward(grad_out, x, [cols], weight, weight):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("cols", [40, 1000, 1025, 16_384, 70_001])
def test_a_variance_beyond_float32(device: str, cols: int) -> None:
    """The sum of (x - mean) * dy is infinite as well, where rstd is zero."""
    x = random((5, cols), torch.float32, device, scale=2.5e36)
    grad_out = random((5, cols), torch.float32, device, seed=3)
    weight = random((cols,), torch.float32, device, seed=1)
    for gradient in check_backward(grad_out, x, [cols], weight, weight, out_of_range=True):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("cols", [9, 40, 255, 256, 1000, 4097])
def test_first_columns_that_mislead(device: str, cols: int) -> None:
    """Under equal gradients dx is what the mean lacks, times the number of columns."""
    for rows, first in ((1, 1), (37, 1), (37, 16)):
        x = random((rows, cols), torch.float32, device)
        x[:, :first] += 1000.0
        grad_out = torch.full((1, 1), 0.7, device=device).expand(rows, cols)
        check_backward(grad_out, x, [cols])


@pytest.mark.parametrize("cols", [1, 2, 3, 7, 40])
def test_subnormal_rows(device: str, cols: int) -> None:
    for rows in (4, 37):
        x = random((rows, cols), torch.float32, device, scale=torch.finfo(torch.float32).tiny / 4)
        grad_out = random((rows, cols), torch.float32, device, seed=3)
        weight = random((cols,), torch.float32, device, seed=1)
        check_backward(grad_out, x, [cols], weight, weight)


@pytest.mark.parametrize("cols", [1, 3, 12, 20, 40, 1000])
def test_huge_equal_columns(device: str, cols: int) -> None:
    """The mean times rstd is beyond float32; what is added for columns that a lane lacks is not."""
    x = torch.full((5, cols), 1e37, device=device)
    grad_out = random((5, cols), torch.float32, device, seed=3)
    check_backward(grad_out, x, [cols])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_equal_gradients_add_up(device: str, dtype: torch.dtype) -> None:
    """Roundings of one chain of sums all go one way."""
    for rows, cols in ((75, 1), (250, 1), (1000, 7), (5000, 64)):
        x = random((rows, cols), dtype, device)
        row, bias = (random((cols,), dtype, device, seed=seed) for seed in (3, 2))
        check_backward(
            row.expand(rows, cols), x, [cols], None, bias, output_mask=[False, False, True]
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("rows", [50, 70_001])
def test_one_column_has_no_weight_gradient(device: str, rows: int, dtype: torch.dtype) -> None:
    """x - mean is exactly zero, so dx and dw are too, however large x is (ATen's dw is not)."""
    x = random((rows, 1), dtype, device, scale=1e4 if dtype == torch.float16 else 1e6)
    grad_out, weight = random((rows, 1), dtype, device, seed=3), random((1,), dtype, device, seed=1)
    dx, dw, _ = check_backward(grad_out, x, [1], weight, weight)
    assert (dx == 0).all()
    assert (dw == 0).all()


def test_rows_beyond_65536_over_two_dimensions(device: str) -> None:
    x = random((100_000, 8, 16), torch.float32, device)
    grad_out = random((100_000, 8, 16), torch.float32, device, seed=3)
    weight, bias = random((8, 16), torch.float32, device, seed=1), torch.zeros(8, 16, device=device)
    check_backward(grad_out, x, [8, 16], weight, bias)


def test_rows_beyond_65536_with_bias_alone(device: str) -> None:
    x = random((100_000, 128), torch.float32, device)
    grad_out = random((100_000, 128), torch.float32, device, seed=3)
    check_backward(grad_out, x, [128], None, torch.zeros(128, device=device))
