"""Timing of calls against each other, and of fastnorm against PyTorch and the memory ceiling.

The ceiling of the forward is a copy of the tensor (read x, write y), that of the backward an
elementwise sum of two tensors (read x and dy, write dx). Every call allocates its own output.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Call = Callable[[], object]

EPS = 1e-5


def time_on_cpu(
    calls: Mapping[str, Call], *, seconds: float, min_repeats: int = 5, max_repeats: int = 1000
) -> dict[str, float]:
    """Median seconds per call; the calls take turns, so that a slow moment of the machine hits all.

    Repeats until `seconds` have passed, within the given limits.
    """
    for call in calls.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    deadline = time.perf_counter() + seconds
    for repeat in range(max_repeats):
        if repeat >= min_repeats and time.perf_counter() >= deadline:
            break
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in samples.items()}


def time_on_cuda(
    calls: Mapping[str, Call], device: torch.device, *, repeats: int = 50, warm_up: int = 5
) -> dict[str, float]:
    """Median seconds per call on the GPU, from cold caches; the calls take turns.

    Before each call a buffer of at least twice the L2 cache is written, so that no operand is
    found there. That also keeps the GPU busy while the host queues the call: what is measured is
    the GPU's time, not the host's.
    """
    with torch.cuda.device(device):
        l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        flush_bytes = max(2 * l2_bytes, 256 * 2**20)
        flush = torch.empty(flush_bytes, dtype=torch.int8, device=device)
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
            name: [
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                for _ in range(repeats)
            ]
            for name in calls
        }
        for _ in range(warm_up):
            for call in calls.values():
                flush.zero_()
                call()
        torch.cuda.synchronize(device)
        for _ in range(50):  # a head start for the host
            flush.zero_()
        for repeat in range(repeats):
            for name, call in calls.items():
                start, end = events[name][repeat]
                flush.zero_()
                start.record()
                call()
                end.record()
        torch.cuda.synchronize(device)
        return {
            name: statistics.median(start.elapsed_time(end) * 1e-3 for start, end in pairs)
            for name, pairs in events.items()
        }


@dataclass(frozen=True)
class Problem:
    """One shape to be timed, forward and backward."""

    rows: int
    cols: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Timing:
    """Median seconds of one direction of one problem."""

    device: str
    direction: str
    rows: int
    cols: int
    dtype: str
    fastnorm_seconds: float
    torch_seconds: float
    ceiling_seconds: float
    gigabytes_per_second: float  # bytes that must move (x, y, or x, dy, dx) over fastnorm's time
    ratio_to_ceiling: float  # 1: as fast as the copy or the sum
    speedup_over_torch: float


def problems(device: torch.device, *, quick: bool) -> list[Problem]:
    """The shapes of the main job on such a device."""
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    if device.type == "cpu":
        shapes = [(256, 1024), (4096, 4096), (32768, 1024), (100000, 64), (64, 65536)]
        if quick:
            shapes = [(256, 1024), (100000, 64), (64, 65536)]
        return [Problem(rows, cols, dtype) for rows, cols in shapes for dtype in (f32, bf16)]
    if quick:
        return [
            Problem(524288, 128, bf16),
            Problem(65536, 1024, bf16),
            Problem(8192, 8192, bf16),
            Problem(16384, 4096, f32),
        ]
    return [
        Problem(524288, 128, bf16),
        Problem(65536, 768, bf16),
        Problem(65536, 1024, bf16),
        Problem(16384, 4095, bf16),
        Problem(16384, 4096, bf16),
        Problem(8192, 8192, bf16),
        Problem(4096, 32768, bf16),
        Problem(512, 262144, bf16),
        Problem(4096, 8192, f16),
        Problem(16384, 4096, f32),
    ]


def time_problem(device: torch.device, problem: Problem, *, quick: bool) -> list[Timing]:
    """Time forward and backward of one problem, each against PyTorch and its ceiling."""
    rows, cols, dtype = problem.rows, problem.cols, problem.dtype
    shape = [cols]
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    x, dy = draw(rows, cols), draw(rows, cols)
    weight, bias = draw(cols), draw(cols)
    ours, aten = torch.ops.fastnorm, torch.ops.aten
    everything = [True, True, True]

    with torch.no_grad():
        _, mean, rstd = ours.layer_norm_forward(x, shape, weight, bias, EPS, None)
        _, torch_mean, torch_rstd = aten.native_layer_norm(x, shape, weight, bias, EPS)
        directions: dict[str, tuple[int, dict[str, Call]]] = {
            "forward": (
                2,
                {
                    "fastnorm": lambda: ours.layer_norm(x, shape, weight, bias, EPS),
                    "torch": lambda: F.layer_norm(x, shape, weight, bias, EPS),
                    "ceiling": lambda: torch.clone(x),
                },
            ),
            "backward": (
                3,
                {
                    "fastnorm": lambda: ours.layer_norm_backward(
                        dy, x, shape, mean, rstd, weight, bias, EPS, everything
                    ),
                    "torch": lambda: aten.native_layer_norm_backward(
                        dy, x, shape, torch_mean, torch_rstd, weight, bias, everything
                    ),
                    "ceiling": lambda: torch.add(x, dy),
                },
            ),
        }
        timings = []
        for direction, (tensors_moved, calls) in directions.items():
            if device.type == "cuda":
                median = time_on_cuda(calls, device, repeats=20 if quick else 100)
            else:
                median = time_on_cpu(calls, seconds=0.3 if quick else 1.0)
            moved = tensors_moved * x.numel() * x.element_size()
            timings.append(
                Timing(
                    device=str(device),
                    direction=direction,
                    rows=rows,
                    cols=cols,
                    dtype=str(dtype).removeprefix("torch."),
                    fastnorm_seconds=median["fastnorm"],
                    torch_seconds=median["torch"],
                    ceiling_seconds=median["ceiling"],
                    gigabytes_per_second=moved / median["fastnorm"] * 1e-9,
                    ratio_to_ceiling=median["ceiling"] / median["fastnorm"],
                    speedup_over_torch=median["torch"] / median["fastnorm"],
                )
            )
    return timings
