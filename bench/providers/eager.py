"""PyTorch, eager: ATen's two primitives, and F.layer_norm and its module."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.problem import EPS, Problem
from bench.providers.base import Norm, Provider, ResultsCall, require


class Torch(Provider):
    """Another output dtype costs it a cast, as it costs its users."""

    name = "torch"

    def version(self) -> str | None:
        return torch.__version__

    def norm(self, problem: Problem) -> Norm:
        _require_dtypes(problem)
        shape, out_dtype = problem.shape, problem.case.out_dtype
        if out_dtype == problem.case.x_dtype:
            return lambda x, weight, bias: F.layer_norm(x, shape, weight, bias, EPS)

        def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.layer_norm(x, shape, weight, bias, EPS).to(out_dtype)

        return norm

    def norm_module(self, problem: Problem) -> torch.nn.Module:
        case = problem.case
        return torch.nn.LayerNorm(case.cols, EPS, device=problem.device, dtype=case.weight_dtype)

    def forward(self, problem: Problem) -> ResultsCall:
        _require_dtypes(problem)
        x, weight, bias, shape = problem.x, problem.weight, problem.bias, problem.shape
        out_dtype = problem.case.out_dtype
        forward = torch.ops.aten.native_layer_norm
        if out_dtype == problem.case.x_dtype:
            return lambda: forward(x, shape, weight, bias, EPS)
        return lambda: forward(x, shape, weight, bias, EPS)[0].to(out_dtype)

    def backward(self, problem: Problem) -> ResultsCall:
        _require_dtypes(problem)
        x, dy, weight, bias = problem.x, problem.dy, problem.weight, problem.bias
        shape, mask, dtype = problem.shape, problem.case.output_mask, problem.case.x_dtype
        _, mean, rstd = torch.ops.aten.native_layer_norm(x, shape, weight, bias, EPS)
        backward = torch.ops.aten.native_layer_norm_backward
        if dy.dtype == dtype:
            return lambda: backward(dy, x, shape, mean, rstd, weight, bias, mask)
        return lambda: backward(dy.to(dtype), x, shape, mean, rstd, weight, bias, mask)


def _require_dtypes(problem: Problem) -> None:
    case = problem.case
    mixed = case.weight_dtype != case.x_dtype
    require(not mixed or problem.device.type == "cpu", "no mixed dtypes")
