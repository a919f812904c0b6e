"""What a provider is: how each pass is called, and why it may not be."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from bench.problem import Problem

Norm = Callable[[Tensor, Tensor, Tensor], Tensor]
Results = Mapping[str, Tensor]
ResultsCall = Callable[[], object]


class UnsupportedError(Exception):
    """The provider does not do this case; the text says which part of it."""


class Provider:
    """Calls of one implementation. By default all go through autograd, from `norm`.

    A call returns what `results` of the same pass understands; nothing but the call is timed.
    """

    name: str
    distribution: str | None = None  # what pip calls it
    module: str | None = None  # what must be importable

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run here at all; None when it can."""
        if self.module is not None and not _is_importable(self.module):
            return "not installed"
        if self.module is not None and device.type != "cuda":
            return "GPU only"
        return None

    def version(self) -> str | None:
        if self.distribution is None:
            return None
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def norm(self, problem: Problem) -> Norm:
        """The differentiable function of x, weight and bias; raises UnsupportedError."""
        raise NotImplementedError

    def norm_module(self, problem: Problem) -> torch.nn.Module | None:
        """The module that users put into models, if there is one."""
        return None

    def forward(self, problem: Problem) -> ResultsCall:
        """y, with whatever the backward needs: the forward of a training step."""
        norm, leaves = self.norm(problem), problem.leaves()
        return lambda: norm(*leaves).detach()

    def inference(self, problem: Problem) -> ResultsCall:
        """y of tensors that need no gradient."""
        norm, x, weight, bias = self.norm(problem), problem.x, problem.weight, problem.bias
        return lambda: norm(x, weight, bias)

    def backward(self, problem: Problem) -> ResultsCall:
        """The gradients asked for, from what a forward has kept."""
        norm, leaves = self.norm(problem), problem.leaves()
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        y, dy = norm(*leaves), problem.dy
        return lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True)

    def both(self, problem: Problem) -> ResultsCall:
        norm, leaves = self.norm(problem), problem.leaves()
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        dy = problem.dy

        def call() -> tuple[Tensor, ...]:
            y = norm(*leaves)
            return (y.detach(), *torch.autograd.grad(y, wanted, dy))

        return call

    def results(self, which: str, problem: Problem, returned: object) -> Results:
        """What a call returned, by name."""
        values = [returned] if isinstance(returned, Tensor) else list(_as_tuple(returned))
        if which in ("fwd", "infer"):
            return {"y": values[0]}
        gradients = values[1:] if which == "both" else values
        # A primitive returns None for what was not asked for, autograd leaves it out.
        given = [value for value in gradients if value is not None]
        named = dict(zip(problem.case.wanted, given, strict=True))
        return {"y": values[0], **named} if which == "both" else named


def _as_tuple(returned: object) -> tuple[Tensor, ...]:
    if not isinstance(returned, tuple | list):
        raise TypeError(f"a call returned {type(returned).__name__}")
    return tuple(returned)


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise UnsupportedError(reason)


def require_plain_dtypes(problem: Problem, *, weights: bool = True) -> None:
    """Of a provider that knows one dtype for all tensors, or all but the weights."""
    case = problem.case
    require(case.dtype != "fp64", "no float64")
    require(case.out_dtype == case.x_dtype, "no other output dtype")
    if weights:
        require(case.weight_dtype == case.x_dtype, "no mixed dtypes")
