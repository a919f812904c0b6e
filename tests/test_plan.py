"""The CUDA plan, a pure function: runs without a GPU, in builds without CUDA too."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from fastnorm import _C

CHUNK_BYTES = 16
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
SMALL = ["float32", "float16", "bfloat16"]
# A dtype of grad_out beside which rows do not stream through shared memory.
OTHER = {
    "float32": "bfloat16", "float16": "bfloat16", "bfloat16": "float16", "float64": "float64",
}  # fmt: skip
DIRECTIONS = ["forward", "backward"]
# The fields that fix the order of summation of y and dx.
SUMMATION = (
    "kernel", "chunks_per_thread", "columns_per_thread", "threads_per_row", "cluster_size",
    "segments", "run_columns",
)  # fmt: skip
# 16-bit rows that end within a chunk and yet are not taken by column where memory is fast, and some
# more where it is slow.
IN_RING = (1001, 1023, 1535, 2047)
IN_SLOW_RING = (901, 1025, 1087, 1801, 2049, 2175, 2601, 3001, 4095, 4097, 5001)
# Of those some that it takes one by one in bulk where memory is fast.
WIDE = (6273, 7001, 8191, 8193, 12_289, 16_385, 24_001, 32_767, 50_257, 65_537, 84_479)
# These hold a row in the same threads and add in the same order; in the forward also the ring and
# rows, in one block.
SAME_ORDER = {"few_rows": "ring", "few_elements": "elements"}
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
SHARED_BYTES = {capability: kilobytes * 1024 for capability, kilobytes in
                {75: 64, 80: 163, 90: 227, 100: 227, 120: 99}.items()}  # fmt: skip
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
    """Whether a warp takes rows by column as they lie in memory, many at once."""
    by_16_bit = direction == "forward" and dtype != "float32" and cols in range(111, 128, 2)
    return cols <= 64 or by_16_bit


def all_plans(direction: str, dtype: str, gpu: tuple[int, int]) -> Any:
    sm_count, capability = gpu
    for rows, cols in itertools.product(ROWS, COLS):
        if rows * cols > MOST_ELEMENTS:
            continue
        plan = _C.plan(
            direction, rows, cols, dtype, sm_count=sm_count, compute_capability=capability
        )
        yield rows, cols, plan


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_order_of_summation_depends_on_width_dtype_and_device_alone(
    direction: str, dtype: str
) -> None:
    for cols, (sm_count, capability) in itertools.product(COLS, GPUS[:3]):
        orders = set()
        for rows, aligned, dw_db in itertools.product((*ROWS, 2**33), (True, False), (True, False)):
            plan = _C.plan(
                direction, rows, cols, dtype, aligned=aligned, dw_db=dw_db, sm_count=sm_count,
                compute_capability=capability,
            )  # fmt: skip
            if direction == "forward" and plan["cluster_size"] == 1:
                plan["kernel"] = "rows" if plan["kernel"] == "ring" else plan["kernel"]
                if plan["rows_per_block"] > 1 and plan["threads_per_row"] == 32:
                    plan["kernel"] = "a row in each warp"  # whether by rows or by short_rows
            order = (plan.get(field) for field in SUMMATION)
            orders.add(tuple(SAME_ORDER.get(value, value) for value in order))
        assert len(orders) == 1, f"{cols} columns: {orders}"


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_many_rows_that_lie_one_behind_the_other_are_copied_in_bulk(
    direction: str, dtype: str
) -> None:
    """Of 16 bits, where kernels by column take them, in the order of others."""
    forward = direction == "forward"
    for cols, rows in itertools.product((*range(65, 1100), *range(1101, 9000, 97)), (200, 200_000)):
        plan, others = (
            _C.plan(direction, rows, cols, dtype, aligned=cols % 8 == 0, contiguous=contiguous)
            for contiguous in (True, False)
        )
        in_bulk = plan.get("in_bulk") or plan.get("bulk_stages", 0) > 0
        wide = cols > (5632 if forward else 6272) and plan["kernel"] == "elements"
        if wide or plan["kernel"] == "short_rows":  # see below
            continue
        by_column = plan["kernel"] == "elements" and not is_very_short(direction, cols, dtype)
        many = SIZES[dtype] == 2 and rows > 1000
        fits = cols <= (5632 if forward else 6272)
        assert in_bulk == (many and by_column and fits), (rows, cols)
        if many and (cols < 480 or 2048 < cols < 2976 or 4160 < cols < 4960):
            assert in_bulk == (cols % 8 != 0 and not (forward and cols in range(111, 128, 2))), cols
        assert not others.get("in_bulk")
        assert not others.get("bulk_stages")
        assert all(plan.get(field) == others.get(field) for field in SUMMATION), (rows, cols)
        if in_bulk and not forward:
            tile = plan["rows_per_block"]
            assert tile % (16 if plan["threads_per_row"] <= 32 else 2) == 0
            assert plan["blocks"] == 132 or (plan["merged"] == 4 and plan["blocks"] > 112)
            sectors = -(-2 * tile * cols // 32) + 1, -(-8 * tile // 32)
            stage = 32 * (2 * sectors[0] + sectors[1])
            assert 2 <= plan["bulk_stages"] <= 8
            assert plan["bulk_stages"] * stage <= 136 * 1024
            warps = tile // 2 * plan["threads_per_row"] // 32
            assert 6 <= warps < 16
            old = {"compute_capability": 80}
            assert not _C.plan(direction, rows, cols, dtype, contiguous=True, **old)["bulk_stages"]
            slow = {"memory_bandwidth": 3352}
            slow_plan = _C.plan(direction, rows, cols, dtype, contiguous=True, **slow)
            assert (slow_plan["bulk_stages"] > 0) == (cols <= 512)


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


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nothing_is_copied_in_bulk_where_no_kernel_does_so(direction: str, dtype: str) -> None:
    for cols, rows in itertools.product((72, 88, 129, 257, 1317, 5001, 8191), (10, 1_000_000)):
        for capability in (80, 89, 120, 121):
            plan = _C.plan(
                direction, rows, cols, dtype, aligned=cols % 8 == 0, contiguous=True,
                compute_capability=capability,
            )  # fmt: skip
            assert not plan.get("in_bulk")
            assert not plan.get("bulk_stages")


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
            if blocks * (plan["shared_bytes"] + 1280) <= kilobytes * 1024
        )
        assert (256 - shared) * 1024 > cols * (4 if one_dtype else 8)
        elsewhere = _C.plan("forward", 1, cols, "bfloat16", aligned=False, memory_bandwidth=3352)
        assert elsewhere["threads_per_row"] != plan["threads_per_row"]
    assert taken > (1800 if one_dtype else 1000)


@pytest.mark.parametrize("one_dtype", [True, False])
@pytest.mark.parametrize("dtype", SIZES)
def test_blocks_that_stay_have_rows_wider_than_those(dtype: str, one_dtype: bool) -> None:
    """Uneven 16-bit ones, in one order, by the fewest of one, two, four and eight that can."""
    taken: dict[int, set[int]] = {}
    widths = (16_384, 16_385, 21_856, 21_857, *WIDE, *range(16_386, 168_961, 397), 168_959, 168_961)
    for cols in widths:
        orders = set()
        for rows, aligned in itertools.product((1, 5, 140, 200_000), (False, True)):
            call = {"aligned": aligned, "contiguous": aligned, "one_dtype": one_dtype}
            plan = _C.plan("forward", rows, cols, dtype, **call)
            least = 21_856 if one_dtype else 16_384
            streams = SIZES[dtype] == 2 and cols % 8 != 0 and least < cols <= 168_960
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
            assert plan["shared_bytes"] == plan["bulk_stages"] * (11 * 64 * 2 * pairs + 32)
            assert plan["shared_bytes"] <= 222 * 1024
        assert len(orders) <= 1
        for other in ({"y_as_x": False}, {"compute_capability": 120}, {"kernel": "ring"},
                      {"memory_bandwidth": 3352}):  # fmt: skip
            assert not _C.plan("forward", 5000, cols, dtype, **other)["bulk_stages"]
    if SIZES[dtype] == 2:
        kernels = set(range(16, 31))
        expected = {2: kernels, 4: kernels, 8: kernels}
        assert taken == (expected if one_dtype else {1: set(range(24, 31)), **expected})


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


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"{gpu[0]}SM-cc{gpu[1]}")
@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_column_and_row_has_its_thread(
    direction: str, dtype: str, gpu: tuple[int, int]
) -> None:
    for rows, cols, plan in all_plans(direction, dtype, gpu):
        where = f"{rows} x {cols}: {plan}"
        assert capacity(plan, dtype) >= cols, where
        blocks = plan["blocks"] - plan.get("column_blocks", 0)  # that take rows
        teams = blocks // (plan["cluster_size"] * plan["segments"])
        assert blocks == teams * plan["cluster_size"] * plan["segments"], where
        groups = -(-rows // plan["rows_per_block"])
        stays = plan["kernel"] == "ring" or plan.get("bulk_stages", 0) > 0
        if plan["kernel"] == "split" or (direction == "forward" and not stays):
            assert teams == groups, where
        elif plan["kernel"] in FEW:
            assert groups <= teams < groups + plan["slices"], f"whole clusters: {where}"
        else:
            assert 1 <= teams <= groups, f"persistent blocks, each with a row at least: {where}"


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_more_threads_than_the_row_needs(direction: str, dtype: str) -> None:
    """Less than one more warp, or, within a warp, less than twice the lanes."""
    for _, cols, plan in all_plans(direction, dtype, (132, 90)):
        if plan["kernel"] in ("short_rows", "rows"):
            chunks = -(-cols // chunk_columns(dtype))
            needed = -(-chunks // plan["chunks_per_thread"])
            threads = plan["threads_per_row"]
            assert threads < 2 * needed if threads <= 32 else threads < needed + 32
        if plan["kernel"] in ("elements", "few_elements"):
            threads = plan["threads_per_row"] * plan["cluster_size"]
            assert threads * (plan["columns_per_thread"] - 4) < cols
            if plan.get("is_wide"):  # see below
                continue
            if is_very_short(direction, cols, dtype):  # up to so many columns of a lane, in pairs
                most = 10 if dtype == "float32" else 8 if cols in (51, 127) else 16
                assert most * (threads // 2) < cols <= most * threads
                assert cols <= threads * plan["columns_per_thread"]
                assert plan["columns_per_thread"] in range(4, most + 1, 2)
                continue
            most = 32 if direction == "forward" else 16  # columns of a thread
            if direction == "forward" or threads <= 32:
                assert (
                    threads == 8 or most * (threads // 2 if threads <= 32 else threads - 32) < cols
                )
            else:  # warps enough to fill a block, or several blocks of a multiprocessor
                assert 8 < plan["columns_per_thread"] <= most
                warps = plan["threads_per_row"] // 32
                limits = ((12, 10), (15, 13)) if dtype == "float32" else ((16, 14),)
                assert any(most // warps * warps >= busy for most, busy in limits)
        if plan["kernel"] == "cluster" and plan["cluster_size"] > 2:
            half = 512 * plan["chunks_per_thread"] * plan["cluster_size"] // 2
            assert half * chunk_columns(dtype) < cols, "a cluster of half the size would do"
        if plan["kernel"] == "split":
            held = plan["threads_per_row"] * plan["chunks_per_thread"] * chunk_columns(dtype)
            assert (plan["segments"] - 1) * held < cols


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


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"{gpu[0]}SM-cc{gpu[1]}")
@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_limits_of_the_hardware(direction: str, dtype: str, gpu: tuple[int, int]) -> None:
    for rows, cols, plan in all_plans(direction, dtype, gpu):
        where = f"{rows} x {cols}: {plan}"
        threads = plan["threads_per_row"]
        tens = threads == 10 and plan["kernel"] == "short_rows"
        odd = threads in (3, 5, 6, 9, 10) and direction == "backward" and (
            plan["kernel"] in ("ring", "few_rows")
        )  # fmt: skip
        assert threads in (1, 2, 4, 8, 16) or threads % 32 == 0 or tens or odd, where
        together = plan.get("rows_per_thread", 1)
        assert plan["rows_per_block"] % together == 0, where
        block = threads * plan["rows_per_block"] // together
        if direction == "backward" and threads < 32 and plan["cluster_size"] == 1:
            assert plan["rows_per_block"] % plan["rows_per_warp"] == 0, "whole warps"
            assert threads * plan["rows_per_warp"] <= 32
            block = plan["rows_per_block"] // plan["rows_per_warp"] * 32
        in_registers = direction == "forward" and plan["chunks_per_thread"] == 4
        most = {"ring": 640, "rows": 768 if in_registers else 512}.get(plan["kernel"], 512)
        assert 1 <= block <= most, where
        assert plan.get("shared_bytes", 0) + 2048 <= SHARED_BYTES[gpu[1]], where
        assert plan["chunks_per_thread"] * together <= 8, where
        assert plan["chunks_per_thread"] in (1, 2, 3, 4, 5, 6, 7, 8), where
        if plan["chunks_per_thread"] in (5, 6, 7):
            short = plan["kernel"] == "short_rows" and plan["chunks_per_thread"] == 5
            assert direction == "forward", where
            assert short or plan["kernel"] == "rows", where
            assert threads <= (16 if short else 64), where
        if plan["kernel"] == "short_rows":
            assert threads <= 32, where
            teams = 32 // threads  # in each of two warps
            assert plan["rows_per_block"] == 2 * teams * together, where
        assert 1 <= plan["blocks"] <= MOST_BLOCKS, where
        in_grid = plan["in_grid"]
        assert in_grid or plan["cluster_size"] in (*range(1, 9), 16), where
        if plan["exchange_warp"]:
            assert plan["kernel"] == "ring", where
            assert plan["cluster_size"] > 1 or direction == "forward", where
            assert block + 32 <= 512, "of 128 registers"
        assert not in_grid or plan["kernel"] == "ring", where
        assert not in_grid or plan["blocks"] <= min(gpu[0], 160), "all run at the same time"
        by_column = plan["kernel"] == "elements"
        stays = direction == "backward" or plan["bulk_stages"] > 0
        streams = plan["kernel"] == "ring" or (by_column and stays)
        assert plan["cluster_size"] <= 8 or streams, where
        ahead = plan.get("rows_ahead", 1)
        assert ahead == 1 or (in_grid and block <= {2: 352, 3: 320}[ahead]), where
        if plan["kernel"] not in FEW and not streams:
            assert (plan["kernel"] == "cluster") == (plan["cluster_size"] > 1), where
        assert plan["kernel"] not in ("cluster", *FEW) or gpu[1] >= 90, where
        assert not streams or gpu[1] >= 90, where
        if plan["kernel"] in FEW:
            assert plan["column_blocks"] % plan["slices"] == plan["blocks"] % plan["slices"] == 0
            assert plan["cluster_size"] in (1, plan["slices"]), where
        if streams:
            merged = plan.get("merged", 1)
            launched = plan["cluster_size"] * merged
            assert merged in (1, 2, 4), where
            assert plan["blocks"] % launched == 0, where
            assert launched <= 16 or in_grid, where
            assert merged == 1 or launched <= 8, where
        if plan["kernel"] in FEW or streams:
            assert direction == "backward" or plan["kernel"] not in FEW, where
            assert dtype != "float64", where
            assert block % 32 == 0, "whole warps"
            assert plan["cluster_size"] == 1 or plan["rows_per_block"] == 1, where
            assert plan["cluster_size"] == 1 or threads % 32 == 0, where
        assert plan["kernel"] != "cluster" or threads % 32 == 0, where
        assert plan["kernel"] != "cluster" or plan["rows_per_block"] == 1, where
        assert (plan["segments"] > 1) <= (plan["kernel"] == "split"), where
        assert plan["workspace_bytes"] >= 0, where


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
    """The backward's kernel, from rows of five chunks to those that eight blocks hold, or sixteen
    where a device has room for such clusters, or a block on every multiprocessor.
    """
    narrowest, widest = 5 * chunk_columns(dtype), 65_536

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
    for chunks in (2, 4):
        assert plan(chunks * chunk_columns(dtype))["kernel"] == "rows"


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
            columns = rows == 1 and not few and cols > 64
            assert plan["weight_grads"] == ("tiles" if few else "columns" if columns else "fused")
            assert plan["chunks_per_thread"] == (4 if dtype == "float32" else 2)
            assert _C.plan("backward", rows, cols, dtype, aligned=False) == plan
        assert _C.plan("backward", 9, cols, dtype, kernel="ring")["kernel"] == "ring"
        others = [{"dy_dtype": other} for other in SMALL if other != dtype]
        for problem in (*others, {"compute_capability": 80}, {"dx": False}):
            assert "elements" not in _C.plan("backward", 9, cols, dtype, **problem)["kernel"]
    one_chunk = chunk_columns(dtype)
    assert _C.plan("backward", 9, one_chunk, dtype)["kernel"] == "elements"
    for cols in (1, 2 * one_chunk, 16, 64, 4096, 131_073, *in_ring):
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


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("bandwidth", [4800, 3352])
def test_uneven_rows_of_the_forward_by_three_and_five_blocks(dtype: str, bandwidth: int) -> None:
    """Where those are not too large; for any number of rows. (Where memory is fast, 16-bit ones
    have another kernel.)
    """

    def sizes(cols: int, **call: Any) -> set[int]:
        call = {"memory_bandwidth": bandwidth, **({"kernel": "ring"} if is_fast else {}), **call}
        plans = [_C.plan("forward", rows, cols, dtype, **call) for rows in (1, 100_000)]
        assert {plan["kernel"] for plan in plans} == {"ring"}
        return {plan["cluster_size"] for plan in plans}

    block = 4096 * chunk_columns(dtype)  # columns
    is_16_bit = dtype != "float32"
    is_fast = is_16_bit and bandwidth > 4000
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
FASTER_IN_BULK = (1101, 1501, 1751, 2049, 2101, 2401, 2901, 3001, 3601, 5001, 6001, 8191)  # 16 bits


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
                assert kernel(cols, capability) == "rows", cols
            assert kernel(cols, capability, y_as_x=False) == in_chunks, cols
        in_bulk = FASTER_IN_BULK if chunk == 8 else ()
        for cols in in_bulk:
            expected = "elements" if capability >= 90 else "rows"
            assert kernel(cols, capability) == expected, cols
            assert kernel(cols, capability, memory_bandwidth=3352) == "rows", cols
            assert kernel(cols, capability, y_as_x=False) == "rows", cols
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
        # Wide 16-bit ones that end within a chunk have blocks that stay.
        by_column = "elements" if wide else "rows"
        assert kernel(block - 1, capability) == ("elements" if wide else shifted)
        assert kernel(3 * block // 4 + 1, capability) == by_column
        for problem in ({"memory_bandwidth": 3352}, {"y_as_x": False}):
            assert kernel(3 * block // 4 + 1, capability, **problem) == "rows"
        in_grid = "ring" if clusters and small else "split"
        if wide:
            assert kernel(block + 1, capability) == "elements"
            assert kernel(block + 1, capability, one_dtype=False) == "elements"
            assert kernel(block + 1, capability, memory_bandwidth=3352) == "ring"
        for cols in (*(() if wide else (block + 1,)), block + chunk, cluster):
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
    for cols, aligned in itertools.product(range(1, 3200), (True, False)):
        plan = _C.plan(
            "forward", 100_000, cols, dtype, aligned=aligned, one_dtype=one_dtype, kernel=kernel
        )
        lanes = plan["threads_per_row"]
        if plan["kernel"] == "elements":
            short = is_very_short("forward", cols, dtype)
            (tiny if short else shapes).add((min(lanes, 64), plan["columns_per_thread"]))
        if plan["kernel"] == "short_rows" and plan["vectorized"]:
            assert (lanes, plan["chunks_per_thread"]) != (1, 2)
    compiled = {(8, columns) for columns in range(12, 33, 4)}
    compiled |= {(64, columns) for columns in range(20, 33, 4)}
    if dtype == "float32":
        assert (1, 8) not in tiny
        compiled |= {(16, columns) for columns in (20, 24, 28)} | {(32, 28)}
    else:
        compiled |= {(lanes, columns) for lanes in (16, 32) for columns in range(20, 33, 4)}
    assert shapes <= compiled
    if kernel != "short_rows":
        wide_lanes = {(8, 8), (8, 14), (8, 16), (16, 8)}  # of 51 columns, of 111 to 125, and of 127
        widest = {(lanes, columns) for lanes, columns in tiny if lanes >= 8}
        assert widest == ({(8, 6), (8, 8)} if dtype == "float32" else wide_lanes)


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_vectorized_only_where_every_chunk_is_whole(direction: str, dtype: str) -> None:
    for cols in COLS:
        whole = cols % chunk_columns(dtype) == 0
        assert _C.plan(direction, 100, cols, dtype, aligned=True)["vectorized"] == whole
        assert not _C.plan(direction, 100, cols, dtype, aligned=False)["vectorized"]


@pytest.mark.parametrize("kernel", ["rows", "cluster", "split"])
@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_forced_kernel_runs_where_it_can(direction: str, dtype: str, kernel: str) -> None:
    short = ("short_rows", "elements")
    streams = (*FEW, "ring", *(["elements"] if direction == "backward" else []))
    for cols, capability in itertools.product(COLS, (80, 90)):
        chosen = _C.plan(direction, 77, cols, dtype, compute_capability=capability)
        forced = _C.plan(direction, 77, cols, dtype, compute_capability=capability, kernel=kernel)
        assert capacity(forced, dtype) >= cols
        stays = chosen["kernel"] in streams or chosen.get("bulk_stages", 0) > 0
        if kernel == "split":
            assert forced["kernel"] == kernel
        elif kernel == "rows" and chosen["kernel"] == "rows":
            assert forced == chosen
        elif (
            direction == "forward" and kernel == "rows" and chosen["kernel"] in short and not stays
        ):
            assert forced["kernel"] == kernel
        elif stays:
            widest = 8192 if kernel == "rows" else 65_536
            if direction == "forward":
                widest = (1 if kernel == "rows" else 8) * 4096 * chunk_columns(dtype)
            assert forced["kernel"] == (kernel if cols <= widest else chosen["kernel"])
        elif kernel == "cluster" and chosen["kernel"] != "split" and capability >= 90:
            assert forced["kernel"] == kernel
        elif kernel == "rows" or capability < 90:
            assert forced["kernel"] == chosen["kernel"], "passed over where it cannot run"


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_forced_cluster_size(direction: str, size: int) -> None:
    plan = _C.plan(direction, 10, 1000, "float32", kernel="cluster", cluster_size=size)
    assert (plan["kernel"], plan["cluster_size"]) == ("cluster", size)
    assert capacity(plan, "float32") >= 1000
    widest = _C.plan(direction, 10, 8 * 8192, "float32", kernel="cluster", cluster_size=size)
    assert capacity(widest, "float32") >= 8 * 8192, "never smaller than the row needs"


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
        vector = 4 if dtype != "float64" and cols % 4 == 0 else 1
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
def test_many_rows_read_x_once_and_few_do_not_wait_for_partials(dtype: str, cols: int) -> None:
    assert _C.plan("backward", 1_000_000, cols, dtype)["weight_grads"] == "fused"
    few = "columns" if dtype == "float64" else "tiles"
    assert _C.plan("backward", 8, cols, dtype)["weight_grads"] == few


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
            many = asked or plan["is_wide"] or rows >= 8 * resident
            assert fused == (many and little), where
            assert not fused or plan["partials"] == needed, where
            seen.add((min(plan["cluster_size"], 17), fused, plan["shares"] > 1))
    assert {(8, True, False), (8, True, True), (8, False, False)} <= seen
    assert {(16, True, False), (16, True, True)} <= seen
    assert {(17, True, False), (17, True, True)} <= seen
    assert (17, False, False) in seen or dtype == "float32", "70 rows by one group of blocks"


def test_the_plan_is_a_pure_function() -> None:
    first = [
        plan for direction in DIRECTIONS for *_, plan in all_plans(direction, "bfloat16", (132, 90))
    ]
    again = [
        plan for direction in DIRECTIONS for *_, plan in all_plans(direction, "bfloat16", (132, 90))
    ]
    assert first == again


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (("sideways", 1, 1, "float32"), {}, ["direction", "sideways", "forward", "backward"]),
        (("forward", 1, 1, "int8"), {}, ["dtype", "int8", "float32", "bfloat16"]),
        (("forward", 1, 1, "float32"), {"kernel": "magic"}, ["kernel", "magic", "rows", "split"]),
        (("backward", 1, 1, "float32"), {"weight_grads": "magic"}, ["weight_grads", "fused"]),
    ],
)
def test_wrong_arguments(args: tuple, kwargs: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        _C.plan(*args, **kwargs)
    for word in words:
        assert word in str(raised.value)


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
