"""Equal bits: from run to run, in any batch, at any alignment, with any number of threads."""

from __future__ import annotations

import pytest
import torch
from reference import DTYPES, name_of, ops, random
from torch import Tensor

MASK = [True, True, True]


def _forward_and_backward(
    x: Tensor, grad_out: Tensor, weight: Tensor | None, bias: Tensor | None
) -> list[Tensor]:
    """y, mean, rstd, dx, dw, db; the last two only if weight and bias are there."""
    cols = [x.shape[-1]]
    outputs = ops.layer_norm_forward(x, cols, weight, bias, 1e-5, None)
    gradients = ops.layer_norm_backward(grad_out, x, cols, *outputs[1:], weight, bias, 1e-5, MASK)
    return [t for t in (*outputs, *gradients) if t is not None]


def _arguments(rows: int, cols: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    return (
        random((rows, cols), dtype, device, shift=0.3),
        random((rows, cols), dtype, device, seed=3),
        random((cols,), dtype, device, seed=1),
        random((cols,), dtype, device, seed=2),
    )


def _bits(t: Tensor) -> Tensor:
    """As integers, so that -0 differs from 0."""
    return t.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def _assert_same_bits(ours: Tensor, other: Tensor, what: str) -> None:
    different = _bits(ours) != _bits(other)
    assert not different.any(), f"{what}: {int(different.sum())} of {ours.numel()} elements differ"


def _at_offset(t: Tensor, elements: int, stride: int = 0) -> Tensor:
    """The same rows `elements` into a buffer whose rows are `stride` elements wider."""
    rows, cols = t.shape
    buffer = t.new_zeros(rows * (cols + stride) + elements)
    view = buffer.as_strided((rows, cols), (cols + stride, 1), elements)
    return view.copy_(t)


COLS = [1, 5, 64, 100, 255, 768, 1024, 1027, 2048, 4095, 4096, 8200]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", COLS)
def test_a_row_does_not_depend_on_its_batch(device: str, cols: int, dtype: torch.dtype) -> None:
    most = 4096 if cols <= 1027 else 300
    x, grad_out, weight, bias = _arguments(most, cols, dtype, device)
    names = ("y", "mean", "rstd", "dx")
    whole = _forward_and_backward(x, grad_out, weight, bias)
    for rows in (1, 2, 3, 7, 255, 256, 257, 1000):
        if rows > most:
            continue
        for start in {0, most - rows}:
            part = slice(start, start + rows)
            results = _forward_and_backward(x[part], grad_out[part], weight, bias)
            for what, ours, all_rows in zip(names, results, whole):
                _assert_same_bits(ours, all_rows[part], f"{what} of {rows} rows from {start}")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", [1, 5, 40, 64, 255, 1024, 1027, 5000])
def test_an_outlier_changes_no_other_row(device: str, cols: int, dtype: torch.dtype) -> None:
    """Rows whose first column lies far off are summed once more, beside others that are not."""
    x, grad_out, weight, bias = _arguments(70, cols, dtype, device)
    expected = _forward_and_backward(x, grad_out, weight, bias)
    x = x.clone()
    x[::3, 0] = 300.0
    results = _forward_and_backward(x, grad_out, weight, bias)
    for what, ours, theirs in zip(("y", "mean", "rstd", "dx"), results, expected):
        for first in (1, 2):
            _assert_same_bits(ours[first::3], theirs[first::3], f"{what} of rows beside it")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", [20_000, 70_000, 300_000])
def test_a_wide_row_does_not_depend_on_its_batch(
    device: str, cols: int, dtype: torch.dtype
) -> None:
    x, grad_out, weight, bias = _arguments(5, cols, dtype, device)
    whole = _forward_and_backward(x, grad_out, weight, bias)
    for row in (0, 4):
        part = slice(row, row + 1)
        results = _forward_and_backward(x[part], grad_out[part], weight, bias)
        for what, ours, all_rows in zip(("y", "mean", "rstd", "dx"), results, whole):
            _assert_same_bits(ours, all_rows[part], f"{what} of row {row} alone")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", [*COLS, 70_000])
def test_results_do_not_depend_on_alignment(device: str, cols: int, dtype: torch.dtype) -> None:
    rows = 37 if cols <= 8200 else 3
    x, grad_out, weight, bias = _arguments(rows, cols, dtype, device)
    expected = _forward_and_backward(x, grad_out, weight, bias)
    names = ("y", "mean", "rstd", "dx", "dw", "db")
    for offset, stride in ((1, 0), (2, 0), (3, 5), (4, 4), (8, 8), (0, 1), (16, 0)):
        moved = [_at_offset(t, offset, stride) for t in (x, grad_out)]
        parameters = [_at_offset(t[None], offset)[0] for t in (weight, bias)]
        for inputs in ((*moved, weight, bias), (x, grad_out, *parameters), (*moved, *parameters)):
            for what, ours, aligned in zip(names[:4], _forward_and_backward(*inputs), expected):
                _assert_same_bits(ours, aligned, f"{what} at offset {offset}, stride +{stride}")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    ("rows", "cols"),
    [(1, 300_000), (3, 70_000), (5000, 100), (20_000, 24), (777, 1027), (1000, 1024), (64, 8200)],
)
def test_runs_are_equal(device: str, rows: int, cols: int, dtype: torch.dtype) -> None:
    """All outputs of five runs, dw and db too, with memory in other states between them."""
    arguments = _arguments(rows, cols, dtype, device)
    first = _forward_and_backward(*arguments)
    kept = []
    for run in range(4):
        kept.append(torch.full((rows, cols), float("nan"), device=device, dtype=dtype))
        for what, ours, before in zip(
            ("y", "mean", "rstd", "dx", "dw", "db"), _forward_and_backward(*arguments), first
        ):
            _assert_same_bits(ours, before, f"{what} in run {run + 2}")
        if run % 2:
            kept.clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 300_000), (3, 70_000), (5000, 100), (20_000, 24), (777, 1027), (2, 64)]
)
def test_results_do_not_depend_on_the_number_of_threads(
    rows: int, cols: int, dtype: torch.dtype
) -> None:
    arguments = _arguments(rows, cols, dtype, "cpu")
    torch.set_num_threads(1)
    one = _forward_and_backward(*arguments)
    for threads in (2, 3, 5, 8):
        torch.set_num_threads(threads)
        for what, ours, expected in zip(
            ("y", "mean", "rstd", "dx", "dw", "db"), _forward_and_backward(*arguments), one
        ):
            _assert_same_bits(ours, expected, f"{what} with {threads} threads")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", [24, 1000, 5000])
def test_gradients_do_not_depend_on_which_others_are_asked_for(
    device: str, cols: int, dtype: torch.dtype
) -> None:
    x, grad_out, weight, bias = _arguments(300, cols, dtype, device)
    _, mean, rstd = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)

    def backward(mask: list[bool]) -> tuple[Tensor | None, ...]:
        return ops.layer_norm_backward(grad_out, x, [cols], mean, rstd, weight, bias, 1e-5, mask)

    dx = backward(MASK)[0]
    _assert_same_bits(backward([True, False, False])[0], dx, "dx alone")
    _assert_same_bits(backward([True, True, False])[0], dx, "dx beside dw")
    _, dw, db = backward([False, True, True])
    _assert_same_bits(backward([False, True, False])[1], dw, "dw alone")
    _assert_same_bits(backward([False, False, True])[2], db, "db alone")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize(("rows", "cols"), [(9, 100), (700, 24), (37, 1027), (3, 70_000)])
def test_no_memory_is_read_before_it_is_written(
    device: str, rows: int, cols: int, dtype: torch.dtype
) -> None:
    """Under use_deterministic_algorithms PyTorch fills fresh memory with NaN."""
    arguments = _arguments(rows, cols, dtype, device)
    expected = _forward_and_backward(*arguments)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        results = _forward_and_backward(*arguments)
    finally:
        torch.use_deterministic_algorithms(before)
    for what, ours, plain in zip(("y", "mean", "rstd", "dx", "dw", "db"), results, expected):
        _assert_same_bits(ours, plain, what)


# --- under load, in large batches -----------------------------------------------------------------


class _Load:
    """Keeps the GPU busy on a stream of its own: with blocks of every size, in and out of step."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.matrix = torch.randn(2048, 2048, device="cuda")
        self.numbers = torch.randn(1 << 24, device="cuda")

    def enqueue(self, times: int) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(times):
                self.matrix.matmul(self.matrix)
                self.numbers.sin()
                self.matrix.softmax(1)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    ("rows", "cols"),
    [(1, 300_000), (3, 70_000), (20_000, 24), (5003, 768), (777, 1027), (4099, 4096), (64, 8200)],
)
def test_runs_are_equal_under_load(rows: int, cols: int, dtype: torch.dtype) -> None:
    """Twenty runs, on streams of their own, beside other work and beside one another."""
    arguments = _arguments(rows, cols, dtype, "cuda")
    expected = _forward_and_backward(*arguments)
    load = _Load()
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    load.enqueue(10)
    results = []
    for run in range(20):
        with torch.cuda.stream(streams[run % len(streams)]):
            results.append(_forward_and_backward(*arguments))
        load.enqueue(2)
    torch.cuda.synchronize()
    for run, tensors in enumerate(results):
        for what, ours, first in zip(("y", "mean", "rstd", "dx", "dw", "db"), tensors, expected):
            _assert_same_bits(ours, first, f"{what} in run {run}")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", [7, 24, 257, 768, 1023, 1024])
def test_a_row_of_a_large_batch(device: str, cols: int, dtype: torch.dtype) -> None:
    """The same row alone and anywhere among up to 100,000 others, at different alignments."""
    sizes = (1, 255, 256, 257, 4096, *((100_000,) if device == "cuda" or cols < 100 else ()))
    row, grad_row, weight, bias = _arguments(1, cols, dtype, device)
    alone = _forward_and_backward(row, grad_row, weight, bias)
    for rows in sizes:
        x, grad_out, _, _ = _arguments(rows, cols, dtype, device)
        at = [0, rows // 2, rows - 1]
        x[at], grad_out[at] = row, grad_row
        for offset, stride in ((0, 0), (1, 0), (0, 3), (8, 8)):
            moved = [_at_offset(t, offset, stride) for t in (x, grad_out)]
            results = _forward_and_backward(*moved, weight, bias)
            for what, ours, expected in zip(("y", "mean", "rstd", "dx"), results, alone):
                for i in at:
                    _assert_same_bits(
                        ours[i], expected[0], f"{what} of row {i} of {rows} at {offset}, +{stride}"
                    )
