"""Forward against float64 over widths, row counts and dtypes; and the comparison itself."""

from __future__ import annotations

import pytest
import torch
from reference import (
    DTYPES,
    assert_no_worse_than_aten,
    aten_forward,
    check_forward,
    forward_reference,
    name_of,
    ops,
    random,
)
from torch import Tensor

# Around every power of two and every change of kernel, and the widths that models have.
WIDTHS = (
    *(1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 760, 768, 769),
    *(1023, 1024, 1025, 1128, 1500, 2048, 3000, 4096, 4097, 8192, 8193, 12288, 16383, 16384, 16385),
    *(32768, 32769, 65536, 65537, 131072, 262144),
)


def rows_for(cols: int) -> int:
    """A number of rows that is no multiple of any tile's, small for wide rows."""
    return 131 if cols <= 512 else 37 if cols <= 2048 else 5


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", WIDTHS)
def test_widths(device: str, cols: int, dtype: torch.dtype) -> None:
    x = random((rows_for(cols), cols), dtype, device, shift=0.5)
    weight = random((cols,), dtype, device, seed=1)
    bias = random((cols,), dtype, device, seed=2)
    check_forward(x, [cols], weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("cols", [300_000, 5_000_000])
def test_very_wide_rows(device: str, cols: int, dtype: torch.dtype) -> None:
    x = random((3 if cols < 1_000_000 else 2, cols), dtype, device, shift=0.5)
    weight = random((cols,), dtype, device, seed=1)
    check_forward(x, [cols], weight, None)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 65_535, 65_536, 65_537, 131_073])
@pytest.mark.parametrize("cols", [1, 5, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_row_counts(device: str, rows: int, cols: int, dtype: torch.dtype) -> None:
    x = random((rows, cols), dtype, device)
    weight = random((cols,), dtype, device, seed=1)
    bias = random((cols,), dtype, device, seed=2)
    check_forward(x, [cols], weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", [3, 64, 1000, 5000])
def test_large_mean(device: str, cols: int, dtype: torch.dtype) -> None:
    """1e6 +- 1 (1e4 where the dtype ends before): E[x^2] - E[x]^2 would leave nothing."""
    shift = 1e4 if dtype == torch.float16 else 1e6
    x = random((17, cols), dtype, device, scale=shift * 1e-6, shift=shift)
    check_forward(x, [cols])


@pytest.mark.parametrize("magnitude", [1e15, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("cols", [64, 1000])
def test_extreme_magnitudes(device: str, cols: int, dtype: torch.dtype, magnitude: float) -> None:
    x = random((9, cols), dtype, device, scale=magnitude)
    outputs = check_forward(x, [cols], random((cols,), dtype, device, seed=1))
    assert all(output.isfinite().all() for output in outputs)


@pytest.mark.parametrize("scale", [1e30, 3e36])
@pytest.mark.parametrize("cols", [64, 256, 257, 1000, 4097, 70_000])
def test_a_variance_beyond_float32_leaves_no_nan(device: str, cols: int, scale: float) -> None:
    """The CPU kernels sum such a row's squares in float64; those of CUDA return the bias."""
    x = random((9, cols), torch.float32, device, scale=scale)
    bias = random((cols,), torch.float32, device, seed=1)
    output, mean, rstd = ops.layer_norm_forward(x, [cols], None, bias, 1e-5, None)
    assert mean.isfinite().all()
    if device == "cuda":
        assert (rstd == 0).all()
        assert output.equal(bias.expand_as(x))
    else:
        expected = forward_reference(x, [cols], None, bias, 1e-5)
        torch.testing.assert_close(output.double(), expected[0].value, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rstd.double(), expected[2].value, rtol=1e-5, atol=0)


@pytest.mark.parametrize("cols", [3, 9, 40, 255, 256, 1000, 4097])
def test_first_columns_that_mislead(device: str, cols: int) -> None:
    """An outlier there, and a step after them: the kernels' first guess at the mean is off."""
    x = random((37, cols), torch.float32, device)
    for first in (1, 16):
        odd = x.clone()
        odd[:, :first] += 1000.0
        check_forward(odd, [cols])


def test_squares_near_the_end_of_float32() -> None:
    """Their sum about the mean is finite, that about another number need not be."""
    for cols in (9, 100, 255):
        x = random((300, cols), torch.float32, "cpu", scale=(2e38 / cols) ** 0.5)
        check_forward(x, [cols], out_of_range=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("cols", [1, 2, 3, 5, 7, 8, 40, 300, 5000])
def test_subnormal_rows(device: str, cols: int, dtype: torch.dtype) -> None:
    x = random((40, cols), dtype, device, scale=torch.finfo(dtype).tiny / 4)
    _, mean, _ = check_forward(x, [cols])
    if cols == 1:
        assert mean.equal(x.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", [1, 2, 5, 64, 300, 1025])
def test_rows_with_an_infinity(device: str, cols: int, dtype: torch.dtype) -> None:
    """In each column once. The other rows are as they would be without it."""
    x = random((cols + 2, cols), dtype, device)
    x.diagonal().fill_(float("inf"))
    y, mean, _ = check_forward(x, [cols])
    assert y[:cols].isnan().any(1).all()
    assert mean[:cols].isposinf().all()
    expected = ops.layer_norm_forward(x[cols:], [cols], None, None, 1e-5, None)
    assert y[cols:].equal(expected[0])
    assert mean[cols:].equal(expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", [3000, 16_384, 40_001, 300_000])
def test_infinities_in_wide_rows(device: str, cols: int, dtype: torch.dtype) -> None:
    """Anywhere: the mean is that infinity, and NaN of a row that holds both, as the sum is."""
    x = random((7, cols), dtype, device)
    row = torch.arange(7, device=device)
    place = torch.linspace(0, cols - 1, 7, device=device).long()
    x[row, place] = float("inf")
    x[row[::3], place[::3]] = float("-inf")
    x[row[1::3], cols // 2] = float("-inf")
    _, mean, _ = check_forward(x, [cols])
    expected = x.double().mean(1, keepdim=True)
    torch.testing.assert_close(mean.double(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", [1, 4, 96, 1024, 20_000])
def test_constant_rows(device: str, cols: int, dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0], [3.0], [-0.5]], dtype=dtype, device=device).repeat(1, cols)
    check_forward(x, [cols], None, random((cols,), dtype, device))


def _off_by_one_element(y: Tensor) -> Tensor:
    return y.roll(1, -1)


def _wrong_in_the_last_element(y: Tensor) -> Tensor:
    y = y.clone()
    y[-1, -1] += 1e-3 if y.dtype in (torch.float32, torch.float64) else 0.25
    return y


def _statistics_in_half(y: Tensor) -> Tensor:
    return y * (1 + 2**-7)


def _a_missing_row(y: Tensor) -> Tensor:
    y = y.clone()
    y[7] = 0
    return y


def _one_nan(y: Tensor) -> Tensor:
    y = y.clone()
    y[3, 5] = float("nan")
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "spoil",
    [
        _off_by_one_element,
        _wrong_in_the_last_element,
        _statistics_in_half,
        _a_missing_row,
        _one_nan,
        Tensor.double,
        Tensor.t,
    ],
)
def test_the_comparison_sees_wrong_results(dtype: torch.dtype, spoil: object) -> None:
    x, weight = random((33, 96), dtype, "cpu"), random((96,), dtype, "cpu", seed=1)
    y = ops.layer_norm_forward(x, [96], weight, None, 1e-5, None)[0]
    spoiled = spoil(y) if spoil is not Tensor.double or dtype != torch.float64 else y.float()
    aten = aten_forward(x, [96], weight, None, 1e-5)[0]
    reference = forward_reference(x, [96], weight, None, 1e-5)[0]
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    assert_no_worse_than_aten("y", y, aten, reference, dtype, arithmetic)
    with pytest.raises(AssertionError):
        assert_no_worse_than_aten("y", spoiled, aten, reference, dtype, arithmetic)
