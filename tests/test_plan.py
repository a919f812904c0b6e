"""The CUDA plan, a pure function: runs without a GPU, in builds without CUDA too."""

from __future__ import annotations

import itertools

import pytest
from plans import (
    COLS,
    FEW,
    GPUS,
    MOST_BLOCKS,
    ROWS,
    SIZES,
    SUMMATION,
    all_plans,
    capacity,
    chunk_columns,
    is_very_short,
)

from fastnorm import _C

DIRECTIONS = ["forward", "backward"]
# These hold a row in the same threads and add in the same order; in the forward also the ring and
# rows, in one block.
SAME_ORDER = {"few_rows": "ring", "few_elements": "elements"}
SHARED_BYTES = {capability: kilobytes * 1024 for capability, kilobytes in
                {75: 64, 80: 163, 90: 227, 100: 227, 120: 99}.items()}  # fmt: skip


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
        narrow = (1024 if SIZES[dtype] == 4 else 5632) if forward else 6272
        wide = cols > narrow and plan["kernel"] == "elements"
        if wide or plan["kernel"] == "short_rows":  # see below
            continue
        by_column = plan["kernel"] == "elements" and not is_very_short(direction, cols, dtype)
        many = SIZES[dtype] == 2 and rows > 1000
        fits = cols <= (5632 if forward else 6272)
        assert in_bulk == (many and by_column and fits), (rows, cols)
        if many and (cols < 480 or 2048 < cols < 2976 or 4160 < cols < 4960):
            assert in_bulk == (cols % 8 != 0 and not is_very_short(direction, cols, dtype)), cols
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
            if plan.get("is_wide") or (plan.get("in_bulk") and plan["rows_per_block"] == 1):
                continue  # see below, and the tests of the forward
            if is_very_short(direction, cols, dtype):  # up to so many columns of a lane, in pairs
                chunk = chunk_columns(dtype)
                if cols in (chunk, 2 * chunk, 4 * chunk):
                    assert (threads, plan["columns_per_thread"]) == (cols // chunk, chunk)
                    continue
                most = 10 if dtype == "float32" else 8 if cols == 51 else 16
                assert most * (threads // 2) < cols <= most * threads
                assert cols <= threads * plan["columns_per_thread"]
                assert plan["columns_per_thread"] in range(2, most + 1, 2)
                continue
            most = 32 if direction == "forward" else 16  # columns of a thread
            if direction == "forward" and (dtype, threads) == ("float32", 16):
                most = 28
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
        very_short = plan["kernel"] == "elements" and is_very_short(direction, cols, dtype)
        if very_short and direction == "backward":  # each of whose lanes has some, one by one
            assert block in (128, 256, 512, 1024), where
            block = 128
        in_registers = direction == "forward" and plan["chunks_per_thread"] == 4
        most = {"ring": 640, "rows": 768 if in_registers else 512}.get(plan["kernel"], 512)
        assert 1 <= block <= most, where
        assert plan.get("shared_bytes", 0) + 2048 <= SHARED_BYTES[gpu[1]], where
        held = plan["columns_per_thread"] / 4 if very_short else plan["chunks_per_thread"]
        assert held * together <= 8, where
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
            assert 1 in (plan["cluster_size"], plan["slices"]), where
            launched = plan["cluster_size"] * plan["slices"]
            assert plan["column_blocks"] % launched == plan["blocks"] % launched == 0, where
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
