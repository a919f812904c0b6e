"""The tensors of a case, and the calls that are its ceilings."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from bench.cases import Case, Pass

Call = Callable[[], object]
EPS = 1e-5


class Problem:
    """One case on one device."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.shape = [case.cols]
        self.generator = torch.Generator(device).manual_seed(0)
        self.x = self._rows(case.x_dtype, scale=2.0, shift=1.0)
        self.weight = self._draw((case.cols,), case.weight_dtype, scale=0.5, shift=1.0)
        self.bias = self._draw((case.cols,), case.weight_dtype, scale=0.5)
        if case.expanded_dy:
            self.dy = self._draw((1, case.cols), case.out_dtype).expand(case.rows, case.cols)
        else:
            self.dy = self._rows(case.out_dtype)

    def _draw(
        self, size: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0, shift: float = 0.0
    ) -> Tensor:
        drawn = torch.randn(size, generator=self.generator, device=self.device, dtype=dtype)
        return drawn.mul_(scale).add_(shift)

    def _rows(self, dtype: torch.dtype, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        case = self.case
        memory = self._draw((case.offset + case.rows * case.stride,), dtype, scale, shift)
        return memory[case.offset :].as_strided(
            (case.rows, case.cols), (case.stride, 1), storage_offset=case.offset
        )

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, weight and bias, each requiring a gradient if the case asks for it."""
        given = (self.x, self.weight, self.bias)
        x, weight, bias = (
            tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(given, self.case.output_mask, strict=True)
        )
        return x, weight, bias

    def ceilings(self, which: Pass) -> dict[str, Call]:
        """The ceiling's call, and where that differs from the one between tensors of x's shape that
        are dense and aligned, `plain`: that one.
        """
        case, x, dy = self.case, self.x, self.dy
        if which == "both":
            forward, backward = self.ceilings("fwd"), self.ceilings("bwd")
            return {
                name: functools.partial(_one_after_another, forward[name], backward[name])
                for name in forward.keys() & backward.keys()
            }
        is_dense = case.row_stride is None and case.offset == 0
        if which == "infer":
            return {"ceiling": self._copy(x)}
        if which == "fwd":
            if case.is_short:
                filled = self._with_moments(x, moved=2)
                return {"ceiling": filled.clone, "plain": self._copy(x)}
            calls: dict[str, Call] = {"ceiling": self._copy(x)}
            if not is_dense:
                calls["plain"] = self._copy(x.contiguous().clone())
            return calls
        if case.wanted == ("dw", "db"):
            return {"ceiling": self._read()}
        calls = {"ceiling": self._add(x, dy)}
        if case.is_short:
            filled, other = self._with_moments(x, moved=3), self._with_moments(dy, moved=3)
            return {
                "ceiling": functools.partial(torch.add, filled, other),
                "plain": calls["ceiling"],
            }
        if not is_dense:
            calls["plain"] = self._add(x.contiguous().clone(), dy.contiguous().clone())
        return calls

    def _with_moments(self, x: Tensor, moved: int) -> Tensor:
        """So much more than x that a call which moves each element `moved` times moves the bytes of
        mean and rstd as well.
        """
        moments = 2 * self.case.rows * (8 if x.dtype == torch.float64 else 4)
        elements = x.numel() + moments // (moved * x.itemsize)
        return x.flatten().repeat(-(-elements // x.numel()))[:elements]

    def _copy(self, x: Tensor) -> Call:
        """Reads x and writes y as the forward does: a dense result, in y's dtype, where y lies."""
        case = self.case
        if case.out_dtype != case.x_dtype:
            return lambda: x.to(case.out_dtype)
        if x.data_ptr() % 16:  # y is written just as far off an aligned address as x is read
            memory = x.new_empty(case.offset + x.numel())
            y = memory[case.offset :].view(x.shape)
            return lambda: y.copy_(x)
        return lambda: x.clone(memory_format=torch.contiguous_format)

    def _add(self, x: Tensor, dy: Tensor) -> Call:
        """Reads x and dy and writes a dense tensor of x's dtype."""
        if x.dtype == dy.dtype and x.is_contiguous():
            return lambda: torch.add(x, dy)
        shape, dtype, device = x.shape, x.dtype, x.device
        return lambda: torch.add(x, dy, out=torch.empty(shape, dtype=dtype, device=device))

    def _read(self) -> Call:
        """Reads x and dy and writes next to nothing."""
        if self.device.type == "cuda":
            try:
                from bench.providers.triton_kernels import read_both
            except ImportError:
                pass
            else:
                return functools.partial(read_both, self.x, self.dy)
        return lambda: (self.x.sum(), self.dy.sum())


def _one_after_another(first: Call, second: Call) -> None:
    first()
    second()
