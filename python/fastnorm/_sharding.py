"""Sharding rules of the operators: what they make of DTensors.

Rows are rows: leading dimensions may be sharded, each shard is a call of the same kernel, and dw
and db are partial sums of the shards. Weight, bias and normalized dimensions are replicated.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

DTENSOR = "torch.distributed.tensor"

Placements = list[Any]  # of results or arguments; None for what is no tensor
Shardings = list[tuple[Placements, Placements]]


def _placements_of_rows(shape: Sequence[int], normalized_shape: Sequence[int]) -> list[Any]:
    """Replicated, or sharded along one of the dimensions that are not normalized."""
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate(), *(Shard(dim) for dim in range(len(shape) - len(normalized_shape)))]


def _replicated(*parameters: object) -> Placements:
    from torch.distributed.tensor import Replicate

    return [None if parameter is None else Replicate() for parameter in parameters]


def _forward(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any,
    bias: Any,
    eps: float,
    out_dtype: torch.dtype | None,
) -> Shardings:
    parameters = _replicated(weight, bias)
    return [
        ([rows] * 3, [rows, None, *parameters, None, None])
        for rows in _placements_of_rows(input.shape, normalized_shape)
    ]


def _backward(
    grad_out: Any,
    input: Any,
    normalized_shape: Sequence[int],
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    eps: float,
    output_mask: Sequence[bool],
) -> Shardings:
    from torch.distributed.tensor import Partial

    parameters = _replicated(weight, bias)
    shardings = []
    for rows in _placements_of_rows(input.shape, normalized_shape):
        sums = Partial() if rows.is_shard() else rows
        results = [
            placement if wanted else None
            for placement, wanted in zip((rows, sums, sums), output_mask)
        ]
        shardings.append((results, [rows, rows, None, rows, rows, *parameters, None, None]))
    return shardings


def _register() -> None:
    try:
        _register_rules()
    except (ImportError, AttributeError) as error:  # the import that led here shall not fail of it
        warnings.warn(
            f"fastnorm's operators have no sharding rules with torch {torch.__version__}, whose "
            f"torch.distributed.tensor is not as expected: {error}",
            stacklevel=2,
        )


def _register_rules() -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    for op, rule, first in (
        (torch.ops.fastnorm.layer_norm_forward.default, _forward, 1),
        (torch.ops.fastnorm.layer_norm_backward.default, _backward, 2),
    ):
        register_sharding(op)(rule)
        # DTensor keeps what a rule answered, by the arguments from this one on: normalized_shape.
        # register_sharding counts integers alone, so that (6, 8) got the answer given for (8,).
        info = RuntimeSchemaInfo(static_argnum=first, needs_pytree=True)
        DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = info


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Registers the rules when DTensor is imported, which takes a second that few need."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != DTENSOR:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        sys.meta_path.remove(self)
        _register()


def register() -> None:
    """Makes the rules known to DTensor, now or when it is imported."""
    if DTENSOR in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterImport())
