"""Liger-Kernel's LayerNorm, where installed."""

from __future__ import annotations

from torch import Tensor

from bench.problem import EPS, Problem
from bench.providers.base import Norm, Provider, require, require_plain_dtypes


class Liger(Provider):
    name = "liger"
    distribution = "liger-kernel"
    module = "liger_kernel"

    def norm(self, problem: Problem) -> Norm:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        require_plain_dtypes(problem, weights=False)
        require(problem.case.cols <= 65536, "no row over 65536")

        def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return LigerLayerNormFunction.apply(x, weight, bias, EPS)

        return norm
