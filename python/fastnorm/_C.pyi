# Types of the compiled module, csrc/python_module.cpp.
from typing import Any, Literal

import torch
from torch import Tensor

Direction = Literal["forward", "backward"]
DtypeName = Literal["float32", "float16", "bfloat16", "float64"]
KernelName = Literal[
    "short_rows", "elements", "rows", "cluster", "few_rows", "few_elements", "ring", "split"
]
WeightGradsName = Literal["none", "fused", "row", "tiles", "columns"]

def layer_norm(
    input: Tensor,
    normalized_shape: list[int] | tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
    /,
) -> Tensor | None: ...
def build_info() -> dict[str, Any]: ...
def plan(
    direction: Direction,
    rows: int,
    cols: int,
    dtype: DtypeName,
    *,
    aligned: bool = True,
    contiguous: bool = False,
    dx: bool = True,
    dw_db: bool = True,
    one_dtype: bool = True,
    y_as_x: bool = True,
    dy_dtype: DtypeName | None = None,
    of_sums_dtype: bool = False,
    sm_count: int = 132,
    compute_capability: int = 90,
    large_clusters: int = 7,
    whole_grids: bool = True,
    memory_bandwidth: int = 4800,
    kernel: KernelName | None = None,
    weight_grads: WeightGradsName | None = None,
    cluster_size: int | None = None,
    merged: int | None = None,
    exchange_warp: bool | None = None,
    blocks: int | None = None,
    in_bulk: bool | None = None,
    finish_by_thread: bool | None = None,
) -> dict[str, Any]: ...
def force_plan(
    *,
    kernel: KernelName | None = None,
    weight_grads: WeightGradsName | None = None,
    cluster_size: int | None = None,
    merged: int | None = None,
    exchange_warp: bool | None = None,
    blocks: int | None = None,
    in_bulk: bool | None = None,
    finish_by_thread: bool | None = None,
) -> None: ...
