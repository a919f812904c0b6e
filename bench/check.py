"""Whether a provider is right: its errors against float64, beside PyTorch's own.

PyTorch's own is ATen's result in float32 arithmetic (float64 for float64) on the upcast inputs,
rounded once to the result's dtype. A result passes when its largest error and its relative error
in the 2-norm are at most `TIMES_TORCH` times PyTorch's plus `UNITS` units in the last place of the
result's dtype.

Beyond that it is inaccurate, as where intermediates or partial sums are rounded to the lowest of
the case's dtypes: it may err by some units of that one more, by many in the sums over all rows. An
inaccurate provider is timed and marked. Beyond that, it is wrong, and not timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bench.cases import Pass
from bench.problem import EPS, Problem

TIMES_TORCH = 4
UNITS = 2
INACCURATE_UNITS = {"y": 4, "dx": 4, "dw": 16, "db": 16}


Grade = Literal["ok", "inaccurate", "wrong"]


@dataclass(frozen=True)
class Errors:
    """Of one result: the largest error and the relative error in the 2-norm, and PyTorch's."""

    largest: float
    relative: float
    torch_largest: float
    torch_relative: float
    grade: Grade

    def to_json(self) -> dict[str, float]:
        return {
            "largest": self.largest,
            "relative": self.relative,
            "torch_largest": self.torch_largest,
            "torch_relative": self.torch_relative,
        }


@dataclass(frozen=True)
class _Expected:
    value: Tensor  # float64
    norm: float
    largest: float
    torch_largest: float
    torch_relative: float
    unit: float  # of the result's dtype
    inaccuracy: float  # the relative error that an inaccurate result may have beyond a good one


class Reference:
    """The right results of a problem; computed once, for all providers."""

    def __init__(self, problem: Problem, passes: Sequence[Pass]) -> None:
        case = problem.case
        dtypes = {
            "y": case.out_dtype,
            "dx": case.x_dtype,
            "dw": case.weight_dtype,
            "db": case.weight_dtype,
        }
        lowest_unit = max(torch.finfo(dtype).eps for dtype in dtypes.values())
        names = ["y"] if passes != ["bwd"] else []
        if not set(passes) <= {"fwd", "infer"}:
            names += case.wanted
        self._expected: dict[str, _Expected] = {}
        with torch.no_grad():
            exact, torchs = _exact(problem, names), _torchs(problem, names)
            for name in names:
                value, theirs = exact.pop(name), torchs.pop(name).to(dtypes[name]).double()
                difference = theirs.sub_(value)
                norm = float(torch.linalg.vector_norm(value))
                self._expected[name] = _Expected(
                    value=value,
                    norm=norm,
                    largest=_largest(value),
                    torch_largest=_largest(difference),
                    torch_relative=float(torch.linalg.vector_norm(difference)) / max(norm, 1e-300),
                    unit=torch.finfo(dtypes[name]).eps,
                    inaccuracy=INACCURATE_UNITS[name] * lowest_unit,
                )

    def errors(self, results: Mapping[str, Tensor]) -> dict[str, Errors]:
        """Of each result that was expected; raises ValueError where one has another shape."""
        found = {}
        for name, got in results.items():
            expected = self._expected.get(name)
            if expected is None:
                continue
            if got.shape != expected.value.shape:
                raise ValueError(f"{name} has shape {tuple(got.shape)}")
            with torch.no_grad():
                difference = got.double().sub_(expected.value)
                largest = _largest(difference)
                relative = float(torch.linalg.vector_norm(difference)) / max(expected.norm, 1e-300)
            found[name] = Errors(
                largest=largest,
                relative=relative,
                torch_largest=expected.torch_largest,
                torch_relative=expected.torch_relative,
                grade=_grade(expected, largest, relative),
            )
        return found


def _largest(values: Tensor) -> float:
    # Without a tensor of absolute values; a NaN stays one.
    low, high = values.aminmax()
    return float(torch.maximum(low.abs(), high.abs()))


def _grade(expected: _Expected, largest: float, relative: float) -> Grade:
    largest_limit = TIMES_TORCH * expected.torch_largest + UNITS * expected.unit * expected.largest
    relative_limit = TIMES_TORCH * expected.torch_relative + UNITS * expected.unit
    # So written, a NaN is wrong.
    if largest <= largest_limit and relative <= relative_limit:
        return "ok"
    largest_limit += 2 * expected.inaccuracy * expected.largest
    relative_limit += expected.inaccuracy
    return "inaccurate" if largest <= largest_limit and relative <= relative_limit else "wrong"


def _exact(problem: Problem, names: Sequence[str]) -> dict[str, Tensor]:
    """The formulas of docs/layer_norm_math.md in float64."""
    weight, bias = problem.weight.double(), problem.bias.double()
    xhat = problem.x.double()
    xhat = xhat.sub_(xhat.mean(1, keepdim=True))
    # Without the rounding of the mean itself, an error that float64 rows under test would share.
    xhat = xhat.sub_(xhat.mean(1, keepdim=True))
    variance = torch.linalg.vector_norm(xhat, dim=1, keepdim=True).square_().div_(xhat.shape[1])
    rstd = variance.add_(EPS).rsqrt_()
    xhat = xhat.mul_(rstd)
    results = {}
    if "y" in names:
        results["y"] = torch.addcmul(bias, xhat, weight)
    if names == ["y"]:
        return results
    dy = problem.dy.double()
    if "dw" in names:
        results["dw"] = (dy * xhat).sum(0)
    if "db" in names:
        results["db"] = dy.sum(0)
    if "dx" in names:
        h = dy * weight
        projection = (h * xhat).mean(1, keepdim=True)
        dx = h.sub_(h.mean(1, keepdim=True)).addcmul_(xhat, projection, value=-1)
        results["dx"] = dx.mul_(rstd)
    return results


def _torchs(problem: Problem, names: Sequence[str]) -> dict[str, Tensor]:
    """ATen's results in float32, or float64 for float64."""
    dtype = torch.promote_types(problem.x.dtype, torch.float32)
    x, dy, weight, bias = (
        tensor.to(dtype).contiguous()
        for tensor in (problem.x, problem.dy, problem.weight, problem.bias)
    )
    aten = torch.ops.aten
    y, mean, rstd = aten.native_layer_norm(x, problem.shape, weight, bias, EPS)
    results = {"y": y}
    if names != ["y"]:
        del y
        mask = problem.case.output_mask
        gradients = aten.native_layer_norm_backward(
            dy, x, problem.shape, mean, rstd, weight, bias, mask
        )
        results |= dict(zip(("dx", "dw", "db"), gradients, strict=True))
    return {name: results[name] for name in names}


def poison(results: Mapping[str, Tensor]) -> None:
    """Fills results with NaN, for the next call to find in the memory that it is given."""
    with torch.no_grad():
        for result in results.values():
            result.fill_(float("nan"))
