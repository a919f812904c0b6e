"""Wrong arguments: ATen's exception and text where ATen checks, a full sentence elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import name_of, ops
from torch import Tensor

import fastnorm

ATEN = torch.nn.functional.layer_norm
WRONG_SHAPES: dict[str, Callable[[str], tuple[Any, ...]]] = {
    "no normalized dimension": lambda device: (_ones(2, 3, device=device), []),
    "wrong last dimension": lambda device: (_ones(2, 3, device=device), [4]),
    "wrong first of two": lambda device: (_ones(2, 3, 4, device=device), [2, 4]),
    "longer than the input": lambda device: (_ones(3, device=device), [2, 3]),
    "scalar input": lambda device: (torch.tensor(1.0, device=device), [1]),
    "negative": lambda device: (_ones(2, 3, device=device), [-1]),
    "weight": lambda device: (_ones(2, 3, device=device), [3], _ones(4, device=device)),
    "weight of more dimensions": lambda device: (
        _ones(2, 3, device=device), [3], _ones(1, 3, device=device)),
    "flat weight": lambda device: (_ones(2, 3, 4, device=device), [3, 4], _ones(12, device=device)),
    "bias": lambda device: (_ones(2, 3, device=device), [3], None, _ones(4, device=device)),
    "empty bias": lambda device: (_ones(2, 3, device=device), [3], None, _ones(0, device=device)),
    "weight and bias": lambda device: (
        _ones(2, 3, device=device), [3], _ones(2, device=device), _ones(2, device=device)),
    "wrong shape of no rows": lambda device: (_ones(0, 3, device=device), [4]),
    "weight of no rows": lambda device: (_ones(0, 3, device=device), [3], _ones(4, device=device)),
}  # fmt: skip


def _ones(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def _error(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        function(*args, **kwargs)
    return raised.value


def _text(error: Exception) -> str:
    """The message without a C++ stack trace, should one be shown."""
    return str(error).split("\nException raised from")[0]


def _forward(*args: Any) -> Any:
    return ops.layer_norm_forward(*(*args, None, None)[:4], 1e-5, None)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda), "meta"])
@pytest.mark.parametrize(
    "function", [fastnorm.functional.layer_norm, ops.layer_norm, _forward],
    ids=["functional", "layer_norm", "layer_norm_forward"],
)  # fmt: skip
@pytest.mark.parametrize("case", WRONG_SHAPES)
def test_wrong_shapes_say_what_aten_says(
    case: str, function: Callable[..., Any], place: str
) -> None:
    aten = _error(ATEN, *WRONG_SHAPES[case]("cpu"))
    ours = _error(function, *WRONG_SHAPES[case](place))
    assert type(ours) is type(aten)
    assert _text(ours) == _text(aten)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int8, torch.bool, torch.complex64], ids=name_of
)
def test_dtype_of_input(device: str, dtype: torch.dtype) -> None:
    """The exception that ATen raises, so that what catches one catches the other."""
    x = _ones(2, 3, device=device, dtype=dtype)
    aten, ours = _error(ATEN, x, [3]), _error(ops.layer_norm, x, [3])
    assert isinstance(ours, type(aten))
    assert "not implemented for" in _text(ours) or "input" in _text(ours)


@pytest.mark.parametrize("which", ["weight", "bias"])
@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [
        (torch.float32, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.bfloat16, torch.float64),
        (torch.float64, torch.float32),
        (torch.float32, torch.int64),
    ],
    ids=name_of,
)
@pytest.mark.parametrize("rows", [2, 0])
def test_dtype_of_weight_and_bias(
    device: str, rows: int, dtype: torch.dtype, wrong: torch.dtype, which: str
) -> None:
    x = _ones(rows, 3, device=device, dtype=dtype)
    error = _error(ops.layer_norm, x, [3], **{which: _ones(3, device=device, dtype=wrong)})
    assert type(error) is RuntimeError
    _assert_explains(error, which, wrong, dtype)


def _assert_explains(error: Exception, argument: str, was: torch.dtype, must: torch.dtype) -> None:
    """The message names the argument, what it was and what it must be."""
    text = _text(error)
    assert argument in text
    assert _names(was).search(text), f"{text!r} does not say that it was {was}"
    assert _names(must).search(text), f"{text!r} does not say that it must be {must}"


def _names(dtype: torch.dtype) -> re.Pattern[str]:
    """torch.float16 or, as C++ says it, Half."""
    in_cpp = {
        torch.float32: "Float",
        torch.float64: "Double",
        torch.float16: "Half",
        torch.bfloat16: "BFloat16",
        torch.int64: "Long",
    }
    return re.compile(rf"\b({str(dtype).removeprefix('torch.')}|{in_cpp[dtype]})\b", re.IGNORECASE)


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float64),
        (torch.float64, torch.float32),
        (torch.float64, torch.bfloat16),
        (torch.float32, torch.int64),
    ],
    ids=name_of,
)
def test_out_dtype(device: str, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    x = _ones(2, 3, device=device, dtype=dtype)
    error = _error(ops.layer_norm, x, [3], out_dtype=out_dtype)
    assert type(error) is RuntimeError
    assert "out_dtype" in _text(error)
    assert _names(out_dtype).search(_text(error))


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_device_of_weight_and_bias(device: str, which: str) -> None:
    other = torch.ones(3, device="meta" if device == "cpu" else "cpu")
    error = _error(ops.layer_norm, _ones(2, 3, device=device), [3], **{which: other})
    assert type(error) is RuntimeError
    assert other.device.type in _text(error)
    assert device in _text(error)


def _backward_arguments(device: str) -> dict[str, Any]:
    return {
        "grad_out": _ones(2, 3, device=device),
        "input": _ones(2, 3, device=device),
        "normalized_shape": [3],
        "mean": _ones(2, 1, device=device),
        "rstd": _ones(2, 1, device=device),
        "weight": _ones(3, device=device),
        "bias": _ones(3, device=device),
        "eps": 1e-5,
        "output_mask": [True, True, True],
    }


@pytest.mark.parametrize("argument", ["grad_out", "mean", "rstd", "weight", "bias"])
def test_backward_checks_shapes(device: str, argument: str) -> None:
    arguments = _backward_arguments(device)
    arguments[argument] = _ones(5, device=device)
    error = _error(lambda: ops.layer_norm_backward(**arguments))
    assert type(error) is RuntimeError
    assert argument in _text(error)


@pytest.mark.parametrize("argument", ["grad_out", "mean", "rstd", "weight", "bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=name_of)
def test_backward_checks_dtypes(device: str, dtype: torch.dtype, argument: str) -> None:
    arguments = _backward_arguments(device)
    arguments[argument] = arguments[argument].to(dtype)
    error = _error(lambda: ops.layer_norm_backward(**arguments))
    assert type(error) is RuntimeError
    assert argument in _text(error)


@pytest.mark.parametrize("argument", ["grad_out", "mean", "rstd", "weight", "bias"])
def test_backward_checks_devices(device: str, argument: str) -> None:
    arguments = _backward_arguments(device)
    arguments[argument] = arguments[argument].to("meta" if device == "cpu" else "cpu")
    error = _error(lambda: ops.layer_norm_backward(**arguments))
    assert type(error) is RuntimeError


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((None, [3]), {}),
        ((torch.ones(2, 3), "ab"), {}),
        ((torch.ones(2, 3), [3], [1.0]), {}),
        ((torch.ones(2, 3), [3]), {"eps": "small"}),
        ((torch.ones(2, 3), [3]), {"epsilon": 1e-5}),
        ((), {}),
    ],
    ids=["no tensor", "shape of letters", "weight of numbers", "eps of letters", "unknown", "none"],
)
def test_arguments_of_the_wrong_kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A TypeError as ATen's; dispatcher operators say RuntimeError for some of these."""
    error = _error(fastnorm.functional.layer_norm, *args, **kwargs)
    assert isinstance(error, TypeError | RuntimeError)


@pytest.mark.skipif(fastnorm._C.build_info()["cuda"] is not None, reason="built with CUDA")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors_in_a_build_without_cuda() -> None:
    with pytest.raises(RuntimeError, match="without CUDA"):
        ops.layer_norm(torch.ones(2, 3, device="cuda"), [3])
