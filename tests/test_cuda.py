"""What only CUDA has: streams, graphs, devices, and each kernel forced by the plan."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import (
    DTYPES,
    SMALL_DTYPES,
    Reference,
    accumulation_dtype,
    assert_no_worse_than_aten,
    aten_backward,
    aten_forward,
    backward_reference,
    check_backward,
    check_forward,
    forward_reference,
    name_of,
    ops,
    random,
)
from torch import Tensor
from variants import AGAIN, GRID, plan_here

import fastnorm

pytestmark = pytest.mark.cuda

KERNELS = ["rows", "cluster", "split"]
FORWARD_KERNELS = ["short_rows", "elements", "ring", *KERNELS]
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


def _skip_without_clusters(kernel: str) -> None:
    if kernel in ("cluster", "few_rows", "ring") and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")


def _arguments(rows: int, cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, grad_out, weight and bias."""
    return (
        random((rows, cols), dtype, "cuda", shift=0.3),
        random((rows, cols), dtype, "cuda", seed=3),
        random((cols,), dtype, "cuda", seed=1),
        random((cols,), dtype, "cuda", seed=2),
    )


def _narrowed(x: Tensor) -> Tensor:
    """The same values one element into rows that are three wider: nothing is aligned."""
    wide = x.new_full((x.shape[0], x.shape[1] + 3), float("nan"))
    wide[:, 1:-2] = x
    return wide[:, 1:-2]


def _check_dx_wherever_rows_lie(grad_out: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Alone, and of rows not aligned with dw and db: the same bits, with any parameters."""
    cols = x.shape[1]
    for parameters in ((weight, bias), (weight.float(), bias.float()), (None, bias)):
        statistics = ops.layer_norm_forward(x, [cols], *parameters, 1e-5, None)[1:]
        dx, others = (
            ops.layer_norm_backward(
                grad_out, rows_of_x, [cols], *statistics, *parameters, 1e-5, mask
            )[0]
            for rows_of_x, mask in ((x, [True, False, False]), (_narrowed(x), [True] * 3))
        )
        assert dx.equal(others), x.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cluster_size", [1, 2, 4, 8, GRID])
@pytest.mark.parametrize("kernel", FORWARD_KERNELS)
def test_forced_forward_kernels(
    force: Callable[..., None], kernel: str, cluster_size: int, dtype: torch.dtype
) -> None:
    _skip_without_clusters(kernel)
    if kernel not in ("cluster", "ring") and cluster_size > 1:
        pytest.skip("only a cluster has a size")
    if kernel == "cluster" and cluster_size == 1:
        pytest.skip("of two blocks at the least")
    if kernel != "ring" and cluster_size == GRID:
        pytest.skip("only the ring runs as a whole grid")
    if kernel in ("elements", "ring") and dtype == torch.float64:
        pytest.skip("no such kernel")
    request: dict[str, Any] = {"kernel": kernel}
    if kernel in ("cluster", "ring"):
        request["cluster_size"] = cluster_size
    force(**request)
    ran = 0
    for rows, cols in SHAPES:
        if plan_here("forward", rows, cols, dtype, **request)["kernel"] != kernel:
            continue
        x, _, weight, bias = _arguments(rows, cols, dtype)
        check_forward(x, [cols], weight, bias)
        check_forward(_narrowed(x), [cols], None, bias)
        ran += 1
    assert ran >= (5 if kernel in ("short_rows", "elements") else 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kernel", FORWARD_KERNELS)
def test_forced_kernels_with_infinities(
    force: Callable[..., None], kernel: str, dtype: torch.dtype
) -> None:
    """Anywhere in a row: its mean is that infinity, and NaN if it holds both."""
    _skip_without_clusters(kernel)
    if kernel in ("elements", "ring") and dtype == torch.float64:
        pytest.skip("no such kernel")
    force(kernel=kernel)
    ran = 0
    for rows, cols in SHAPES:
        if plan_here("forward", rows, cols, dtype, kernel=kernel)["kernel"] != kernel:
            continue
        x = random((rows, cols), dtype, "cuda")
        row = torch.arange(rows, device="cuda")
        place = torch.linspace(0, cols - 1, rows, device="cuda").long()
        x[row, place] = float("inf")
        x[row[::3], place[::3]] = float("-inf")
        x[row[1::3], (place[1::3] + cols // 2) % cols] = float("-inf")
        for each in (x, _narrowed(x)):
            mean = ops.layer_norm_forward(each, [cols], None, None, 1e-5, None)[1]
            expected = x.double().mean(1, keepdim=True)
            torch.testing.assert_close(mean.double(), expected, rtol=0, atol=0, equal_nan=True)
        ran += 1
    assert ran >= 5


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "cols",
    [
        2, 7, 13, 29, 45, 66, 100, 126, 250, 515, 520, 600, 601, 700, 701, 1023, 1025, 1031, 1032,
        1155, 1411, 1500, 1536, 1600, 1667, 2049, 2201, 2304, 3200, 3301, 4095, 4103, 8192, 8193,
        12_289, 16_391, 20_001, 24_601,
    ],
)  # fmt: skip
def test_rows_that_start_anywhere(cols: int, dtype: torch.dtype) -> None:
    """At each place in 16 bytes, x and y, between NaNs: the bits that a row alone has."""
    chunk = 16 // dtype.itemsize
    rows = 2 * chunk + 1
    x, _, weight, bias = _arguments(rows, cols, dtype)
    check_forward(x, [cols], weight, bias)
    alone = [ops.layer_norm_forward(row, [cols], weight, bias, 1e-5, None) for row in x.split(1)]
    for offset in range(chunk):
        memory = x.new_full((rows * cols + chunk,), float("nan"))
        moved = memory[offset : offset + rows * cols].view(rows, cols).copy_(x)
        results = ops.layer_norm_forward(moved, [cols], weight, bias, 1e-5, None)
        for result, *each in zip(results, *alone, strict=True):
            assert result.equal(torch.cat(each)), offset


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", [601, 1023, 1024, 1279, 1535, 1791, 2601, 4095, 8191, 20_001])
def test_weight_and_bias_that_start_anywhere(cols: int, dtype: torch.dtype) -> None:
    """Between NaNs, both of them or one; or missing, which is as good as ones and zeros."""
    x, _, weight, bias = _arguments(37, cols, dtype)

    def moved(parameter: Tensor) -> Tensor:
        memory = parameter.new_full((cols + 2,), float("nan"))
        return memory[1:-1].copy_(parameter)

    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
        return ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)

    ones, zeros = torch.ones_like(weight), torch.zeros_like(bias)
    for each in (x, _narrowed(x)):
        for expected, *others in (
            (
                (weight, bias),
                (moved(weight), bias),
                (weight, moved(bias)),
                map(moved, (weight, bias)),
            ),
            ((ones, bias), (None, bias), (None, moved(bias))),
            ((weight, zeros), (weight, None), (moved(weight), None)),
        ):
            results = forward(each, *expected)
            for other in others:
                for result, like in zip(forward(each, *other), results, strict=True):
                    assert result.equal(like)


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
@pytest.mark.parametrize("cluster_size", [2, 4, 8])
def test_the_forward_ring_sums_as_clusters_do(
    force: Callable[..., None], cluster_size: int, dtype: torch.dtype
) -> None:
    """Bit for bit, with many rows for each cluster and with few, aligned or not."""
    _skip_without_clusters("ring")
    for rows, cols in ((1, 40), (1031, 40), (700, 1027), (333, 8192), (97, 16_385), (67, 40_000)):
        x, _, weight, bias = _arguments(rows, cols, dtype)
        for each in (x, _narrowed(x)):
            results = []
            for kernel in ("ring", "cluster"):
                force(kernel=kernel, cluster_size=cluster_size)
                results.append(ops.layer_norm_forward(each, [cols], weight, bias, 1e-5, None))
            for ring, cluster in zip(*results, strict=True):
                assert ring.equal(cluster), f"{rows} x {cols}"


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "cols", [1, 2, 3, 4, 5, 8, 13, 16, 24, 28, 31, 32, 45, 63, 65, 81, 99, 127]
)
def test_any_number_of_very_short_rows(cols: int, dtype: torch.dtype) -> None:
    """Wherever the last one ends, there lies nothing but NaN behind: the bits of a larger batch,
    dense or with gaps between rows, and dw and db of these rows alone."""
    rows = 1031
    x, grad_out, weight, bias = _arguments(rows, cols, dtype)
    y, mean, rstd = check_forward(x, [cols], weight, bias)
    dx = check_backward(grad_out, x, [cols], weight, bias)[0]
    for count in (*range(1, 40), 63, 64, 65, 127, 255, 256, 257, 511, 513, 1023):
        given, grad = (
            torch.cat([each[:count].flatten(), each.new_full((64,), float("nan"))])[
                : count * cols
            ].view(count, cols)
            for each in (x, grad_out)
        )
        for some, some_grad in ((given, grad), (_narrowed(given), _narrowed(grad))):
            results = ops.layer_norm_forward(some, [cols], weight, bias, 1e-5, None)
            for result, whole in zip(results, (y, mean, rstd), strict=True):
                assert result.equal(whole[:count]), count
            arguments = (some, [cols], results[1], results[2], weight, bias, 1e-5, [True] * 3)
            part = ops.layer_norm_backward(some_grad, *arguments)
            assert part[0].equal(dx[:count]), count
        if count in (1, 7, 64, 257, 1023):
            check_backward(grad, given, [cols], weight, bias)


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
def test_uneven_rows_by_three_and_five_blocks(
    force: Callable[..., None], dtype: torch.dtype
) -> None:
    """Many rows for each cluster, few, and one have the same bits, wherever they start. (Where
    memory is fast they have another kernel if none is forced.)
    """
    _skip_without_clusters("ring")
    force(kernel="ring")
    block = 4096 * 16 // dtype.itemsize  # columns
    for cols, size in ((2 * block + 1, 3), (round(2.4 * block) | 1, 3), (4 * block + 3, 5)):
        for rows in (1, 7, 401):
            x, _, weight, bias = _arguments(rows, cols, dtype)
            if dtype != torch.float32 or size == 3:
                plan = plan_here("forward", rows, cols, dtype, kernel="ring")
                assert (plan["kernel"], plan["cluster_size"]) == ("ring", size)
            results = check_forward(x, [cols], weight, bias)
            for other, count in ((_narrowed(x), rows), (x[-1:].clone(), 1)):
                again = ops.layer_norm_forward(other, [cols], weight, bias, 1e-5, None)
                for result, same in zip(results, again, strict=True):
                    assert result[-count:].equal(same), f"{rows} x {cols}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
def test_the_forward_ring_beside_float32_parameters(
    force: Callable[..., None], dtype: torch.dtype
) -> None:
    """Many rows for each cluster, few, and one have the same bits, wherever they start, whether or
    not a warp does nothing but exchange moments, and whichever parameters are missing."""
    _skip_without_clusters("ring")
    block = 384 * 7 * 8  # columns
    for cols, rows in (
        (16_392, 601), (16_385, 601), (block, 401), (block + 8, 301), (2 * block - 7, 301),
        (50_257, 301), (4 * block + 8, 101), (8 * block, 77), (8 * block + 8, 77), (300_001, 19),
    ):  # fmt: skip
        for count in (1, 7, rows):
            plan = plan_here("forward", count, cols, dtype, one_dtype=False, kernel="ring")
            assert (plan["kernel"], plan["chunks_per_thread"]) == ("ring", 7)
            force(kernel="ring")  # some of them have another where memory is fast
            x, _, weight, bias = _arguments(count, cols, dtype)
            weight, bias = weight.float() / 3, bias.float() / 3
            results = check_forward(x, [cols], weight, bias)
            again = {
                "narrowed": (_narrowed(x), weight, bias),
                "one row": (x[-1:].clone(), weight, bias),
                "shifted parameters": (x, _narrowed(weight[None])[0], _narrowed(bias[None])[0]),
                "without bias": (x, weight, None),
                "without weight": (x, None, bias),
            }
            for exchange_warp in (False, True):
                force(kernel="ring", exchange_warp=exchange_warp)
                for name, (other, *parameters) in again.items():
                    expected = results
                    if None in parameters:
                        filled = (
                            weight if parameters[0] is not None else torch.ones_like(weight),
                            bias if parameters[1] is not None else torch.zeros_like(bias),
                        )
                        expected = ops.layer_norm_forward(x, [cols], *filled, 1e-5, None)
                    same = ops.layer_norm_forward(other, [cols], *parameters, 1e-5, None)
                    for result, like in zip(same, expected, strict=True):
                        assert result.equal(like[-len(other) :]), f"{count} x {cols}, {name}"
            force()


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
def test_the_forward_ring_sums_as_rows_of_one_block_do(
    force: Callable[..., None], dtype: torch.dtype
) -> None:
    """Bit for bit, for rows are many that take the one and few that take the other."""
    _skip_without_clusters("ring")
    chunk = 16 // dtype.itemsize
    for rows, chunks in ((700, 3073), (5, 3074), (140, 3473), (3, 3999), (401, 3585), (133, 4096)):
        cols = chunk * chunks
        x, _, weight, bias = _arguments(rows, cols, dtype)
        for each in (x, _narrowed(x)):
            results = []
            for request in ({"kernel": "ring", "cluster_size": 1}, {"kernel": "rows"}):
                plan = plan_here("forward", rows, cols, dtype, **request)
                assert (plan["kernel"], plan["cluster_size"]) == (request["kernel"], 1)
                force(**request)
                results.append(ops.layer_norm_forward(each, [cols], weight, bias, 1e-5, None))
            for ring, block in zip(*results, strict=True):
                assert ring.equal(block), f"{rows} x {cols}"


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_clusters_sum_alike_with_a_warp_that_exchanges_and_without(
    force: Callable[..., None], direction: str, dtype: torch.dtype
) -> None:
    """Bit for bit, with many rows for each cluster and with few."""
    _skip_without_clusters("ring")
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
        x, grad_out, weight, bias = _arguments(rows, cols, dtype)
        statistics = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)[1:]
        results = []
        for warp in (False, True):
            force(**common, exchange_warp=warp)
            if direction == "forward":
                results.append(
                    ops.layer_norm_forward(_narrowed(x), [cols], weight, bias, 1e-5, None)
                )
            else:
                results.append(
                    ops.layer_norm_backward(
                        _narrowed(grad_out), _narrowed(x), [cols], *statistics, weight, bias, 1e-5,
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
    _skip_without_clusters("ring")
    rows = 601
    x, grad_out, weight, bias = _arguments(rows, cols, dtype)
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
        for given, grad in ((x, grad_out), (_narrowed(x), _narrowed(grad_out))):
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
        for served, given in itertools.product((False, True), (x, _narrowed(x))):
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
            x, grad_out, weight, bias = _arguments(rows, cols, dtype)
            statistics = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)[1:]
            for given, grad in ((x, grad_out), (_narrowed(x), _narrowed(grad_out))):
                for parameter in (weight, weight.float(), None):
                    dx, alone = (
                        ops.layer_norm_backward(
                            grad, given, [cols], *statistics, parameter, None, 1e-5, mask
                        )[0]
                        for mask in ([True] * 3, [True, False, False])
                    )
                    assert alone.equal(dx), f"{rows} x {cols}"


def _in_memory_of_nan(x: Tensor, offset: int) -> Tensor:
    """x from so many elements behind an aligned address on, between NaNs."""
    memory = x.new_full((offset + x.numel() + 16 // x.itemsize,), float("nan"))
    return memory[offset : offset + x.numel()].view(x.shape).copy_(x)


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
    x, grad_out, weight, bias = _arguments(301, cols, dtype)
    statistics = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)[1:]
    mask = [False, True, True]
    expected = check_backward(grad_out, x, [cols], weight, bias, output_mask=mask)[1:]
    for one, other in itertools.product(range(chunk), {0, 1, chunk - 1}):
        for of_x, of_grad in ((one, one), (one, other)):
            sums = ops.layer_norm_backward(
                _in_memory_of_nan(grad_out, of_grad), _in_memory_of_nan(x, of_x), [cols],
                *statistics, weight, bias, 1e-5, mask,
            )[1:]  # fmt: skip
            assert all(a.equal(b) for a, b in zip(sums, expected, strict=True)), (of_x, of_grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize(
    "cols",
    [
        *(65, 66, 67, 100, 126, 129, 155, 191, 250, 257, 258, 333, 500, 511, 514, 601, 900, 901),
        *(1089, 1102, 1317, 1601, 1802, 2201, 2302, 2601, 3001, 3301, 3602, 4097, 5001, 5502, 5631),
    ],
)
def test_forward_by_bulk_copies(cols: int, dtype: torch.dtype) -> None:
    """Of many rows that lie one behind the other, the last of them too: the bits of other rows."""
    for rows in (5001, 5006, 5017):
        x, _, weight, bias = _arguments(rows, cols, dtype)
        assert plan_here("forward", rows, cols, dtype)["kernel"] == "elements"
        check_forward(x, [cols], weight, bias)
        for parameters in ((weight, bias), (weight.float(), bias.float()), (None, bias)):
            results = ops.layer_norm_forward(x, [cols], *parameters, 1e-5, None)
            others = ops.layer_norm_forward(_narrowed(x), [cols], *parameters, 1e-5, None)
            assert all(a.equal(b) for a, b in zip(results, others, strict=True)), rows


WIDE_COLS = (
    *(5633, 6002, 6145, 7001, 7169, 7684, 8190, 8191, 8321, 8961, 9538, 10_001, 10_753, 11_523),
    *(12_289, 13_441, 13_826, 14_017, 14_977, 16_130, 16_385, 18_305, 20_001, 20_546, 22_015),
)
WIDE_FLOAT_COLS = (
    *(1025, 1026, 1101, 1279, 1281, 1317, 1919, 1921, 2063, 2689, 2887, 3201, 3333, 4439, 5601),
    *(6501, 7041, 7043, 8125, 9187, 9601, 10_249, 10_623),
)


@pytest.mark.parametrize(
    ("cols", "dtype"),
    [
        *itertools.product(WIDE_COLS, (torch.float16, torch.bfloat16)),
        *itertools.product(WIDE_FLOAT_COLS, (torch.float32,)),
    ],
    ids=name_of,
)
def test_forward_of_wide_rows(cols: int, dtype: torch.dtype) -> None:
    """The bits do not depend on where rows of x begin, and few are as right as any."""
    for rows in (1, 2, 67, 1601):
        x, _, weight, bias = _arguments(rows, cols, dtype)
        if rows == 67:
            check_forward(x, [cols], weight, bias)
            check_forward(_narrowed(x), [cols], weight, bias)
            check_forward(x, [cols], weight.float(), bias.float())
        for parameters in ((weight, bias), (weight.float(), bias.float()), (None, bias)):
            results = ops.layer_norm_forward(x, [cols], *parameters, 1e-5, None)
            for other in (_narrowed(x), *(_in_memory_of_nan(x, i) for i in (1, 4, 8))):
                others = ops.layer_norm_forward(other, [cols], *parameters, 1e-5, None)
                assert all(a.equal(b) for a, b in zip(results, others, strict=True)), rows


# Each number of pairs of columns that a lane has of a row of two blocks; some of one (16-bit rows
# beside float32 parameters), four and eight.
STREAM_COLS = (
    *(22 * 64 * pairs - 36 - pairs for pairs in range(16, 31)),
    *(16_385, 18_306, 21_119, 21_857, 42_239, 42_241, 50_257),
    *(65_537, 84_479, 84_481, 98_001, 131_071, 168_959),
)
STREAM_FLOAT_COLS = (
    *(10_625, 11_263, 11_969, 12_671, 12_673, 25_343, 25_345, 42_239, 42_241, 50_257, 101_375),
    *(22 * 64 * pairs - 36 - pairs for pairs in range(10, 19)),
    *(88 * 64 * pairs - 36 - pairs for pairs in range(8, 19, 3)),
)


@pytest.mark.parametrize(
    ("cols", "dtype"),
    [
        *itertools.product(STREAM_COLS, (torch.float16, torch.bfloat16)),
        *itertools.product(STREAM_FLOAT_COLS, (torch.float32,)),
    ],
    ids=name_of,
)
def test_forward_of_rows_of_blocks_that_stay(
    force: Callable[..., None], cols: int, dtype: torch.dtype
) -> None:
    """The bits do not depend on where rows of x begin, nor on how many there are, of one cluster
    or all; rows that need a second look among others that do not.
    """
    _skip_without_clusters("ring")
    rows = max(67, 5_000_000 // cols | 1)
    one_dtype = dtype == torch.float32
    if plan_here("forward", rows, cols, dtype, one_dtype=one_dtype)["bulk_stages"] == 0:
        pytest.skip("not on this device")
    x, _, weight, bias = _arguments(rows, cols, dtype)
    if cols < 21_857:
        weight, bias = weight.float(), bias.float()
    x[3] += 3
    x[4] = 7.25
    x[5, : cols // 3] += 1000
    x[6:9] -= 2
    check_forward(x, [cols], weight, bias)
    for parameters in ((weight, bias), (weight.float(), bias.float()), (None, bias)):
        results = ops.layer_norm_forward(x, [cols], *parameters, 1e-5, None)
        assert results[0][4].equal(bias.to(dtype).expand(cols)), "equal columns"
        for other in (_narrowed(x), *(_in_memory_of_nan(x, i) for i in (1, 2, 4, 8))):
            others = ops.layer_norm_forward(other, [cols], *parameters, 1e-5, None)
            assert all(a.equal(b) for a, b in zip(results, others, strict=True))
    expected = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)
    for blocks, count in ((0, 1), (0, 2), (8, 9), (8, 40), (24, rows)):
        force(**({"blocks": blocks} if blocks else {}))
        for given in (x[:count], _narrowed(x[:count])):
            results = ops.layer_norm_forward(given, [cols], weight, bias, 1e-5, None)
            for result, whole in zip(results, expected, strict=True):
                assert result.equal(whole[:count]), (blocks, count)


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
@pytest.mark.parametrize("chunks", [9, 10, 11, 13, 17, 19, 23, 25, 31, 33, 39, 41, 49, 57, 65, 95])
def test_forward_of_whole_chunks_by_bulk_copies(chunks: int, dtype: torch.dtype) -> None:
    """Of as many rows that lie one behind the other as it takes: the bits of other rows."""
    cols = chunks * 16 // dtype.itemsize
    in_bulk = 0
    for rows in (450_001 // chunks, 3_300_017 // chunks):
        x, _, weight, bias = _arguments(rows, cols, dtype)
        for parameters in ((weight, bias), (weight.float(), bias.float()), (None, bias)):
            one_dtype = parameters[1].dtype == dtype
            in_bulk += plan_here(
                "forward", rows, cols, dtype, one_dtype=one_dtype, contiguous=True
            )["in_bulk"]  # fmt: skip
            results = ops.layer_norm_forward(x, [cols], *parameters, 1e-5, None)
            others = ops.layer_norm_forward(_narrowed(x), [cols], *parameters, 1e-5, None)
            assert all(a.equal(b) for a, b in zip(results, others, strict=True)), rows
    last = torch.cat((x[:5], x[-11:]))
    expected = ops.layer_norm_forward(last, [cols], None, bias, 1e-5, None)
    for result, few in zip(results, expected, strict=True):
        assert torch.cat((result[:5], result[-11:])).equal(few)
    check_forward(last, [cols], weight, bias)
    properties = torch.cuda.get_device_properties(0)
    if properties.major == 9 and "H100" not in properties.name:
        # (Of float32 lanes of four chunks are as well off without.)
        assert in_bulk > 0 or (dtype == torch.float32 and chunks in (13, 49, 57))


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
    _skip_without_clusters("ring")
    request = {"kernel": "elements", "weight_grads": "fused", "blocks": 2}
    force(**request)
    for rows in (1600, 1601, 1606, 1637) if cols < 1024 else (480, 485):
        plan = plan_here("backward", rows, cols, dtype, contiguous=True, **request)
        assert plan["bulk_stages"] > 0
        x, grad_out, weight, bias = _arguments(rows, cols, dtype)
        x, grad_out = _in_memory_of_nan(x, 8), _in_memory_of_nan(grad_out, 8)
        expected = check_backward(grad_out, x, [cols], weight, bias)
        again = check_backward(grad_out, x, [cols], weight, bias)
        assert all(a.equal(b) for a, b in zip(expected, again, strict=True)), rows
        _check_dx_wherever_rows_lie(grad_out, x, weight, bias)


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
    _skip_without_clusters("ring")
    for rows, blocks in ((1, 8), (5, 2), (6, 3), (29, 16), *([(200, 8)] if cols > 10_560 else [])):
        request = {"weight_grads": "fused", "blocks": blocks}
        force(**request)
        if not plan_here("backward", rows, cols, dtype, **request)["is_wide"]:
            pytest.skip("not on this device")
        x, grad_out, weight, bias = _arguments(rows, cols, dtype)
        x, grad_out = _in_memory_of_nan(x, 8), _in_memory_of_nan(grad_out, 8)
        statistics = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)[1:]
        expected = check_backward(grad_out, x, [cols], weight, bias)
        for of_x, of_grad in ((8, 8), (1, 1), (0, 1), (2, 5)):
            results = ops.layer_norm_backward(
                _in_memory_of_nan(grad_out, of_grad), _in_memory_of_nan(x, of_x), [cols],
                *statistics, weight, bias, 1e-5, [True] * 3,
            )  # fmt: skip
            assert all(a.equal(b) for a, b in zip(results, expected, strict=True)), rows
        _check_dx_wherever_rows_lie(grad_out, x, weight, bias)
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
        x, grad_out, weight, bias = _arguments(rows, cols, dtype)
        statistics = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)[1:]
        expected = check_backward(grad_out, x, [cols], weight, bias)
        plan = plan_here("backward", rows, cols, dtype, contiguous=True, kernel="elements")
        same = 1 if plan["bulk_stages"] > 0 else 3
        for of_x, of_grad in ((1, 1), (0, 1), (2, 5)):
            results = ops.layer_norm_backward(
                _in_memory_of_nan(grad_out, of_grad), _in_memory_of_nan(x, of_x), [cols],
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
    _skip_without_clusters("ring" if "elements" in kernel else kernel)
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
        x, grad_out, weight, bias = _arguments(rows, cols, dtype)
        check_backward(grad_out, x, [cols], weight, bias)
        check_backward(_narrowed(grad_out), _narrowed(x), [cols], weight, None)
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
        x, grad_out, weight, bias = _arguments(1, cols, dtype)
        weight, bias = widen(weight), widen(bias)
        mean, rstd = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)[1:]
        for given in (x, _narrowed(x)):
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
@pytest.mark.parametrize("cols", [648, 672, 776, 896])
def test_rows_that_leave_lanes_idle(cols: int, dtype: torch.dtype) -> None:
    """Many have a kernel of their own, with the bits of few."""
    rows = 16 * torch.cuda.get_device_properties("cuda").multi_processor_count + 1
    assert plan_here("forward", rows, cols, dtype)["kernel"] == "rows"
    assert plan_here("forward", 7, cols, dtype)["kernel"] == "short_rows"
    x, _, weight, bias = _arguments(rows, cols, dtype)
    x[5] = 100
    x[6, 0] = 1000
    many = check_forward(x, [cols], weight, bias)
    few = check_forward(x[:7], [cols], weight, bias)
    assert all(ours[:7].equal(other) for ours, other in zip(many, few))
    check_forward(x, [cols], None, bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("cols", [2600, 4200, 5200])
def test_rows_of_several_warps_that_leave_lanes_idle(cols: int, dtype: torch.dtype) -> None:
    """Many have a kernel of fewer registers, with the bits of few."""
    rows = 16 * torch.cuda.get_device_properties("cuda").multi_processor_count + 1
    assert plan_here("forward", rows, cols, dtype)["more_warps"]
    assert not plan_here("forward", 7, cols, dtype)["more_warps"]
    x, _, weight, bias = _arguments(rows, cols, dtype)
    many = check_forward(x, [cols], weight, bias)
    few = check_forward(x[:7], [cols], weight, bias)
    assert all(ours[:7].equal(other) for ours, other in zip(many, few))


# By column, a few lanes, one warp, several with chunks in registers, clusters of two and eight.
@pytest.mark.parametrize("out", [None, torch.float32], ids=["as_x", "float32"])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=["as_x", "float32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize(
    "cols",
    [66, 152, 257, 264, 640, 1023, 1600, 2601, 4096, 6145, 8191, 16_385, 20_001, 33_001, 98_001],
)
def test_means_near_zero_and_far_from_it(
    cols: int, dtype: torch.dtype, weight_dtype: torch.dtype | None, out: torch.dtype | None
) -> None:
    """Sums serve near ones, differences the others; none depends on the rows beside it."""
    _, _, weight, bias = _arguments(40, cols, dtype)
    weight, bias = (p.to(weight_dtype or dtype) for p in (weight, bias))
    x = random((40, cols), torch.float32, "cuda")
    means = torch.tensor([0, 0.9, -0.99, 1.01, 1.9, -2.1, 5, 100], device="cuda")
    x = (x + means.repeat(5)[:, None]).to(dtype)
    x[8:16, : cols // 8] *= 100  # these columns weigh more than all others
    x[16] = 0
    x[17] = 3.0
    x[18, 1:] = 0.25
    x[18, 0] = 1000.0
    x[19, cols // 2] = float("inf")
    x[20, cols - 1] = float("nan")
    together = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, out)
    for row in (0, 1, 3, 7, 9, 11, 16, 17, 18, 19, 20, 25, 39):
        alone = check_forward(x[row : row + 1], [cols], weight, bias, out_dtype=out)
        for ours, other in zip(together, alone):
            assert ours[row].nan_to_num(nan=7.0).equal(other[0].nan_to_num(nan=7.0))
    assert together[0][17].equal(bias.to(out or dtype))


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
@pytest.mark.parametrize("chunks", [3, 5, 7, 9, 13, 15, 17, 19])
def test_rows_that_a_warp_writes_together(chunks: int, dtype: torch.dtype) -> None:
    """In any number of rows, the last warp's of any number, and with the bits of rows that it does
    not write so.
    """
    cols = chunks * 16 // dtype.itemsize
    plan = plan_here("forward", 5, cols, dtype)
    assert plan["kernel"] == "short_rows"
    assert plan["gathers"] == (chunks >= 13 or dtype != torch.float32)
    x, _, weight, bias = _arguments(1003, cols, dtype)
    x[5] = 100
    x[6, 0] = 1000
    whole = check_forward(x, [cols], weight, bias)
    apart = check_forward(_narrowed(x), [cols], weight, bias)
    assert all(one.equal(other) for one, other in zip(whole, apart))
    for rows in (1, 2, *range(7, 65, 3), 1000, 1002):
        some = ops.layer_norm_forward(x[:rows], [cols], weight, bias, 1e-5, None)
        assert all(one.equal(other[:rows]) for one, other in zip(some, whole))
    check_forward(x, [cols], None, bias)
    if dtype != torch.float32:
        wide = weight.float(), bias.float()
        for rows in (1003, 7):
            results = check_forward(x[:rows], [cols], *wide)
            others = check_forward(_narrowed(x[:rows]), [cols], *wide)
            assert all(one.equal(other) for one, other in zip(results, others))


@pytest.mark.parametrize(
    ("cols", "dtype"),
    [
        (64, torch.bfloat16),
        (200, torch.float16),
        (400, torch.bfloat16),
        (512, torch.float16),
        (1600, torch.bfloat16),
        (512, torch.float32),
        (256, torch.float64),
    ],
    ids=str,
)
def test_statistics_of_so_many_rows_that_others_have_been_written(
    cols: int, dtype: torch.dtype
) -> None:
    """Mean and rstd, which the L2 cache keeps until 8 MB of later rows have been written."""
    rows = 24 * 2**20 // (cols * dtype.itemsize) + 5
    assert plan_here("forward", rows, cols, dtype)["threads_per_row"] <= 32  # others: plain stores
    x, _, weight, bias = _arguments(rows, cols, dtype)
    x += torch.arange(rows, device="cuda", dtype=torch.float32).remainder(7)[:, None].to(dtype)
    whole = check_forward(x, [cols], weight, bias)
    for begin in (0, rows // 2, rows - 77):
        some = ops.layer_norm_forward(x[begin : begin + 77], [cols], weight, bias, 1e-5, None)
        assert all(one.equal(other[begin : begin + 77]) for one, other in zip(some, whole))


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
    x, grad_out, weight, bias = _arguments(rows, cols, dtype)
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
    assert check_backward(_narrowed(grad_out), _narrowed(x), [cols], weight, bias)[0].equal(whole)
    assert dx_of(rows, _narrowed(x), _narrowed(grad_out)).equal(whole)
    for given in (grad_out.float(), _narrowed(grad_out.float())):
        assert dx_of(rows, x, given).equal(whole)
    check_backward(grad_out.float(), x, [cols], weight, bias)
    force(kernel="few_rows")
    for count in (1, 2, 5, 31, 1003):
        assert dx_of(count).equal(whole[:count])
        assert dx_of(count, _narrowed(x), grad_out).equal(whole[:count])
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
    x, grad_out, weight, bias = _arguments(rows, cols, dtype)
    force(kernel="ring", weight_grads="fused")
    whole = check_backward(grad_out, x, [cols], weight, bias)[0]
    assert check_backward(_narrowed(grad_out), _narrowed(x), [cols], weight, bias)[0].equal(whole)
    check_backward(grad_out, x, [cols], None, None)
    check_backward(grad_out, x, [cols], weight.float(), bias.float())
    outputs = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)
    for request in (
        {"kernel": "ring"}, {"kernel": "ring", "weight_grads": "columns"}, {"kernel": "few_rows"}
    ):  # fmt: skip
        force(**request)
        for count in (1, 2, 5, 31, 307):
            given, grad = x[:count], grad_out[:count]
            for each in (given, _narrowed(given)):
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
        x, grad_out, weight, bias = _arguments(rows, cols, dtype)
        dx = []
        for together in (1, merged):
            force(merged=together, **common)
            dx.append(check_backward(grad_out, x, [cols], weight, bias)[0])
            if whole:
                dx.append(
                    check_backward(_narrowed(grad_out), _narrowed(x), [cols], weight, bias)[0]
                )
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
        x, grad_out, weight, bias = _arguments(rows, cols, dtype)
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
    x, grad_out, weight, bias = _arguments(rows, cols, dtype)
    outputs = check_forward(x, [cols], weight, bias)
    gradients = check_backward(grad_out, x, [cols], weight, bias)
    assert outputs[0].equal(check_forward(_narrowed(x), [cols], weight, bias)[0])
    narrowed = check_backward(_narrowed(grad_out), _narrowed(x), [cols], weight, bias)
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
    x, grad_out, weight, bias = _arguments(rows, cols, torch.float32)
    force(**request)
    for each in (x, _narrowed(x)):
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
    x, grad_out, weight, bias = _arguments(rows, cols, dtype)
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


def test_a_context_with_few_multiprocessors() -> None:
    """Where a grid cannot run as a whole, rows are cut instead."""
    green_contexts = pytest.importorskip("torch.cuda.green_contexts")
    cols = 300_000
    x, grad_out, weight, bias = _arguments(13, cols, torch.bfloat16)
    try:
        context = green_contexts.GreenContext.create(32, 0)
    except RuntimeError as error:
        pytest.skip(f"no green contexts: {error}")
    context.set_context()
    try:
        check_forward(x, [cols], weight, bias)
        check_backward(grad_out, x, [cols], weight, bias)
    finally:
        context.pop_context()


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
    _skip_without_clusters(kernel)
    for weight_grads in ("columns", "fused"):
        force(kernel=kernel, weight_grads=weight_grads)
        for rows, cols in ((37, 40), (5, 1001), (3, 4096)):
            x, grad_out, weight, bias = _arguments(rows, cols, dtype)
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
    _skip_without_clusters("ring")
    for weight_grads in ("columns", "fused"):
        force(kernel="ring", weight_grads=weight_grads, cluster_size=cluster_size)
        for rows, cols in (*SHAPES, (20_011, 41), (5003, 1000), (3001, 769), (2003, 5120)):
            x, grad_out, weight, bias = _arguments(rows, cols, dtype)
            noise = random((rows, cols), torch.float32, "cuda", seed=4)
            check_backward(grad_out.float() + noise, x, [cols], weight, bias)
            same = check_backward(grad_out, x, [cols], weight, None)
            wide = check_backward(_narrowed(grad_out.float()), _narrowed(x), [cols], weight, None)
            plan = plan_here("backward", rows, cols, dtype, dy_dtype="float32", kernel="ring",
                             cluster_size=cluster_size)  # fmt: skip
            assert plan["kernel"] == "ring" or cols <= 32 or cols > 131_072
            if plan["kernel"] == "ring":
                assert wide[0].equal(same[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
def test_forced_kernels_do_not_depend_on_the_batch(
    force: Callable[..., None], kernel: str, dtype: torch.dtype
) -> None:
    _skip_without_clusters(kernel)
    force(kernel=kernel)
    for cols in (24, 40, 152, 257, 1000, 1023, 4096):
        x, grad_out, weight, bias = _arguments(700, cols, dtype)
        outputs = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)
        mask = [True, True, True]
        dx = ops.layer_norm_backward(grad_out, x, [cols], *outputs[1:], weight, bias, 1e-5, mask)[0]
        for rows in (1, 3, 255, 256, 257):
            part = slice(100, 100 + rows)
            some = ops.layer_norm_forward(x[part], [cols], weight, bias, 1e-5, None)
            assert all(a.equal(b[part]) for a, b in zip(some, outputs))
            assert ops.layer_norm_backward(
                grad_out[part], x[part], [cols], *some[1:], weight, bias, 1e-5, mask
            )[0].equal(dx[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
def test_rows_of_nan_spoil_no_other_row(
    force: Callable[..., None], kernel: str, dtype: torch.dtype
) -> None:
    """Many rows pass through the same threads and the same shared memory."""
    _skip_without_clusters("ring" if "elements" in kernel else kernel)
    force(kernel=kernel)
    for cols in (40, 257, 1000, 4099):
        x, grad_out, weight, bias = _arguments(3001, cols, dtype)
        _, mean, rstd = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)
        mask = [True, True, True]
        for each in (lambda t: t, _narrowed):
            spoilt_x, spoilt_mean, spoilt_grad = x.clone(), mean.clone(), grad_out.clone()
            spoilt_x[::5] = spoilt_mean[::5] = float("nan")
            spoilt_grad[2::7] = float("inf")
            whole, spoilt = (
                ops.layer_norm_backward(
                    each(g), each(rows), [cols], means, rstd, weight, bias, 1e-5, mask
                )[0]
                for rows, means, g in ((x, mean, grad_out), (spoilt_x, spoilt_mean, spoilt_grad))
            )
            sound = torch.ones(len(x), dtype=torch.bool, device="cuda")
            sound[::5] = sound[2::7] = False
            assert whole[sound].equal(spoilt[sound])
            assert not spoilt[~sound].isfinite().any()


def _kernel_names(function: Callable[[], Any]) -> frozenset[str]:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    return frozenset(event.name for event in profile.events())


@pytest.mark.filterwarnings("ignore")
def test_each_forced_kernel_is_another(force: Callable[..., None]) -> None:
    """Otherwise the tests above would run one kernel under several names."""
    kernels = KERNELS if torch.cuda.get_device_capability() >= (9, 0) else ["rows", "split"]
    x, grad_out, weight, bias = _arguments(64, 1024, torch.float32)
    _, mean, rstd = ops.layer_norm_forward(x, [1024], weight, bias, 1e-5, None)
    runs: dict[str, Callable[[], Any]] = {
        "forward": lambda: ops.layer_norm_forward(x, [1024], weight, bias, 1e-5, None),
        "backward": lambda: ops.layer_norm_backward(
            grad_out, x, [1024], mean, rstd, weight, bias, 1e-5, [True, True, True]
        ),
    }
    for run in runs.values():
        seen = []
        for kernel in kernels:
            force(kernel=kernel, weight_grads="columns")
            seen.append(_kernel_names(run))
        if not any("layer_norm" in name or "fastnorm" in name for names in seen for name in names):
            pytest.skip("the profiler sees no kernels on this machine")
        assert len(set(seen)) == len(kernels)


def test_stream_of_the_caller() -> None:
    """Work queued before on the same stream is seen; launched elsewhere, zeros would be read."""
    x, grad_out, weight, bias = _arguments(257, 1000, torch.float32)
    expected = check_forward(x, [1000], weight, bias)
    mask = [True, True, True]
    gradients = ops.layer_norm_backward(
        grad_out, x, [1000], *expected[1:], weight, bias, 1e-5, mask
    )
    stream = torch.cuda.Stream()
    late_x, late_grad = torch.zeros_like(x), torch.zeros_like(grad_out)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late_x.copy_(x)
        late_grad.copy_(grad_out)
        outputs = ops.layer_norm_forward(late_x, [1000], weight, bias, 1e-5, None)
        late_gradients = ops.layer_norm_backward(
            late_grad, late_x, [1000], *outputs[1:], weight, bias, 1e-5, mask
        )
    stream.synchronize()
    for ours, other in zip((*outputs, *late_gradients), (*expected, *gradients)):
        assert ours.equal(other)


def _beside_each_other(call: Callable[[], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """Results of calls in several streams, whose blocks take each other's places."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for _ in range(4):
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(call())
        torch.cuda.synchronize()
    return results


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
def test_blocks_that_keep_together_rely_on_nobody(dtype: torch.dtype) -> None:
    """Blocks of many long rows pause for those that lag behind. Beside other work, for which some
    of them find no place for a while, they end all the same, and results have the bits of few rows
    at a time, whose blocks do not pause.
    """
    _skip_without_clusters("ring")
    rows = 1500
    for cols, parameters in ((32_768, dtype), (49_152 * 2 // dtype.itemsize, torch.float32)):
        x, _, weight, bias = _arguments(rows, cols, dtype)
        weight, bias = weight.to(parameters), bias.to(parameters)
        plan = plan_here("forward", rows, cols, dtype, one_dtype=dtype == parameters)
        assert (plan["kernel"], plan["in_grid"]) == ("ring", False)

        def forward(x: Tensor) -> tuple[Tensor, ...]:
            return ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)  # noqa: B023

        parts = [forward(part) for part in x.split(300)]
        expected = [torch.cat(results) for results in zip(*parts, strict=True)]
        for ours in _beside_each_other(lambda: forward(x)):  # noqa: B023
            assert all(map(torch.equal, ours, expected))


def test_clusters_that_keep_together_rely_on_nobody() -> None:
    """The same of the backward, of float32."""
    _skip_without_clusters("ring")
    rows, mask = 1500, [True, True, True]
    for cols in (12_288, 49_152):
        x, grad, weight, bias = _arguments(rows, cols, torch.float32)
        plan = plan_here("backward", rows, cols, torch.float32)
        assert plan["kernel"] == "ring"
        assert plan["cluster_size"] > 1
        _, mean, rstd = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)

        def backward() -> tuple[Tensor, ...]:
            saved = (mean, rstd, weight, bias)  # noqa: B023
            return ops.layer_norm_backward(grad, x, [cols], *saved, 1e-5, mask)  # noqa: B023

        expected = check_backward(grad, x, [cols], weight, bias)
        for ours in _beside_each_other(backward):
            assert all(map(torch.equal, ours, expected))


def test_calls_do_not_wait_for_the_device() -> None:
    x, grad_out, weight, bias = _arguments(257, 1000, torch.bfloat16)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = ops.layer_norm_forward(x, [1000], weight, bias.float(), 1e-5, torch.float32)
        ops.layer_norm_backward(
            grad_out, x, [1000], *outputs[1:], weight, bias, 1e-5, [True, True, True]
        )
    finally:
        torch.cuda.set_sync_debug_mode(before)
    torch.cuda.synchronize()


@pytest.mark.parametrize("kernel", [None, *KERNELS])
@pytest.mark.parametrize(("rows", "cols"), [(257, 1000), (4000, 64), (3, 40_000), (2, 300_000)])
def test_graph_capture_and_replay(
    force: Callable[..., None], rows: int, cols: int, kernel: str | None
) -> None:
    """A training step captured once and replayed on other data equals the eager step bit by bit."""
    _skip_without_clusters(kernel or "")
    force(kernel=kernel)
    norm = fastnorm.LayerNorm(cols, device="cuda")
    x = torch.zeros(rows, cols, device="cuda", requires_grad=True)
    grad_out = torch.zeros(rows, cols, device="cuda")
    leaves = [x, *norm.parameters()]

    def step() -> tuple[Tensor, ...]:
        y = norm(x)
        return (y, *torch.autograd.grad(y, leaves, grad_out))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (5, 6):
        with torch.no_grad():
            x.copy_(random((rows, cols), torch.float32, "cuda", seed=seed))
            grad_out.copy_(random((rows, cols), torch.float32, "cuda", seed=seed + 10))
        graph.replay()
        torch.cuda.synchronize()
        replayed = [t.clone() for t in captured]
        for ours, eager in zip(replayed, step()):
            assert ours.equal(eager)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_device_of_the_tensors_not_the_current_one() -> None:
    x, grad_out, weight, bias = _arguments(257, 1000, torch.float32)
    mask = [True, True, True]

    def run(*tensors: Tensor) -> list[Tensor]:
        x, grad_out, weight, bias = tensors
        outputs = ops.layer_norm_forward(x, [1000], weight, bias, 1e-5, None)
        return [
            *outputs,
            *ops.layer_norm_backward(grad_out, x, [1000], *outputs[1:], weight, bias, 1e-5, mask),
        ]

    expected = run(x, grad_out, weight, bias)
    with torch.cuda.device(0):
        others = run(*(t.to("cuda:1") for t in (x, grad_out, weight, bias)))
        assert torch.cuda.current_device() == 0
    for ours, first in zip(others, expected):
        assert ours.device == torch.device("cuda:1")
        assert ours.to("cuda:0").equal(first)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_weight_on_another_gpu_is_refused() -> None:
    x, weight = torch.ones(2, 3, device="cuda:0"), torch.ones(3, device="cuda:1")
    with pytest.raises(RuntimeError, match="cuda:1"):
        ops.layer_norm(x, [3], weight)


def test_threads_of_python_do_not_disturb_each_other() -> None:
    x, grad_out, weight, bias = _arguments(300, 1000, torch.float32)
    weight.requires_grad_()
    x.requires_grad_()

    def run() -> list[Tensor]:
        y = ops.layer_norm(x, [1000], weight, bias)
        return [y, *torch.autograd.grad(y, (x, weight), grad_out)]

    expected = run()
    results: list[list[Tensor]] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                results.append(run())
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(results) == 80
    assert all(a.equal(b) for result in results for a, b in zip(result, expected))


def test_memory_is_given_back() -> None:
    arguments = _arguments(500, 70_000, torch.bfloat16)

    def run() -> None:
        x, grad_out, weight, bias = arguments
        outputs = ops.layer_norm_forward(x, [70_000], weight, bias, 1e-5, None)
        ops.layer_norm_backward(
            grad_out, x, [70_000], *outputs[1:], weight, bias, 1e-5, [True, True, True]
        )

    run()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        run()
    assert torch.cuda.memory_allocated() == before


def test_an_expanded_gradient_is_not_copied() -> None:
    """Rows with stride zero are read in place: no memory of the input's size beyond dx."""
    rows, cols = 20_000, 1024
    x = torch.ones(rows, cols, device="cuda")
    grad_out = torch.ones(1, cols, device="cuda").expand(rows, cols)
    _, mean, rstd = ops.layer_norm_forward(x, [cols], None, None, 1e-5, None)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.layer_norm_backward(grad_out, x, [cols], mean, rstd, None, None, 1e-5, [True, False, False])
    used = torch.cuda.max_memory_allocated() - before
    assert used < 1.5 * x.numel() * x.element_size()


SANITIZER_SHAPES = [(5, 1), (3, 7), (9, 33), (130, 24), (3, 255), (2, 1027), (33, 64)]


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("weight_grads", ["fused", "columns"])
@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
def test_small_shapes_for_the_sanitizer(
    force: Callable[..., None], kernel: str, weight_grads: str, dtype: torch.dtype
) -> None:
    """Every kernel on ragged shapes, with references computed on the CPU to keep this short."""
    _skip_without_clusters(kernel)
    force(kernel=kernel, weight_grads=weight_grads)
    arithmetic = accumulation_dtype(dtype)
    for (rows, cols), narrowed in itertools.product(SANITIZER_SHAPES, (False, True)):
        x, grad_out = random((rows, cols), dtype, "cpu"), random((rows, cols), dtype, "cpu", seed=3)
        weight, bias = random((cols,), dtype, "cpu", seed=1), random((cols,), dtype, "cpu", seed=2)
        on_gpu = [t.cuda() for t in (x, grad_out, weight, bias)]
        if narrowed:
            on_gpu[:2] = [_narrowed(t) for t in on_gpu[:2]]
        outputs = ops.layer_norm_forward(on_gpu[0], [cols], *on_gpu[2:], 1e-5, None)
        gradients = ops.layer_norm_backward(
            on_gpu[1], on_gpu[0], [cols], *outputs[1:], *on_gpu[2:], 1e-5, [True, True, True]
        )
        theirs = (
            *aten_forward(x, [cols], weight, bias, 1e-5),
            *aten_backward(grad_out, x, [cols], weight, 1e-5),
        )
        references = (
            *forward_reference(x, [cols], weight, bias, 1e-5),
            *backward_reference(grad_out, x, [cols], weight, 1e-5),
        )
        names = ("y", "mean", "rstd", "dx", "dw", "db")
        dtypes = (dtype, arithmetic, arithmetic, dtype, dtype, dtype)
        for what, ours, aten, reference, result_dtype in zip(
            names, (*outputs, *gradients), theirs, references, dtypes
        ):
            assert_no_worse_than_aten(
                f"{what} of {rows} x {cols}", ours.cpu(), aten, reference, result_dtype, arithmetic
            )
