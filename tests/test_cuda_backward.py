"""The backward's CUDA kernels, and forwards beside them: each forced, or reached by its widths."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_kernels import (
    BACKWARD_KERNELS,
    KERNELS,
    SHAPES,
    arguments_of,
    check_dx_wherever_rows_lie,
    in_memory_of_nan,
    skip_without_clusters,
    spaced,
)
from reference import (
    DTYPES,
    SMALL_DTYPES,
    Reference,
    accumulation_dtype,
    assert_no_worse_than_aten,
    aten_backward,
    backward_reference,
    check_backward,
    check_forward,
    name_of,
    ops,
    random,
)
from torch import Tensor
from variants import AGAIN, GRID, plan_here

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "cols", [1, 2, 3, 4, 5, 8, 13, 16, 24, 28, 31, 32, 45, 63, 65, 81, 99, 127]
)
def test_any_number_of_very_short_rows(cols: int, dtype: torch.dtype) -> None:
    """Wherever the last one ends, there lies nothing but NaN behind: the bits of a larger batch,
    dense or with gaps between rows, and dw and db of these rows alone."""
    rows = 1031
    x, grad_out, weight, bias = arguments_of(rows, cols, dtype)
    y, mean, rstd = check_forward(x, [cols], weight, bias)
    dx = check_backward(grad_out, x, [cols], weight, bias)[0]
    for count in (*range(1, 40), 63, 64, 65, 127, 255, 256, 257, 511, 513, 1023):
        given, grad = (
            torch.cat([each[:count].flatten(), each.new_full((64,), float("nan"))])[
                : count * cols
            ].view(count, cols)
            for each in (x, grad_out)
        )
        for some, some_grad in ((given, grad), (spaced(given), spaced(grad))):
            results = ops.layer_norm_forward(some, [cols], weight, bias, 1e-5, None)
            for result, whole in zip(results, (y, mean, rstd), strict=True):
                assert result.equal(whole[:count]), count
            arguments = (some, [cols], results[1], results[2], weight, bias, 1e-5, [True] * 3)
            part = ops.layer_norm_backward(some_grad, *arguments)
            assert part[0].equal(dx[:count]), count
        if count in (1, 7, 64, 257, 1023):
            check_backward(grad, given, [cols], weight, bias)


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_clusters_sum_alike_with_a_warp_that_exchanges_and_without(
    force: Callable[..., None], direction: str, dtype: torch.dtype
) -> None:
    """Bit for bit, with many rows for each cluster and with few."""
    skip_without_clusters("ring")
    block = 4096 * 16 // dtype.itemsize  # columns of a block of the forward
    shapes = {
        "forward": (
            (1, 1027, 0), (1031, 1027, 0), (700, 12_001, 1), (331, block + 1, 2),
            (97, 2 * block + 1, 3), (67, 3 * block - 777, 4), (41, 6 * block + 5, 8),
        ),
        "backward": (
            (1031, 1001, 2), (700, 6001, 2), (331, 12_288, 0), (333, 8200, 2), (200, 12_289, 4),
            (67, 30_001, 8), (67, 49_152, 8), (41, 90_001, 0), (37, 100_008, 0),
        ),
    }[direction]  # fmt: skip
    ran = 0
    for rows, cols, size in shapes:
        common = {"kernel": "ring"} | ({"cluster_size": size} if size else {})
        plans = [
            plan_here(direction, rows, cols, dtype, aligned=False, **common, exchange_warp=warp)
            for warp in (False, True)
        ]
        if plans[0] | {"exchange_warp": True} != plans[1] or plans[0] == plans[1]:
            continue  # no room for it, or a grid, which always has one
        x, grad_out, weight, bias = arguments_of(rows, cols, dtype)
        statistics = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)[1:]
        results = []
        for warp in (False, True):
            force(**common, exchange_warp=warp)
            if direction == "forward":
                results.append(ops.layer_norm_forward(spaced(x), [cols], weight, bias, 1e-5, None))
            else:
                results.append(
                    ops.layer_norm_backward(
                        spaced(grad_out), spaced(x), [cols], *statistics, weight, bias, 1e-5,
                        [True] * 3,
                    )
                )  # fmt: skip
        for without, served in zip(*results, strict=True):
            assert served.equal(without), f"{rows} x {cols}"
        ran += 1
    assert ran >= 4


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", [1000, 1001, 1002, 1049, 4112, 8201])
def test_many_rows_for_each_block(
    force: Callable[..., None], cols: int, dtype: torch.dtype
) -> None:
    """Sums and moments of many rows pass through the same few places of shared memory. Bits of a
    row do not tell of it, nor whether a warp does nothing but exchange them.
    """
    skip_without_clusters("ring")
    rows = 601
    x, grad_out, weight, bias = arguments_of(rows, cols, dtype)
    statistics = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)[1:]
    xhat = (x.double() - statistics[0].double()) * statistics[1].double()
    exact_sums = [
        (terms.sum(0), terms.abs().sum(0)) for terms in (grad_out * xhat, grad_out.double())
    ]

    def backward(x: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        return ops.layer_norm_backward(
            grad_out, x, [cols], *statistics, weight, bias, 1e-5, [True] * 3
        )

    for request, kernel in itertools.product(AGAIN, ("ring", "elements")):
        same = {"kernel": kernel, "weight_grads": "fused"}
        if "cluster_size" in request:
            same["cluster_size"] = request["cluster_size"]
        plan = plan_here("backward", rows, cols, dtype, **request | same)
        if plan["kernel"] != kernel:
            assert kernel == "elements"  # neither aligned rows nor 16-bit ones in clusters
            continue
        assert plan["blocks"] <= max(request["blocks"], plan["cluster_size"])
        force(**same)
        dx = backward(x, grad_out)[0]
        for given, grad in ((x, grad_out), (spaced(x), spaced(grad_out))):
            force(**request | same)
            results = backward(given, grad)
            assert results[0].equal(dx), f"{request}, {kernel}"
            for sums, (exact, magnitude) in zip(results[1:], exact_sums, strict=True):
                # What any order of summation in float32 keeps to, and the result's own rounding.
                bound = magnitude * (rows + 8) * 2**-24 + exact.abs() * torch.finfo(dtype).eps
                assert ((sums.double() - exact).abs() <= bound).all(), f"{request}, {kernel}"
    for request in AGAIN:
        if "exchange_warp" in request:
            continue
        results = []
        for served, given in itertools.product((False, True), (x, spaced(x))):
            force(**request, exchange_warp=served, kernel="ring")
            results.append(check_forward(given, [cols], weight, bias))
        for again in results[1:]:
            for one, other in zip(again, results[0], strict=True):
                assert one.equal(other)


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
def test_dx_alone_has_the_bits_of_dx_with_dw_and_db(dtype: torch.dtype) -> None:
    """Few rows and many, whose dx comes from different kernels, in any number of lanes."""
    for cols in (
        40, 64, 72, 80, 96, 104, 136, 152, 160, 192, 200, 224, 264, 320, 384, 520, 576, 640, 768,
        1000, 1024, 1027, 2048, 4096, 5120, 8192, 16_384,
    ):  # fmt: skip
        for rows in (1, 5, 131, 40_009 if cols <= 768 else 3001):
            x, grad_out, weight, bias = arguments_of(rows, cols, dtype)
            statistics = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)[1:]
            for given, grad in ((x, grad_out), (spaced(x), spaced(grad_out))):
                for parameter in (weight, weight.float(), None):
                    dx, alone = (
                        ops.layer_norm_backward(
                            grad, given, [cols], *statistics, parameter, None, 1e-5, mask
                        )[0]
                        for mask in ([True] * 3, [True, False, False])
                    )
                    assert alone.equal(dx), f"{rows} x {cols}"


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "cols", [1, 3, 7, 24, 33, 100, 249, 250, 257, 301, 505, 1000, 1023, 2500, 4097, 20_001]
)
def test_dw_and_db_alone_wherever_rows_begin(
    force: Callable[..., None], cols: int, dtype: torch.dtype
) -> None:
    """By the granules in which rows lie, where those of x and dy hold the same columns, by words,
    or by chunks where they are aligned: to the bit the same.
    """
    force(weight_grads="columns")  # few rows have another kernel
    chunk = 16 // dtype.itemsize
    x, grad_out, weight, bias = arguments_of(301, cols, dtype)
    statistics = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)[1:]
    mask = [False, True, True]
    expected = check_backward(grad_out, x, [cols], weight, bias, output_mask=mask)[1:]
    for one, other in itertools.product(range(chunk), {0, 1, chunk - 1}):
        for of_x, of_grad in ((one, one), (one, other)):
            sums = ops.layer_norm_backward(
                in_memory_of_nan(grad_out, of_grad), in_memory_of_nan(x, of_x), [cols],
                *statistics, weight, bias, 1e-5, mask,
            )[1:]  # fmt: skip
            assert all(a.equal(b) for a, b in zip(sums, expected, strict=True)), (of_x, of_grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize(
    "cols",
    [
        *(65, 66, 67, 79, 90, 127, 129, 130, 155, 191, 250, 257, 258, 333, 449, 500, 511),
        *(513, 641, 770, 1023, 1101, 1102, 1537, 2047, 2050, 2601, 3001, 4095, 4500, 5001, 6002),
        6145,
    ],
)
def test_gradients_by_bulk_copies(
    force: Callable[..., None], cols: int, dtype: torch.dtype
) -> None:
    """Of many rows that lie one behind the other, the last of them too; dx has the bits that rows
    have elsewhere, with any parameters and mask.
    """
    skip_without_clusters("ring")
    request = {"kernel": "elements", "weight_grads": "fused", "blocks": 2}
    force(**request)
    for rows in (1600, 1601, 1606, 1637) if cols < 1024 else (480, 485):
        plan = plan_here("backward", rows, cols, dtype, contiguous=True, **request)
        assert plan["bulk_stages"] > 0
        x, grad_out, weight, bias = arguments_of(rows, cols, dtype)
        x, grad_out = in_memory_of_nan(x, 8), in_memory_of_nan(grad_out, 8)
        expected = check_backward(grad_out, x, [cols], weight, bias)
        again = check_backward(grad_out, x, [cols], weight, bias)
        assert all(a.equal(b) for a, b in zip(expected, again, strict=True)), rows
        check_dx_wherever_rows_lie(grad_out, x, weight, bias)


# By nine to 15 pairs of columns in each lane of a block, by eight to 15 of two, and by three to
# eight blocks.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize(
    "cols",
    [
        *(6273, 6337, 7681, 8191, 9002, 9601, 10_001, 10_559),
        *(10_561, 12_289, 13_001, 15_001, 16_385, 17_002, 19_001, 20_001, 21_119),
        *(24_001, 32_767, 40_001, 50_257, 65_537, 84_479),
    ],
)
def test_gradients_of_wide_rows(force: Callable[..., None], cols: int, dtype: torch.dtype) -> None:
    """One by one in bulk, wherever they begin: dx has the same bits, with any parameters and mask,
    and so have dw and db of as many blocks.
    """
    skip_without_clusters("ring")
    for rows, blocks in ((1, 8), (5, 2), (6, 3), (29, 16), *([(200, 8)] if cols > 10_560 else [])):
        request = {"weight_grads": "fused", "blocks": blocks}
        force(**request)
        if not plan_here("backward", rows, cols, dtype, **request)["is_wide"]:
            pytest.skip("not on this device")
        x, grad_out, weight, bias = arguments_of(rows, cols, dtype)
        x, grad_out = in_memory_of_nan(x, 8), in_memory_of_nan(grad_out, 8)
        statistics = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)[1:]
        expected = check_backward(grad_out, x, [cols], weight, bias)
        for of_x, of_grad in ((8, 8), (1, 1), (0, 1), (2, 5)):
            results = ops.layer_norm_backward(
                in_memory_of_nan(grad_out, of_grad), in_memory_of_nan(x, of_x), [cols],
                *statistics, weight, bias, 1e-5, [True] * 3,
            )  # fmt: skip
            assert all(a.equal(b) for a, b in zip(results, expected, strict=True)), rows
        check_dx_wherever_rows_lie(grad_out, x, weight, bias)
        check_backward(grad_out, x, [cols], weight.float(), bias.float())
        force()
        alone = ops.layer_norm_backward(
            grad_out[-1:], x[-1:], [cols], *(s[-1:] for s in statistics), weight, bias, 1e-5,
            [True] * 3,
        )[0]  # fmt: skip
        assert alone.equal(expected[0][-1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("cols", [66, 100, 126, 250, 258, 514, 1026, 1500, 2500, 4094])
def test_gradients_by_pairs_of_columns(
    force: Callable[..., None], cols: int, dtype: torch.dtype
) -> None:
    """Rows by column that begin at whole words have a kernel that moves pairs: the same bits. (In
    bulk those of dx: sums of dw and db have other rows together.)
    """
    force(kernel="elements")
    for rows in (37, 6007):
        x, grad_out, weight, bias = arguments_of(rows, cols, dtype)
        statistics = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)[1:]
        expected = check_backward(grad_out, x, [cols], weight, bias)
        plan = plan_here("backward", rows, cols, dtype, contiguous=True, kernel="elements")
        same = 1 if plan["bulk_stages"] > 0 else 3
        for of_x, of_grad in ((1, 1), (0, 1), (2, 5)):
            results = ops.layer_norm_backward(
                in_memory_of_nan(grad_out, of_grad), in_memory_of_nan(x, of_x), [cols],
                *statistics, weight, bias, 1e-5, [True] * 3,
            )  # fmt: skip
            pairs = list(zip(results, expected, strict=True))[:same]
            assert all(a.equal(b) for a, b in pairs), rows


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cluster_size", [2, 4, 8, GRID])
@pytest.mark.parametrize("weight_grads", ["fused", "columns"])
@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
def test_forced_backward_kernels(
    force: Callable[..., None],
    kernel: str,
    weight_grads: str,
    cluster_size: int,
    dtype: torch.dtype,
) -> None:
    skip_without_clusters("ring" if "elements" in kernel else kernel)
    if kernel in ("few_rows", "few_elements", "elements", "ring") and dtype == torch.float64:
        pytest.skip("none of them has float64")
    by_block = ("few_rows", "few_elements", "elements", "ring")
    if kernel not in ("cluster", *by_block) and cluster_size > 2:
        pytest.skip("only a cluster has a size")
    if kernel != "ring" and cluster_size == GRID:
        pytest.skip("only the ring runs as a whole grid")
    if "elements" in kernel and cluster_size > 2 and dtype.itemsize == 2:
        pytest.skip("16-bit rows by column are held by one block")
    if kernel in ("few_rows", "few_elements"):
        weight_grads = "tiles"
    if (kernel, weight_grads) == ("split", "fused"):
        pytest.skip("a row that is cut has no fused sums")
    request: dict[str, Any] = {"kernel": kernel, "weight_grads": weight_grads}
    if kernel == "cluster" or (kernel in by_block and cluster_size > 2):
        request["cluster_size"] = cluster_size  # one block, otherwise
    force(**request)
    ran = 0
    # Also many rows: persistent blocks then work on several, the last one on none. Very many only
    # where no lane adds up thousands of them.
    many = ((600_011, 3), (80_011, 45)) if kernel == "elements" else ()
    for rows, cols in (*SHAPES, *many, (20_011, 41), (5003, 1000), (3001, 769), (2003, 5120)):
        plan = plan_here("backward", rows, cols, dtype, **request)
        source = "row" if kernel == "few_rows" and rows == 1 else weight_grads
        if (plan["kernel"], plan["weight_grads"]) != (kernel, source):
            continue
        x, grad_out, weight, bias = arguments_of(rows, cols, dtype)
        check_backward(grad_out, x, [cols], weight, bias)
        check_backward(spaced(grad_out), spaced(x), [cols], weight, None)
        check_backward(grad_out, x, [cols], None, bias, output_mask=[True, False, True])
        ran += 1
    assert ran >= (5 if "elements" in kernel else 8)


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", [40, 48, 200, 1000, 1024, 5120, 12_288, 40_960])
def test_gradients_of_a_single_row(cols: int, dtype: torch.dtype) -> None:
    """dw and db are what they are beside a row that adds nothing to them."""
    plan = plan_here("backward", 1, cols, dtype)
    assert (plan["kernel"], plan["weight_grads"]) == ("few_rows", "row")
    for widen in (lambda parameter: parameter, Tensor.float):
        x, grad_out, weight, bias = arguments_of(1, cols, dtype)
        weight, bias = widen(weight), widen(bias)
        mean, rstd = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)[1:]
        for given in (x, spaced(x)):
            check_backward(grad_out, given, [cols], weight, bias)
            arguments = (grad_out, given, [cols], mean, rstd, weight, bias, 1e-5)
            ours = ops.layer_norm_backward(*arguments, [True, True, True])
            alone = ops.layer_norm_backward(*arguments, [False, True, True])
            assert all(one.equal(other) for one, other in zip(alone[1:], ours[1:]))
            two = [torch.cat((tensor, tensor)) for tensor in (given, mean, rstd)]
            beside = torch.cat((grad_out, torch.zeros_like(grad_out)))
            tiles = ops.layer_norm_backward(
                beside, two[0], [cols], *two[1:], weight, bias, 1e-5, [True, True, True]
            )
            assert tiles[0][:1].equal(ours[0])
            assert all(one.equal(other) for one, other in zip(tiles[1:], ours[1:]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize(
    "cols", [40, 48, 72, 80, 88, 96, 136, 144, 152, 160, 192, 200, 240, 264, 384, 520, 640, 768]
)
def test_rows_in_lanes_of_any_number(
    force: Callable[..., None], cols: int, dtype: torch.dtype
) -> None:
    """Or that have three chunks. dx has the same bits in a ring of any number of rows, where lanes
    are left over between them and where not, one by one, and beside a float32 dy; dw and db miss no
    row.
    """
    rows = 40_009
    plan = plan_here("backward", rows, cols, dtype, kernel="ring")
    assert plan["threads_per_row"] * plan["rows_per_warp"] <= 32
    x, grad_out, weight, bias = arguments_of(rows, cols, dtype)
    force(kernel="ring", weight_grads="fused")
    whole = check_backward(grad_out, x, [cols], weight, bias)[0]
    outputs = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)

    def dx_of(count: int, given: Tensor = x, grad: Tensor = grad_out) -> Tensor:
        return ops.layer_norm_backward(
            grad[:count], given[:count], [cols], outputs[1][:count], outputs[2][:count],
            weight, bias, 1e-5, [True, True, True],
        )[0]  # fmt: skip

    for count in (1, 2, *range(7, 65, 3), 1000, 1002, 20_001):
        assert dx_of(count).equal(whole[:count])
    assert check_backward(spaced(grad_out), spaced(x), [cols], weight, bias)[0].equal(whole)
    assert dx_of(rows, spaced(x), spaced(grad_out)).equal(whole)
    for given in (grad_out.float(), spaced(grad_out.float())):
        assert dx_of(rows, x, given).equal(whole)
    check_backward(grad_out.float(), x, [cols], weight, bias)
    force(kernel="few_rows")
    for count in (1, 2, 5, 31, 1003):
        assert dx_of(count).equal(whole[:count])
        assert dx_of(count, spaced(x), grad_out).equal(whole[:count])
    check_backward(grad_out[:1003], x[:1003], [cols], weight, bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize(
    "cols",
    [1025, 1087, 2049, 4097, 4351, 6145, 8193, 12_289, 16_385, 32_769, 49_386, 65_537, 131_073],
)
def test_columns_behind_the_chunks_of_a_warp(
    force: Callable[..., None], cols: int, dtype: torch.dtype
) -> None:
    """dx has the same bits in a ring of any number of rows and one by one, wherever they start, and
    alone; dw and db miss no row and no column, with several groups of warps in a block and one.
    """
    rows = 20_000_000 // cols | 1
    x, grad_out, weight, bias = arguments_of(rows, cols, dtype)
    force(kernel="ring", weight_grads="fused")
    whole = check_backward(grad_out, x, [cols], weight, bias)[0]
    assert check_backward(spaced(grad_out), spaced(x), [cols], weight, bias)[0].equal(whole)
    check_backward(grad_out, x, [cols], None, None)
    check_backward(grad_out, x, [cols], weight.float(), bias.float())
    outputs = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)
    for request in (
        {"kernel": "ring"}, {"kernel": "ring", "weight_grads": "columns"}, {"kernel": "few_rows"}
    ):  # fmt: skip
        force(**request)
        for count in (1, 2, 5, 31, 307):
            given, grad = x[:count], grad_out[:count]
            for each in (given, spaced(given)):
                for mask in ([True, True, True], [True, False, False]):
                    dx = ops.layer_norm_backward(
                        grad, each, [cols], outputs[1][:count], outputs[2][:count],
                        weight, bias, 1e-5, mask,
                    )[0]  # fmt: skip
                    assert dx.equal(whole[:count]), (request, count, mask)
        check_backward(grad_out[:307], x[:307], [cols], weight, bias)


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
@pytest.mark.parametrize("merged", [2, 4])
@pytest.mark.parametrize("cluster_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kernel", ["ring", "elements"])
def test_blocks_that_leave_their_partial_sums_together(
    force: Callable[..., None], kernel: str, cluster_size: int, merged: int, dtype: torch.dtype
) -> None:
    """In all the ways that rows are held, several of them in a block or one; dx has the bits that
    blocks which do not merge give, and dw and db of every row and column.
    """
    if cluster_size * merged > 8:
        pytest.skip("no cluster has so many blocks")
    if kernel == "elements" and cluster_size == 3:
        pytest.skip("powers of two alone")
    if kernel == "elements" and cluster_size > 1 and dtype.itemsize == 2:
        pytest.skip("16-bit rows by column are held by one block")
    common: dict[str, Any] = {"kernel": kernel, "weight_grads": "fused"}
    if cluster_size > 1:
        common["cluster_size"] = cluster_size
    ran = 0
    for rows, cols in (
        (40_009, 41), (20_011, 264), (5003, 257), (3001, 1000), (3001, 1001), (1003, 3072),
        (1301, 2048), (517, 4096), (131, 4104), (1301, 4097), (1301, 8191), (517, 8192),
        (301, 16_384), (301, 16_387),
    ):  # fmt: skip
        whole = cols * dtype.itemsize % 16 == 0
        plan = plan_here("backward", rows, cols, dtype, merged=merged, **common)
        found = (plan["kernel"], plan["cluster_size"], plan["merged"])
        if found != (kernel, cluster_size, merged) or plan["partials"] < 2:
            continue
        x, grad_out, weight, bias = arguments_of(rows, cols, dtype)
        dx = []
        for together in (1, merged):
            force(merged=together, **common)
            dx.append(check_backward(grad_out, x, [cols], weight, bias)[0])
            if whole:
                dx.append(check_backward(spaced(grad_out), spaced(x), [cols], weight, bias)[0])
            if kernel == "ring":
                check_backward(grad_out.float(), x, [cols], weight, bias)
        assert all(each.equal(dx[0]) for each in dx)
        ran += 1
    assert ran >= 2


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_partial_sums_added_up_by_one_thread_or_by_four(
    force: Callable[..., None], dtype: torch.dtype
) -> None:
    """To the same bits, where blocks of the second kernel would else have rows of four threads."""
    ran = set()
    for (rows, cols), weight_grads in itertools.product(
        ((613, 9000), (613, 20_001), (67, 70_000), (2100, 33_001), (130, 100_001)),
        ("fused", "columns"),
    ):
        request: dict[str, Any] = {"weight_grads": weight_grads}
        plan = plan_here("backward", rows, cols, dtype, **request)
        if plan["weight_grads"] != weight_grads or plan["partials"] < 2:
            continue
        assert plan["finish_threads"] == 64
        x, grad_out, weight, bias = arguments_of(rows, cols, dtype)
        for parameters in dict.fromkeys((dtype, accumulation_dtype(dtype))):
            results = []
            for by_thread in (True, False):
                force(finish_by_thread=by_thread, **request)
                results.append(
                    check_backward(grad_out, x, [cols], weight.to(parameters), bias.to(parameters))
                )
            for one, other in zip(*results, strict=True):
                assert one.equal(other)
        ran.add((weight_grads, cols % 4 == 0))
    assert len(ran) == 4


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", [131_080, 139_265, 262_145, 524_296, 1_000_001, 1_050_000])
def test_rows_that_no_cluster_holds(cols: int, dtype: torch.dtype) -> None:
    """Held by a grid that runs as a whole, in more rows than it holds at once."""
    rows = 13
    if torch.cuda.get_device_capability() == (9, 0):
        plan = plan_here("backward", rows, cols, dtype)
        assert (plan["kernel"], plan["in_grid"]) == ("ring", True)
        assert plan["blocks"] < rows * plan["cluster_size"]
    x, grad_out, weight, bias = arguments_of(rows, cols, dtype)
    outputs = check_forward(x, [cols], weight, bias)
    gradients = check_backward(grad_out, x, [cols], weight, bias)
    assert outputs[0].equal(check_forward(spaced(x), [cols], weight, bias)[0])
    narrowed = check_backward(spaced(grad_out), spaced(x), [cols], weight, bias)
    assert gradients[0].equal(narrowed[0])
    mean, rstd = outputs[1:]
    for mask in ([True, True, False], [True, False, True]):
        some = ops.layer_norm_backward(grad_out, x, [cols], mean, rstd, weight, bias, 1e-5, mask)
        for asked, one, of_all in zip(mask, some, gradients, strict=True):
            assert one.equal(of_all) if asked else one is None


@pytest.mark.parametrize(
    ("cluster_size", "rows"), [(8, 12_000), (GRID, 3136), (GRID, 20_011), (40, 4000), (120, 1025)]
)
def test_sums_over_many_rows_by_few_teams(
    force: Callable[..., None], cluster_size: int, rows: int
) -> None:
    """As many as they may add up, of equal signs, so that all roundings matter; in a grid more, in
    several shares.
    """
    cols = 500
    request: dict[str, Any] = {
        "kernel": "ring", "cluster_size": cluster_size, "weight_grads": "fused",
    }  # fmt: skip
    if torch.cuda.get_device_capability() == (9, 0):
        plan = plan_here("backward", rows, cols, torch.float32, **request)
        assert plan["weight_grads"] == "fused"
        assert (plan["shares"] > 1) == (cluster_size >= GRID and rows != 3136)
    x, grad_out, weight, bias = arguments_of(rows, cols, torch.float32)
    force(**request)
    for each in (x, spaced(x)):
        check_backward(grad_out.abs(), each, [cols], weight, bias)


@pytest.mark.parametrize(("cols", "dtype"), [(90_001, torch.bfloat16), (65_537, torch.float32)])
def test_wide_rows_in_several_launches(cols: int, dtype: torch.dtype) -> None:
    """As the seven clusters of 16 blocks that an H100 has would add up too many; of equal signs, so
    that all roundings matter. dx has the bits that a few rows give.
    """
    rows, eps = 3301, 1e-5
    if torch.cuda.get_device_capability() == (9, 0):
        plan = plan_here("backward", rows, cols, dtype)
        assert (plan["weight_grads"], plan["shares"] > 1) == ("fused", True)
    x, grad_out, weight, bias = arguments_of(rows, cols, dtype)
    grad_out = grad_out.abs_()
    mean, rstd = ops.layer_norm_forward(x, [cols], weight, bias, eps, None)[1:]
    dx, *ours = ops.layer_norm_backward(
        grad_out, x, [cols], mean, rstd, weight, bias, eps, [True] * 3
    )
    exact = [torch.zeros(cols, dtype=torch.float64, device="cuda") for _ in ours]
    squares = [0.0, 0.0]  # of what sums of some rows are rounded from: as of random walks
    for begin in range(0, rows, 300):
        g, some = grad_out[begin : begin + 300], x[begin : begin + 300]
        few = check_backward(g[:5], some[:5], [cols], weight, bias, eps)[0]
        assert dx[begin : begin + 5].equal(few)
        for i, sums in enumerate(backward_reference(g, some, [cols], weight, eps)[1:]):
            exact[i] += sums.value
            squares[i] += sums.term**2
    aten = aten_backward(grad_out, x, [cols], weight, eps)[1:]
    for i, what in enumerate(("dw", "db")):
        term = max(squares[i] ** 0.5, exact[i].abs().max().item())
        reference = Reference(exact[i], term)
        assert_no_worse_than_aten(
            what, ours[i], aten[i], reference, dtype, accumulation_dtype(dtype)
        )


@pytest.mark.parametrize("parameters", ["input's", "float32", "mixed"])
@pytest.mark.parametrize("other", SMALL_DTYPES, ids=name_of)
@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
@pytest.mark.parametrize("kernel", ["ring", *KERNELS])
def test_forced_kernels_with_mixed_dtypes(
    force: Callable[..., None],
    kernel: str,
    dtype: torch.dtype,
    other: torch.dtype,
    parameters: str,
) -> None:
    """`other`: of the output and of grad_out."""
    skip_without_clusters(kernel)
    for weight_grads in ("columns", "fused"):
        force(kernel=kernel, weight_grads=weight_grads)
        for rows, cols in ((37, 40), (5, 1001), (3, 4096)):
            x, grad_out, weight, bias = arguments_of(rows, cols, dtype)
            if parameters != "input's":
                weight = weight.float()
            if parameters == "float32":
                bias = bias.float()
            check_forward(x, [cols], weight, bias, out_dtype=other)
            check_backward(grad_out.to(other), x, [cols], weight, bias)


@pytest.mark.parametrize("cluster_size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
def test_the_ring_with_float32_gradients(
    force: Callable[..., None], dtype: torch.dtype, cluster_size: int
) -> None:
    """In as many shapes as one dtype; and dx has the bits that float32 of such values gives in the
    ring of one dtype, and of rows that are not aligned.
    """
    skip_without_clusters("ring")
    for weight_grads in ("columns", "fused"):
        force(kernel="ring", weight_grads=weight_grads, cluster_size=cluster_size)
        for rows, cols in (*SHAPES, (20_011, 41), (5003, 1000), (3001, 769), (2003, 5120)):
            x, grad_out, weight, bias = arguments_of(rows, cols, dtype)
            noise = random((rows, cols), torch.float32, "cuda", seed=4)
            check_backward(grad_out.float() + noise, x, [cols], weight, bias)
            same = check_backward(grad_out, x, [cols], weight, None)
            wide = check_backward(spaced(grad_out.float()), spaced(x), [cols], weight, None)
            plan = plan_here("backward", rows, cols, dtype, dy_dtype="float32", kernel="ring",
                             cluster_size=cluster_size)  # fmt: skip
            assert plan["kernel"] == "ring" or cols <= 32 or cols > 131_072
            if plan["kernel"] == "ring":
                assert wide[0].equal(same[0])
