"""What fastnorm is to reach on an H200, as data: a ratio or a time, by pass and kind of case."""

from __future__ import annotations

from dataclasses import dataclass

from bench.cases import Case, Mode, Pass

LARGE_BYTES = 128e6
MEDIUM_BYTES = 8e6


@dataclass(frozen=True)
class Goal:
    """What each case is to reach, and a set of them together.

    `ratio`: the least ceiling time / fastnorm time of each case; `mean`: of their geometric mean.
    `times_ceiling` and `seconds`: at most the larger of so many times the ceiling's time and so
    long. `times_torch`: at most so many times PyTorch's time.
    """

    kind: str
    ratio: float | None = None
    mean: float | None = None
    times_ceiling: float | None = None
    seconds: float | None = None
    times_torch: float | None = None

    def is_met(
        self, seconds: float, ceiling: float | None, torch_seconds: float | None
    ) -> bool | None:
        """None where what it is measured by is missing."""
        if self.times_torch is not None:
            return None if torch_seconds is None else seconds <= self.times_torch * torch_seconds
        if ceiling is None:
            return None
        if self.times_ceiling is not None:
            return seconds <= max(self.times_ceiling * ceiling, self.seconds or 0.0)
        return self.ratio is None or ceiling / seconds >= self.ratio

    def __str__(self) -> str:
        if self.times_torch is not None:
            return f"at most torch's time x {self.times_torch:g}"
        if self.times_ceiling is not None:
            limit = f"{(self.seconds or 0) * 1e6:g} us"
            return f"at most {self.times_ceiling:g} x the ceiling's time or {limit}"
        return f">= {self.ratio:g}" + (f", mean >= {self.mean:g}" if self.mean else "")


# The kinds of cases are told apart by `kind_of`.
GOALS: dict[tuple[Pass, str], Goal] = {
    ("fwd", "large"): Goal("large", ratio=0.97, mean=0.98),
    ("fwd", "large, wide or few rows"): Goal("large", ratio=0.97, mean=0.98),
    ("fwd", "medium"): Goal("medium", ratio=0.95),
    ("fwd", "special"): Goal("special", ratio=0.85),
    ("fwd", "graph"): Goal("graph", times_ceiling=1.5, seconds=2e-6),
    ("fwd", "host"): Goal("host", times_torch=1.0),
    ("infer", "special"): Goal("special", ratio=0.85),
    ("infer", "graph"): Goal("graph", times_ceiling=1.5, seconds=2e-6),
    ("bwd", "large"): Goal("large", ratio=0.95, mean=0.97),
    ("bwd", "large, wide or few rows"): Goal("large, wide or few rows", ratio=0.90),
    ("bwd", "medium"): Goal("medium", ratio=0.85),
    ("bwd", "special"): Goal("special", ratio=0.75),
    ("bwd", "dx only"): Goal("dx only", ratio=0.95),
    ("bwd", "dw+db only"): Goal("dw+db only", ratio=0.95),
    ("bwd", "graph"): Goal("graph", times_ceiling=2.0, seconds=4e-6),
    ("both", "host"): Goal("host", times_torch=1.0),
}


def kind_of(mode: Mode, case: Case) -> str:
    if mode != "cold":
        return mode
    if case.grads != "dx+dw+db":
        return f"{case.grads} only"
    if not case.is_plain or case.dtype == "fp64" or not 64 <= case.cols <= 262144:
        return "special"
    if case.x_bytes >= LARGE_BYTES:
        is_usual = case.cols <= 65536 and case.rows >= 2048
        return "large" if is_usual else "large, wide or few rows"
    return "medium" if case.x_bytes >= MEDIUM_BYTES else "small"


def goal_of(mode: Mode, case: Case, which: Pass) -> Goal | None:
    return GOALS.get((which, kind_of(mode, case)))


def memory_goal(case: Case) -> float | None:
    """The largest share of x that the backward may take beyond its results."""
    if case.x_bytes < LARGE_BYTES:
        return None
    return 0.02 if case.cols <= 8192 else 0.08
