"""What is timed: one `Case` per line of a table, and the named sets of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

# fwd: y, mean and rstd, as before a backward. infer: y alone, where nobody differentiates.
Pass = Literal["fwd", "infer", "bwd", "both"]
PASSES: tuple[Pass, ...] = ("fwd", "infer", "bwd", "both")
PASS_NAMES = {
    "fwd": "forward",
    "infer": "inference",
    "bwd": "backward",
    "both": "forward + backward",
}

# cold: GPU time from a cold cache. graph: time per call of many in one CUDA graph, cache warm.
# host: time the host takes to issue a call.
Mode = Literal["cold", "graph", "host"]
COLD: Mode = "cold"

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Case:
    """One input: its shape and dtypes, how it lies in memory, and what is asked of it."""

    rows: int
    cols: int
    dtype: str = "bf16"
    weight: str | None = None  # the weight's and bias' dtype; None: that of the input
    out: str | None = None  # the dtype of y and of its gradient; None: that of the input
    row_stride: int | None = None  # elements from row to row; None: dense
    offset: int = 0  # elements that x and dy start beyond an aligned address
    expanded_dy: bool = False  # one row of gradients, expanded to all rows without a copy
    grads: str = "dx+dw+db"  # or dx, or dw+db

    @property
    def x_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def weight_dtype(self) -> torch.dtype:
        return DTYPES[self.weight or self.dtype]

    @property
    def out_dtype(self) -> torch.dtype:
        return DTYPES[self.out or self.dtype]

    @property
    def stride(self) -> int:
        return self.row_stride or self.cols

    @property
    def wanted(self) -> tuple[str, ...]:
        """The gradients asked for."""
        return tuple(self.grads.split("+"))

    @property
    def output_mask(self) -> list[bool]:
        return [name in self.wanted for name in ("dx", "dw", "db")]

    @property
    def x_bytes(self) -> int:
        return self.rows * self.cols * self.x_dtype.itemsize

    @property
    def is_plain(self) -> bool:
        """Whether only shape, dtype and the weight's dtype are out of the ordinary."""
        return self == Case(self.rows, self.cols, self.dtype, self.weight)

    @property
    def is_short(self) -> bool:
        """Whether mean and rstd are more than a few hundredths of the bytes that move."""
        return self.is_plain and self.cols < 64

    @property
    def concerns_backward_alone(self) -> bool:
        return self.expanded_dy or self.grads != "dx+dw+db"

    def bytes_moved(self, which: Pass) -> int:
        """The bytes of x, y and their gradients that cannot but be moved."""
        elements = self.rows * self.cols
        x, y = elements * self.x_dtype.itemsize, elements * self.out_dtype.itemsize
        dy = self.cols * self.out_dtype.itemsize if self.expanded_dy else y
        backward = x + dy + (x if "dx" in self.wanted else 0)
        forward = x + y
        moved: dict[Pass, int] = {
            "fwd": forward,
            "infer": forward,
            "bwd": backward,
            "both": forward + backward,
        }
        return moved[which]

    @property
    def details(self) -> str:
        """What is out of the ordinary, in words."""
        words = []
        if self.weight not in (None, self.dtype):
            words.append(f"{self.weight} weights")
        if self.out not in (None, self.dtype):
            words.append(f"{self.out} output")
        if self.row_stride is not None:
            words.append(f"row stride {self.row_stride}")
        if self.offset:
            words.append(f"offset {self.offset}")
        if self.expanded_dy:
            words.append("expanded dy")
        if self.grads != "dx+dw+db":
            words.append(f"{self.grads} only")
        return ", ".join(words)

    def __str__(self) -> str:
        details = f", {self.details}" if self.details else ""
        return f"{self.rows}x{self.cols} {self.dtype}{details}"

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> Case:
        return Case(**values)


@dataclass(frozen=True)
class Work:
    """A case and how it is timed."""

    mode: Mode
    case: Case

    def passes(self, wanted: list[Pass]) -> list[Pass]:
        """Those of the wanted passes that there is something to time of."""
        if self.mode == "host":  # nobody issues a backward alone
            backward: list[Pass] = ["both"] if "bwd" in wanted or "both" in wanted else []
            return [which for which in wanted if which == "fwd"] + backward
        if self.case.concerns_backward_alone:
            return [which for which in wanted if which == "bwd"]
        if not self.case.is_short and self.mode == "cold":  # inference differs by nothing
            return [which for which in wanted if which != "infer"]
        return wanted


# x of 128 MB and more.
LARGE = (
    Case(2097152, 64),
    Case(1032444, 65),
    Case(1525201, 88),
    Case(1048576, 128),
    Case(883011, 152),
    Case(1048576, 192),
    Case(1048576, 200),
    Case(524288, 257),
    Case(508400, 264),
    Case(524288, 320),
    Case(524288, 384),
    Case(268435, 500),
    Case(262144, 512),
    Case(262144, 768),
    Case(65536, 1024),
    Case(131072, 1024),
    Case(131072, 1023),
    Case(101911, 1317),
    Case(131072, 1600),
    Case(65536, 2048),
    Case(16384, 4095),
    Case(16384, 4096),
    Case(32768, 4096),
    Case(26838, 5001),
    Case(32768, 5120),
    Case(16386, 8191),
    Case(16384, 8192),
    Case(16384, 12288),
    Case(10921, 12289),
    Case(10699, 12544),
    Case(8192, 16384),
    Case(8192, 16385),
    Case(8192, 18432),
    Case(6710, 20001),
    Case(4096, 32768),
    Case(4096, 50257),
    Case(4096, 65536),
    Case(2048, 65537),
    Case(1024, 131072),
    Case(1024, 262144),
    Case(131072, 1024, "fp16"),
    Case(44724, 3001, "fp16"),
    Case(65536, 3072, "fp16"),
    Case(16384, 6145, "fp16"),
    Case(1048576, 64, "fp32"),
    Case(883011, 76, "fp32"),
    Case(508400, 132, "fp32"),
    Case(262144, 769, "fp32"),
    Case(52180, 1286, "fp32"),
    Case(131072, 1024, "fp32"),
    Case(16384, 4096, "fp32"),
    Case(6548, 10249, "fp32"),
    Case(8192, 12288, "fp32"),
    Case(4096, 16385, "fp32"),
    Case(4096, 32768, "fp32"),
    Case(1024, 65537, "fp32"),
    Case(1024, 131072, "fp32"),
    Case(65536, 1024, weight="fp32"),
    Case(16384, 8192, weight="fp32"),
    Case(1048576, 104, weight="fp32"),
    Case(13420, 10001, weight="fp32"),
    Case(131072, 768, "fp16", weight="fp32"),
    Case(8192, 18432, weight="fp32"),
    Case(1024, 131072, weight="fp32"),
)

# x of 8 to 128 MB.
MEDIUM = (
    Case(131072, 64),
    Case(262144, 128),
    Case(65536, 768),
    Case(4096, 1024),
    Case(32768, 1024),
    Case(8192, 1023),
    Case(8192, 4096),
    Case(1024, 8192),
    Case(256, 65536),
    Case(64, 262144),
    Case(4096, 2048, "fp16"),
    Case(4096, 4096, "fp16"),
    Case(4096, 8192, "fp16"),
    Case(4096, 12289, "fp16"),
    Case(16384, 768, "fp32"),
    Case(2048, 4096, "fp32"),
    Case(16384, 1024, weight="fp32"),
)

# Widths, dtypes and layouts out of the ordinary, and gradients asked for in part.
SPECIAL = (
    Case(4194304, 32),
    Case(8388608, 16),
    Case(3355443, 40),
    Case(8388608, 7, "fp32"),
    Case(13421772, 5),
    Case(5162220, 13),
    Case(3355443, 20),
    Case(2796202, 24),
    Case(2033601, 33),
    Case(1065220, 63),
    Case(8388608, 8),
    Case(8388608, 8, row_stride=16),
    Case(3355443, 10, "fp32"),
    Case(3728270, 18, "fp32"),
    Case(2097152, 48, "fp16"),
    Case(448, 300000),
    Case(447, 300001),
    Case(192, 1000000),
    Case(64, 1000000, "fp32"),
    Case(262144, 256, "fp64"),
    Case(123764, 271, "fp64"),
    Case(16344, 2053, "fp64"),
    Case(16384, 4096, "fp64"),
    Case(4088, 8208, "fp64"),
    Case(2730, 12288, "fp64"),
    Case(1320, 25405, "fp64"),
    Case(65536, 1024, row_stride=1536),
    Case(32768, 4095, row_stride=4100),
    Case(16384, 8192, "fp32", row_stride=8448),
    Case(65536, 1024, offset=1),
    Case(16386, 8191, offset=1),
    Case(16384, 8192, offset=1),
    Case(16384, 4096, "fp32", offset=1),
    Case(65536, 1024, out="fp32"),
    Case(16384, 8192, "fp16", out="fp32"),
    Case(16384, 5120, out="fp32"),
    Case(65536, 1024, "fp32", out="bf16"),
    Case(65536, 1024, expanded_dy=True),
    Case(16384, 8192, expanded_dy=True),
    Case(524288, 200, grads="dx"),
    Case(131072, 768, grads="dx"),
    Case(65536, 1024, grads="dx"),
    Case(16384, 8192, grads="dx"),
    Case(16384, 4096, "fp32", grads="dx"),
    Case(65536, 1023, grads="dx"),
    Case(65536, 1023, "fp32", grads="dx"),
    Case(65536, 1024, grads="dw+db"),
    Case(16384, 8192, grads="dw+db"),
    Case(16384, 4096, "fp32", grads="dw+db"),
)

# Few wide rows, which are to be no slower than by others.
FEW = (
    Case(16, 65536),
    Case(64, 16384),
    Case(9, 55329, "fp32"),
    Case(512, 2048, "fp64"),
)

GRAPH = tuple(
    Case(rows, cols)
    for rows, cols in ((1, 1024), (8, 4096), (128, 768), (512, 1024), (512, 8192), (2048, 4096))
)
HOST = (Case(8, 256, "fp32"),)

QUICK = (
    Case(1048576, 128),
    Case(131072, 1024),
    Case(16384, 4095),
    Case(16384, 8192),
    Case(16384, 4096, "fp32"),
    Case(4096, 4096, "fp16"),
)
CPU = tuple(
    Case(rows, cols, dtype)
    for dtype in ("fp32", "bf16")
    for rows, cols in ((256, 1024), (4096, 4096), (32768, 1024), (100000, 64), (64, 65536))
)


def _works(mode: Mode, cases: tuple[Case, ...]) -> tuple[Work, ...]:
    return tuple(Work(mode, case) for case in cases)


SETS: dict[str, tuple[Work, ...]] = {
    "large": _works("cold", LARGE),
    "medium": _works("cold", MEDIUM),
    "special": _works("cold", SPECIAL),
    "few": _works("cold", FEW),
    "graph": _works("graph", GRAPH),
    "host": _works("host", HOST),
    "quick": _works("cold", QUICK),
    "cpu": _works("cold", CPU),
}
SETS["full"] = tuple(
    work for name in ("large", "medium", "special", "few", "graph", "host") for work in SETS[name]
)


def part_of(works: list[Work], part: int, parts: int) -> list[Work]:
    """Every `parts`-th piece of work: parts take about equally long."""
    return works[part - 1 :: parts]


def widths(count: int, most: int) -> list[int]:
    """So many row widths up to `most`, the same each time and evenly spread over its powers: one
    third of them multiples of 64 where they are that wide, one third of 8.
    """
    drawn = random.Random(0)
    found = set()
    for index in range(count):
        unit = (1, 8, 64)[index % 3]
        cols = round(most ** ((index + drawn.random()) / count))
        found.add(max(1, round(cols / unit) * unit) if cols >= unit else cols)
    return sorted(found)


def cross(shapes: list[tuple[int, int]], dtypes: list[str], weight: str | None) -> Iterator[Case]:
    """Every shape in every dtype."""
    for dtype in dtypes:
        for rows, cols in shapes:
            yield Case(rows, cols, dtype, weight)
