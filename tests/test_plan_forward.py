"""The CUDA plan of the forward: which kernel takes which rows, and in what shape."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from plans import (
    GRID_WORDS,
    SIZES,
    SMALL,
    SUMMATION,
    WIDE,
    all_plans,
    chunk_columns,
    is_very_short,
)

from fastnorm import _C


@pytest.mark.parametrize("one_dtype", [True, False])
def test_wide_rows_leave_the_cache_room_for_weight_and_bias(one_dtype: bool) -> None:
    """Uneven 16-bit ones on an H200, wherever they begin, however many there are."""
    taken = 0
    for cols in range(5633, 24_000, 7):
        plans = [
            _C.plan(
                "forward", rows, cols, "bfloat16", aligned=aligned, contiguous=aligned,
                one_dtype=one_dtype,
            )
            for rows in (1, 100_000)
            for aligned in (False, True)
        ]  # fmt: skip
        plan = plans[0]
        wide = plan["kernel"] == "elements" and plan["rows_per_block"] == 1
        wide = wide and plan["bulk_stages"] == 0
        if cols % 8 == 0:
            assert not wide
        if not wide:
            continue
        taken += 1
        for other in plans[1:]:
            assert {**other, "blocks": 1, "vectorized": False} == plan
        warps, columns = plan["threads_per_row"] // 32, plan["columns_per_thread"]
        assert 4 <= warps <= 13
        assert columns == 2 * -(-cols // (64 * warps))
        assert columns <= 64
        assert plan["blocks"] == 1
        assert plan["shared_bytes"] >= 2 * cols + 30
        blocks = 51 // warps
        shared = next(
            kilobytes
            for kilobytes in (100, 132, 164, 196)
            if blocks * -(-(plan["shared_bytes"] + 1312) // 128 * 128) <= kilobytes * 1024
        )
        assert (256 - shared) * 1024 > cols * (4 if one_dtype else 8)
        elsewhere = _C.plan("forward", 1, cols, "bfloat16", aligned=False, memory_bandwidth=3352)
        assert elsewhere["threads_per_row"] != plan["threads_per_row"]
    assert taken > (1800 if one_dtype else 1000)


def test_a_warp_has_ten_steps_of_wide_float32_rows() -> None:
    """Of 64 columns, or fewer; uneven ones, wherever they begin, however many there are."""
    for cols in range(1000, 10_700):
        plans = [
            _C.plan("forward", rows, cols, "float32", aligned=aligned, contiguous=aligned)
            for rows, aligned in ((1, False), (100_000, True))
        ]
        plan = plans[0]
        wide = plan["in_bulk"] and plan["rows_per_block"] == 1 and not plan["bulk_stages"]
        assert wide == (cols % 4 != 0 and 1025 <= cols <= 10_624)
        if not wide:
            continue
        assert {**plans[1], "blocks": 1, "vectorized": False} == plan
        steps = -(-cols // 64)
        warps = plan["threads_per_row"] // 32
        assert warps == min(16, -(-steps // 10))
        assert steps // warps >= 2  # the first four columns of each lane exist
        assert plan["columns_per_thread"] == 2 * -(-steps // warps)
        assert plan["shared_bytes"] >= 4 * cols + 28 + 32
        for other in ({"y_as_x": False}, {"compute_capability": 120}, {"memory_bandwidth": 3352}):
            assert not _C.plan("forward", 5000, cols, "float32", **other)["in_bulk"]


@pytest.mark.parametrize("one_dtype", [True, False])
@pytest.mark.parametrize("dtype", SIZES)
def test_blocks_that_stay_have_rows_wider_than_those(dtype: str, one_dtype: bool) -> None:
    """Uneven ones, in one order, by the fewest of one, two, four and eight that can; but four have
    fewer columns of float32 than they could.
    """
    if dtype == "float32" and not one_dtype:
        pytest.skip("parameters of float32 rows are float32")
    size = SIZES[dtype]
    taken: dict[int, set[int]] = {}
    widths = (16_384, 16_385, 21_856, 21_857, *WIDE, *range(16_386, 168_961, 397), 168_959, 168_961)
    if size == 4:
        widths = (10_624, 10_625, 12_671, 12_673, *WIDE, *range(10_626, 101_376, 397), 101_375)
        widths += (42_239, 42_241, 101_377)
    for cols in widths:
        orders = set()
        for rows, aligned in itertools.product((1, 5, 140, 200_000), (False, True)):
            call = {"aligned": aligned, "contiguous": aligned, "one_dtype": one_dtype}
            plan = _C.plan("forward", rows, cols, dtype, **call)
            least, most = (21_856 if one_dtype else 16_384), 168_960
            if size == 4:
                least, most = 10_624, 101_376
            streams = size < 8 and cols * size % 16 != 0 and least < cols <= most
            assert (plan["bulk_stages"] > 0) == streams, cols
            if not streams:
                continue
            orders.add(tuple(plan.get(field) for field in SUMMATION))
            blocks = plan["cluster_size"]
            pairs = math.ceil(math.ceil(cols / 64) / (11 * blocks))
            assert plan["columns_per_thread"] == 2 * pairs
            taken.setdefault(blocks, set()).add(pairs)
            assert plan["threads_per_row"] == 11 * 32
            clusters = plan["blocks"] // blocks
            assert 100 // blocks <= clusters <= 132 // blocks or clusters == rows
            assert plan["most_ahead"] == (clusters * 5 // 4 if rows > 8 * clusters else 0)
            assert 4 <= plan["bulk_stages"] <= 8
            assert plan["shared_bytes"] == plan["bulk_stages"] * (11 * 64 * size * pairs + 32)
            assert plan["shared_bytes"] <= 222 * 1024
        assert len(orders) <= 1
        for other in ({"y_as_x": False}, {"compute_capability": 120}, {"kernel": "ring"},
                      {"memory_bandwidth": 3352}):  # fmt: skip
            assert not _C.plan("forward", 5000, cols, dtype, **other)["bulk_stages"]
    if SIZES[dtype] == 2:
        kernels = set(range(16, 31))
        expected = {2: kernels, 4: kernels, 8: kernels}
        assert taken == (expected if one_dtype else {1: set(range(24, 31)), **expected})
    if size == 4:
        assert set(taken) == {1, 2, 4, 8}
        assert set().union(*taken.values()) == set(range(8, 19))
        assert max(taken[4]) == 15


@pytest.mark.parametrize("one_dtype", [True, False])
@pytest.mark.parametrize("dtype", SIZES)
def test_whole_chunks_that_leave_lanes_idle_are_copied_in_bulk(dtype: str, one_dtype: bool) -> None:
    """Of an odd number, where many rows lie one behind the other; in the order of other rows."""
    size = SIZES[dtype]
    for chunks, megabytes in itertools.product(range(1, 130), (1, 16, 134)):
        cols, rows = chunks * 16 // size, megabytes * 1_000_000 // (16 * chunks)
        arguments = {"one_dtype": one_dtype, "contiguous": True}
        plan = _C.plan("forward", rows, cols, dtype, **arguments)
        for others in ({"contiguous": False}, {"memory_bandwidth": 3352}, {"y_as_x": False}):
            other = _C.plan("forward", rows, cols, dtype, **{**arguments, **others})
            assert not other["in_bulk"]
            if "y_as_x" not in others:
                assert all(plan.get(field) == other.get(field) for field in SUMMATION), cols
        lanes, in_lane = plan["threads_per_row"], plan["chunks_per_thread"]
        in_bulk = plan["in_bulk"]
        if in_bulk:
            assert size < 8
            assert megabytes > 1
            assert chunks < lanes * in_lane
            assert chunks % 2 == 1 or chunks == 10
            assert in_lane == 5 or megabytes > 16
            assert plan["kernel"] == "short_rows"
            assert plan["rows_per_block"] == 4 * (32 // lanes) * plan["rows_per_thread"]
            assert plan["shared_bytes"] == plan["rows_per_block"] * cols * size <= 16 * 1024
        elif size < 8 and megabytes > 16 and chunks in (11, 21, 25, 33, 39, 41, 47, 51, 65, 79, 95):
            raise AssertionError(chunks)
    assert one_dtype or size != 2 or _C.plan("forward", 10**6, 104, dtype, **arguments)["in_bulk"]


def test_many_rows_that_leave_lanes_idle_want_more_warps() -> None:
    for rows, cols, wanted in (
        (100_000, 2600, True), (2112, 2600, True), (2111, 2600, False), (1, 2600, False),
        (100_000, 2688, True), (100_000, 2696, False), (100_000, 3072, False),
        (100_000, 4200, True), (100_000, 4096, False), (100_000, 5200, True),
    ):  # fmt: skip
        plan = _C.plan("forward", rows, cols, "bfloat16")
        assert (plan["kernel"], plan["more_warps"]) == ("rows", wanted), (rows, cols)


@pytest.mark.parametrize("dtype", SIZES)
def test_what_a_warp_writes_together(dtype: str) -> None:
    """Aligned rows, of x and y of one dtype, that begin in the middle of a sector every other time;
    the same lanes hold others of that width.
    """
    gathered = []
    for chunks in range(1, 200):
        cols = chunks * chunk_columns(dtype)
        plan = _C.plan("forward", 1000, cols, dtype)
        if not plan["gathers"]:
            continue
        gathered.append(chunks)
        assert (plan["kernel"], plan["vectorized"]) == ("short_rows", True)
        assert plan["threads_per_row"] * (plan["chunks_per_thread"] - 1) < chunks
        unaligned = _C.plan("forward", 1000, cols, dtype, aligned=False)
        assert not unaligned["gathers"]
        for field in ("kernel", "threads_per_row", "chunks_per_thread", "rows_per_block"):
            assert unaligned[field] == plan[field]
        assert _C.plan("forward", 1000, cols, dtype, one_dtype=False) == plan
        assert not _C.plan("forward", 1000, cols, dtype, y_as_x=False)["gathers"]
    wide = [13, 15, 17, 19]
    expected = {"float32": wide, "float64": []}
    assert gathered == expected.get(dtype, [3, 5, 7, 9, *wide])


@pytest.mark.parametrize("dtype", SMALL)
def test_rows_that_find_a_place_in_a_warp(dtype: str) -> None:
    """In the backward's ring of a 16-bit type as many as there are lanes for, though these are no
    power of two then; of float32, or in other kernels, as many as of the next one.
    """
    for cols in range(40, 513 if dtype == "float32" else 769, 8):
        many = _C.plan("backward", 2_000_000, cols, dtype)
        assert many["kernel"] == "ring"
        lanes, rows = many["threads_per_row"], many["rows_per_warp"]
        chunks = cols // chunk_columns(dtype)
        needed = -(-chunks // many["chunks_per_thread"])
        if lanes > 32:
            assert (many["chunks_per_thread"], lanes) == (2, 64)
            continue
        assert needed <= lanes <= 32 // rows
        assert rows == 32 // (1 << (needed - 1).bit_length() if dtype == "float32" else needed)
        padded = 1 << (lanes - 1).bit_length()
        others = [
            _C.plan("backward", 2_000_000, cols, dtype, aligned=False),
            _C.plan("backward", 300, cols, dtype),
        ]
        if dtype != "float32":
            others.append(_C.plan("backward", 2_000_000, cols, dtype, dy_dtype="float32"))
        for other in others:
            assert (other["threads_per_row"], other["rows_per_warp"]) == (lanes, 32 // padded)
            assert other["chunks_per_thread"] == many["chunks_per_thread"]


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("bandwidth", [4800, 3352])
def test_uneven_rows_of_the_forward_by_three_and_five_blocks(dtype: str, bandwidth: int) -> None:
    """Where those are not too large; for any number of rows. (Where memory is fast they have a
    kernel of their own.)
    """

    def sizes(cols: int, **call: Any) -> set[int]:
        call = {"memory_bandwidth": bandwidth, **({"kernel": "ring"} if is_fast else {}), **call}
        plans = [_C.plan("forward", rows, cols, dtype, **call) for rows in (1, 100_000)]
        assert {plan["kernel"] for plan in plans} == {"ring"}
        return {plan["cluster_size"] for plan in plans}

    block = 4096 * chunk_columns(dtype)  # columns
    is_16_bit = dtype != "float32"
    is_fast = bandwidth > 4000
    threes = 2.8 if is_16_bit else 2.4  # blocks that are full, of three
    assert sizes(2 * block - 1) == {2}
    assert sizes(2 * block + 1) == sizes(round(threes * block) + 1) == {3}
    assert sizes(3 * block - 1) == sizes(4 * block - 1) == {4}
    assert sizes(4 * block + 1) == sizes(round(4.6 * block) + 1) == {5 if is_16_bit else 8}
    assert sizes(5 * block - 1) == sizes(6 * block + 1) == {8}
    for cols in (2 * block + 64, round(threes * block) // 64 * 64):
        assert sizes(cols) == sizes(cols, aligned=False) == {4}
    assert sizes(2 * block + 1, cluster_size=8) == {8}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_large_blocks_of_uneven_rows_in_the_forward_ring(dtype: str) -> None:
    """Where memory is slow. (Else they have a kernel of their own.)"""

    def kernel(rows: int, cols: int) -> str:
        assert _C.plan("forward", rows, cols, dtype)["kernel"] == "elements"
        return str(_C.plan("forward", rows, cols, dtype, memory_bandwidth=3352)["kernel"])

    for cols, many in ((22_401, "rows"), (24_583, "rows"), (24_585, "ring"), (32_767, "ring")):
        assert kernel(4000, cols) == many
        assert kernel(400, cols) == "rows"
    # Full but for what lies behind the last chunk, which the ring would add up in another order.
    assert kernel(4000, 26_625) == "rows"


@pytest.mark.parametrize("dtype", SMALL)
def test_wide_blocks_hold_rows_in_registers(dtype: str) -> None:
    """Of up to 24 warps, however many and wherever they start, if all tensors are of one dtype."""
    columns = chunk_columns(dtype)
    widest = 768 * 4 * columns
    for cols in (512 * 4 * columns + columns, widest - 5 * columns, widest, widest + columns - 1):
        for rows, aligned in itertools.product((1, 700, 100_000), (False, True)):
            slow = {} if cols % columns == 0 else {"memory_bandwidth": 3352}
            plan = _C.plan("forward", rows, cols, dtype, aligned=aligned, **slow)
            held = (plan["kernel"], plan["chunks_per_thread"], plan["shared_bytes"])
            assert held == ("rows", 4, 0)
            assert plan["threads_per_row"] == -(-(cols // columns) // 128) * 32
            mixed = _C.plan("forward", rows, cols, dtype, aligned=aligned, one_dtype=False)
            assert mixed["threads_per_row"] <= 512
    assert _C.plan("forward", 700, widest + columns, dtype)["threads_per_row"] <= 512


# Columns, by the columns of a chunk, as measured on an H200 (docs/kernels_notebook.md).
FASTER_BY_COLUMN = {
    2: (),
    4: (33, 257, 385, 777, 865, 1101, 1301, 1601, 1701, 2101, 2301),
    8: (33, 257, 511, 513, 769, 901),
}
FASTER_IN_CHUNKS = {
    2: (257, 1023, 2049, 3001),
    4: (449, 511, 513, 517, 529, 643, 769, 897, 1023, 1025, 1501, 1801, 2047, 2049, 3001),
    8: (937, 1023, 1025, 1033, 2047, 4095),
}
FASTER_IN_BULK = {
    2: (),
    4: (1025, 1501, 1801, 2047, 2049, 3001, 4095, 8191),
    8: (1033, 1101, 1501, 1751, 2049, 2101, 2401, 2901, 3001, 3601, 5001, 6001, 8191),
}


@pytest.mark.parametrize("dtype", SIZES)
def test_widths_where_the_forward_changes(dtype: str) -> None:
    """A row that fits a warp or a block stays in it; how much a block holds is a matter of shared
    memory. Up to eight blocks of 512 threads make a cluster, or sixteen where a device has room for
    such clusters; then all blocks that run at the same time share a few rows, and what those do not
    hold is cut. A row that ends within a chunk is held by column, in a block, where chunks would
    leave many lanes of its warps idle.
    """
    chunk = chunk_columns(dtype)
    small = dtype in SMALL
    warp, cluster = 128 * chunk, 8 * 4096 * chunk
    widest = 132 * 480 * 8 * chunk  # each block of a grid has a warp more that has no columns

    def kernel(cols: int, capability: int, **problem: Any) -> str:
        plan = _C.plan("forward", 1000, cols, dtype, compute_capability=capability, **problem)
        return plan["kernel"]

    for capability, threads in ((75, 256), (80, 512), (86, 512), (90, 512), (100, 512)):
        block = threads * 8 * chunk
        assert kernel(chunk, capability) == kernel(warp, capability) == "short_rows"
        for cols in (1, 3, 7, 13, 31):
            by_column = small and cols % chunk != 0 and (chunk == 8 or cols != 7)
            assert kernel(cols, capability) == ("elements" if by_column else "short_rows"), cols
            assert kernel(cols, capability, y_as_x=False) == "short_rows"
        for cols in (*FASTER_BY_COLUMN[chunk], *FASTER_IN_CHUNKS[chunk]):
            in_chunks = "short_rows" if cols < warp // 2 else "rows"
            if cols in FASTER_BY_COLUMN[chunk]:
                assert kernel(cols, capability) == "elements", cols
            else:
                assert kernel(cols, capability, memory_bandwidth=3352) == "rows", cols
            assert kernel(cols, capability, y_as_x=False) == in_chunks, cols
        in_bulk = FASTER_IN_BULK[chunk]
        for cols in in_bulk:
            expected = "elements" if capability >= 90 else "rows"
            assert kernel(cols, capability) == expected, cols
            assert kernel(cols, capability, memory_bandwidth=3352) == "rows", cols
            assert kernel(cols, capability, y_as_x=False) == "rows", cols
        if chunk != 4:
            assert kernel(4095, capability) == kernel(4095, capability, y_as_x=False) == "rows"
        if dtype in ("bfloat16", "float16") and capability >= 90:
            for cols, expected in ((1801, "elements"), (2049, "elements"), (12_289, "elements")):
                assert kernel(cols, capability, one_dtype=False) == expected, cols
            assert kernel(14_001, capability, one_dtype=False) == "elements"
        clusters = capability >= 90
        assert kernel(warp + chunk, capability) == kernel(block // 2, capability) == "rows"
        by_ring = clusters and small
        assert kernel(block, capability) == ("ring" if by_ring else "rows")
        # With float32 parameters half as many columns find a place in a block's registers.
        wide = clusters and chunk == 8
        for cols in (block // 2, block // 2 + chunk, block):
            by_blocks = wide and cols > block // 2
            assert kernel(cols, capability, one_dtype=False) == ("ring" if by_blocks else "rows")
        # Of rows that are not aligned float32 alone, where the order of summation is the same.
        shifted = "ring" if by_ring and chunk == 4 else "rows"
        assert kernel(block, capability, aligned=False) == shifted
        # Wide ones that end within a chunk have blocks that stay.
        by_column = "elements" if by_ring else "rows"
        assert kernel(block - 1, capability) == ("elements" if by_ring else shifted)
        assert kernel(3 * block // 4 + 1, capability) == by_column
        for problem in ({"memory_bandwidth": 3352}, {"y_as_x": False}):
            assert kernel(3 * block // 4 + 1, capability, **problem) == "rows"
        in_grid = "ring" if clusters and small else "split"
        if wide:
            assert kernel(block + 1, capability, one_dtype=False) == "elements"
        if by_ring:
            assert kernel(block + 1, capability) == "elements"
            assert kernel(block + 1, capability, memory_bandwidth=3352) == "ring"
        for cols in (*(() if by_ring else (block + 1,)), block + chunk, cluster):
            assert kernel(cols, capability, one_dtype=False) == (
                "ring" if wide else "cluster" if clusters else "split"
            )
            assert kernel(cols, capability) == (
                "split" if not clusters else "ring" if small else "cluster"
            )
        for cols in (cluster + 1, 2 * cluster):
            assert kernel(cols, capability) == in_grid
            without = {"large_clusters": 0}
            assert kernel(cols, capability, **without) == in_grid
            assert kernel(cols, capability, whole_grids=False, **without) == "split"
            assert kernel(cols, capability, one_dtype=False) == ("ring" if wide else "split")
        for cols in (2 * cluster + 1, widest):
            assert kernel(cols, capability) == in_grid
            assert kernel(cols, capability, whole_grids=False) == "split"
        assert kernel(widest + 1, capability) == "split"
        assert kernel(20_000_000, capability) == "split"


@pytest.mark.parametrize("dtype", SMALL)
def test_the_forward_ring_shares_rows_evenly(dtype: str) -> None:
    """Where each cluster has few: none has two more than another, and there is none too many."""
    for rows, blocks in itertools.product(
        (1, 2, 64, 65, 66, 131, 256, 395, 396, 400, 1100, 4096), (1, 2, 4, 8, 16)
    ):
        plan = _C.plan("forward", rows, blocks * 4096 * chunk_columns(dtype), dtype)
        if blocks == 1 and rows < 3 * 132:  # nothing to stream yet
            assert plan["kernel"] == "rows"
            continue
        assert (plan["kernel"], plan["cluster_size"]) == ("ring", blocks)
        clusters = plan["blocks"] // blocks
        turns = -(-rows // clusters)
        assert turns > 8 or clusters == -(-rows // turns)
        assert clusters <= rows
        assert plan["blocks"] <= (131 if blocks == 1 else 130)


@pytest.mark.parametrize("kernel", [None, "elements", "short_rows"])
@pytest.mark.parametrize("one_dtype", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_forward_asks_for_no_kernel_that_is_not_compiled(
    dtype: str, one_dtype: bool, kernel: str | None
) -> None:
    """Those by column, and rows of two chunks: a launcher that lacks one returns an error."""
    if dtype == "float32" and not one_dtype:
        pytest.skip("parameters of float32 rows are float32")
    shapes, tiny = set(), set()
    memories: list[dict[str, int]] = [{}, {"memory_bandwidth": 3352}]
    for cols, aligned, memory in itertools.product(range(1, 3200), (True, False), memories):
        plan = _C.plan(
            "forward", 100_000, cols, dtype, aligned=aligned, one_dtype=one_dtype, kernel=kernel,
            **memory,
        )  # fmt: skip
        lanes = plan["threads_per_row"]
        if plan["kernel"] == "elements" and plan["rows_per_block"] > 1:  # one: for any width
            short = is_very_short("forward", cols, dtype)
            (tiny if short else shapes).add((min(lanes, 64), plan["columns_per_thread"]))
        if plan["kernel"] == "short_rows" and plan["vectorized"]:
            assert (lanes, plan["chunks_per_thread"]) != (1, 2)
    compiled = {(8, columns) for columns in range(12, 29 if dtype == "float32" else 33, 4)}
    compiled |= {(64, columns) for columns in range(20, 33, 4)}
    if dtype == "float32":
        assert (1, 8) not in tiny
        compiled |= {(16, columns) for columns in (16, 20, 24, 28)} | {(32, 28)}
    else:
        compiled |= {(lanes, columns) for lanes in (16, 32) for columns in range(20, 33, 4)}
    assert shapes <= compiled
    if kernel != "short_rows":
        wide_lanes = {(8, columns) for columns in range(8, 17, 2)}
        widest = {(lanes, columns) for lanes, columns in tiny if lanes >= 8}
        assert widest == ({(8, 6), (8, 8)} if dtype == "float32" else wide_lanes)


@pytest.mark.parametrize("dtype", SMALL)
def test_warps_have_several_tiles_of_many_very_short_rows(dtype: str) -> None:
    """16-bit ones: at most four, and only where all multiprocessors have blocks enough."""
    for cols in range(1, 128):
        if cols * SIZES[dtype] % 16 == 0 or not is_very_short("forward", cols, dtype):
            continue
        few, many = (
            _C.plan("forward", rows, cols, dtype) for rows in (10_000, 500_000_000 // cols)
        )
        if few["kernel"] != "elements":
            continue
        lanes, columns = few["threads_per_row"], few["columns_per_thread"]
        assert few["rows_per_block"] == few["rows_per_thread"] * 128 // lanes
        most = 1 if SIZES[dtype] == 4 else 4 if lanes > 1 else 2 if columns >= 12 else 1
        assert many["rows_per_block"] == most * few["rows_per_block"]
        assert all(few.get(field) == many.get(field) for field in SUMMATION)


@pytest.mark.parametrize("dtype", SIZES)
def test_forward_workspace(dtype: str) -> None:
    """Mean and squares of each segment, or of what each block of a whole grid has of the eight
    rows under way, with a tag; nothing where a row is held by a block or a cluster.
    """
    item = max(4, SIZES[dtype])
    for rows, cols, plan in all_plans("forward", dtype, (132, 90)):
        expected = 0
        if plan["kernel"] == "split":
            expected = 2 * item * rows * plan["segments"]
        elif plan["in_grid"]:
            expected = GRID_WORDS * plan["blocks"]
        assert plan["workspace_bytes"] == expected, f"{rows} x {cols}"


@pytest.mark.parametrize(
    ("bandwidth", "teams"), [(4800, (131, 65, 29, 15)), (3352, (132, 66, 23, 14))]
)
def test_multiprocessors_that_the_forward_ring_uses(bandwidth: int, teams: tuple[int, ...]) -> None:
    for cols, size, blocks in zip(
        (32_768, 65_536, 131_072, 262_144), (1, 2, 4, 8), teams, strict=True
    ):
        plan = _C.plan("forward", 100_000, cols, "bfloat16", memory_bandwidth=bandwidth)
        assert (plan["kernel"], plan["cluster_size"]) == ("ring", size)
        assert plan["blocks"] == blocks * size


@pytest.mark.parametrize(
    ("bandwidth", "teams"),
    [(4800, (131, 65, 39, 30, 21, 16, 15, 15)), (3352, (132, 66, 38, 23, 22, 15, 13, 14))],
)
def test_float32_parameters_take_as_few_blocks_as_hold_a_row(
    bandwidth: int, teams: tuple[int, ...]
) -> None:
    """Of any number to eight, as many clusters as measured to be best, and then a grid."""
    block = 384 * 7 * 8
    properties = {"memory_bandwidth": bandwidth, "one_dtype": False}
    for blocks, clusters in enumerate(teams, 1):
        for cols in ((blocks - 1) * block + 8, blocks * block):
            if cols <= 512 * 4 * 8:
                continue
            plan = _C.plan("forward", 100_000, cols, "bfloat16", **properties)
            assert (plan["kernel"], plan["cluster_size"]) == ("ring", blocks)
            assert (plan["blocks"], plan["in_grid"]) == (clusters * blocks, False)
            assert plan["threads_per_row"] <= 384
            for field in SUMMATION:  # whatever the number of rows and the alignment
                for other in ({"rows": 1}, {"aligned": False}):
                    call = {"rows": 100_000, "aligned": True, **other}
                    again = _C.plan("forward", cols=cols, dtype="bfloat16", **call, **properties)
                    assert again.get(field) == plan.get(field), field
    plan = _C.plan("forward", 100_000, 8 * block + 8, "bfloat16", **properties)
    assert (plan["kernel"], plan["in_grid"]) == ("ring", True)
    assert plan["threads_per_row"] <= 352
    assert not _C.plan("forward", 9, 10**6, "bfloat16", whole_grids=False, **properties)["in_grid"]


def test_blocks_of_the_forwards_ring_that_keep_together() -> None:
    """Aligned rows that a block holds, or up to three of them, if there are many: each block may be
    one row and 3 MB ahead of the average, and all have as many rows, or one less.
    """

    def plan(rows: int, cols: int, dtype: str = "bfloat16", **call: Any) -> dict[str, Any]:
        return _C.plan("forward", rows, cols, dtype, **call)

    for cols, dtype, call, size in (
        (24_584, "bfloat16", {}, 1),
        (32_768, "float16", {}, 1),
        (65_536, "bfloat16", {}, 2),
        (16_384, "float32", {}, 1),
        (32_768, "float32", {}, 2),
        (18_432, "bfloat16", {"one_dtype": False}, 1),
        (49_152, "bfloat16", {"one_dtype": False}, 3),
    ):
        for rows in (2000, 4096, 5000):
            many = plan(rows, cols, dtype, **call)
            assert (many["kernel"], many["cluster_size"]) == ("ring", size), cols
            teams = many["blocks"] // size
            assert many["most_ahead"] == teams + 3 * 2**20 // (cols * SIZES[dtype]), cols
            turns = -(-rows // teams)
            assert turns * teams - rows < turns, "blocks that have a row less, one row less"
        assert plan(300, cols, dtype, **call)["most_ahead"] == 0, "few rows"
        assert plan(4096, cols, dtype, **call, memory_bandwidth=3352)["most_ahead"] == 0
    assert plan(4096, 30_000, aligned=False)["most_ahead"] == 0
    assert plan(4096, 131_072)["most_ahead"] == 0, "in fours"
    assert plan(4096, 1_000_000)["most_ahead"] == 0, "in a grid"
    assert plan(4096, 4096)["most_ahead"] == 0, "in registers"
