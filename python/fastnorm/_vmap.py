"""Batching rules of the operators: what `torch.func.vmap` makes of them.

Rows are rows: a batch of inputs is one call of the same kernel. Only what the kernels do not have,
a weight or a bias for each sample and sums over each sample's rows, is done by PyTorch's operators,
in the precision of the kernels' arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Results = tuple[Tensor | None, Tensor | None, Tensor | None]
Dims = tuple[int | None, int | None, int | None]


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _batched(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The samples along dimension 0, the same one `size` times if there is but one."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _beside_rows(parameter: Tensor, dim: int | None, batch_dims: int) -> Tensor:
    """A weight or bias, shaped to meet an input of `batch_dims` dimensions of rows per sample."""
    if dim is None:
        return parameter
    samples = parameter.movedim(dim, 0)
    return samples.reshape(samples.shape[0], *[1] * batch_dims, *samples.shape[1:])


def _forward(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
) -> tuple[Results, Dims]:
    op = torch.ops.fastnorm.layer_norm_forward
    input_dim, _, weight_dim, bias_dim, _, _ = in_dims
    x = input if input_dim is None else input.movedim(input_dim, 0)
    if weight_dim is None and bias_dim is None:
        return op(x, normalized_shape, weight, bias, eps, out_dtype), (0, 0, 0)
    batch_dims = x.dim() - (input_dim is not None) - len(normalized_shape)
    # Unrounded, so that the result is rounded once, as in the kernel.
    wide = _accumulation_dtype(x.dtype)
    y, mean, rstd = op(x, normalized_shape, None, None, eps, wide)
    if weight is not None:
        y = y * _beside_rows(weight, weight_dim, batch_dims)
    if bias is not None:
        y = y + _beside_rows(bias, bias_dim, batch_dims)
    statistics_dim = None if input_dim is None else 0
    return (y.to(out_dtype or input.dtype), mean, rstd), (0, statistics_dim, statistics_dim)


def _backward(
    info: Any,
    in_dims: tuple[int | None, ...],
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Results, Dims]:
    grad_dim, input_dim, _, mean_dim, rstd_dim, weight_dim, _, _, _ = in_dims
    grad_out = _batched(grad_out, grad_dim, info.batch_size)
    samples = input if input_dim is None else input.movedim(input_dim, 0)
    x = _batched(input, input_dim, info.batch_size)
    mean = _batched(mean, mean_dim, info.batch_size)
    rstd = _batched(rstd, rstd_dim, info.batch_size)
    dtype = _accumulation_dtype(x.dtype)
    batch_dims = x.dim() - 1 - len(normalized_shape)
    rows = list(range(1, 1 + batch_dims))  # the dimensions that one sample's dw and db sum over

    def sum_over_rows(values: Tensor, parameter: Tensor) -> Tensor:
        return (values.sum(rows) if rows else values).to(parameter.dtype)

    dx = dw = db = None
    if output_mask[0]:
        grad, scale = grad_out, weight
        if weight is not None and weight_dim is not None:
            grad = grad_out.to(dtype) * _beside_rows(weight, weight_dim, batch_dims)
            scale = None
        dx, _, _ = torch.ops.fastnorm.layer_norm_backward(
            grad, x, normalized_shape, mean, rstd, scale, None, eps, [True, False, False]
        )
    if output_mask[1] and weight is not None:
        # Not from mean and rstd: they are constants to a transform around this one.
        xhat, _, _ = torch.ops.fastnorm.layer_norm_forward(
            samples, normalized_shape, None, None, eps, dtype
        )
        dw = sum_over_rows(grad_out.to(dtype) * xhat, weight)
    if output_mask[2] and bias is not None:
        db = sum_over_rows(grad_out.to(dtype), bias)
    results = (dx, dw, db)
    return results, tuple(None if result is None else 0 for result in results)


def register() -> None:
    """Makes the rules known to PyTorch; once, where copies of the package share the library."""
    for name, rule in (("layer_norm_forward", _forward), ("layer_norm_backward", _backward)):
        operator = f"fastnorm::{name}"
        if not torch._C._dispatch_has_kernel_for_dispatch_key(operator, "FuncTorchBatched"):
            torch.library.register_vmap(operator, rule)
