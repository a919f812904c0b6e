"""fastnorm: its two primitives, and its function and module."""

from __future__ import annotations

import torch
from torch import Tensor

import fastnorm
from bench.problem import EPS, Problem
from bench.providers.base import Norm, Provider, ResultsCall
from fastnorm.functional import layer_norm


class Fastnorm(Provider):
    name = "fastnorm"

    def missing(self, device: torch.device) -> str | None:
        if device.type == "cuda" and fastnorm._C.build_info()["cuda"] is None:
            return "built without CUDA"
        return None

    def version(self) -> str | None:
        return str(fastnorm.__version__)

    def norm(self, problem: Problem) -> Norm:
        case, shape = problem.case, problem.shape
        out_dtype = None if case.out_dtype == case.x_dtype else case.out_dtype

        def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return layer_norm(x, shape, weight, bias, EPS, out_dtype)

        return norm

    def norm_module(self, problem: Problem) -> torch.nn.Module:
        return fastnorm.LayerNorm(
            problem.case.cols, EPS, device=problem.device, dtype=problem.case.weight_dtype
        )

    def forward(self, problem: Problem) -> ResultsCall:
        x, weight, bias, shape = problem.x, problem.weight, problem.bias, problem.shape
        out_dtype = problem.case.out_dtype
        forward = torch.ops.fastnorm.layer_norm_forward
        return lambda: forward(x, shape, weight, bias, EPS, out_dtype)

    def backward(self, problem: Problem) -> ResultsCall:
        x, dy, weight, bias = problem.x, problem.dy, problem.weight, problem.bias
        shape, mask = problem.shape, problem.case.output_mask
        _, mean, rstd = torch.ops.fastnorm.layer_norm_forward(
            x, shape, weight, bias, EPS, problem.case.out_dtype
        )
        backward = torch.ops.fastnorm.layer_norm_backward
        return lambda: backward(dy, x, shape, mean, rstd, weight, bias, EPS, mask)
