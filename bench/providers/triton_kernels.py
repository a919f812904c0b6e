"""Kernels in Triton: a LayerNorm, and a read of two tensors, the ceiling of what writes neither.

The forward is that of Triton's LayerNorm tutorial: a program per row, which loops over blocks of
columns for the mean, again for the variance, and again to write. The backward has the tutorial's
two stages, dx with partial sums of dw and db for groups of rows, then the sum over the groups.
Where the tutorial's programs take turns at a group's sums under a lock, here one program walks all
rows of its group and keeps the sums in registers, or, of rows too wide for that, in its own line
of memory: no waiting, and the same bits every time.
"""

# Triton's kernels have untyped arguments and constants in capitals.
# ruff: noqa: ANN001, ANN202, N803

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK_BYTES = 65536  # of a row in one block, as in the tutorial
MAX_RESIDENT_COLS = 8192  # the widest row whose sums of dw and db a program keeps in registers


@triton.jit
def _forward_kernel(
    x_ptr, y_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr,
    x_stride, cols, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * cols
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, cols, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sums += tl.load(x_ptr + at, mask=at < cols, other=0.0).to(tl.float32)
    mean = tl.sum(sums, axis=0) / cols
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, cols, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < cols, other=0.0).to(tl.float32)
        centred = tl.where(at < cols, x - mean, 0.0)
        squares += centred * centred
    rstd = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / cols + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, cols, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < cols
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y = (x - mean) * rstd * weight + bias
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr,
    dy_stride, x_stride, rows, cols,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A row fits into one block; program g takes the rows g, g + groups, ..."""
    group, groups = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    inside = at < cols
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for index in range(group, rows, groups):
        row = tl.cast(index, tl.int64)
        x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + at, mask=inside, other=0.0).to(tl.float32)
        mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
        xhat = tl.where(inside, (x - mean) * rstd, 0.0)
        wdy = weight * dy
        projection = tl.sum(xhat * wdy, axis=0) / cols
        average = tl.sum(wdy, axis=0) / cols
        dx = (wdy - average - xhat * projection) * rstd
        tl.store(dx_ptr + row * cols + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dw += dy * xhat
        db += dy
    line = group.to(tl.int64) * cols
    tl.store(dw_ptr + line + at, dw, mask=inside)
    tl.store(db_ptr + line + at, db, mask=inside)


@triton.jit
def _wide_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr,
    dy_stride, x_stride, rows, cols,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for a row of several blocks: two loops over it, the sums in the program's memory."""
    group, groups = tl.program_id(0), tl.num_programs(0)
    line = group.to(tl.int64) * cols
    for index in range(group, rows, groups):
        row = tl.cast(index, tl.int64)
        x_row, dy_row = x_ptr + row * x_stride, dy_ptr + row * dy_stride
        mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
        projections = tl.zeros([BLOCK], dtype=tl.float32)
        averages = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, cols, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < cols
            x = tl.load(x_row + at, mask=inside, other=0.0).to(tl.float32)
            dy = tl.load(dy_row + at, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
            wdy = weight * dy
            projections += (x - mean) * rstd * wdy
            averages += wdy
        projection = tl.sum(projections, axis=0) / cols
        average = tl.sum(averages, axis=0) / cols
        for start in range(0, cols, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < cols
            x = tl.load(x_row + at, mask=inside, other=0.0).to(tl.float32)
            dy = tl.load(dy_row + at, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
            xhat = (x - mean) * rstd
            dx = (weight * dy - average - xhat * projection) * rstd
            tl.store(dx_ptr + row * cols + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
            dw, db = dy * xhat, dy
            if index != group:
                dw += tl.load(dw_ptr + line + at, mask=inside, other=0.0)
                db += tl.load(db_ptr + line + at, mask=inside, other=0.0)
            tl.store(dw_ptr + line + at, dw, mask=inside)
            tl.store(db_ptr + line + at, db, mask=inside)
        tl.debug_barrier()  # before another thread reads them for the next row


@triton.jit
def _sum_groups_kernel(
    dw_parts_ptr, db_parts_ptr, dw_ptr, db_ptr,
    groups, cols,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([GROUPS, BLOCK], dtype=tl.float32)
    db = tl.zeros([GROUPS, BLOCK], dtype=tl.float32)
    for start in range(0, groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        inside = (group[:, None] < groups) & (at[None, :] < cols)
        place = group[:, None].to(tl.int64) * cols + at[None, :]
        dw += tl.load(dw_parts_ptr + place, mask=inside, other=0.0)
        db += tl.load(db_parts_ptr + place, mask=inside, other=0.0)
    tl.store(dw_ptr + at, tl.sum(dw, axis=0).to(dw_ptr.dtype.element_ty), mask=at < cols)
    tl.store(db_ptr + at, tl.sum(db, axis=0).to(db_ptr.dtype.element_ty), mask=at < cols)


@triton.jit
def _read_kernel(x_ptr, dy_ptr, out_ptr, elements, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < elements, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=at < elements, other=0.0).to(tl.float32)
    tl.store(out_ptr + program, tl.sum(x * dy, axis=0))


def layer_norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and rstd of a (rows, cols) tensor whose rows are dense."""
    rows, cols = x.shape
    y = torch.empty((rows, cols), dtype=out_dtype, device=x.device)
    mean = torch.empty(rows, dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    block = min(MAX_BLOCK_BYTES // x.element_size(), triton.next_power_of_2(cols))
    _forward_kernel[(rows,)](
        x, y, weight, bias, mean, rstd, x.stride(0), cols, eps,
        BLOCK=block, num_warps=min(max(block // 256, 1), 8),
    )  # fmt: skip
    return y, mean, rstd


def layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw and db; rows of dy may be spaced apart or all the same one."""
    rows, cols = x.shape
    if dy.stride(1) != 1:
        dy = dy.contiguous()
    block = min(MAX_RESIDENT_COLS, triton.next_power_of_2(cols))
    is_wide = cols > block
    warps = 16 if is_wide else min(max(block // 256, 1), 16)
    groups = min(rows, _multiprocessors(x.device) * max(1, (4 if is_wide else 32) // warps))
    dx = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    dw_parts = torch.empty((groups, cols), dtype=torch.float32, device=x.device)
    db_parts = torch.empty_like(dw_parts)
    kernel = _wide_backward_kernel if is_wide else _backward_kernel
    kernel[(groups,)](
        dy, x, weight, mean, rstd, dx, dw_parts, db_parts, dy.stride(0), x.stride(0), rows, cols,
        BLOCK=block, num_warps=warps,
    )  # fmt: skip
    dw, db = torch.empty_like(weight), torch.empty_like(weight)
    block = 32
    _sum_groups_kernel[(triton.cdiv(cols, block),)](
        dw_parts, db_parts, dw, db, groups, cols, GROUPS=32, BLOCK=block, num_warps=4
    )
    return dx, dw, db


def read_both(x: Tensor, dy: Tensor) -> Tensor:
    """Reads two dense tensors of one shape and writes a number for every 8192 elements."""
    block = 8192
    # Of a number of elements that is no multiple of 16 Triton would read one at a time.
    count = x.numel() // 16 * 16 or x.numel()
    programs = triton.cdiv(count, block)
    out = torch.empty(programs, dtype=torch.float32, device=x.device)
    _read_kernel[(programs,)](x, dy, out, count, BLOCK=block, num_warps=8)
    return out


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


class LayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, out_dtype: torch.dtype
    ) -> Tensor:
        y, mean, rstd = layer_norm_forward(x, weight, bias, eps, out_dtype)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, db = layer_norm_backward(dy, *ctx.saved_tensors)
        return dx, dw, db, None, None
