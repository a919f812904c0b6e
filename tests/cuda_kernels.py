"""Names of the CUDA kernels, and shapes and arguments for them, which their tests share."""

from __future__ import annotations

import pytest
import torch
from reference import (
    ops,
    random,
)
from torch import Tensor

KERNELS = ["rows", "cluster", "split"]
BACKWARD_KERNELS = ["few_rows", "few_elements", "elements", "ring", *KERNELS]
SHAPES = [
    (1, 1), (3, 7), (37, 33), (130, 64), (257, 255), (64, 1024), (67, 1027), (33, 2048),
    (7, 4097), (130, 66), (301, 5), (129, 13), (1, 29), (75, 45), (61, 511), (9, 1023),
    (13, 2049), (3, 12_289), (5, 8192), (5, 8193), (3, 16_385), (3, 32_769), (2, 65_536),
    (35, 1025), (19, 1087), (2, 49_386), (2, 50_257),
    (2, 131_073), (1, 262_144), (11, 333), (13, 601), (9, 1101),
    (10, 520), (9, 700), (21, 1160), (9, 1409), (9, 1600), (9, 1667), (13, 2304), (5, 3200),
    (7, 3307),
    (77, 8), (77, 16), (67, 144), (33, 320), (35, 400), (53, 200), (29, 640),
    (79, 24), (78, 40), (71, 44), (61, 76), (75, 88), (68, 152), (31, 132),
]  # fmt: skip


def skip_without_clusters(kernel: str) -> None:
    if kernel in ("cluster", "few_rows", "ring") and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")


def arguments_of(rows: int, cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, grad_out, weight and bias."""
    return (
        random((rows, cols), dtype, "cuda", shift=0.3),
        random((rows, cols), dtype, "cuda", seed=3),
        random((cols,), dtype, "cuda", seed=1),
        random((cols,), dtype, "cuda", seed=2),
    )


def spaced(x: Tensor) -> Tensor:
    """The same values one element into rows that are three wider: nothing is aligned."""
    wide = x.new_full((x.shape[0], x.shape[1] + 3), float("nan"))
    wide[:, 1:-2] = x
    return wide[:, 1:-2]


def check_dx_wherever_rows_lie(grad_out: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Alone, and of rows not aligned with dw and db: the same bits, with any parameters."""
    cols = x.shape[1]
    for parameters in ((weight, bias), (weight.float(), bias.float()), (None, bias)):
        statistics = ops.layer_norm_forward(x, [cols], *parameters, 1e-5, None)[1:]
        dx, others = (
            ops.layer_norm_backward(
                grad_out, rows_of_x, [cols], *statistics, *parameters, 1e-5, mask
            )[0]
            for rows_of_x, mask in ((x, [True, False, False]), (spaced(x), [True] * 3))
        )
        assert dx.equal(others), x.shape


def in_memory_of_nan(x: Tensor, offset: int) -> Tensor:
    """x from so many elements behind an aligned address on, between NaNs."""
    memory = x.new_full((offset + x.numel() + 16 // x.itemsize,), float("nan"))
    return memory[offset : offset + x.numel()].view(x.shape).copy_(x)
