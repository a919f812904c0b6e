"""quack's LayerNorm, where installed. It takes float32 weights alone: it is given them as such,
whatever the case's, and returns their gradients so.
"""

from __future__ import annotations

from torch import Tensor

from bench.problem import EPS, Problem
from bench.providers.base import Norm, Provider, ResultsCall, UnsupportedError, require_plain_dtypes


class Quack(Provider):
    name = "quack"
    distribution = "quack-kernels"
    module = "quack.rmsnorm"

    def norm(self, problem: Problem) -> Norm:
        raise UnsupportedError("no autograd")

    def forward(self, problem: Problem) -> ResultsCall:
        from quack.rmsnorm import layernorm_fwd

        require_plain_dtypes(problem, weights=False)
        x, weight, bias = problem.x, problem.weight.float(), problem.bias.float()
        return lambda: layernorm_fwd(x, weight, bias, EPS, return_rstd=True, return_mean=True)

    def backward(self, problem: Problem) -> ResultsCall:
        from quack.rmsnorm import layernorm_bwd, layernorm_fwd

        require_plain_dtypes(problem, weights=False)
        if problem.case.grads != "dx+dw+db":
            raise UnsupportedError("all gradients only")
        x, dy, weight, bias = problem.x, problem.dy, problem.weight.float(), problem.bias.float()
        _, rstd, mean = layernorm_fwd(x, weight, bias, EPS, return_rstd=True, return_mean=True)

        def call() -> tuple[Tensor, Tensor, Tensor | None]:
            return layernorm_bwd(x, weight, dy, rstd, mean, has_bias=True)

        return call
