"""The float64 reference, ATen's own results, and the comparison of fastnorm with both.

The rule: fastnorm's largest error against float64 may be at most twice ATen's own, plus a rounding
term. ATen runs in the arithmetic's precision (float32, or float64 for float64 input) on the
upcast arguments, and its result is rounded once to the dtype that fastnorm returns, so that it is a
yardstick for every mixture of dtypes, also those that ATen lacks.

The rounding term is `ARITHMETIC_UNITS` units in the last place of the arithmetic, plus half a unit
of the result's dtype where that is narrower, both relative to the largest magnitude among the
terms which the result sums up: a result near zero is no more exact than what cancelled in it.

The root mean square of the errors is held to twice ATen's as well, plus the arithmetic's units
alone, where there are enough elements for a mean to mean something: a small error everywhere hides
behind the largest one.

`worst` keeps how near to the rule's limits the results compared so far have come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ARITHMETIC_UNITS = 4
ELEMENTS_FOR_A_MEAN = 256
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SMALL_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ops = torch.ops.fastnorm


@dataclass
class Worst:
    """Of a quantity's comparisons: the largest error in parts of its limit (at most 1), and the
    largest beyond rounding in units of ATen's (at most 2).
    """

    of_limit: float = 0.0
    of_aten: float = 0.0


worst: dict[str, Worst] = {}


def name_of(value: object) -> str:
    """A short name of a dtype, shape or flag for test ids."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple | list):
        return "x".join(name_of(item) for item in value) or "none"
    return str(value)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of arithmetic, mean and rstd for rows of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def random(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str,
    *,
    scale: float = 1.0,
    shift: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator)
    return numbers.mul_(scale).add_(shift).to(dtype).to(device)


@dataclass
class Reference:
    """A float64 value and the largest magnitude among the terms that it is the sum of."""

    value: Tensor
    term: float


def _largest(value: Tensor) -> float:
    """The largest finite magnitude."""
    return value.abs().nan_to_num(0.0, 0.0).max().item() if value.numel() else 0.0


def _mean(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Corrected by the mean of what is left: that of equal numbers is the number itself."""
    mean = x.mean(dims, keepdim=True)
    correction = (x - mean).mean(dims, keepdim=True)
    return torch.where(correction.isfinite(), mean + correction, mean)


def _root_of_squares(values: Tensor) -> float:
    """The largest over columns of the root of the sum of squares; squares may underflow."""
    largest = _largest(values)
    return _largest((values / largest).square().sum(0)) ** 0.5 * largest if largest else 0.0


def _least_mean_term(dtype: torch.dtype, cols: int) -> float:
    """Of subnormal rows. Their columns are divided by `cols` before they are added, so that a sum
    does not overflow where the mean does not; each is then off by half the smallest number.
    """
    return torch.finfo(accumulation_dtype(dtype)).tiny * max(1.0, cols / 2 / ARITHMETIC_UNITS)


def _conditioning(variance: Tensor, eps: float) -> float:
    """How much a rounding of the variance grows in rstd; more than one for negative eps alone."""
    return max(1.0, _largest(variance / (variance + eps)))


def _as_rows(input: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    leading = input.shape[: input.dim() - len(normalized_shape)]
    return input.reshape(math.prod(leading), math.prod(normalized_shape))


def forward_reference(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Reference, Reference, Reference]:
    """output, mean and rstd in float64, in the shapes that fastnorm returns."""
    dims = tuple(range(-len(normalized_shape), 0))
    x = input.double()
    mean = _mean(x, dims)
    centered = x - mean
    variance = centered.square().mean(dims, keepdim=True)
    rstd = (variance + eps).rsqrt_()
    y = centered.mul_(rstd)
    # The mean is rounded to the arithmetic's precision before it is subtracted.
    shift = (1.0 + _largest(mean * rstd)) * _conditioning(variance, eps)
    term = _largest(y) + shift
    if weight is not None:
        y *= weight
        term *= _largest(weight)
    if bias is not None:
        y += bias
        term += _largest(bias)
    mean_term = max(_largest(x), _least_mean_term(input.dtype, math.prod(normalized_shape)))
    return Reference(y, term), Reference(mean, mean_term), Reference(rstd, _largest(rstd) * shift)


def backward_reference(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
) -> tuple[Reference, Reference, Reference]:
    """dx, dw and db in float64, as if weight and bias were there."""
    x = _as_rows(input, normalized_shape).double()
    dy = _as_rows(grad_out, normalized_shape).double()
    mean = _mean(x, (1,))
    xhat = x - mean
    variance = xhat.square().mean(1, keepdim=True)
    rstd = (variance + eps).rsqrt_()
    xhat *= rstd
    shift = (1.0 + _largest(mean * rstd)) * _conditioning(variance, eps)
    w_dy = dy if weight is None else dy * weight.double().reshape(-1)
    mean_1 = w_dy.mean(1, keepdim=True)
    mean_2 = (w_dy * xhat).mean(1, keepdim=True)
    dx = rstd * (w_dy - mean_1 - xhat * mean_2)
    dx_term = _largest(rstd * (w_dy.abs() + mean_1.abs() + (xhat * mean_2).abs())) * shift
    # Rounding errors of a long sum grow like a random walk, as the sum itself does.
    dy_xhat = dy * xhat
    dw, db = dy_xhat.sum(0), dy.sum(0)
    dw_term = max(_root_of_squares(dy_xhat), _largest(dw)) * shift
    db_term = max(_root_of_squares(dy), _largest(db))
    dw_term += _least_mean_term(input.dtype, x.shape[1]) * _largest(rstd) * _root_of_squares(dy)
    shape = tuple(normalized_shape)
    return (
        Reference(dx.reshape(input.shape), dx_term),
        Reference(dw.reshape(shape), dw_term),
        Reference(db.reshape(shape), db_term),
    )


def aten_forward(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """ATen's output, mean and rstd in the arithmetic's precision.

    Called on plain rows with one normalized dimension and a weight, where ATen is right.
    """
    dtype = accumulation_dtype(input.dtype)
    x = _as_rows(input, normalized_shape).to(dtype).contiguous()
    w, b = (None if t is None else t.to(dtype).reshape(-1) for t in (weight, bias))
    y, mean, rstd = torch.native_layer_norm(x, [x.shape[1]], w, b, eps)
    leading = input.shape[: input.dim() - len(normalized_shape)]
    statistics = (*leading, *[1] * len(normalized_shape))
    return y.reshape(input.shape), mean.reshape(statistics), rstd.reshape(statistics)


def aten_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """ATen's dx, dw and db in the arithmetic's precision, called as `aten_forward` calls it."""
    dtype = accumulation_dtype(input.dtype)
    x = _as_rows(input, normalized_shape).to(dtype).contiguous()
    dy = _as_rows(grad_out, normalized_shape).to(dtype).contiguous()
    w = x.new_ones(x.shape[1]) if weight is None else weight.to(dtype).reshape(-1)
    cols = [x.shape[1]]
    _, mean, rstd = torch.native_layer_norm(x, cols, w, None, eps)
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(
        dy, x, cols, mean, rstd, w, torch.zeros_like(w), [True, True, True]
    )
    shape = tuple(normalized_shape)
    return dx.reshape(input.shape), dw.reshape(shape), db.reshape(shape)


def assert_no_worse_than_aten(
    what: str,
    ours: Tensor,
    aten: Tensor,
    reference: Reference,
    dtype: torch.dtype,
    arithmetic: torch.dtype,
    *,
    out_of_range: bool = False,
) -> None:
    """Fails unless `ours` has the dtype, the shape and an error within the rule above.

    `out_of_range`: sums of squares overflow or underflow, so that ATen is wrong. Where it answers
    inf or NaN, elements that are finite in float64 are then not compared, and the others may be
    either.
    """
    assert ours.dtype == dtype, f"{what} is {ours.dtype}, expected {dtype}"
    assert ours.shape == reference.value.shape, f"{what} has shape {tuple(ours.shape)}"
    assert ours.is_contiguous(), f"{what} has strides {ours.stride()}"
    if ours.numel() == 0:
        return
    in_range = aten.isfinite() if out_of_range else torch.ones_like(aten, dtype=torch.bool)
    aten = aten.to(dtype).double()
    got = ours.double()
    exact = reference.value.to(dtype).double()
    comparable = got.isfinite() & reference.value.isfinite()
    odd = ~(comparable | _same_not_finite(got, aten) | _same_not_finite(got, exact))
    odd &= in_range | (got.isfinite() & ~reference.value.isfinite())
    assert not odd.any(), (
        f"{what}: {int(odd.sum())} elements are inf or NaN where ATen's are not, or the reverse; "
        f"first: {got[odd][0].item()} for {aten[odd][0].item()}, {exact[odd][0].item()} in float64"
    )
    errors = torch.where(comparable & in_range, (got - reference.value).abs(), 0)
    aten_errors = torch.where(comparable & aten.isfinite(), (aten - reference.value).abs(), 0)
    rounding = ARITHMETIC_UNITS * _unit(arithmetic, reference.term)
    if ours.numel() >= ELEMENTS_FOR_A_MEAN:
        _hold(f"{what}, root mean square", _rms(errors), _rms(aten_errors), rounding)
    if torch.finfo(dtype).eps > torch.finfo(arithmetic).eps:
        rounding += 0.5 * _unit(dtype, reference.term)
    _hold(f"{what}, largest", errors.max().item(), aten_errors.max().item(), rounding)


def _unit(dtype: torch.dtype, magnitude: float) -> float:
    """A unit in the last place of a number of this magnitude.

    The units of subnormal numbers do not shrink with them.
    """
    info = torch.finfo(dtype)
    return info.eps * max(magnitude, info.tiny)


def _same_not_finite(ours: Tensor, other: Tensor) -> Tensor:
    return (ours.isinf() & (ours == other)) | (ours.isnan() & other.isnan())


def _rms(errors: Tensor) -> float:
    return errors.square().mean().sqrt().item()


def _hold(what: str, error: float, aten_error: float, rounding: float) -> None:
    limit = 2 * aten_error + rounding
    record = worst.setdefault(what, Worst())
    record.of_limit = max(record.of_limit, error / limit)
    if aten_error > 0:
        record.of_aten = max(record.of_aten, (error - rounding) / aten_error)
    assert error <= limit, (
        f"{what}: error {error:.3e} exceeds {limit:.3e} "
        f"(twice ATen's {aten_error:.3e} plus {rounding:.3e} for rounding)"
    )


def check_forward(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
    *,
    out_of_range: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs layer_norm_forward, holds each output to the rule, and returns them. What layer_norm
    returns where nobody differentiates has the same bits.
    """
    arithmetic = accumulation_dtype(input.dtype)
    with torch.no_grad():
        outputs = ops.layer_norm_forward(input, normalized_shape, weight, bias, eps, out_dtype)
        alone = ops.layer_norm(input, normalized_shape, weight, bias, eps, out_dtype=out_dtype)
        torch.testing.assert_close(alone, outputs[0], rtol=0, atol=0, equal_nan=True)
        aten = aten_forward(input, normalized_shape, weight, bias, eps)
        references = forward_reference(input, normalized_shape, weight, bias, eps)
    dtypes = (out_dtype or input.dtype, arithmetic, arithmetic)
    names = ("output", "mean", "rstd")
    for what, ours, theirs, reference, dtype in zip(names, outputs, aten, references, dtypes):
        assert_no_worse_than_aten(
            what, ours, theirs, reference, dtype, arithmetic, out_of_range=out_of_range
        )
    return outputs


def check_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    output_mask: Sequence[bool] = (True, True, True),
    *,
    out_dtype: torch.dtype | None = None,
    out_of_range: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Runs layer_norm_backward, holds each output to the rule, and returns them.

    `out_dtype`: of the forward, whose statistics may differ in their last bits.
    """
    arithmetic = accumulation_dtype(input.dtype)
    with torch.no_grad():
        _, mean, rstd = ops.layer_norm_forward(
            input, normalized_shape, weight, bias, eps, out_dtype
        )
        outputs = ops.layer_norm_backward(
            grad_out, input, normalized_shape, mean, rstd, weight, bias, eps, output_mask
        )
        aten = aten_backward(grad_out, input, normalized_shape, weight, eps)
        references = backward_reference(grad_out, input, normalized_shape, weight, eps)
    likes = (input, weight, bias)
    names = ("dx", "dw", "db")
    for what, asked, like, ours, theirs, reference in zip(
        names, output_mask, likes, outputs, aten, references
    ):
        if not asked or like is None:
            assert ours is None, f"{what} was not asked for but is there"
            continue
        assert ours is not None, f"{what} was asked for but is not there"
        assert_no_worse_than_aten(
            what,
            ours,
            theirs,
            reference,
            like.dtype,
            arithmetic,
            out_of_range=out_of_range,
        )
    return outputs


def composed_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer norm of elementary operations, whose derivatives of every order autograd has right."""
    dims = tuple(range(-len(normalized_shape), 0))
    centered = input - input.mean(dims, keepdim=True)
    y = centered * (centered.square().mean(dims, keepdim=True) + eps).rsqrt()
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias
