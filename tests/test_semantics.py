"""The table of semantics row by row: dtypes, shapes, strides, sizes, eps, inf and NaN."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from reference import (
    DTYPES,
    SMALL_DTYPES,
    accumulation_dtype,
    check_backward,
    check_forward,
    name_of,
    ops,
    random,
)
from torch import Tensor

import fastnorm


def _parameter_dtypes(dtype: torch.dtype) -> list[torch.dtype | None]:
    return (
        [None, dtype] if dtype in (torch.float32, torch.float64) else [None, dtype, torch.float32]
    )


MIXTURES = [
    (dtype, weight_dtype, bias_dtype)
    for dtype in DTYPES
    for weight_dtype, bias_dtype in itertools.product(_parameter_dtypes(dtype), repeat=2)
]


@pytest.mark.parametrize("mixture", MIXTURES, ids=name_of)
@pytest.mark.parametrize("shape", [(33, 64), (6, 1003), (3, 40_000)], ids=name_of)
def test_dtypes_of_weight_and_bias(
    device: str,
    shape: tuple[int, int],
    mixture: tuple[torch.dtype, torch.dtype | None, torch.dtype | None],
) -> None:
    dtype, weight_dtype, bias_dtype = mixture
    x, grad_out = random(shape, dtype, device), random(shape, dtype, device, seed=3)
    cols = shape[1]
    weight = None if weight_dtype is None else random((cols,), weight_dtype, device, seed=1)
    bias = None if bias_dtype is None else random((cols,), bias_dtype, device, seed=2)
    check_forward(x, [cols], weight, bias)
    check_backward(grad_out, x, [cols], weight, bias)


@pytest.mark.parametrize("out_dtype", [None, *SMALL_DTYPES], ids=name_of)
@pytest.mark.parametrize("parameter_dtype", [None, "input's", torch.float32], ids=name_of)
@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", [(33, 64), (6, 1003), (3, 40_000)], ids=name_of)
def test_out_dtype(
    device: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    parameter_dtype: torch.dtype | str | None,
    out_dtype: torch.dtype | None,
) -> None:
    cols = shape[1]
    x = random(shape, dtype, device)
    weight = bias = None
    if parameter_dtype is not None:
        parameter_dtype = dtype if isinstance(parameter_dtype, str) else parameter_dtype
        weight = random((cols,), parameter_dtype, device, seed=1)
        bias = random((cols,), parameter_dtype, device, seed=2)
    output = check_forward(x, [cols], weight, bias, out_dtype=out_dtype)[0]
    assert ops.layer_norm(x, [cols], weight, bias, out_dtype=out_dtype).equal(output)


def test_out_dtype_of_float64(device: str) -> None:
    x = random((6, 40), torch.float64, device)
    check_forward(x, [40], out_dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=name_of)
@pytest.mark.parametrize(
    ("shape", "normalized_shape"),
    [((6,), (6,)), ((4, 6), (6,)), ((2, 4, 6), (6,)), ((2, 4, 6), (4, 6)), ((2, 4, 6), (2, 4, 6)),
     ((1, 1), (1,)), ((3, 1, 5), (1, 5)), ((2, 3, 4, 5, 2), (4, 5, 2))],
    ids=name_of,
)  # fmt: skip
def test_normalized_shapes(
    device: str,
    shape: tuple[int, ...],
    normalized_shape: tuple[int, ...],
    out_dtype: torch.dtype | None,
    dtype: torch.dtype,
) -> None:
    """Also the shape and dtype of mean and rstd: leading dimensions, then ones."""
    if dtype == torch.float64:
        out_dtype = None
    x, grad_out = random(shape, dtype, device), random(shape, dtype, device, seed=3)
    weight = random(normalized_shape, dtype, device, seed=1)
    bias = random(normalized_shape, dtype, device, seed=2)
    _, mean, rstd = check_forward(x, normalized_shape, weight, bias, out_dtype=out_dtype)
    leading = shape[: len(shape) - len(normalized_shape)]
    for statistic in (mean, rstd):
        assert statistic.shape == (*leading, *[1] * len(normalized_shape))
        assert statistic.dtype == accumulation_dtype(dtype)
    check_backward(grad_out, x, normalized_shape, weight, bias)


def _slice_of_wider(x: Tensor) -> Tensor:
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 5), float("nan"))
    wide[..., 3:-2] = x
    return wide[..., 3:-2]


def _slice_of_wider_by_a_vector(x: Tensor) -> Tensor:
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 32), float("nan"))
    wide[..., 16:-16] = x
    return wide[..., 16:-16]


def _offset_by_one_element(x: Tensor) -> Tensor:
    flat = x.new_full((x.numel() + 2,), float("nan"))
    flat[1:-1] = x.flatten()
    return flat[1:-1].view_as(x)


def _every_other_row(x: Tensor) -> Tensor:
    sparse = x.new_full((x.shape[0], 2, *x.shape[1:]), float("nan"))
    sparse[:, 1] = x
    return sparse[:, 1]


def _expanded_rows(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


def _expanded_columns(x: Tensor) -> Tensor:
    return x[..., :1].expand_as(x)


def _one_number(x: Tensor) -> Tensor:
    return x.flatten()[:1].view([1] * x.dim()).expand_as(x)


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def _leading_dimensions_transposed(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _every_other_column(x: Tensor) -> Tensor:
    sparse = x.new_full((*x.shape, 2), float("nan"))
    sparse[..., 0] = x
    return sparse[..., 0]


def _overlapping_rows(x: Tensor) -> Tensor:
    """Rows which start one element apart, as unfold makes them."""
    row = x.flatten()[: x.shape[0] + x.shape[-1] - 1]
    return row.unfold(0, x.shape[-1], 1)[:, None].expand(-1, x.shape[1], -1)


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    _slice_of_wider,
    _slice_of_wider_by_a_vector,
    _offset_by_one_element,
    _every_other_row,
    _expanded_rows,
    _expanded_columns,
    _one_number,
    _transposed,
    _leading_dimensions_transposed,
    _every_other_column,
    _overlapping_rows,
]


def _layout_name(layout: Callable[[Tensor], Tensor]) -> str:
    return layout.__name__.strip("_")


@pytest.mark.parametrize("layout", LAYOUTS, ids=_layout_name)
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("cols", [24, 129, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=name_of)
def test_layouts_of_input_and_grad_out(
    device: str, dtype: torch.dtype, cols: int, dims: int, layout: Callable[[Tensor], Tensor]
) -> None:
    """Any layout gives the bits of its contiguous copy; the buffers around it hold NaN."""
    shape = (7, 3, cols)
    normalized_shape = shape[-dims:]
    x = layout(random(shape, dtype, device))
    grad_out = layout(random(shape, dtype, device, seed=3))
    weight = random(normalized_shape, dtype, device, seed=1)
    bias = random(normalized_shape, dtype, device, seed=2)
    outputs = check_forward(x, normalized_shape, weight, bias)
    plain = ops.layer_norm_forward(x.contiguous(), normalized_shape, weight, bias, 1e-5, None)
    assert all(a.equal(b) for a, b in zip(outputs, plain))
    gradients = check_backward(grad_out, x, normalized_shape, weight, bias)
    plain = ops.layer_norm_backward(
        grad_out.contiguous(), x.contiguous(), normalized_shape, *outputs[1:], weight, bias, 1e-5,
        [True, True, True],
    )  # fmt: skip
    assert gradients[0].equal(plain[0])
    assert gradients[1].equal(plain[1])
    assert gradients[2].equal(plain[2])


@pytest.mark.parametrize("layout", LAYOUTS, ids=_layout_name)
def test_layouts_through_autograd(device: str, layout: Callable[[Tensor], Tensor]) -> None:
    """The gradient reaches the base of a view as ATen's does."""
    shape = (7, 3, 40)
    weight = random((40,), torch.float64, device, seed=1)
    grad_out = random(shape, torch.float64, device, seed=3)
    gradients = []
    for function in (fastnorm.functional.layer_norm, torch.nn.functional.layer_norm):
        base = random(shape, torch.float64, device).requires_grad_()
        gradients += torch.autograd.grad(function(layout(base), [40], weight), base, grad_out)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", [24, 129, 2048, 20_000])
def test_layouts_of_weight_and_bias(device: str, cols: int, dtype: torch.dtype) -> None:
    """Offset by one element, strided and expanded parameters."""
    x, grad_out = random((5, cols), dtype, device), random((5, cols), dtype, device, seed=3)
    weight, bias = random((cols,), dtype, device, seed=1), random((cols,), dtype, device, seed=2)
    expected = check_forward(x, [cols], weight, bias)[0]
    for layout in (_offset_by_one_element, _every_other_column):
        assert check_forward(x, [cols], layout(weight), layout(bias))[0].equal(expected)
        check_backward(grad_out, x, [cols], layout(weight), layout(bias))
    check_forward(x, [cols], weight[:1].expand(cols), bias[:1].expand(cols))
    check_backward(grad_out, x, [cols], weight[:1].expand(cols), bias[:1].expand(cols))


@pytest.mark.parametrize("cols", [24, 129, 2048])
def test_layouts_of_statistics(device: str, cols: int) -> None:
    """mean and rstd given to the backward may be strided, too."""
    x, dy = (
        random((6, cols), torch.float32, device),
        random((6, cols), torch.float32, device, seed=3),
    )
    weight = random((cols,), torch.float32, device, seed=1)
    _, mean, rstd = ops.layer_norm_forward(x, [cols], weight, None, 1e-5, None)
    mask = [True, True, False]
    expected = ops.layer_norm_backward(dy, x, [cols], mean, rstd, weight, None, 1e-5, mask)
    both = torch.cat([mean, rstd], 1)
    got = ops.layer_norm_backward(dy, x, [cols], both[:, :1], both[:, 1:], weight, None, 1e-5, mask)
    assert got[0].equal(expected[0])
    assert got[1].equal(expected[1])


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("shape", "normalized_shape"),
    [((0, 5), (5,)), ((0,), (0,)), ((3, 0), (0,)), ((0, 3, 4), (3, 4)), ((2, 0, 4), (4,)),
     ((2, 0, 4), (0, 4)), ((0, 0), (0,))],
    ids=name_of,
)  # fmt: skip
def test_empty(
    device: str, shape: tuple[int, ...], normalized_shape: tuple[int, ...], affine: bool
) -> None:
    """No rows or no columns; dw and db of no rows are zero, as ATen's are on the CPU."""
    results = []
    for function, place in (
        (fastnorm.functional.layer_norm, device),
        (torch.nn.functional.layer_norm, "cpu"),
    ):
        x = torch.ones(shape, device=place, requires_grad=True)
        leaves = [x]
        if affine:
            leaves += [torch.ones(normalized_shape, device=place, requires_grad=True) for _ in "wb"]
        y = function(x, normalized_shape, *leaves[1:])
        results.append([y, *torch.autograd.grad(y.sum(), leaves)])
    for ours, aten in zip(*results):
        assert ours.dtype == aten.dtype
        assert ours.stride() == aten.stride()
        assert ours.cpu().equal(aten)


def test_statistics_of_no_columns(device: str) -> None:
    """The mean of nothing is 0 and its rstd NaN, as ATen has it on the CPU."""
    _, mean, rstd = ops.layer_norm_forward(
        torch.ones(3, 0, device=device), [0], None, None, 1e-5, None
    )
    assert mean.cpu().equal(torch.zeros(3, 1))
    assert rstd.isnan().all()
    assert rstd.shape == (3, 1)


@pytest.mark.parametrize("eps", [0.0, 1e-12, 0.5, -0.5, -100.0, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", [8, 1500])
def test_eps(device: str, cols: int, dtype: torch.dtype, eps: float) -> None:
    """Also negative (NaN where variance + eps is) and not finite."""
    x, grad_out = random((9, cols), dtype, device), random((9, cols), dtype, device, seed=3)
    weight = random((cols,), dtype, device, seed=1)
    check_forward(x, [cols], weight, weight, eps=eps)
    check_backward(grad_out, x, [cols], weight, weight, eps=eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_eps_zero_of_constant_rows(device: str, dtype: torch.dtype) -> None:
    """rstd is infinite and 0 * inf is NaN, in those rows alone."""
    x = random((4, 16), dtype, device)
    x[2] = 1.0
    y, _, rstd = ops.layer_norm_forward(x, [16], None, None, 0.0, None)
    assert rstd[2].isinf().all()
    assert y[2].isnan().all()
    others = [0, 1, 3]
    assert y[others].equal(ops.layer_norm(x[others], [16], eps=0.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cols", [1, 3, 64, 100, 1024, 1500, 9000, 40_000])
def test_inf_and_nan_stay_in_their_row(
    device: str, cols: int, dtype: torch.dtype, value: float
) -> None:
    rows = 11
    x, grad_out = random((rows, cols), dtype, device), random((rows, cols), dtype, device, seed=3)
    weight, bias = random((cols,), dtype, device, seed=1), random((cols,), dtype, device, seed=2)
    mask = [True, True, True]

    def run(x: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        y, mean, rstd = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)
        gradients = ops.layer_norm_backward(
            grad_out, x, [cols], mean, rstd, weight, bias, 1e-5, mask
        )
        return (y, mean, rstd, *gradients)

    clean = run(x, grad_out)
    others = torch.arange(rows, device=device) != 4
    bad = x.clone()
    bad[4, cols // 2] = value
    dirty = run(bad, grad_out)
    for what, before, after in zip(("y", "mean", "rstd", "dx"), clean, dirty):
        assert after[others].equal(before[others]), f"{what} of another row changed"
    assert dirty[0][4].isnan().all(), "the row itself is NaN"
    assert dirty[3][4].isnan().all(), "the row's gradient is NaN"
    assert dirty[4].isnan().all(), "dw sums over the row"
    assert dirty[5].equal(clean[5]), "db does not look at x"

    bad = grad_out.clone()
    bad[4, cols // 2] = value
    dirty = run(x, bad)
    assert dirty[3][others].equal(clean[3][others])
    assert not dirty[3][4].isfinite().any()
    columns = torch.arange(cols, device=device) != cols // 2
    for before, after in zip(clean[4:], dirty[4:]):
        assert after[columns].equal(before[columns]), "a column's sum looks at its column alone"
    assert not dirty[5][cols // 2].isfinite()


def test_nothing_is_mutated_or_aliased(device: str) -> None:
    x, grad_out = (
        random((5, 48), torch.float32, device),
        random((5, 48), torch.float32, device, seed=3),
    )
    weight, bias = torch.ones(48, device=device), torch.zeros(48, device=device)
    inputs = [x, grad_out, weight, bias]
    before = [t.clone() for t in inputs]
    y, mean, rstd = ops.layer_norm_forward(x, [48], weight, bias, 1e-5, None)
    gradients = ops.layer_norm_backward(
        grad_out, x, [48], mean, rstd, weight, bias, 1e-5, [True, True, True]
    )
    assert all(a.equal(b) for a, b in zip(inputs, before))
    storages = [t.untyped_storage().data_ptr() for t in (*inputs, y, mean, rstd, *gradients)]
    assert len(set(storages)) == len(storages)


def test_outputs_are_whole_tensors_of_their_own(device: str) -> None:
    """Whatever the input's strides: outputs are contiguous and start their own storage."""
    x = random((48, 5), torch.float32, device).t()
    for output in ops.layer_norm_forward(x, [48], None, None, 1e-5, None):
        assert output.is_contiguous()
        assert output.storage_offset() == 0
        assert output.untyped_storage().nbytes() >= output.numel() * output.element_size()
