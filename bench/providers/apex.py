"""NVIDIA Apex's two LayerNorms, where installed."""

from __future__ import annotations

from torch import Tensor

from bench.problem import EPS, Problem
from bench.providers.base import Norm, Provider, require, require_plain_dtypes

# The widths that contrib's FastLayerNorm has kernels for.
FAST_COLS = frozenset(
    int(cols)
    for cols in [
        "768",
        "1024",
        "1536",
        "2048",
        "2304",
        "3072",
        "3840",
        "4096",
        "5120",
        "6144",
        "8192",
        "10240",
        "12288",
        "12800",
        "14336",
        "15360",
        "16384",
        "18432",
        "20480",
        "24576",
        "25600",
        "30720",
        "32768",
        "40960",
        "49152",
        "65536",
    ]
)


class ApexFused(Provider):
    name = "apex"
    distribution = "apex"
    module = "fused_layer_norm_cuda"

    def norm(self, problem: Problem) -> Norm:
        from apex.normalization import fused_layer_norm as apex

        require_plain_dtypes(problem)  # its function for mixed dtypes writes the weights' dtype
        shape = problem.shape

        def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return apex.fused_layer_norm_affine(x, weight, bias, shape, EPS)

        return norm


class ApexFast(Provider):
    name = "apex-fast"
    distribution = "apex"
    module = "fast_layer_norm"

    def norm(self, problem: Problem) -> Norm:
        from apex.contrib.layer_norm.layer_norm import FastLayerNormFN

        require_plain_dtypes(problem)
        case = problem.case
        require(case.cols in FAST_COLS, "not this width")
        require(case.row_stride is None and case.offset == 0, "dense, aligned rows only")

        def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return FastLayerNormFN.apply(x, weight, bias, EPS, False)

        return norm
