"""Samples of calls that take turns: on a GPU from a cold cache or inside CUDA graphs, on a CPU, and
of the time that the host takes to issue them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bench.problem import Call

# Launches in flight before sampling begins; a hiccup of the host is paid from it.
HEAD_START_SECONDS = 4e-3


@dataclass(frozen=True)
class Times:
    """Seconds: the median and the 20th and 80th percentiles of so many samples."""

    median: float
    p20: float
    p80: float
    samples: int

    @staticmethod
    def of(samples: list[float]) -> Times:
        ordered = sorted(samples)
        last = len(ordered) - 1
        return Times(
            median=statistics.median(ordered),
            p20=ordered[round(0.2 * last)],
            p80=ordered[round(0.8 * last)],
            samples=len(ordered),
        )

    def to_json(self) -> dict[str, float]:
        return {
            "us": self.median * 1e6,
            "p20_us": self.p20 * 1e6,
            "p80_us": self.p80 * 1e6,
            "samples": self.samples,
        }


@dataclass(frozen=True)
class Budget:
    """How long to sample: `seconds` for all calls together, within the limits on their turns."""

    seconds: float
    min_turns: int = 15
    max_turns: int = 200

    def turns(self, seconds_per_turn: float) -> int:
        wanted = int(self.seconds / max(seconds_per_turn, 1e-9))
        return min(max(wanted, self.min_turns), self.max_turns)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _turns(names: list[str], count: int) -> Iterator[str]:
    """Each name `count` times; who goes first changes, so that none is favoured by its place."""
    for turn in range(count if names else 0):
        first = turn % len(names)
        yield from names[first:] + names[:first]


class ColdTimer:
    """Times calls on one GPU from a cold cache.

    Before each sample a buffer of at least twice the L2 cache is written, so that no operand is
    found there. Between two samples the GPU is kept busy longer than the host needs to issue one,
    and no sample is read before all are queued: the host runs ahead, and what lies between the two
    events is the GPU's time alone.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        self.flush_bytes = max(2 * l2_bytes, 256 * 2**20)
        self._flush = torch.empty(self.flush_bytes, dtype=torch.int8, device=device)
        for _ in range(3):
            self._flush.zero_()
        self._cycles_per_second = self._measure_spin()
        self._flush_seconds = self._seconds(self._flush.zero_)

    def _seconds(self, call: Call) -> float:
        start, end = _event(), _event()
        torch.cuda.synchronize(self.device)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end) * 1e-3

    def _measure_spin(self) -> float:
        cycles = 2_000_000
        self._seconds(lambda: torch.cuda._sleep(cycles))
        return cycles / self._seconds(lambda: torch.cuda._sleep(cycles))

    def _spin(self, seconds: float) -> None:
        if seconds > 0:
            torch.cuda._sleep(int(seconds * self._cycles_per_second))

    def _host_seconds(self, call: Call) -> float:
        """What the host needs for one sample of this call, at the median of a few."""
        samples = []
        for _ in range(7):
            start, end = _event(), _event()
            torch.cuda.synchronize(self.device)
            begin = time.perf_counter()
            self._spin(1e-6)
            self._flush.zero_()
            start.record()
            call()
            end.record()
            samples.append(time.perf_counter() - begin)
        torch.cuda.synchronize(self.device)
        return statistics.median(samples)

    def time(self, calls: Mapping[str, Call], budget: Budget) -> dict[str, Times]:
        """The calls must have run before: nothing is compiled here."""
        with torch.cuda.device(self.device), _no_garbage_collection():
            spins, turn_seconds = {}, 0.0
            for name, call in calls.items():
                host = self._host_seconds(call)
                spins[name] = max(0.0, 2 * host + 10e-6 - self._flush_seconds)
                turn_seconds += max(host, self._flush_seconds + spins[name] + self._seconds(call))
            count = budget.turns(turn_seconds)
            events = {name: [(_event(), _event()) for _ in range(count)] for name in calls}
            unused = {name: iter(pairs) for name, pairs in events.items()}
            torch.cuda.synchronize(self.device)
            self._spin(HEAD_START_SECONDS)
            for name in _turns(list(calls), count):
                start, end = next(unused[name])
                self._spin(spins[name])
                self._flush.zero_()
                start.record()
                calls[name]()
                end.record()
            torch.cuda.synchronize(self.device)
        return {
            name: Times.of([start.elapsed_time(end) * 1e-3 for start, end in pairs])
            for name, pairs in events.items()
        }


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def capture(call: Call, stream: torch.cuda.Stream, calls: int) -> torch.cuda.CUDAGraph:
    """A graph of so many calls in a row; `call` was prepared and warmed up on that stream."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    return graph


def time_graphs(
    graphs: Mapping[str, torch.cuda.CUDAGraph], calls: int, device: torch.device, budget: Budget
) -> dict[str, Times]:
    """Seconds per call: a replay's time over its calls. The cache is warm with the operands."""
    with torch.cuda.device(device), _no_garbage_collection():
        turn_seconds = 0.0
        for graph in graphs.values():
            graph.replay()  # its first replay also uploads it
            start, end = _event(), _event()
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize(device)
            turn_seconds += start.elapsed_time(end) * 1e-3
        count = budget.turns(turn_seconds)
        events = {name: [(_event(), _event()) for _ in range(count)] for name in graphs}
        unused = {name: iter(pairs) for name, pairs in events.items()}
        torch.cuda._sleep(2_000_000)  # a head start for the host, about a millisecond
        for name in _turns(list(graphs), count):
            start, end = next(unused[name])
            start.record()
            graphs[name].replay()
            end.record()
        torch.cuda.synchronize(device)
    return {
        name: Times.of([start.elapsed_time(end) * 1e-3 / calls for start, end in pairs])
        for name, pairs in events.items()
    }


def time_host(
    calls: Mapping[str, Call], batch: int, synchronize: Callable[[], object], budget: Budget
) -> dict[str, Times]:
    """Seconds that the host takes to issue a call, one of `batch` in a row, not waiting for it."""
    samples: dict[str, list[float]] = {name: [] for name in calls}

    def sample(call: Call) -> float:
        synchronize()
        begin = time.perf_counter()
        for _ in range(batch):
            call()
        return (time.perf_counter() - begin) / batch

    with _no_garbage_collection():
        turn_seconds = sum(batch * sample(call) for call in calls.values())
        for name in _turns(list(calls), budget.turns(turn_seconds)):
            samples[name].append(sample(calls[name]))
        synchronize()
    return {name: Times.of(values) for name, values in samples.items()}


def time_cpu(calls: Mapping[str, Call], budget: Budget) -> dict[str, Times]:
    """Seconds per call on the CPU."""
    samples: dict[str, list[float]] = {name: [] for name in calls}

    def sample(call: Call) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    with _no_garbage_collection():
        turn_seconds = sum(sample(call) for call in calls.values())
        for name in _turns(list(calls), budget.turns(turn_seconds)):
            samples[name].append(sample(calls[name]))
    return {name: Times.of(values) for name, values in samples.items()}
