"""More elements than 32 bits count: needs a GPU with more than 100 GB (-m large)."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from reference import check_backward, check_forward, ops

pytestmark = [pytest.mark.cuda, pytest.mark.large]

ROWS, COLS = 8_388_673, 512  # 2^32 elements and 33,280 more
CHUNK = 1 << 18


@pytest.fixture(autouse=True)
def _release_memory() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def test_beyond_2_to_the_32_elements() -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    x, grad_out, weight, bias = (
        numbers(ROWS, COLS),
        numbers(ROWS, COLS),
        numbers(COLS),
        numbers(COLS),
    )
    y, mean, rstd = ops.layer_norm_forward(x, [COLS], weight, bias, 1e-5, None)
    dx, dw, db = ops.layer_norm_backward(
        grad_out, x, [COLS], mean, rstd, weight, bias, 1e-5, [True, True, True]
    )
    assert y.shape == dx.shape == x.shape

    # Rows do not depend on their batch: the same rows by themselves, checked against float64.
    borders = (0, 1 << 22, 1 << 23, ROWS - 64)
    for start in (*borders, *(border - 32 for border in borders[1:3])):
        part = slice(start, start + 64)
        outputs = check_forward(x[part], [COLS], weight, bias)
        assert y[part].equal(outputs[0])
        assert mean[part].equal(outputs[1])
        assert rstd[part].equal(outputs[2])
        assert dx[part].equal(check_backward(grad_out[part], x[part], [COLS], weight, bias)[0])

    # Every row's mean and rstd, and the column sums, in float64.
    expected_dw = torch.zeros(COLS, dtype=torch.float64, device="cuda")
    expected_db, squares_dw, squares_db = (torch.zeros_like(expected_dw) for _ in range(3))
    for start in range(0, ROWS, CHUNK):
        part = slice(start, start + CHUNK)
        rows, dy = x[part].double(), grad_out[part].double()
        row_mean = rows.mean(1, keepdim=True)
        centered = rows.sub_(row_mean)
        row_rstd = centered.square().mean(1, keepdim=True).add_(1e-5).rsqrt_()
        torch.testing.assert_close(mean[part].double(), row_mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(rstd[part].double(), row_rstd, rtol=1e-6, atol=0)
        xhat = centered.mul_(row_rstd)
        expected_y = (xhat * weight + bias).float()
        difference = (y[part].float() - expected_y).abs_()
        assert (difference <= expected_y.abs_().mul_(2**-8).add_(1e-5)).all()
        expected_db += dy.sum(0)
        squares_db += dy.square().sum(0)
        terms = dy.mul_(xhat)
        expected_dw += terms.sum(0)
        squares_dw += terms.square().sum(0)
    for ours, expected, squares in ((dw, expected_dw, squares_dw), (db, expected_db, squares_db)):
        # Half a unit of bfloat16's last place for the result, and the float32 rounding of a random
        # walk of 8 million terms in chains of at most 64 thousand: 4 times 0.15 * sqrt(64 K) units.
        limit = expected.abs() * 2**-8 + 160 * torch.finfo(torch.float32).eps * squares.sqrt()
        assert ((ours.double() - expected).abs() <= limit).all()


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
