"""Hypothesis strategies: LayerNorm problems of all shapes, layouts, dtypes and magnitudes.

What is drawn is a `Problem`, a plain record of small values that shrinks well and prints whole; it
makes the tensors itself, on any device, from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from reference import DTYPES, SMALL_DTYPES
from torch import Tensor

# Widths beside which something changes: vectors, warps, tiles, kernels, on the CPU or a GPU.
EDGES = (8, 16, 32, 64, 128, 255, 256, 512, 768, 1024, 1536, 2048, 4096, 5120, 6144, 8192)
WIDE_EDGES = (16_384, 20_480, 32_768, 65_536)
MOST_ELEMENTS = 1 << 13
MOST_WIDE_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class Problem:
    leading: tuple[int, ...]
    normalized_shape: tuple[int, ...]
    dtype: torch.dtype
    out_dtype: torch.dtype | None
    grad_dtype: torch.dtype
    weight_dtype: torch.dtype | None  # None: there is none
    bias_dtype: torch.dtype | None
    layout: str  # of the input
    grad_layout: str
    parameter_layout: str
    values: str
    eps: float
    output_mask: tuple[bool, bool, bool]
    seed: int

    @property
    def cols(self) -> int:
        return math.prod(self.normalized_shape)

    @property
    def out_of_range(self) -> bool:
        """Whether the variance may overflow or underflow: ATen answers 0, inf or NaN."""
        return self.values in OVERFLOWING or (self.values in UNDERFLOWING and self.eps == 0)

    def input(self, device: str) -> Tensor:
        shape = (*self.leading, *self.normalized_shape)
        values = VALUES[self.values](shape, self.dtype, _generator(self.seed))
        return LAYOUTS[self.layout](values.to(self.dtype).to(device), len(self.leading))

    def grad_out(self, device: str) -> Tensor:
        shape = (*self.leading, *self.normalized_shape)
        values = _normal(shape, self.grad_dtype, _generator(self.seed + 1))
        return LAYOUTS[self.grad_layout](values.to(self.grad_dtype).to(device), len(self.leading))

    def weight(self, device: str) -> Tensor | None:
        return self._parameter(self.weight_dtype, 2, device)

    def bias(self, device: str) -> Tensor | None:
        return self._parameter(self.bias_dtype, 3, device)

    def _parameter(self, dtype: torch.dtype | None, seed: int, device: str) -> Tensor | None:
        if dtype is None:
            return None
        values = _normal(self.normalized_shape, dtype, _generator(self.seed + seed))
        return LAYOUTS[self.parameter_layout](values.to(dtype).to(device), 0)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- values: each makes float64 numbers, which the problem rounds to its dtype -------------------

Values = Callable[[tuple[int, ...], torch.dtype, torch.Generator], Tensor]


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _scaled(scale: float, shift: float = 0.0) -> Values:
    def make(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return _normal(shape, dtype, generator).mul_(scale).add_(shift)

    return make


def _subnormal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return _normal(shape, dtype, generator) * (torch.finfo(dtype).tiny / 4)


def _huge(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Up to what the dtype holds, but no more than 1e37."""
    largest = min(1e37, torch.finfo(dtype).max / 2)
    return _normal(shape, dtype, generator).clamp_(-4, 4) * (largest / 4)


def _constant_rows(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    numbers = _normal(shape, dtype, generator)
    if numbers.numel():
        rows = numbers.reshape(-1, shape[-1])
        rows[::2] = rows[::2, :1].clone()
    return numbers


def _outliers(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    numbers = _normal(shape, dtype, generator)
    if numbers.numel():
        numbers.view(-1)[:: max(1, shape[-1])] = 1000.0
    return numbers


def _step(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """The first columns tell nothing of the others."""
    numbers = _normal(shape, dtype, generator)
    numbers[..., :16] += 1000.0
    return numbers


def _one_of(value: float) -> Values:
    def make(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        numbers = _normal(shape, dtype, generator)
        if numbers.numel():
            where = torch.randint(numbers.numel(), (1,), generator=generator)
            numbers.view(-1)[where] = value
        return numbers

    return make


VALUES: dict[str, Values] = {
    "normal": _scaled(1.0),
    "shifted": _scaled(1.0, 0.5),
    "small": _scaled(1e-4),
    "large": _scaled(300.0, -100.0),
    "mean of 1e4": _scaled(1.0, 1e4),
    "mean of 1e6": _scaled(1.0, 1e6),  # inf in float16
    "1e-30": _scaled(1e-30),
    "1e18": _scaled(1e18),  # squares near float32's end; inf in float16
    "subnormal": _subnormal,
    "huge": _huge,
    "constant rows": _constant_rows,
    "outliers": _outliers,
    "step": _step,
    "inf": _one_of(math.inf),
    "-inf": _one_of(-math.inf),
    "nan": _one_of(math.nan),
    "zeros": _scaled(0.0),
}

OVERFLOWING = ("huge", "1e18")
UNDERFLOWING = ("1e-30", "subnormal")


# --- layouts: each returns a tensor of the same shape ---------------------------------------------


def _offset(elements: int) -> Callable[[Tensor, int], Tensor]:
    def lay(t: Tensor, leading: int) -> Tensor:
        buffer = t.new_full((t.numel() + elements,), math.nan)
        return buffer[elements:].view(t.shape).copy_(t)

    return lay


def _padded(before: int, after: int) -> Callable[[Tensor, int], Tensor]:
    """Rows that lie apart, in a buffer of NaN."""

    def lay(t: Tensor, leading: int) -> Tensor:
        cols = math.prod(t.shape[leading:])
        wide = t.new_full((*t.shape[:leading], cols + before + after), math.nan)
        rows = wide[..., before : before + cols]
        return rows.unflatten(-1, t.shape[leading:]).copy_(t)

    return lay


def _every_second(dim: int) -> Callable[[Tensor, int], Tensor]:
    def lay(t: Tensor, leading: int) -> Tensor:
        shape = list(t.shape)
        shape[dim] *= 2
        wide = t.new_full(shape, math.nan)
        index = [slice(None)] * t.dim()
        index[dim] = slice(None, None, 2)
        return wide[tuple(index)].copy_(t)

    return lay


def _transposed(t: Tensor, leading: int) -> Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def _reversed_dimensions(t: Tensor, leading: int) -> Tensor:
    """Leading dimensions in the reverse order, rows dense."""
    order = (*reversed(range(leading)), *range(leading, t.dim()))
    return t.permute(order).contiguous().permute(order)  # the order is its own inverse


def _expanded(t: Tensor, leading: int) -> Tensor:
    """The same row, or the same rows, again and again."""
    return t[:1].expand(t.shape)


def _expanded_everywhere(t: Tensor, leading: int) -> Tensor:
    return t.reshape(-1)[:1].expand(t.shape) if t.numel() else t


def _overlapping(t: Tensor, leading: int) -> Tensor:
    """Rows one element apart: a sliding window."""
    rows, cols = math.prod(t.shape[:leading]), math.prod(t.shape[leading:])
    if t.numel() == 0 or leading == 0:
        return t
    return t.reshape(-1)[: rows + cols - 1].as_strided((rows, cols), (1, 1)).view(t.shape)


def _negated(t: Tensor, leading: int) -> Tensor:
    """A view with the negative bit: its memory holds the numbers with the other sign."""
    return torch._neg_view(t.neg())


LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "contiguous": lambda t, leading: t,
    "offset by 1": _offset(1),
    "offset by 3": _offset(3),
    "rows apart by 1": _padded(0, 1),
    "rows apart by 8": _padded(4, 4),
    "rows apart by 7, offset by 5": _padded(5, 2),
    "every second row": _every_second(0),
    "every second column": _every_second(-1),
    "transposed": _transposed,
    "reversed dimensions": _reversed_dimensions,
    "expanded": _expanded,
    "expanded everywhere": _expanded_everywhere,
    "overlapping": _overlapping,
    "negated": _negated,
}
PARAMETER_LAYOUTS = ["contiguous", "offset by 1", "every second column", "expanded everywhere"]


# --- problems -------------------------------------------------------------------------------------


@st.composite
def widths(draw: st.DrawFn) -> int:
    kind = draw(st.integers(0, 9))
    if kind <= 4:
        return draw(st.integers(1, 70))
    if kind <= 8:
        return max(1, draw(st.sampled_from(EDGES)) + draw(st.integers(-1, 1)))
    if draw(st.integers(0, 3)) < 3:
        return draw(st.integers(1, MOST_ELEMENTS))
    return draw(st.sampled_from(WIDE_EDGES)) + draw(st.integers(-1, 1))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Leading dimensions and normalized_shape; now and then one of them is zero."""
    cols = draw(widths())
    normalized: tuple[int, ...] = (cols,)
    split = draw(st.sampled_from([0, 0, 0, 1, 2, 3]))
    if split == 1 and cols > 1:
        factor = next((f for f in (7, 5, 4, 3, 2) if cols % f == 0), 1)
        normalized = (cols // factor, factor)
    elif split == 2:
        normalized = (1, cols)
    elif split == 3 and cols <= 300:
        normalized = (2, cols, draw(st.integers(1, 3)))
    most = MOST_ELEMENTS if cols <= MOST_ELEMENTS else MOST_WIDE_ELEMENTS
    most_rows = max(1, most // math.prod(normalized))
    rows = draw(st.integers(1, min(most_rows, 40)) | st.integers(1, min(most_rows, 1100)))
    leading = draw(
        st.sampled_from([(rows,), (rows,), (1, rows), (rows, 1), (-(-rows // 3), 3), ()])
    )
    if draw(st.integers(0, 30)) == 0:
        leading = (*leading[:1], 0)
    return leading, normalized


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    leading, normalized_shape = draw(shapes())
    dtype = draw(st.sampled_from(DTYPES))
    small = dtype != torch.float64
    parameter_dtypes = [None, dtype, dtype, torch.float32 if small else torch.float64]
    out_dtype = draw(st.sampled_from([None, None, *SMALL_DTYPES] if small else [None, dtype]))
    return Problem(
        leading=leading,
        normalized_shape=normalized_shape,
        dtype=dtype,
        out_dtype=out_dtype,
        grad_dtype=out_dtype or dtype,
        weight_dtype=draw(st.sampled_from(parameter_dtypes)),
        bias_dtype=draw(st.sampled_from(parameter_dtypes)),
        layout=draw(st.sampled_from(list(LAYOUTS))),
        grad_layout=draw(st.sampled_from(list(LAYOUTS))),
        parameter_layout=draw(st.sampled_from(PARAMETER_LAYOUTS)),
        values=draw(st.sampled_from(list(VALUES))),
        eps=draw(st.sampled_from([1e-5, 1e-5, 1e-12, 1e-6, 0.1, 0.0, 10.0])),
        output_mask=draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        seed=draw(st.integers(0, 2**20)),
    )
