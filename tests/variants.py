"""Every variant of the CUDA kernels as a list of small calls that reach it through the plan.

The plan is asked, width by width, where it changes its mind; the calls lie on both sides of each
change, one column less and one more, with aligned rows and with rows that are not. The list needs
no GPU; running it does.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from reference import DTYPES, SMALL_DTYPES, name_of, ops, random
from torch import Tensor

from fastnorm import _C

Request = tuple[tuple[str, Any], ...]

DTYPE_OF_BYTES = {2: "bfloat16", 4: "float32", 8: "float64"}  # float16 has bfloat16's plans
# Of a row beyond a warp: where other instantiations begin, or other ways through them.
MOST_THREADS = (192, 256, 384, 512, 10**9)
GRID = 17  # blocks of a grid that runs as a whole, which are asked for so; others: the same code
# Its blocks hold so few rows at once that they leave several partial sums of hundreds of rows.
SHARES = {"kernel": "ring", "cluster_size": 60, "weight_grads": "fused"}
FORWARD_REQUESTS: list[dict[str, Any]] = [
    {},
    {"kernel": "short_rows"},
    {"kernel": "elements"},
    {"kernel": "rows"},
    *({"kernel": "cluster", "cluster_size": size} for size in (2, 4, 8)),
    *({"kernel": "ring", "cluster_size": size} for size in (1, 2, 4, 8, GRID)),
    *({"kernel": "ring", "cluster_size": size, "exchange_warp": True} for size in (1, 2)),
    {"kernel": "split"},
]
BACKWARD_REQUESTS: list[dict[str, Any]] = [
    {"weight_grads": weight_grads, **request}
    for weight_grads in ("fused", "columns")
    for request in (
        {"kernel": "elements"},
        *({"kernel": "elements", "cluster_size": size} for size in (2, 4, 8)),
        {"kernel": "ring"},
        *({"kernel": "ring", "cluster_size": size} for size in (2, 3, 4, 8, GRID)),
        {"kernel": "ring", "cluster_size": 2, "exchange_warp": False},
        {"kernel": "rows"},
        *({"kernel": "cluster", "cluster_size": size} for size in (2, 4, 8)),
        {"kernel": "split"},
    )
    if (weight_grads, request["kernel"]) != ("fused", "split")
]
BACKWARD_REQUESTS += [
    {"kernel": "few_elements"},
    *({"kernel": "few_elements", "cluster_size": size} for size in (2, 4, 8)),
    {"kernel": "few_rows"},
    *({"kernel": "few_rows", "cluster_size": size} for size in (2, 3, 4, 8)),
]
# Partial sums that several blocks or clusters leave together, as they do for little memory.
MERGED: list[dict[str, Any]] = [
    {"kernel": kernel, "weight_grads": "fused", **request}
    for kernel in ("ring", "elements")
    for request in ({"merged": 2}, {"merged": 4}, {"cluster_size": 2, "merged": 2})
]
# Partial sums that a thread adds up, as it does of wide rows, or four.
FINISH: list[dict[str, Any]] = [
    {"weight_grads": weight_grads, "finish_by_thread": by_thread}
    for weight_grads in ("fused", "columns")
    for by_thread in (True, False)
]
# Few blocks with many rows each, so that places in shared memory are written anew again and again.
# Rows that a block holds, several side by side; a cluster; a cluster without a warp of its own for
# the exchange of sums. (A grid has many rows anyhow.)
AGAIN: list[dict[str, Any]] = [
    {"blocks": 2},
    {"blocks": 4, "cluster_size": 2},
    {"blocks": 4, "cluster_size": 2, "exchange_warp": False},
]
MANY_TURNS = 10  # of such places, or more
MOST_FEW_ROWS = 40
MOST_CHUNKS = 560_000  # of 16 bytes: beyond what the blocks of a whole grid hold


@dataclass(frozen=True)
class Device:
    sm_count: int
    compute_capability: int
    memory_bandwidth: int  # GB/s

    @staticmethod
    def current() -> Device:
        properties = torch.cuda.get_device_properties()
        # PyTorch 2.7 does not tell; 0 is planned for as an H200.
        kilohertz = getattr(properties, "memory_clock_rate", 0)
        bits = getattr(properties, "memory_bus_width", 0)
        return Device(
            properties.multi_processor_count,
            properties.major * 10 + properties.minor,
            kilohertz * 2 * (bits // 8) // 1_000_000,
        )


def plan_here(
    direction: str, rows: int, cols: int, dtype: torch.dtype, **call: Any
) -> dict[str, Any]:
    """The plan for the current GPU."""
    return _C.plan(direction, rows, cols, name_of(dtype), **asdict(Device.current()), **call)


@dataclass(frozen=True)
class Call:
    direction: str
    rows: int
    cols: int
    dtype: torch.dtype
    other: torch.dtype  # of y or dy
    parameters: torch.dtype | None  # of weight and bias
    aligned: bool
    request: Request
    mask: tuple[bool, bool, bool] = (True, True, True)
    inference: bool = False  # a forward that writes neither mean nor rstd

    @property
    def cost(self) -> float:
        """What racecheck takes, roughly, in 45 ms: it grows faster than a row's bytes do."""
        share = 1.8 if self.direction == "backward" else 0.36
        held = min(self.cols * self.dtype.itemsize, 260_000)
        return 1.0 + share * self.rows * (held / 25_000) ** 1.6

    def asked(self, device: Device) -> dict[str, Any]:
        """What the plan is told, with bfloat16 for any 16-bit type."""
        parameters = self.parameters or self.dtype
        return {
            "dtype": DTYPE_OF_BYTES[self.dtype.itemsize],
            "aligned": self.aligned,
            "contiguous": self.aligned,
            **asdict(device),
            **dict(_dtypes(self.direction, self.dtype, self.other, parameters)),
            **dict(self.request),
        }

    def __str__(self) -> str:
        request = " ".join(f"{key}={value}" for key, value in self.request)
        return (
            f"{'inference' if self.inference else self.direction} "
            f"{self.rows} x {self.cols} {name_of(self.dtype)}, "
            f"{'y' if self.direction == 'forward' else 'dy'} {name_of(self.other)}, parameters "
            f"{name_of(self.parameters)}, {'aligned' if self.aligned else 'unaligned'} [{request}]"
        )


def _plan(direction: str, rows: int, cols: int, call: dict[str, Any]) -> tuple[Any, ...]:
    """What tells one instantiation, or one way through it, from another."""
    plan = _C.plan(direction, rows, cols, **call)
    threads = plan["threads_per_row"]
    if plan["in_grid"]:  # of any size: the same code
        threads = GRID * 32
    one_block = plan["kernel"] == "elements" and plan["rows_per_block"] == 1
    wide = direction == "forward" and one_block and plan["bulk_stages"] == 0  # likewise
    return (
        plan["kernel"],
        GRID if plan["in_grid"] else plan["cluster_size"],
        plan["chunks_per_thread"],
        threads if threads <= 32 else next(most for most in MOST_THREADS if threads <= most),
        None if wide else plan.get("columns_per_thread"),
        plan["segments"] > 1,
        plan["vectorized"],
        plan.get("weight_grads"),
        plan.get("shared_bytes", 0) > 44 * 1024,
        plan.get("gathers"),
        plan.get("brakes"),
        plan.get("run_columns", 0) > 0,
        plan.get("merged"),
        plan.get("rows_ahead"),
        plan.get("most_ahead", 0) > 0,
        plan.get("in_bulk"),
        plan.get("bulk_stages", 0) > 0,
        plan.get("finish_vectors"),
        direction == "forward" and plan["exchange_warp"],  # (in the backward in most widths anyway)
    )


def turns_of(direction: str, rows: int, cols: int, call: dict[str, Any]) -> int:
    """Rows that those who hold one together take one after the other."""
    plan = _C.plan(direction, rows, cols, **call)
    at_once = plan["blocks"] // plan["cluster_size"] * plan["rows_per_block"]
    return rows // max(1, at_once)


def _code(plan: tuple[Any, ...]) -> tuple[Any, ...]:
    """What tells one instantiation from another: threads and clusters of another number are the
    same code.
    """
    kernel, cluster_size, chunks, threads, *rest = plan
    in_warp = threads <= 32 and kernel in ("short_rows", "elements", "few_elements")
    size = threads if in_warp else sum(threads > most for most in (32, *MOST_THREADS))
    return (kernel, cluster_size > 1, cluster_size == GRID, chunks, size, *rest)


def _has_parameter_types(code: tuple[Any, ...]) -> bool:
    """Whether a kernel of the backward is compiled for each dtype of the weight."""
    return code[0] in ("rows", "cluster", "split")


def _fits(plan: tuple[Any, ...], request: dict[str, Any]) -> bool:
    return all(
        request.get(name, plan[index]) == plan[index]
        for name, index in (("kernel", 0), ("cluster_size", 1), ("weight_grads", 7))
    )


def _changes(
    plan: Callable[[int], tuple[Any, ...]], per_chunk: int, less: int, begin: int, end: int
) -> Iterator[int]:
    """Between two counts of chunks, the last before the plan changes, at most once."""
    first = plan(begin * per_chunk - less)
    if plan(end * per_chunk - less) == first:
        return
    while end - begin > 1:
        middle = (begin + end) // 2
        if plan(middle * per_chunk - less) == first:
            begin = middle
        else:
            end = middle
    yield begin


def _dtypes(direction: str, x: torch.dtype, other: torch.dtype, parameters: torch.dtype) -> Request:
    """What the plan has to know of the dtypes beside x, with bfloat16 for a 16-bit x."""
    if direction == "forward":
        return (("one_dtype", x == other == parameters), ("y_as_x", x == other))
    if other == x or other.itemsize > 2:
        return (("dy_dtype", None if other == x else name_of(other)),)
    return (("dy_dtype", "float16"),)


@cache
def _widths(
    direction: str, bytes_of_x: int, dtypes: Request, items: Request, device: Device
) -> tuple[tuple[int, bool], ...]:
    """Widths beside each change of the plan; with True, the first of an instantiation."""
    request = dict(items)
    per_chunk = 16 // bytes_of_x
    call: dict[str, Any] = {
        "dtype": DTYPE_OF_BYTES[bytes_of_x],
        **asdict(device),
        **dict(dtypes),
        **request,
    }

    def plan(cols: int) -> tuple[Any, ...]:
        return _plan(direction, 5, cols, call)

    found: dict[int, bool] = {}
    seen: set[tuple[Any, ...]] = set()
    counts = [
        *range(1, 140), *range(160, 1024, 32), *range(1024, 70_000, 128),
        *range(70_000, MOST_CHUNKS, 4096),
    ]  # fmt: skip
    # Whole chunks; a row that ends within one; and such a row of pairs of columns.
    for less in (0, 1, 2) if bytes_of_x == 2 else (0, 1):
        ends = {count * per_chunk - less for count in (1, 2, MOST_CHUNKS)}
        for low, high in itertools.pairwise(counts):
            for count in _changes(plan, per_chunk, less, low, high):
                ends |= {(count + more) * per_chunk - less for more in (0, 1)}
        for end in sorted(ends):
            if end > 0 and _fits(plan(end), request):
                code = (end % 2, *_code(plan(end)))
                found[end] = found.get(end, False) or code not in seen
                seen.add(code)
            for cols in (end - 1, end + 1):
                if cols > 0 and _fits(plan(cols), request):
                    # There may be another instantiation for an even number of columns.
                    first = found.get(end, False) and less == 1 and cols % 2 == 0
                    found[cols] = found.get(cols, False) or first
    for cols in range(1, 64):  # the plan of very short rows changes within a chunk as well
        code = (cols % 2, *_code(plan(cols)))
        if code not in seen and _fits(plan(cols), request):
            found[cols] = True
            seen.add(code)
    return tuple(sorted(found.items()))


def _rows(cols: int) -> int:
    """No multiple of anything; few of wide rows, on which racecheck spends nearly all its time."""
    return 37 if cols <= 600 else 11 if cols <= 4200 else 3 if cols <= 20_000 else 2


def calls(device: Device) -> Iterator[Call]:
    for dtype in DTYPES:
        others = SMALL_DTYPES if dtype != torch.float64 else [dtype]
        parameter_dtypes = {dtype, torch.float32 if dtype != torch.float64 else dtype}
        for other, parameters in itertools.product(others, sorted(parameter_dtypes, key=str)):
            # float16 is the code of bfloat16 with another conversion: once through each is enough.
            plain = other == parameters == dtype != torch.float16
            for direction, requests in (
                ("forward", FORWARD_REQUESTS),
                ("backward", BACKWARD_REQUESTS),
            ):
                for request in requests:
                    if not plain and (not request or request.get("cluster_size") in (3, 4, 8)):
                        continue  # the same code as others
                    items = tuple(request.items())
                    size = dtype.itemsize
                    dtypes = _dtypes(direction, dtype, other, parameters)
                    for cols, first in _widths(direction, size, dtypes, items, device):
                        if not (plain or first):
                            continue
                        whole = cols * size % 16 == 0
                        # Uneven rows of a 16-bit type too: by column they move pairs if aligned.
                        for aligned in (True, False) if whole or plain or size == 2 else (False,):
                            yield Call(
                                direction, _rows(cols), cols, dtype, other, parameters, aligned,
                                items,
                            )  # fmt: skip
        # Rows of whose statistics nothing is wanted.
        for request, aligned in itertools.product(FORWARD_REQUESTS, (True, False)):
            for cols in (3, 8, 40, 129, 1000, 4097, 16_400, 33_000):
                items = tuple(request.items())
                call = Call(
                    "forward", _rows(cols), cols, dtype, dtype, dtype, aligned, items,
                    inference=True,
                )  # fmt: skip
                if _fits(_plan("forward", 5, cols, call.asked(device)), request):
                    yield call
        # Without parameters, with some of the gradients, and with rows for every persistent block.
        for aligned in (True, False):
            for cols in (40, 200, 1000, 2056):
                yield Call("forward", 5, cols, dtype, dtype, None, aligned, ())
                for mask in itertools.product((True, False), repeat=3):
                    if any(mask):
                        yield Call("backward", 5, cols, dtype, dtype, dtype, aligned, (), mask)
                yield Call("backward", 5, cols, dtype, dtype, None, aligned, ())
            # So many that each warp takes several tiles of them, or one that is not full.
            for rows, cols in ((2111, 2), (2111, 7), (80_011, 45)):
                for direction in ("forward", "backward"):
                    yield Call(direction, rows, cols, dtype, dtype, dtype, aligned, ())
            for rows, cols in ((2111, 40), (1031, 264), (613, 1000)):
                if dtype != torch.float64:
                    for blocks in (1, 2):
                        ring = (("kernel", "ring"), ("cluster_size", blocks))
                        yield Call("forward", rows, cols, dtype, dtype, dtype, aligned, ring)
                        if not aligned:
                            items = (*ring, ("exchange_warp", True))
                            yield Call("forward", rows, cols, dtype, dtype, dtype, aligned, items)
                for request in (*BACKWARD_REQUESTS, SHARES):
                    if "cluster_size" not in request or request == SHARES:
                        items = tuple(request.items())
                        yield Call("backward", rows, cols, dtype, dtype, dtype, aligned, items)
            # The same of few blocks, of a grid, and of clusters that hold long rows.
            if dtype != torch.float64:
                grid = (("kernel", "ring"), ("cluster_size", 60))
                yield Call("forward", 41, 1000, dtype, dtype, dtype, aligned, grid)
                fours = (("kernel", "ring"), ("cluster_size", 4), ("blocks", 8))
                yield Call("forward", 29, 4112, dtype, dtype, dtype, aligned, fours)
                for request in AGAIN:
                    items = (("kernel", "ring"), *request.items())
                    for cols in (4112, 4113):
                        yield Call("forward", 29, cols, dtype, dtype, dtype, aligned, items)
                        if not aligned and "exchange_warp" not in request:
                            served = (*items, ("exchange_warp", True))
                            yield Call("forward", 29, cols, dtype, dtype, dtype, aligned, served)
                    rows = 29 if "cluster_size" in request else 239
                    items = (*items, ("weight_grads", "fused"))
                    by_column = (("kernel", "elements"), *items[1:])
                    for cols in (1000, 1001, 1002, 1049):
                        for other in dict.fromkeys((dtype, torch.float32)):
                            yield Call("backward", rows, cols, dtype, other, dtype, aligned, items)
                        yield Call("backward", rows, cols, dtype, dtype, dtype, aligned, by_column)
            if dtype.itemsize <= 4 and aligned:  # copied in bulk, as many rows are
                bulk = (("in_bulk", True),)
                for chunks in (9, 10, 11, 13, 17, 21, 25, 33, 41, 49, 51, 65, 81):
                    for parameters in dict.fromkeys((dtype, torch.float32)):
                        cols = chunks * 16 // dtype.itemsize
                        yield Call("forward", 131, cols, dtype, dtype, parameters, aligned, bulk)
            if dtype.itemsize == 2 and aligned:
                for lanes, columns, less in itertools.product(
                    (8, 16, 32, 64), range(12, 33, 4), (1, 2)
                ):
                    if lanes == 64:  # which have chunks where those fill the lanes
                        less += 64
                    cols = lanes * columns - less
                    for parameters in (dtype, torch.float32):
                        yield Call("forward", 131, cols, dtype, dtype, parameters, aligned, bulk)
                # And the backward, of few blocks: the last of some tiles is not full.
                two = (("kernel", "elements"), ("blocks", 2), ("weight_grads", "fused"))
                for lanes, columns, less in itertools.product(
                    (8, 16, 32, 64, 448), range(10, 17, 2), (1, 2)
                ):
                    rows = {64: 453, 448: 21}.get(lanes, 12_288 // lanes + 5)
                    cols = lanes * columns - less
                    yield Call("backward", rows, cols, dtype, dtype, dtype, aligned, two)
            if dtype.itemsize == 2:
                # Wide ones, one by one in up to six stages: by a block, two and four.
                for cols, blocks in ((6335, 1), (10_558, 1), (10_567, 2), (21_118, 2), (33_001, 4)):
                    wide = (("kernel", "elements"), ("blocks", blocks), ("weight_grads", "fused"))
                    yield Call("backward", 23, cols, dtype, dtype, dtype, aligned, wide)
                # And the forward's, likewise.
                stays = ((16_385, 1), (22_017, 2), (33_001, 2), (50_257, 4), (98_001, 8))
                for cols, blocks in stays:
                    parameters = torch.float32 if blocks == 1 else dtype
                    stay = (("blocks", blocks),)
                    yield Call("forward", 23, cols, dtype, dtype, parameters, aligned, stay)
                eights = (("kernel", "ring"), ("cluster_size", 8), ("blocks", 16))
                for cols in (16_392, 16_399):
                    call = Call("forward", 29, cols, dtype, dtype, torch.float32, aligned, eights)
                    yield call
                    alone = (("kernel", "ring"), ("cluster_size", 1), ("blocks", 2))
                    yield replace(call, request=alone)
                    yield replace(call, rows=43, request=grid)
                    if not aligned:
                        yield replace(call, request=(*eights, ("exchange_warp", True)))
            for cols, request in itertools.product((1000, 1001), FINISH):
                items = tuple(request.items())
                yield Call("backward", 131, cols, dtype, dtype, dtype, aligned, items)
            for cols in (110_001, 420_000):  # by threads of several columns, or vectors of them
                yield Call("backward", 2, cols, dtype, dtype, dtype, aligned, ())
            for (rows, cols), request in itertools.product(
                ((613, 1000), (37, 264), (37, 261), (11, 1000), (11, 1001), (5, 4104), (5, 4097)),
                MERGED,
            ):
                by_column = request["kernel"] == "elements"
                for other in SMALL_DTYPES if dtype in SMALL_DTYPES else ():
                    beside = other == torch.float32 and not by_column
                    if (other == dtype and not (by_column and cols % 2 == 0)) or beside:
                        items = tuple(request.items())
                        yield Call("backward", rows, cols, dtype, other, dtype, aligned, items)


def two_of_each(calls: list[Call], device: Device, slow: float) -> tuple[list[Call], list[Call]]:
    """Of each instantiation, aligned or not, with few rows or with rows for every persistent block
    or with many for each, the cheapest call; and the dearest of no more than `slow`, and both of
    those that differ in nothing but the parameters' dtype, which are the same code.
    """
    alike: dict[tuple[Any, ...], list[Call]] = {}
    for call in calls:
        asked = call.asked(device)
        code = _code(_plan(call.direction, call.rows, call.cols, asked))
        turns = turns_of(call.direction, call.rows, call.cols, asked)
        many = (call.rows > MOST_FEW_ROWS, turns >= MANY_TURNS)
        key = (
            call.direction, call.dtype, call.other, call.aligned, call.mask, call.inference,
            call.cols % 2, many, code, call.parameters,
        )  # fmt: skip
        alike.setdefault(key, []).append(call)

    cost = operator.attrgetter("cost")
    one: dict[tuple[Any, ...], Call] = {}
    others: set[Call] = set()
    for key, group in alike.items():
        by_dtype = key[0] == "forward" or _has_parameter_types(key[-2])
        call = min(group, key=cost)
        if one.setdefault(key if by_dtype else key[:-1], call) != call:
            others.add(call)
        quick = [call for call in group if call.cost <= slow]
        if quick:
            others.add(max(quick, key=cost))
    kept = set(one.values())
    others -= kept
    return [call for call in calls if call in kept], [call for call in calls if call in others]


def widths_left_out(calls: list[Call], kept: list[Call]) -> list[Call]:
    """A row of each width that has no call left in `kept`, for either direction and each size of
    x: from an aligned address if it has whole chunks, and not element by element, where racecheck
    takes longest, if another kernel has a call of that width.
    """

    def key(call: Call) -> tuple[Any, ...]:
        return call.direction, call.dtype.itemsize, call.cols

    missing: dict[tuple[Any, ...], Call] = {}
    for call in sorted(calls, key=lambda call: "elements" in str(call)):
        missing.setdefault(key(call), call)
    for call in kept:
        missing.pop(key(call), None)
    return [
        replace(call, rows=1, aligned=call.cols * call.dtype.itemsize % 16 == 0)
        for call in missing.values()
    ]


def _on_device(t: Tensor, aligned: bool) -> Tensor:
    """By copies alone. Not aligned: one element into rows that are three wider."""
    if aligned:
        return t.cuda()
    rows, cols = t.shape
    wide = t.new_full((rows, cols + 3), float("nan"))
    wide[:, 1 : cols + 1] = t
    return wide.cuda()[:, 1 : cols + 1]


def run(call: Call) -> list[Tensor]:
    """The results, on the CPU. Statistics of a backward are made up: it need not be right here."""
    shape = (call.rows, call.cols)
    rows = random(shape, call.dtype, "cpu")
    rows[1::4] += 2  # means far from zero: the forward has another way for some
    x = _on_device(rows, call.aligned)
    weight = bias = None
    if call.parameters is not None:
        weight, bias = (random(shape[1:], call.parameters, "cpu", seed=s).cuda() for s in (1, 2))
    _C.force_plan(**dict(call.request))
    try:
        if call.direction == "forward":
            out_dtype = None if call.other == call.dtype else call.other
            if call.inference:
                results = (ops.layer_norm(x, shape[1:], weight, bias, 1e-5, out_dtype=out_dtype),)
            else:
                results = ops.layer_norm_forward(x, shape[1:], weight, bias, 1e-5, out_dtype)
        else:
            arithmetic = torch.float64 if call.dtype == torch.float64 else torch.float32
            statistics = torch.ones(call.rows, 1, dtype=arithmetic)
            grad_out = _on_device(random(shape, call.other, "cpu", seed=3), call.aligned)
            results = ops.layer_norm_backward(
                grad_out, x, shape[1:], (0 * statistics).cuda(), statistics.cuda(), weight, bias,
                1e-5, call.mask,
            )  # fmt: skip
    finally:
        _C.force_plan()
    return [t.cpu() for t in results if t is not None]
