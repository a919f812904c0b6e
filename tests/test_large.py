"""More elements than 32 bits count: needs a GPU with more than 100 GB (-m large)."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from reference import check_backward, check_forward, name_of, ops
from torch import Tensor

pytestmark = [pytest.mark.cuda, pytest.mark.large]

ROWS, COLS = 8_388_673, 512  # 2^32 elements and 33,280 more
CHUNK = 1 << 18


@pytest.fixture(autouse=True)
def _release_memory() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def _assert_sums(ours: Tensor, expected: Tensor, squares: Tensor, chain: int) -> None:
    """`squares`: the sum of the terms' squares. Half a unit of the result's last place, and four
    times the float32 rounding of a random walk in chains of at most `chain` terms."""
    unit = torch.finfo(torch.float32).eps
    limit = expected.abs() * (torch.finfo(ours.dtype).eps / 2)
    limit += 4 * 0.15 * chain**0.5 * unit * squares.sqrt() + unit
    assert ((ours.double() - expected).abs() <= limit).all()


@pytest.mark.parametrize(
    ("rows", "cols", "dtype"),
    [
        (ROWS, COLS, torch.bfloat16),
        (4_194_305, 512, torch.float16),  # 2^31 and 512 more
        (2_796_203, 769, torch.bfloat16),  # 2^31 and more, rows not aligned
        (1_048_577, 2048, torch.float32),  # 2^31 and 2048 more
        (10_000_019, 128, torch.bfloat16),
        (10_000_019, 24, torch.float32),
        (430, 5_000_000, torch.bfloat16),  # 2^31 and more in rows that are cut
        (33, 5_000_000, torch.float32),
    ],
    ids=name_of,
)
def test_many_elements(rows: int, cols: int, dtype: torch.dtype) -> None:
    """Forward and backward: first, middle and last rows and those at 32-bit borders by the rule of
    reference.py, all others' statistics and values, and dw and db against float64."""
    generator = torch.Generator("cuda").manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    x, grad_out, weight, bias = (
        numbers(rows, cols),
        numbers(rows, cols),
        numbers(cols),
        numbers(cols),
    )
    y, mean, rstd = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)
    dx, dw, db = ops.layer_norm_backward(
        grad_out, x, [cols], mean, rstd, weight, bias, 1e-5, [True, True, True]
    )
    assert y.shape == dx.shape == x.shape

    # Rows do not depend on their batch: the same rows by themselves, checked against float64.
    few = max(1, min(64, (1 << 24) // cols))
    borders = (0, rows // 2, (1 << 31) // cols, (1 << 32) // cols, (1 << 32) // cols // x.itemsize)
    starts = {max(0, min(border - few // 2, rows - few)) for border in borders} | {rows - few}
    for start in sorted(starts):
        part = slice(start, start + few)
        outputs = check_forward(x[part], [cols], weight, bias)
        assert y[part].equal(outputs[0])
        assert mean[part].equal(outputs[1])
        assert rstd[part].equal(outputs[2])
        assert dx[part].equal(check_backward(grad_out[part], x[part], [cols], weight, bias)[0])

    # Every row's mean, rstd and y, and the column sums, in float64.
    expected_dw = torch.zeros(cols, dtype=torch.float64, device="cuda")
    expected_db, squares_dw, squares_db = (torch.zeros_like(expected_dw) for _ in range(3))
    rounding = torch.finfo(dtype).eps
    chunk = max(1, CHUNK * COLS // cols)
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        centered, dy = x[part].double(), grad_out[part].double()
        row_mean = centered.mean(1, keepdim=True)
        centered.sub_(row_mean)
        row_rstd = centered.square().mean(1, keepdim=True).add_(1e-5).rsqrt_()
        torch.testing.assert_close(mean[part].double(), row_mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(rstd[part].double(), row_rstd, rtol=1e-6, atol=0)
        xhat = centered.mul_(row_rstd)
        expected_y = (xhat * weight + bias).float()
        difference = (y[part].float() - expected_y).abs_()
        assert (difference <= expected_y.abs_().mul_(rounding).add_(1e-5)).all()
        expected_db += dy.sum(0)
        squares_db += dy.square().sum(0)
        terms = dy.mul_(xhat)
        expected_dw += terms.sum(0)
        squares_dw += terms.square().sum(0)
    # Chains of about as many terms as a block has rows.
    chain = max(64, rows // 100)
    _assert_sums(dw, expected_dw, squares_dw, chain)
    _assert_sums(db, expected_db, squares_db, chain)


def test_one_row_beyond_2_to_the_31_elements() -> None:
    cols = (1 << 31) + 1000
    x = torch.ones(1, cols, dtype=torch.bfloat16, device="cuda")
    x[0, 1::2] = -1
    y, mean, rstd = ops.layer_norm_forward(x, [cols], None, None, 0.0, None)
    assert mean.abs().item() < 1e-6
    assert abs(rstd.item() - 1) < 1e-6
    assert y.equal(x)
    dx = ops.layer_norm_backward(y, x, [cols], mean, rstd, None, None, 0.0, [True, False, False])[0]
    assert dx.abs().max().item() < 1e-5


def test_as_many_rows_of_one_column() -> None:
    rows = (1 << 31) + 1000
    x = torch.ones(rows, 1, dtype=torch.bfloat16, device="cuda")
    bias = torch.full((1,), 3.0, dtype=torch.bfloat16, device="cuda")
    y = ops.layer_norm(x, [1], None, bias)
    assert (y == 3).all()
