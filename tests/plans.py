"""What the tests of the CUDA plan share: rows, columns and GPUs, and what a plan holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from fastnorm import _C

CHUNK_BYTES = 16
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
SMALL = ["float32", "float16", "bfloat16"]
# The fields that fix the order of summation of y and dx.
SUMMATION = (
    "kernel", "chunks_per_thread", "columns_per_thread", "threads_per_row", "cluster_size",
    "segments", "run_columns",
)  # fmt: skip
# Some that end within a chunk and that the backward takes one by one in bulk where memory is fast.
WIDE = (6273, 7001, 8191, 8193, 12_289, 16_385, 24_001, 32_767, 50_257, 65_537, 84_479)
FEW = ("few_rows", "few_elements")
COLS = sorted(
    {
        width + off
        for width in (1 << power for power in range(23))
        for off in (-1, 0, 1)
        if width + off > 0
    }
    | {3, 5, 100, 760, 768, 1128, 1500, 3000, 12_288, 12_289, 13_001, 24_576, 24_577, 27_001}
    | {50_257, 300_000, 5_000_000}
    | {16, 144, 200, 264, 320, 400, 520, 640}  # short rows with other than two or four chunks
    | {24, 40, 72, 120, 152}  # that a warp writes together
    | {40, 80, 88, 96, 136, 160}  # in lanes that are no power of two
)
ROWS = (1, 2, 3, 7, 127, 128, 129, 255, 256, 257, 4096, 65_535, 65_536, 65_537, 8_388_673)
GPUS = [(132, 90), (108, 80), (40, 75), (148, 100), (188, 120), (1, 90)]
MOST_BLOCKS = 2**31 - 1
MOST_ELEMENTS = 2**38  # more than any device's memory


def chunk_columns(dtype: str) -> int:
    return CHUNK_BYTES // SIZES[dtype]


# Bytes by which a block of a whole grid tells others of the rows under way: eight, 16 bytes each.
GRID_WORDS = 8 * 16


def capacity(plan: dict[str, Any], dtype: str) -> int:
    """Columns of a row that the planned threads hold."""
    if plan["kernel"] in ("elements", "few_elements"):
        return plan["threads_per_row"] * plan["columns_per_thread"] * plan["cluster_size"]
    if plan.get("run_columns"):
        return plan["threads_per_row"] // 32 * plan["run_columns"] * plan["cluster_size"]
    held = (
        plan["threads_per_row"] * plan["chunks_per_thread"] * plan["cluster_size"]
        * plan["segments"] * chunk_columns(dtype)
    )  # fmt: skip
    # The forward's last warp also takes the columns behind a row's last whole chunk.
    behind = plan["kernel"] == "rows" and "shared_bytes" in plan and not plan["vectorized"]
    return held + (chunk_columns(dtype) - 1 if behind else 0)


def is_very_short(direction: str, cols: int, dtype: str) -> bool:
    """Whether a warp takes rows by column as they lie in memory, many at once, if it does."""
    longer = direction == "forward" and SIZES[dtype] == 2 and cols <= (127 if cols % 2 else 104)
    return cols <= 64 or (longer and cols not in (73, 85, 102, 103))


def all_plans(
    direction: str, dtype: str, gpu: tuple[int, int]
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    sm_count, capability = gpu
    for rows, cols in itertools.product(ROWS, COLS):
        if rows * cols > MOST_ELEMENTS:
            continue
        plan = _C.plan(
            direction, rows, cols, dtype, sm_count=sm_count, compute_capability=capability
        )
        yield rows, cols, plan
