"""The forward's CUDA kernels: each forced, or reached by its widths."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_kernels import (
    KERNELS,
    SHAPES,
    arguments_of,
    in_memory_of_nan,
    skip_without_clusters,
    spaced,
)
from reference import (
    DTYPES,
    SMALL_DTYPES,
    check_forward,
    name_of,
    ops,
    random,
)
from torch import Tensor
from variants import GRID, plan_here

pytestmark = pytest.mark.cuda

FORWARD_KERNELS = ["short_rows", "elements", "ring", *KERNELS]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cluster_size", [1, 2, 4, 8, GRID])
@pytest.mark.parametrize("kernel", FORWARD_KERNELS)
def test_forced_forward_kernels(
    force: Callable[..., None], kernel: str, cluster_size: int, dtype: torch.dtype
) -> None:
    skip_without_clusters(kernel)
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
        x, _, weight, bias = arguments_of(rows, cols, dtype)
        check_forward(x, [cols], weight, bias)
        check_forward(spaced(x), [cols], None, bias)
        ran += 1
    assert ran >= (5 if kernel in ("short_rows", "elements") else 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kernel", FORWARD_KERNELS)
def test_forced_kernels_with_infinities(
    force: Callable[..., None], kernel: str, dtype: torch.dtype
) -> None:
    """Anywhere in a row: its mean is that infinity, and NaN if it holds both."""
    skip_without_clusters(kernel)
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
        for each in (x, spaced(x)):
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
    x, _, weight, bias = arguments_of(rows, cols, dtype)
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
    x, _, weight, bias = arguments_of(37, cols, dtype)

    def moved(parameter: Tensor) -> Tensor:
        memory = parameter.new_full((cols + 2,), float("nan"))
        return memory[1:-1].copy_(parameter)

    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
        return ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)

    ones, zeros = torch.ones_like(weight), torch.zeros_like(bias)
    for each in (x, spaced(x)):
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
    skip_without_clusters("ring")
    for rows, cols in ((1, 40), (1031, 40), (700, 1027), (333, 8192), (97, 16_385), (67, 40_000)):
        x, _, weight, bias = arguments_of(rows, cols, dtype)
        for each in (x, spaced(x)):
            results = []
            for kernel in ("ring", "cluster"):
                force(kernel=kernel, cluster_size=cluster_size)
                results.append(ops.layer_norm_forward(each, [cols], weight, bias, 1e-5, None))
            for ring, cluster in zip(*results, strict=True):
                assert ring.equal(cluster), f"{rows} x {cols}"


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
def test_uneven_rows_by_three_and_five_blocks(
    force: Callable[..., None], dtype: torch.dtype
) -> None:
    """Many rows for each cluster, few, and one have the same bits, wherever they start. (Where
    memory is fast they have another kernel if none is forced.)
    """
    skip_without_clusters("ring")
    force(kernel="ring")
    block = 4096 * 16 // dtype.itemsize  # columns
    for cols, size in ((2 * block + 1, 3), (round(2.4 * block) | 1, 3), (4 * block + 3, 5)):
        for rows in (1, 7, 401):
            x, _, weight, bias = arguments_of(rows, cols, dtype)
            if dtype != torch.float32 or size == 3:
                plan = plan_here("forward", rows, cols, dtype, kernel="ring")
                assert (plan["kernel"], plan["cluster_size"]) == ("ring", size)
            results = check_forward(x, [cols], weight, bias)
            for other, count in ((spaced(x), rows), (x[-1:].clone(), 1)):
                again = ops.layer_norm_forward(other, [cols], weight, bias, 1e-5, None)
                for result, same in zip(results, again, strict=True):
                    assert result[-count:].equal(same), f"{rows} x {cols}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
def test_the_forward_ring_beside_float32_parameters(
    force: Callable[..., None], dtype: torch.dtype
) -> None:
    """Many rows for each cluster, few, and one have the same bits, wherever they start, whether or
    not a warp does nothing but exchange moments, and whichever parameters are missing."""
    skip_without_clusters("ring")
    block = 384 * 7 * 8  # columns
    for cols, rows in (
        (16_392, 601), (16_385, 601), (block, 401), (block + 8, 301), (2 * block - 7, 301),
        (50_257, 301), (4 * block + 8, 101), (8 * block, 77), (8 * block + 8, 77), (300_001, 19),
    ):  # fmt: skip
        for count in (1, 7, rows):
            plan = plan_here("forward", count, cols, dtype, one_dtype=False, kernel="ring")
            assert (plan["kernel"], plan["chunks_per_thread"]) == ("ring", 7)
            force(kernel="ring")  # some of them have another where memory is fast
            x, _, weight, bias = arguments_of(count, cols, dtype)
            weight, bias = weight.float() / 3, bias.float() / 3
            results = check_forward(x, [cols], weight, bias)
            again = {
                "narrowed": (spaced(x), weight, bias),
                "one row": (x[-1:].clone(), weight, bias),
                "shifted parameters": (x, spaced(weight[None])[0], spaced(bias[None])[0]),
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
    skip_without_clusters("ring")
    chunk = 16 // dtype.itemsize
    for rows, chunks in ((700, 3073), (5, 3074), (140, 3473), (3, 3999), (401, 3585), (133, 4096)):
        cols = chunk * chunks
        x, _, weight, bias = arguments_of(rows, cols, dtype)
        for each in (x, spaced(x)):
            results = []
            for request in ({"kernel": "ring", "cluster_size": 1}, {"kernel": "rows"}):
                plan = plan_here("forward", rows, cols, dtype, **request)
                assert (plan["kernel"], plan["cluster_size"]) == (request["kernel"], 1)
                force(**request)
                results.append(ops.layer_norm_forward(each, [cols], weight, bias, 1e-5, None))
            for ring, block in zip(*results, strict=True):
                assert ring.equal(block), f"{rows} x {cols}"


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
        x, _, weight, bias = arguments_of(rows, cols, dtype)
        assert plan_here("forward", rows, cols, dtype)["kernel"] == "elements"
        check_forward(x, [cols], weight, bias)
        for parameters in ((weight, bias), (weight.float(), bias.float()), (None, bias)):
            results = ops.layer_norm_forward(x, [cols], *parameters, 1e-5, None)
            others = ops.layer_norm_forward(spaced(x), [cols], *parameters, 1e-5, None)
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
        x, _, weight, bias = arguments_of(rows, cols, dtype)
        if rows == 67:
            check_forward(x, [cols], weight, bias)
            check_forward(spaced(x), [cols], weight, bias)
            check_forward(x, [cols], weight.float(), bias.float())
        for parameters in ((weight, bias), (weight.float(), bias.float()), (None, bias)):
            results = ops.layer_norm_forward(x, [cols], *parameters, 1e-5, None)
            for other in (spaced(x), *(in_memory_of_nan(x, i) for i in (1, 4, 8))):
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
    skip_without_clusters("ring")
    rows = max(67, 5_000_000 // cols | 1)
    one_dtype = dtype == torch.float32
    if plan_here("forward", rows, cols, dtype, one_dtype=one_dtype)["bulk_stages"] == 0:
        pytest.skip("not on this device")
    x, _, weight, bias = arguments_of(rows, cols, dtype)
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
        for other in (spaced(x), *(in_memory_of_nan(x, i) for i in (1, 2, 4, 8))):
            others = ops.layer_norm_forward(other, [cols], *parameters, 1e-5, None)
            assert all(a.equal(b) for a, b in zip(results, others, strict=True))
    expected = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)
    for blocks, count in ((0, 1), (0, 2), (8, 9), (8, 40), (24, rows)):
        force(**({"blocks": blocks} if blocks else {}))
        for given in (x[:count], spaced(x[:count])):
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
        x, _, weight, bias = arguments_of(rows, cols, dtype)
        for parameters in ((weight, bias), (weight.float(), bias.float()), (None, bias)):
            one_dtype = parameters[1].dtype == dtype
            in_bulk += plan_here(
                "forward", rows, cols, dtype, one_dtype=one_dtype, contiguous=True
            )["in_bulk"]  # fmt: skip
            results = ops.layer_norm_forward(x, [cols], *parameters, 1e-5, None)
            others = ops.layer_norm_forward(spaced(x), [cols], *parameters, 1e-5, None)
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
@pytest.mark.parametrize("cols", [648, 672, 776, 896])
def test_rows_that_leave_lanes_idle(cols: int, dtype: torch.dtype) -> None:
    """Many have a kernel of their own, with the bits of few."""
    rows = 16 * torch.cuda.get_device_properties("cuda").multi_processor_count + 1
    assert plan_here("forward", rows, cols, dtype)["kernel"] == "rows"
    assert plan_here("forward", 7, cols, dtype)["kernel"] == "short_rows"
    x, _, weight, bias = arguments_of(rows, cols, dtype)
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
    x, _, weight, bias = arguments_of(rows, cols, dtype)
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
    _, _, weight, bias = arguments_of(40, cols, dtype)
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
    x, _, weight, bias = arguments_of(1003, cols, dtype)
    x[5] = 100
    x[6, 0] = 1000
    whole = check_forward(x, [cols], weight, bias)
    apart = check_forward(spaced(x), [cols], weight, bias)
    assert all(one.equal(other) for one, other in zip(whole, apart))
    for rows in (1, 2, *range(7, 65, 3), 1000, 1002):
        some = ops.layer_norm_forward(x[:rows], [cols], weight, bias, 1e-5, None)
        assert all(one.equal(other[:rows]) for one, other in zip(some, whole))
    check_forward(x, [cols], None, bias)
    if dtype != torch.float32:
        wide = weight.float(), bias.float()
        for rows in (1003, 7):
            results = check_forward(x[:rows], [cols], *wide)
            others = check_forward(spaced(x[:rows]), [cols], *wide)
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
    x, _, weight, bias = arguments_of(rows, cols, dtype)
    x += torch.arange(rows, device="cuda", dtype=torch.float32).remainder(7)[:, None].to(dtype)
    whole = check_forward(x, [cols], weight, bias)
    for begin in (0, rows // 2, rows - 77):
        some = ops.layer_norm_forward(x[begin : begin + 77], [cols], weight, bias, 1e-5, None)
        assert all(one.equal(other[begin : begin + 77]) for one, other in zip(some, whole))
