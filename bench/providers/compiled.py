"""torch.compile of F.layer_norm for the case's very shape, forward and backward as autograd runs
them: what a user of torch.compile gets where nothing is there to fuse with.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.problem import EPS, Problem
from bench.providers.base import Norm, Provider


class Compiled(Provider):
    name = "compile"

    def __init__(self) -> None:
        self._latest: tuple[Problem, Norm] | None = None

    def missing(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "GPU only"

    def version(self) -> str | None:
        return torch.__version__

    def norm(self, problem: Problem) -> Norm:
        if self._latest is None or self._latest[0] is not problem:
            self._latest = problem, _compile(problem)
        return self._latest[1]


def _compile(problem: Problem) -> Norm:
    import torch._dynamo
    import torch._functorch.config

    torch._dynamo.reset()  # the programs of cases before: no guard of theirs is to be checked
    # The backward is run more than once on what one forward kept.
    torch._functorch.config.donated_buffer = False
    case, shape, out_dtype = problem.case, problem.shape, problem.case.out_dtype
    # F.layer_norm takes one dtype on GPUs; where there are two, casts are fused into the kernels.
    arithmetic = torch.promote_types(case.x_dtype, case.weight_dtype)

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = F.layer_norm(x.to(arithmetic), shape, weight.to(arithmetic), bias.to(arithmetic), EPS)
        return y.to(out_dtype)

    compiled: Norm = torch.compile(layer_norm, dynamic=False, fullgraph=True)
    return compiled
