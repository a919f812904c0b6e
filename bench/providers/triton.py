"""A LayerNorm in Triton, after the tutorial's algorithm: see triton_kernels.py."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.problem import EPS, Problem
from bench.providers.base import Norm, Provider, ResultsCall, _is_importable, require


class Triton(Provider):
    name = "triton"
    distribution = "triton"

    def missing(self, device: torch.device) -> str | None:
        if not _is_importable("triton"):
            return "not installed"
        return None if device.type == "cuda" else "GPU only"

    def norm(self, problem: Problem) -> Norm:
        from bench.providers.triton_kernels import LayerNormFunction

        _require_supported(problem)
        out_dtype = problem.case.out_dtype

        def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            y: Tensor = LayerNormFunction.apply(x, weight, bias, EPS, out_dtype)
            return y

        return norm

    def forward(self, problem: Problem) -> ResultsCall:
        from bench.providers.triton_kernels import layer_norm_forward

        _require_supported(problem)
        x, weight, bias, out_dtype = problem.x, problem.weight, problem.bias, problem.case.out_dtype
        return lambda: layer_norm_forward(x, weight, bias, EPS, out_dtype)

    def backward(self, problem: Problem) -> ResultsCall:
        from bench.providers.triton_kernels import layer_norm_backward, layer_norm_forward

        _require_supported(problem)
        x, dy, weight, bias = problem.x, problem.dy, problem.weight, problem.bias
        _, mean, rstd = layer_norm_forward(x, weight, bias, EPS, problem.case.out_dtype)
        return lambda: layer_norm_backward(dy, x, weight, mean, rstd)


def _require_supported(problem: Problem) -> None:
    require(problem.case.dtype != "fp64", "no float64")
    require(problem.case.grads == "dx+dw+db", "all gradients only")
