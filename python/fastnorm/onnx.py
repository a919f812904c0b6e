"""What the operators become in ONNX: the standard LayerNormalization node.

torch.onnx.export(model, args, dynamo=True,
                  custom_translation_table=fastnorm.onnx.translation_table())
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return what ``torch.onnx.export(dynamo=True)`` takes as its ``custom_translation_table``.

    ``layer_norm`` and ``layer_norm_forward`` each become one ``LayerNormalization`` node. A missing
    weight becomes ones. The node wants one dtype for all of its tensors: where weight, bias or the
    result have another than the input, it is surrounded by casts and works in float32, the
    precision of fastnorm's own arithmetic. ONNX keeps eps as a float32.

    Raises:
        ImportError: onnxscript, of the extra ``fastnorm[onnx]``, is not installed.
    """
    try:
        from onnxscript import ir
        from onnxscript import opset18 as op
    except ImportError as error:
        raise ImportError(
            "fastnorm.onnx needs onnxscript: pip install 'fastnorm[onnx]'", name="onnxscript"
        ) from error

    def layer_norm_forward(
        input: Any,
        normalized_shape: Sequence[Any],
        weight: Any = None,
        bias: Any = None,
        eps: float = 1e-5,
        out_dtype: Any = None,
    ) -> tuple[Any, Any, Any]:
        axis = -len(normalized_shape)
        result_dtype = input.dtype if out_dtype is None else ir.DataType(out_dtype)
        given = [parameter for parameter in (weight, bias) if parameter is not None]
        dtype = input.dtype
        if {dtype} != {result_dtype, *(parameter.dtype for parameter in given)}:
            dtype = ir.DataType.FLOAT

        def cast(tensor: Any) -> Any:
            return op.Cast(tensor, to=dtype) if tensor.dtype != dtype else tensor

        x = cast(input)
        # Shape and not normalized_shape, whose sizes may be symbols.
        scale = cast(weight) if weight is not None else _ones(op, x, axis)
        shift = cast(bias) if bias is not None else None
        y, mean, rstd = op.LayerNormalization(x, scale, shift, axis=axis, epsilon=eps)
        return op.Cast(y, to=result_dtype) if result_dtype != dtype else y, mean, rstd

    def layer_norm(
        input: Any,
        normalized_shape: Sequence[Any],
        weight: Any = None,
        bias: Any = None,
        eps: float = 1e-5,
        out_dtype: Any = None,
    ) -> Any:
        return layer_norm_forward(input, normalized_shape, weight, bias, eps, out_dtype)[0]

    ops = torch.ops.fastnorm
    return {
        ops.layer_norm.default: layer_norm,
        ops.layer_norm_forward.default: layer_norm_forward,
    }


def _ones(op: Any, x: Any, axis: int) -> Any:
    return op.Expand(op.CastLike(1.0, x), op.Shape(x, start=axis))
