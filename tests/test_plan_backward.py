"""The CUDA plan of the backward: which kernel takes which rows, in what shape, and dw and db."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from plans import (
    COLS,
    FEW,
    GPUS,
    GRID_WORDS,
    MOST_BLOCKS,
    ROWS,
    SIZES,
    SMALL,
    SUMMATION,
    WIDE,
    capacity,
    chunk_columns,
)

from fastnorm import _C

# A dtype of grad_out beside which rows do not stream through shared memory.
OTHER = {
    "float32": "bfloat16", "float16": "bfloat16", "bfloat16": "float16", "float64": "float64",
}  # fmt: skip
# 16-bit rows that end within a chunk and yet are not taken by column where memory is fast, and some
# more where it is slow.
IN_RING = (1001, 1023, 1535, 2047)
IN_SLOW_RING = (901, 1025, 1087, 1801, 2049, 2175, 2601, 3001, 4095, 4097, 5001)


@pytest.mark.parametrize("dtype", SIZES)
def test_wide_rows_of_the_backward_have_one_order(dtype: str) -> None:
    """However many there are, wherever they lie, and whatever is asked for, by up to 8 blocks."""
    shared = set()
    for cols in (*WIDE, *range(6273, 84_481, 397)):
        orders = set()
        calls = itertools.product((1, 5, 140, 200_000), (False, True), (False, True), (False, True))
        for rows, aligned, contiguous, dw_db in calls:
            call = {"aligned": aligned, "contiguous": contiguous, "dw_db": dw_db}
            plan = _C.plan("backward", rows, cols, dtype, **call)
            assert plan["is_wide"] == (SIZES[dtype] == 2 and cols % 8 != 0)
            if not plan["is_wide"]:
                continue
            orders.add(tuple(plan[field] for field in SUMMATION))
            blocks = plan["cluster_size"]
            warps = blocks * plan["threads_per_row"] // 32
            steps = -(-cols // 64)
            assert plan["columns_per_thread"] == 2 * -(-steps // warps)
            assert 8 <= plan["columns_per_thread"] // 2 <= 15
            assert (blocks == 1) == (cols <= 10_560)
            assert blocks <= 8
            assert plan["rows_per_block"] == 1
            clusters = plan["blocks"] // blocks
            assert clusters == rows or 100 // blocks <= clusters <= min(132 // blocks, rows)
            widest = -(-steps // warps) * warps // blocks * 64
            assert 3 <= plan["bulk_stages"] <= 8
            paced = blocks > 1 and rows > 8 * clusters
            assert plan["most_ahead"] == (clusters * 3 // 2 if paced else 0)
            shared.add(plan["bulk_stages"] * 2 * (2 * widest + 32))
            assert plan["weight_grads"] == ("fused" if dw_db else "none")
        assert len(orders) <= 1
        for other in ({"dy_dtype": "float32"}, {"compute_capability": 120}, {"dx": False},
                      {"memory_bandwidth": 3352}, {"kernel": "ring"}):  # fmt: skip
            if dtype != "float32":
                assert not _C.plan("backward", 5000, cols, dtype, **other)["is_wide"]
    # Beside the sums of the warps, and barriers.
    assert not shared or 90 * 1024 < min(shared) < max(shared) <= 223 * 1024


@pytest.mark.parametrize(
    ("dtype", "block"),
    [("bfloat16", 8_192), ("float16", 8_192), ("float32", 8_192), ("float64", 4_096)],
)
def test_widths_where_the_backward_changes(dtype: str, block: int) -> None:
    """A row that fits a block stays in it; up to eight times that, in a cluster; then it is cut.
    Where the ring does not run: a grad_out of another dtype.
    """

    def kernel(cols: int, capability: int) -> str:
        plan = _C.plan(
            "backward", 1000, cols, dtype, dy_dtype=OTHER[dtype], compute_capability=capability
        )
        return plan["kernel"]

    for capability in (90, 100, 120):
        assert kernel(1, capability) == kernel(block, capability) == "rows"
        assert kernel(block + 1, capability) == kernel(8 * block, capability) == "cluster"
        assert kernel(8 * block + 1, capability) == kernel(5_000_000, capability) == "split"
    for capability in (75, 80, 86, 89):
        assert kernel(block, capability) == "rows"
        assert kernel(block + 1, capability) == "split"


@pytest.mark.parametrize("dtype", SMALL)
def test_widths_of_the_ring(dtype: str) -> None:
    """The backward's kernel, from rows of five chunks (float32 eight) to those that eight blocks
    hold, or sixteen where a device has room for such clusters, or a block on every multiprocessor.
    """
    narrowest, widest = 32 if dtype == "float32" else 40, 65_536

    def plan(cols: int, capability: int = 90, **request: Any) -> dict[str, Any]:
        return _C.plan("backward", 60_000, cols, dtype, compute_capability=capability, **request)

    for cols in (narrowest, 64, 768, 1024, 5120, 8192, 16_384, 50_256, widest):
        assert plan(cols)["kernel"] == plan(cols, 100)["kernel"] == "ring"
        assert plan(cols, aligned=False)["kernel"] == "ring"
        for capability in (80, 120):  # neither has the shared memory, nor 8.0 the barriers
            assert plan(cols, capability)["kernel"] != "ring"
        assert plan(cols, dy_dtype=OTHER[dtype])["kernel"] != "ring"
        for size in (1, 2, 4, 8):
            forced = plan(cols, cluster_size=size)
            assert forced["kernel"] == "ring"
            assert forced["cluster_size"] >= size
            assert capacity(forced, dtype) >= cols
    for cols in (widest + 8, 2 * widest):
        assert (plan(cols)["kernel"], plan(cols)["cluster_size"]) == ("ring", 16)
    for cols, options in (
        *((cols, {"large_clusters": 0}) for cols in (widest + 8, 2 * widest)),
        *((cols, {}) for cols in (2 * widest + 8, 300_001, 120 * 8192 + 8, 132 * 8192)),
    ):
        in_grid = plan(cols, **options)
        assert (in_grid["kernel"], in_grid["in_grid"]) == ("ring", True)
        assert 8 < in_grid["cluster_size"] <= in_grid["blocks"] <= 132
        assert capacity(in_grid, dtype) >= cols
        assert plan(cols, whole_grids=False, **options)["kernel"] == "split"
    assert plan(132 * 8192 + 8)["kernel"] == "split"
    for size in (17, 40, 132):
        forced = plan(1000, cluster_size=size)
        assert (forced["kernel"], forced["cluster_size"] >= size) == ("ring", True)
    for cols in range(1, narrowest):
        assert plan(cols)["kernel"] == "elements"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_ring_takes_float32_gradients_of_16_bit_rows(dtype: str) -> None:
    """Of any number of rows, as far as clusters go; and where they end within a chunk."""

    def plan(rows: int, cols: int, **options: Any) -> dict[str, Any]:
        return _C.plan("backward", rows, cols, dtype, dy_dtype="float32", **options)

    for cols, rows in itertools.product((40, 768, 4096, 65_536, 131_072), (1, 700, 60_000)):
        chosen = plan(rows, cols)
        assert chosen["kernel"] == "ring"
        one_dtype = _C.plan("backward", 60_000, cols, dtype)
        assert all(chosen.get(field) == one_dtype.get(field) for field in SUMMATION)
    for cols in (41, 1023, 4095, 50_257):
        assert plan(1, cols)["kernel"] == plan(60_000, cols)["kernel"] == "ring"
    for cols in (131_080, 262_144):
        assert plan(700, cols)["kernel"] == plan(700, cols, cluster_size=17)["kernel"] == "split"
    assert plan(700, 4096, kernel="few_rows")["kernel"] == "ring"
    # Where 6144 columns stream on each, fewer multiprocessors than all.
    for cols in (1024, 1536, 2048, 3072, 6144):
        chosen = plan(60_000, cols)
        assert chosen["rows_per_block"] * cols == 6144
        assert chosen["blocks"] < 120
    for cols in (4096, 8192):
        chosen = plan(60_000, cols)
        assert chosen["rows_per_block"] * cols == 8192
        assert chosen["blocks"] > 120


@pytest.mark.parametrize("dtype", SMALL)
def test_widths_that_the_backward_takes_by_column(dtype: str) -> None:
    """Those that end within a chunk, as far as the ring goes; for any number of rows."""
    small = (33, 65, 257, 513, 850, 1201, 2177, 3073, *IN_SLOW_RING)
    in_ring = () if dtype == "float32" else IN_RING
    wide = (65_537, 122_879, *IN_RING, *WIDE) if dtype == "float32" else (6145, 6271)
    for cols in (*small, *wide):
        for rows in (1, 60_000):
            plan = _C.plan("backward", rows, cols, dtype)
            few = rows == 1 and cols > 64 and plan["cluster_size"] <= 8
            assert plan["kernel"] == ("few_elements" if few else "elements")
            assert plan["weight_grads"] == ("tiles" if few else "fused")
            assert plan["chunks_per_thread"] == (4 if dtype == "float32" else 2)
            assert _C.plan("backward", rows, cols, dtype, aligned=False) == plan
        assert _C.plan("backward", 9, cols, dtype, kernel="ring")["kernel"] == "ring"
        others = [{"dy_dtype": other} for other in SMALL if other != dtype]
        for problem in (*others, {"compute_capability": 80}, {"dx": False}):
            assert "elements" not in _C.plan("backward", 9, cols, dtype, **problem)["kernel"]
    chunk = chunk_columns(dtype)
    for chunks in range(1, 8 if dtype == "float32" else 5):
        for aligned in (False, True):
            plan = _C.plan("backward", 9, chunks * chunk, dtype, aligned=aligned)
            assert plan["kernel"] == "elements"
    for cols in (40, 64, 4096, 131_073, *in_ring):
        assert "elements" not in _C.plan("backward", 9, cols, dtype)["kernel"]
    if dtype != "float32":
        for cols in (84_481, 100_001, 131_071):
            assert _C.plan("backward", 60_000, cols, dtype)["kernel"] == "ring"
    for bandwidth, widths in ((4800, IN_RING), (3352, IN_RING + IN_SLOW_RING + WIDE)):
        for cols, rows in itertools.product(widths if dtype != "float32" else (), (1, 60_000)):
            problem = {"memory_bandwidth": bandwidth, "contiguous": True}
            plan = _C.plan("backward", rows, cols, dtype, **problem)
            few = rows == 1 and plan["cluster_size"] <= 8
            assert plan["kernel"] == ("few_rows" if few else "ring")
            forced = _C.plan("backward", rows, cols, dtype, kernel="elements", **problem)
            held = cols <= 8192  # by a block
            assert forced["kernel"] == ("elements" if held else plan["kernel"])


@pytest.mark.parametrize("bandwidth", [4800, 3352])
@pytest.mark.parametrize("dtype", SMALL)
def test_columns_behind_the_chunks_of_a_warp(dtype: str, bandwidth: int) -> None:
    """One for each lane at the most, of rows that end within a chunk and would need a warp more; as
    few as there can be if all warps have as many, but for the last ones.
    """
    widths = set()
    for cols in (*range(481, 4700, 2), *range(4701, 69_000, 331), 8193, 16_385, 32_769, 50_257,
                 69_631, 131_073, 139_263):  # fmt: skip
        for rows in (2, 100_000):
            plan = _C.plan("backward", rows, cols, dtype, memory_bandwidth=bandwidth)
            columns = plan["run_columns"]
            if columns == 0:
                continue
            widths.add(cols)
            warps = plan["threads_per_row"] // 32 * plan["cluster_size"]
            assert plan["kernel"] in ("ring", "few_rows")
            assert 512 < columns <= 544
            assert columns % 8 == 0
            assert 512 * warps < cols <= columns * warps
            assert (columns - 8) * warps < cols
    if dtype == "float32":
        assert not widths
        return
    assert 131_073 in widths
    assert ({1025, 4097, 8193, 32_769, 50_257} <= widths) == (bandwidth < 4000)
    assert min(widths) > (1024 if bandwidth < 4000 else 84_480)
    for cols in widths:
        call = {"memory_bandwidth": bandwidth}
        wide = _C.plan("backward", 9, cols, dtype, dy_dtype="float32", **call)
        assert wide["run_columns"] == 0
        assert _C.plan("backward", 9, cols + 8 - cols % 8, dtype, **call)["run_columns"] == 0


def test_slow_memory_leaves_multiprocessors_idle_but_for_rows_that_are_not_aligned() -> None:
    def clusters(cols: int, dtype: str = "bfloat16", **call: Any) -> int:
        plan = _C.plan("forward", 4096, cols, dtype, memory_bandwidth=3352, **call)
        assert plan["kernel"] == "ring"
        return int(plan["blocks"] // plan["cluster_size"])

    assert clusters(80_000) == 23
    assert clusters(80_000, aligned=False) == clusters(100_001) == 30
    assert clusters(80_001) == 39  # threes
    assert clusters(40_001, "float32") == 23
    assert clusters(160_000) == 14
    assert clusters(170_001) == 15
    assert clusters(140_001) == 21  # fives


def test_slow_memory_has_more_uneven_rows_in_the_ring() -> None:
    for cols, fast in ((1001, "ring"), (901, "elements"), (1201, "elements"), (3073, "elements")):
        for bandwidth, kernel in ((4800, fast), (3352, "ring")):
            plan = _C.plan("backward", 100_000, cols, "bfloat16", memory_bandwidth=bandwidth)
            assert plan["kernel"] == kernel


@pytest.mark.parametrize("dtype", SMALL)
def test_dx_alone_by_column(dtype: str) -> None:
    """Row by row where there are few, or where elements are as wide as a store."""

    def kernel(rows: int, cols: int) -> str:
        return _C.plan("backward", rows, cols, dtype, dw_db=False)["kernel"]

    is_16_bit = dtype != "float32"
    assert kernel(1000, 257) == "few_elements"
    assert kernel(60_000, 257) == ("elements" if is_16_bit else "few_elements")
    assert kernel(1000, 1023) == ("few_rows" if is_16_bit else "few_elements")
    assert kernel(60_000, 1023) == ("ring" if is_16_bit else "few_elements")
    assert kernel(60_000, 12_289) == "elements"
    assert kernel(60_000, 50_257) == kernel(60_000, 65_537) == "elements"
    assert kernel(60_000, 84_481) == ("ring" if is_16_bit else "elements")
    assert kernel(60_000, 6145) == "elements"


@pytest.mark.parametrize("dtype", SMALL)
def test_partial_sums_of_the_ring_need_little_memory(dtype: str) -> None:
    """Of 128 MB of x and more at most 2 percent to 8192 columns, and of rows that one block holds;
    else 8 percent.
    """
    wide = (*range(8193, 65_536, 1999), 32_768, 65_535, 65_536)
    for bandwidth, aligned, cols in itertools.product(
        (4800, 3352), (True, False), (*range(64, 8192, 17), *range(4096, 8193, 128), *wide)
    ):
        rows = 2**27 // (cols * SIZES[dtype])
        plan = _C.plan("backward", rows, cols, dtype, aligned=aligned, memory_bandwidth=bandwidth)
        assert plan["weight_grads"] == "fused"
        few = plan["cluster_size"] == 1 or cols <= 8192
        x_bytes = rows * cols * SIZES[dtype]
        assert plan["workspace_bytes"] <= (0.02 if few else 0.08) * x_bytes, f"{cols}: {plan}"
    for cols, times in itertools.product(
        (65_544, 131_080, 262_144, 300_001, 524_288, 1_000_000, 1_081_344), (1, 1.05, 1.5, 2, 5, 40)
    ):
        rows = int(2**27 * times) // (cols * SIZES[dtype])
        plan = _C.plan("backward", rows, cols, dtype)
        most = 0.08 * rows * cols * SIZES[dtype] + GRID_WORDS * plan["blocks"]
        assert plan["workspace_bytes"] <= most, f"{rows} x {cols}: {plan}"


@pytest.mark.parametrize(("kernel", "cols"), [("ring", 1000), ("ring", 4104), ("elements", 4101)])
@pytest.mark.parametrize("cluster_size", [1, 2, 4])
def test_merged_partial_sums_can_be_asked_for(kernel: str, cols: int, cluster_size: int) -> None:
    """As many as a cluster of the device has blocks, and there are; else none."""
    for rows, merged in itertools.product((1, 3, 131, 100_000), (0, 1, 2, 4, 8)):
        plan = _C.plan(
            "backward", rows, cols, "bfloat16", kernel=kernel, weight_grads="fused",
            cluster_size=cluster_size, merged=merged,
        )  # fmt: skip
        together, where = plan["merged"], f"{rows} rows, {merged}: {plan}"
        fits = merged > 0 and merged * plan["cluster_size"] <= 8
        groups = plan["blocks"] // plan["cluster_size"]
        assert groups % together == 0, where
        assert plan["partials"] == groups // together, where
        assert together == (merged if fits and groups >= merged else 1), where


@pytest.mark.parametrize("dtype", SMALL)
def test_no_more_blocks_merge_their_sums_than_memory_asks_for(dtype: str) -> None:
    """2 percent of 128 MB of x and more, 8 MB beside less."""
    seen = set()
    for cols, megabytes, aligned in itertools.product(
        (257, 1024, 3001, 4095, 4096, 5120, 6144, 6145, 7168, 8191, 8192),
        (30, 70, 120, 128.1, 134, 200, 268, 400, 1000),
        (True, False),
    ):
        rows = int(megabytes * 1e6) // (cols * SIZES[dtype]) + 1
        plan = _C.plan("backward", rows, cols, dtype, aligned=aligned)
        if plan["weight_grads"] != "fused" or plan["cluster_size"] > 1:
            continue
        x_bytes = rows * cols * SIZES[dtype]
        most = 0.02 * x_bytes if x_bytes >= 128e6 else 8e6
        partials, where = plan["partials"], f"{rows} x {cols}: {plan}"
        assert 8 * partials * cols <= most, where
        if plan["merged"] > 1:
            assert 8 * 2 * partials * cols > 0.99 * most, where
        seen.add(plan["merged"])
    assert seen == {1, 2, 4}


@pytest.mark.parametrize("dtype", SMALL)
def test_few_rows_take_one_launch(dtype: str) -> None:
    """No workspace, whatever is asked for; in the ring's widths, up to 12 MB of x."""
    most = (12 << 20) // SIZES[dtype]
    assert _C.plan("backward", most // 8192, 8192, dtype)["kernel"] == "few_rows"
    assert _C.plan("backward", most // 8192 + 1, 8192, dtype)["kernel"] == "ring"
    for rows, cols in ((1, 64), (1, 1024), (8, 4096), (128, 768), (512, 1024), (512, 4096)):
        for asked in ({}, {"dx": False}, {"dw_db": False}):
            plan = _C.plan("backward", rows, cols, dtype, **asked)
            if "dw_db" in asked and plan["cluster_size"] > 1:
                assert plan["kernel"] == "ring"
                continue
            assert plan["kernel"] == "few_rows"
            assert plan["workspace_bytes"] == 0
            source = "none" if "dw_db" in asked else "row" if rows == 1 else "tiles"
            assert plan["weight_grads"] == source
            if source != "row":
                width = plan["tile_lanes"] * chunk_columns(dtype)
                tiles = 0 if source == "none" else -(-cols // width)
                assert plan["column_blocks"] == tiles * plan["slices"]
            assert plan["blocks"] > plan["column_blocks"] or "dx" in asked
    assert _C.plan("backward", 100_000, 1024, dtype)["kernel"] == "ring"
    assert _C.plan("backward", 100_000, 1024, dtype, dw_db=False)["kernel"] == "few_rows"
    assert _C.plan("backward", 100_000, 8192, "bfloat16", dw_db=False)["kernel"] == "ring"


def test_dx_alone_goes_where_lanes_are_idle_or_not() -> None:
    """Of many 16-bit rows on an H200, one by one if their warps' lanes have enough to do."""

    def kernel(cols: int, dtype: str = "bfloat16", **device: object) -> str:
        return _C.plan("backward", 200_000, cols, dtype, dw_db=False, **device)["kernel"]

    for cols in (64, 80, 160, 192, 224, 320, 448, 640, 704, 768, 896, 1024, 1344, 1792, 3584):
        assert kernel(cols) == "few_rows", cols
    for cols in (72, 104, 152, 200, 264, 312, 576, 616, 776, 1032, 1200, 1600, 2304, 3328):
        assert kernel(cols) == "ring", cols
        assert kernel(cols, "float32") == "few_rows", cols
        assert kernel(cols, memory_bandwidth=3352) == "few_rows", cols  # an H100
        assert kernel(cols, aligned=False) == "ring", cols
    for cols in (192, 384, 768, 1024):
        assert kernel(cols, aligned=False) == "few_rows", cols
    for cols in (224, 320, 896):  # not aligned, lanes go by powers of two, and more are idle
        assert kernel(cols, aligned=False) == "ring", cols


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"{gpu[0]}SM-cc{gpu[1]}")
@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("weight_grads", [None, "fused", "columns"])
def test_sums_over_rows(dtype: str, weight_grads: str | None, gpu: tuple[int, int]) -> None:
    """Every partial sum has its place in the workspace, every column its tile."""
    item = max(4, SIZES[dtype])
    sm_count, capability = gpu
    for rows, cols in itertools.product(ROWS, COLS):
        plan = _C.plan(
            "backward", rows, cols, dtype, sm_count=sm_count, compute_capability=capability,
            weight_grads=weight_grads,
        )  # fmt: skip
        where = f"{rows} x {cols}: {plan}"
        if plan["kernel"] in FEW:
            by_row = plan["kernel"] == "few_rows" and rows == 1
            source = "row" if by_row else "tiles"
            assert (plan["weight_grads"], weight_grads) == (source, None), where
            continue
        assert plan["weight_grads"] in ("fused", "columns"), where
        assert plan["partials"] >= 1, where
        split = plan["segments"] * rows if plan["kernel"] == "split" else 0
        assert plan["workspace_bytes"] >= 2 * item * (plan["partials"] * cols + split), where
        if plan["weight_grads"] == "fused":
            assert plan["kernel"] != "split", where
            launched = plan["cluster_size"] * plan["merged"]
            assert plan["partials"] * launched == plan["blocks"] * plan["shares"], where
            assert plan["shares"] == 1 or plan["cluster_size"] > 1, where
        else:
            few_teams = plan["cluster_size"] > 1 and plan["blocks"] < 32 * plan["cluster_size"]
            assert weight_grads != "fused" or plan["kernel"] == "split" or few_teams, where
            chunk, width = chunk_columns(dtype), plan["column_width"]
            threads, tiles = plan["column_threads"], plan["column_tiles"]
            assert 1 <= threads <= 32, where
            assert threads * plan["column_rows"] <= 256, where
            assert (tiles - 1) * width < cols <= tiles * width, where
            if plan["vectorized"]:
                assert width == threads * chunk, where
            else:  # wherever in a chunk of memory the tile begins; by rows that begin alike
                assert width + chunk - 1 <= threads * chunk, where
                assert plan["column_rows"] % chunk == 0, where
            assert plan["partials"] <= rows, where
            assert plan["column_tiles"] * plan["partials"] <= MOST_BLOCKS, where
            shares = plan["partials"] * plan["column_rows"]  # each added up row by row
            assert shares >= 32 or rows <= 64 * shares**2, where


@pytest.mark.parametrize("dtype", SIZES)
def test_one_row_of_partial_sums_is_the_result_where_it_can_be(dtype: str) -> None:
    """Where dw and db have its dtype. Then it takes no workspace, and nothing else changes."""
    item = max(4, SIZES[dtype])
    seen = set()
    for rows, cols in itertools.product(ROWS, COLS):
        plan = _C.plan("backward", rows, cols, dtype)
        direct = _C.plan("backward", rows, cols, dtype, of_sums_dtype=True)
        one = plan["partials"] == 1
        assert direct["sums_are_results"] == one
        assert not plan["sums_are_results"]
        seen.add(one)
        if one:
            assert plan["workspace_bytes"] - direct["workspace_bytes"] == 2 * item * cols
            assert not direct["finish_threads"]
            changed = ("workspace_bytes", "sums_are_results", "finish_threads", "finish_vectors",
                       "finish_spreads")  # fmt: skip
            plan |= {name: direct[name] for name in changed}
        assert plan == direct, f"{rows} x {cols}"
    assert seen == {False, True}


@pytest.mark.parametrize("dtype", SIZES)
def test_the_second_kernel_has_no_more_blocks_than_it_needs(dtype: str) -> None:
    """By thread, where partial sums are few and blocks would be many; spread out, where the blocks
    are so few that two on each multiprocessor are enough.
    """
    sm_count, seen = 132, set()
    for rows, cols in itertools.product(ROWS, (*COLS, 65_537, 300_001, 1_000_000)):
        plan = _C.plan("backward", rows, cols, dtype, sm_count=sm_count)
        where = f"{rows} x {cols}: {plan}"
        if plan["weight_grads"] not in ("fused", "columns"):
            assert not plan["finish_threads"], where
            continue
        vector = 4 if dtype != "float64" and cols % 4 == 0 and cols > 512 else 1
        threads, by_thread = plan["finish_threads"], plan["finish_vectors"] > 0
        blocks = 2 * -(-cols // (vector * threads))
        assert threads in (2, 4, 8, 16, 32, 64), where
        assert threads * vector * max(4, SIZES[dtype]) >= 32, where
        assert threads == 64 or blocks <= 2 * sm_count, where
        few = plan["partials"] <= 16
        assert by_thread == (few and 2 * -(-cols // (vector * 64)) > 6 * sm_count), where
        if by_thread:
            several = 2 * -(-cols // (vector * 256)) > 6 * sm_count
            assert plan["finish_vectors"] == ((4 if vector == 1 else 2) if several else 1), where
        assert plan["finish_spreads"] == (not by_thread and blocks <= 2 * sm_count), where
        seen.add((min(plan["finish_vectors"], 2), plan["finish_spreads"]))
    assert seen == {(0, False), (0, True), (1, False), (2, False)}


@pytest.mark.parametrize("dtype", SIZES)
def test_sums_over_rows_that_nobody_asks_for_cost_nothing(dtype: str) -> None:
    for rows, cols in itertools.product(ROWS, COLS):
        without = _C.plan("backward", rows, cols, dtype, dw_db=False)
        assert (without["weight_grads"], without["partials"]) == ("none", 0)
        in_grid = without["in_grid"]
        if without["kernel"] != "split":
            assert without["workspace_bytes"] == (GRID_WORDS * without["blocks"] if in_grid else 0)
        alone = _C.plan("backward", rows, cols, dtype, dx=False)
        tiles = (False, "row" if rows == 1 else "tiles", alone["column_blocks"])
        columns = (False, "columns", 0)
        expected = tiles if alone["kernel"] == "few_rows" else columns
        assert (alone["dx"], alone["weight_grads"], alone["blocks"]) == expected


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("cols", [64, 1024, 4096])
def test_x_is_read_once_or_in_one_launch(dtype: str, cols: int) -> None:
    assert _C.plan("backward", 1_000_000, cols, dtype)["weight_grads"] == "fused"
    plan = _C.plan("backward", 8, cols, dtype)
    assert plan["weight_grads"] == ("fused" if dtype == "float64" else "tiles")
    assert plan["partials"] <= 8


def test_few_long_rows_in_registers_are_read_twice_where_they_are_not_aligned() -> None:
    def source(rows: int, cols: int, aligned: bool) -> str:
        plan = _C.plan("backward", rows, cols, "float16", dy_dtype="bfloat16", aligned=aligned)
        assert plan["kernel"] == "rows"
        return plan["weight_grads"]

    assert source(244, 4095, False) == "columns"
    assert source(244, 4096, True) == source(10_000, 4095, False) == "fused"
    assert source(244, 1023, False) == "fused"


def test_the_partial_sums_of_many_rows_stay_few() -> None:
    """Bounded by the device, not by the number of rows."""
    for dtype, cols in itertools.product(SIZES, COLS):
        few = _C.plan("backward", 1_000_000, cols, dtype)["partials"]
        assert _C.plan("backward", 100_000_000, cols, dtype)["partials"] <= max(few, 132 * 64)


@pytest.mark.parametrize("dtype", SMALL)
def test_no_share_of_rows_is_so_long_that_its_sums_are_off(dtype: str) -> None:
    """Where fewer than 32 teams would add up dw and db: at most 64 rows times the square of their
    number, even if asked for; or of that of their shares, while those take little memory.
    """

    def is_long(rows: int, teams: int) -> bool:
        return teams < 32 and rows > 64 * teams**2

    seen = set()
    for cols, asked in itertools.product((*COLS, 57_001, 1_000_000), (None, "fused")):
        for rows in (70, 110, 192, 1000, 1024, 1025, 3136, 3137, 12_544, 12_545, 1_000_000):
            plan = _C.plan("backward", rows, cols, dtype, weight_grads=asked)
            if plan["kernel"] not in ("ring", "elements") or plan["cluster_size"] == 1:
                continue
            resident = _C.plan("backward", 10**6, cols, dtype)["blocks"] // plan["cluster_size"]
            resident = min(resident, rows)
            fused, where = plan["weight_grads"] == "fused", f"{rows} x {cols}: {plan}"
            needed = resident
            while is_long(rows, needed):
                needed += resident
            little = needed == resident or 8 * needed <= 0.08 * rows * SIZES[dtype]
            assert fused == little, where
            assert not fused or plan["partials"] == needed, where
            seen.add((min(plan["cluster_size"], 17), fused, plan["shares"] > 1))
    assert {(8, True, False), (8, True, True)} <= seen
    assert {(16, True, False), (16, True, True)} <= seen
    assert {(17, True, False), (17, True, True)} <= seen
    assert (17, False, False) in seen or dtype == "float32", "70 rows by one group of blocks"


# Slower memory wants less asked for at once: three quarters, in GB/s of an H200 and of an H100.
@pytest.mark.parametrize(("bandwidth", "part"), [(4800, 1), (0, 1), (3352, 0.75)])
@pytest.mark.parametrize("dtype", SMALL)
def test_columns_that_stream_on_a_multiprocessor(dtype: str, bandwidth: int, part: float) -> None:
    """Of aligned rows in the ring, near to the 8192 (float32: 4096) that memory asks for: for no
    width fewer than half of them, for few fewer than 0.6, and no more than one and a half times,
    but for rows of which a block has no fewer: the largest of a block or a cluster.
    """
    enough = (4096 if dtype == "float32" else 8192) * part
    shares = {}
    least = set()
    for cols in range(544, 49_152, 8):
        plan = _C.plan(
            "backward", 10_000_000 // cols * 100, cols, dtype, memory_bandwidth=bandwidth
        )
        assert plan["kernel"] == "ring"
        rows_at_once = plan["blocks"] // plan["cluster_size"] * plan["rows_per_block"]
        shares[cols] = rows_at_once * cols / (132 * enough)
        if plan["rows_per_block"] == 1:
            least.add(cols)
    assert min(shares.values()) >= 0.5, min(shares, key=shares.__getitem__)
    most = {cols: share for cols, share in shares.items() if part == 1 or cols not in least}
    assert max(most.values()) <= 1.5, max(most, key=most.__getitem__)
    assert max(shares.values()) <= 1.5 / part, max(shares, key=shares.__getitem__)
    assert sum(share < 0.6 for share in shares.values()) < 0.02 * len(shares)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rows_brake_where_slow_memory_is_asked_for_too_much(dtype: str) -> None:
    def plan_ring(cols: int, bandwidth: int = 3352, **call: Any) -> dict[str, Any]:
        plan = _C.plan("backward", 65_536, cols, dtype, memory_bandwidth=bandwidth, **call)
        assert plan["kernel"] == "ring"
        return plan

    def brakes(cols: int, **call: Any) -> bool:
        return bool(plan_ring(cols, **call)["brakes"])

    is_16_bit = dtype != "float32"
    for cols in (4096, 8192) if is_16_bit else (2048, 4096):
        assert brakes(cols)
        assert plan_ring(cols)["blocks"] == 115
        assert brakes(cols, aligned=False)
        assert not brakes(cols, bandwidth=4800)
        assert not brakes(cols, bandwidth=0)
    for cols in (64, 1024, 3072):  # as many columns stream as is best
        assert not brakes(cols)
    for cols in (57_344, 65_536):  # in clusters
        assert brakes(cols) == is_16_bit
        assert not brakes(cols, aligned=False)
    if is_16_bit:
        assert not brakes(4096, dy_dtype="float32")
        assert brakes(4095, kernel="ring")
        for cols in (5120, 12_288, 16_385):
            assert not brakes(cols)


@pytest.mark.parametrize("dtype", SMALL)
def test_rows_brake_where_fast_memory_is_asked_for_too_much(dtype: str) -> None:
    """Of a block; with a few more under way on all multiprocessors, with more on fewer."""
    is_16_bit = dtype != "float32"
    if is_16_bit:
        cases = {
            (4608, True): (2, True, 131),
            (5120, True): (2, True, 115),
            (4096, True): (2, False, 115),
            (2047, False): (4, False, 132),
            (20_480, True): (1, False, None),  # in clusters
        }
    else:
        cases = {
            (768, True): (6, True, 131),
            (1024, True): (4, False, 115),
            (1280, True): (4, True, 115),
            (3072, True): (2, True, 131),
            (4096, True): (1, False, 115),
            (5120, True): (1, True, 115),
            (4096, False): (1, False, 132),
            (24_576, True): (1, False, None),
        }
    for (cols, aligned), (rows, brakes, blocks) in cases.items():
        plan = _C.plan("backward", 400_000, cols, dtype, aligned=aligned)
        assert plan["kernel"] == "ring"
        assert (plan["rows_per_block"], plan["brakes"]) == (rows, brakes), cols
        assert blocks is None or plan["blocks"] == blocks, cols


@pytest.mark.parametrize("bandwidth", [4800, 3352])
@pytest.mark.parametrize("dtype", SMALL)
def test_rows_of_a_warp_are_in_an_odd_number_of_warps(dtype: str, bandwidth: int) -> None:
    """But for odd numbers of chunks, three in a lane, on fast memory; on all multiprocessors but
    one."""
    fast, slow = (3500, 2560) if dtype == "float32" else (6600, 5200)
    best = slow if bandwidth == 3352 else fast
    for cols in (64, 128, 192, 200, 264, 320, 384, 512):
        plan = _C.plan("backward", 10**6, cols, dtype, memory_bandwidth=bandwidth)
        assert plan["threads_per_row"] <= 32
        assert plan["blocks"] == 131
        warps = plan["rows_per_block"] // plan["rows_per_warp"]
        even = plan["chunks_per_thread"] == 3 and cols % 16 == 8 and bandwidth == 4800
        assert warps % 2 == (0 if even else 1), cols
        assert abs(warps * plan["rows_per_warp"] * cols - best) < 0.2 * best, cols


@pytest.mark.parametrize("dtype", SMALL)
def test_clusters_ask_slow_memory_for_less(dtype: str) -> None:
    """Nearly always there is one of which 0.6 to 0.81 of the columns stream on a multiprocessor."""
    most = 4096 if dtype == "float32" else 8192
    widths = range(most * 3 // 2 + 8, 6 * most, 8)
    within = 0
    for cols in widths:
        slow, fast = (
            _C.plan("backward", 20_000, cols, dtype, memory_bandwidth=bandwidth)
            for bandwidth in (3352, 4800)
        )
        assert slow["kernel"] == fast["kernel"] == "ring"
        together = max(1, most // 16 // slow["threads_per_row"])
        within += 0.6 <= cols * together / (slow["cluster_size"] * most) <= 0.81
        assert slow["cluster_size"] > 1
    assert within > 0.95 * len(widths)


def test_clusters_of_the_backward_that_keep_together() -> None:
    """Aligned rows of float32 in clusters whose copies pass the L1 cache, if there are many: four
    rows ahead of the average.
    """
    for cols in (8_192, 12_288, 32_768, 49_152):
        plan = _C.plan("backward", 4096, cols, "float32")
        assert (plan["kernel"], plan["in_grid"]) == ("ring", False)
        clusters = plan["blocks"] // plan["cluster_size"]
        assert plan["most_ahead"] == 4 * clusters > 0, cols
        for few in (
            _C.plan("backward", 8 * clusters, cols, "float32"),
            _C.plan("backward", 4096, cols, "float32", memory_bandwidth=3352),
            _C.plan("backward", 4096, cols, "float32", aligned=False),
            _C.plan("backward", 4096, cols, "bfloat16"),
        ):
            assert few["most_ahead"] == 0, cols
    assert _C.plan("backward", 40_960, 4096, "float32")["most_ahead"] == 0, "in a block"
    assert _C.plan("backward", 4096, 65_536, "float32")["most_ahead"] == 0, "past the L1 cache"
