"""Forward and backward of every dtype against float64, on shapes that reach every kind of kernel.

A result passes when its largest error is at most twice PyTorch's own on the same input, plus
rounding: one step of the result's dtype at the result's largest magnitude, and one of the
accumulation's dtype at the largest sum of the absolute values of the terms that make it up (where
terms cancel, any order of adding them is off by about that much, and which does better is luck).
Where PyTorch cannot take the dtypes, its own error is that of its float32 result rounded to the
result's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5


@dataclass(frozen=True)
class Mode:
    """Which dtypes meet in one call."""

    name: str
    x: torch.dtype
    weight: torch.dtype
    out: torch.dtype

    @property
    def is_mixed(self) -> bool:
        return not self.x == self.weight == self.out


def _modes() -> tuple[Mode, ...]:
    f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
    return (
        Mode("float32", f32, f32, f32),
        Mode("float16", f16, f16, f16),
        Mode("bfloat16", bf16, bf16, bf16),
        Mode("float64", f64, f64, f64),
        Mode("float16, float32 weights", f16, f32, f16),
        Mode("bfloat16, float32 weights", bf16, f32, bf16),
        Mode("float16 to float32", f16, f16, f32),
        Mode("bfloat16 to float32", bf16, bf16, f32),
    )


@dataclass(frozen=True)
class Layout:
    """One input: its shape, which parameters it has, and how it lies in memory."""

    leading: tuple[int, ...]
    normalized: tuple[int, ...]
    weight: bool = True
    bias: bool = True
    strided: bool = False  # rows spaced apart, and no row aligned to more than its element

    def __str__(self) -> str:
        affine = {
            (True, True): "weight and bias",
            (True, False): "weight only",
            (False, True): "bias only",
            (False, False): "no weight, no bias",
        }[self.weight, self.bias]
        shape = (*self.leading, *self.normalized)
        strided = ", rows spaced apart" if self.strided else ""
        return f"input {shape} over {self.normalized}, {affine}{strided}"


MODES = _modes()
LAYOUTS = (
    Layout((200,), (5,)),  # rows shorter than a 16-bit vector load
    Layout((70000,), (32,)),  # many short rows
    Layout((4096,), (64,)),
    Layout((515,), (127,)),  # odd width: no row after the first is aligned
    Layout((6, 5), (8, 16)),  # two normalized dimensions
    Layout((33,), (769,), bias=False),
    Layout((200,), (1000,), strided=True),
    Layout((100,), (1024,), weight=False, bias=False),
    Layout((64,), (4096,)),
    Layout((16,), (12288,)),
    Layout((1,), (65536,)),  # a single row
    Layout((3,), (70001,), weight=False),  # long and odd
    Layout((2,), (300000,)),  # longer than any on-chip memory holds
)


@dataclass(frozen=True)
class Outcome:
    """What one call got wrong: per result its error, PyTorch's and the allowed one."""

    device: str
    mode: str
    layout: str
    errors: dict[str, dict[str, float]]
    complaint: str | None  # None when everything passed

    def share_of_allowed(self, result: str) -> float | None:
        """This result's error as a fraction of the allowed one; None when there is none."""
        error = self.errors.get(result)
        if error is None:
            return None
        if error["allowed"] == 0:
            return 0.0 if error["fastnorm"] == 0 else float("inf")
        return error["fastnorm"] / error["allowed"]


@dataclass(frozen=True)
class _Inputs:
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    grad_out: Tensor
    normalized: tuple[int, ...]

    def to(self, dtype: torch.dtype) -> _Inputs:
        return _Inputs(
            self.x.to(dtype),
            None if self.weight is None else self.weight.to(dtype),
            None if self.bias is None else self.bias.to(dtype),
            self.grad_out.to(dtype),
            self.normalized,
        )

    def first(self, count: int) -> _Inputs:
        return _Inputs(
            self.x[:count], self.weight, self.bias, self.grad_out[:count], self.normalized
        )


def _make_inputs(device: torch.device, mode: Mode, layout: Layout) -> _Inputs:
    # Drawn on the CPU: every device is asked the same question.
    generator = torch.Generator().manual_seed(0)
    shape = (*layout.leading, *layout.normalized)

    def draw(size: tuple[int, ...], dtype: torch.dtype, scale: float, shift: float) -> Tensor:
        drawn = torch.promote_types(dtype, torch.float32)
        values = torch.randn(size, generator=generator, dtype=drawn).mul_(scale).add_(shift)
        return values.to(device=device, dtype=dtype)

    def draw_rows(dtype: torch.dtype, scale: float, shift: float) -> Tensor:
        if not layout.strided:
            return draw(shape, dtype, scale, shift)
        wider = (*shape[:-1], shape[-1] + 8)
        return draw(wider, dtype, scale, shift)[..., 1 : shape[-1] + 1]

    return _Inputs(
        x=draw_rows(mode.x, 2.0, 1.0),
        weight=draw(layout.normalized, mode.weight, 0.5, 1.0) if layout.weight else None,
        bias=draw(layout.normalized, mode.weight, 0.5, 0.0) if layout.bias else None,
        grad_out=draw_rows(mode.out, 1.0, 0.0),
        normalized=layout.normalized,
    )


Norm = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


def _results(norm: Norm, inputs: _Inputs) -> dict[str, Tensor]:
    """y, dx and, where the parameter is there, dw and db."""
    names = ["dx"]
    leaves = [inputs.x.detach().requires_grad_()]
    for name, parameter in (("dw", inputs.weight), ("db", inputs.bias)):
        if parameter is not None:
            names.append(name)
            leaves.append(parameter.detach().requires_grad_())
    given = dict(zip(names, leaves, strict=True))
    y = norm(given["dx"], given.get("dw"), given.get("db"))
    gradients = torch.autograd.grad(y, leaves, inputs.grad_out)
    return {"y": y.detach(), **dict(zip(names, gradients, strict=True))}


def _fastnorm_results(inputs: _Inputs, mode: Mode) -> dict[str, Tensor]:
    shape = list(inputs.normalized)
    out_dtype = None if mode.out == mode.x else mode.out

    def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y: Tensor = torch.ops.fastnorm.layer_norm(x, shape, weight, bias, EPS, out_dtype=out_dtype)
        return y

    return _results(norm, inputs)


def _torch_results(inputs: _Inputs, mode: Mode) -> dict[str, Tensor]:
    shape = list(inputs.normalized)

    def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if weight is None and bias is not None:  # PyTorch has no backward of this at every size
            weight = torch.ones_like(bias)
        return F.layer_norm(x, shape, weight, bias, EPS)

    return _results(norm, inputs.to(torch.float32) if mode.is_mixed else inputs)


def _exact_results(inputs: _Inputs) -> dict[str, tuple[Tensor, Tensor]]:
    """Each result in float64, beside the sum of the absolute values of its terms.

    The formulas are those of docs/layer_norm_math.md.
    """
    exact = inputs.to(torch.float64)
    dy = exact.grad_out
    over = tuple(range(-len(inputs.normalized), 0))
    leading = tuple(range(exact.x.dim() - len(inputs.normalized)))
    centred = exact.x - exact.x.mean(over, keepdim=True)
    # Without the rounding of the mean itself, an error that float64 rows under test would share.
    centred = centred - centred.mean(over, keepdim=True)
    rstd = (centred.square().mean(over, keepdim=True) + EPS).rsqrt()
    xhat = centred * rstd
    results = {}
    y, y_terms, h = xhat, xhat.abs(), dy
    if exact.weight is not None:
        y, y_terms, h = y * exact.weight, y_terms * exact.weight.abs(), h * exact.weight
        results["dw"] = (dy * xhat).sum(leading), (dy * xhat).abs().sum(leading)
    if exact.bias is not None:
        y, y_terms = y + exact.bias, y_terms + exact.bias.abs()
        results["db"] = dy.sum(leading), dy.abs().sum(leading)
    results["y"] = y, y_terms
    mean_h = h.mean(over, keepdim=True)
    projected = xhat * (h * xhat).mean(over, keepdim=True)
    terms = h.abs() + mean_h.abs() + projected.abs()
    results["dx"] = rstd * (h - mean_h - projected), rstd * terms
    return results


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


def _check(device: torch.device, mode: Mode, layout: Layout) -> Outcome:
    inputs = _make_inputs(device, mode, layout)
    got = _fastnorm_results(inputs, mode)
    theirs = _torch_results(inputs, mode)
    exact = _exact_results(inputs)
    dtypes = {"y": mode.out, "dx": mode.x, "dw": mode.weight, "db": mode.weight}
    accumulation = torch.promote_types(mode.x, torch.float32)
    errors: dict[str, dict[str, float]] = {}
    complaint = None
    for name, value in got.items():
        want, terms = exact[name]
        dtype = dtypes[name]
        if value.shape != want.shape or value.dtype != dtype:
            complaint = complaint or (
                f"{name} is {tuple(value.shape)} {value.dtype} and must be "
                f"{tuple(want.shape)} {dtype}"
            )
            continue
        error = _largest(value.double() - want)
        torch_error = _largest(theirs[name].to(dtype).double() - want)
        rounding = torch.finfo(dtype).eps * _largest(want)
        rounding += torch.finfo(accumulation).eps * _largest(terms)
        allowed = 2 * torch_error + rounding
        errors[name] = {"fastnorm": error, "torch": torch_error, "allowed": allowed}
        if not error <= allowed:  # so written, a NaN is a failure
            complaint = complaint or (
                f"{name} is off by {error:.3g} where {allowed:.3g} is allowed (twice PyTorch's "
                f"{torch_error:.3g} plus {rounding:.3g} for rounding)"
            )

    again = _fastnorm_results(inputs, mode)
    for name, value in got.items():
        if not torch.equal(value, again[name]):
            complaint = complaint or f"{name} differs between two runs on the same input"
    if layout.leading[0] > 1:
        count = (layout.leading[0] + 2) // 3
        fewer = _fastnorm_results(inputs.first(count), mode)
        for name in ("y", "dx"):
            if not torch.equal(got[name][:count], fewer[name]):
                complaint = complaint or f"{name} of a row depends on the rows it is batched with"
    return Outcome(str(device), mode.name, str(layout), errors, complaint)


def check_device(device: torch.device) -> Iterator[Outcome]:
    """Yield one outcome per dtypes and layout; stop at the first call that raises."""
    for mode in MODES:
        for layout in LAYOUTS:
            try:
                outcome = _check(device, mode, layout)
            except Exception as error:
                # After an error on a GPU nothing further on it can be trusted.
                text = str(error).strip() or "no message"
                complaint = f"it raised {type(error).__name__}: {text}"
                yield Outcome(str(device), mode.name, str(layout), {}, complaint)
                return
            yield outcome
