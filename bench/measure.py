"""Checks and times the providers on one case: from a `Work` to the cells of a results file.

A cell is one pass of one case: the ceiling's times, and per provider a status (ok, inaccurate,
wrong, unsupported, missing, failed) with its times and errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.cases import Case, Pass, Work
from bench.check import Errors, Grade, Reference, poison
from bench.goals import goal_of, kind_of
from bench.problem import Call, Problem
from bench.providers import PROVIDERS, Provider, UnsupportedError
from bench.timing import Budget, ColdTimer, Times, capture, time_cpu, time_graphs, time_host

Cell = dict[str, Any]

CALLS_PER_GRAPH = 100
CALLS_PER_HOST_SAMPLE = 100


class DeviceLostError(RuntimeError):
    """A kernel brought the GPU's context down: nothing further can be run in this process."""


@dataclass
class Bench:
    """What stays the same from case to case."""

    device: torch.device
    providers: Sequence[str]
    budget: Budget
    timer: ColdTimer | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def run(self, work: Work, wanted: list[Pass]) -> list[Cell]:
        """One cell for each pass (and, of the host's time, for each way of calling)."""
        passes = work.passes(wanted)
        if not passes:
            return []
        runs: dict[str, Callable[[Case, list[Pass]], list[Cell]]] = {
            "cold": self._run_cold,
            "graph": self._run_graph,
            "host": self._run_host,
        }
        cells = runs[work.mode](work.case, passes)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return cells

    def compile(self, work: Work, wanted: list[Pass]) -> None:
        """Runs once what is compiled at run time, so that it lies in the caches on disk."""
        problem = Problem(work.case, self.device)
        for name in ("compile", "triton"):
            if name not in self.providers or PROVIDERS[name].missing(self.device):
                continue
            for which in work.passes(wanted):
                try:
                    _prepare(PROVIDERS[name], which, problem)()
                except (UnsupportedError, torch.OutOfMemoryError):
                    continue
        torch.cuda.synchronize(self.device)

    def _run_cold(self, case: Case, passes: list[Pass]) -> list[Cell]:
        problem = Problem(case, self.device)
        reference = Reference(problem, passes)
        cells = []
        for which in passes:
            cell = _cell("cold", case, which)
            calls = self._checked(cell, problem, reference, which)
            calls |= _warmed(problem.ceilings(which))
            if self.device.type == "cuda":
                if self.timer is None:
                    self.timer = ColdTimer(self.device)
                times = self.timer.time(calls, self.budget)
            else:
                times = time_cpu(calls, self.budget)
            cells.append(_with_times(cell, times, self.device))
        return cells

    def _run_graph(self, case: Case, passes: list[Pass]) -> list[Cell]:
        if self.device.type != "cuda":
            return []
        stream = torch.cuda.Stream(self.device)
        cells = []
        # Autograd runs a backward on the stream of its forward: all happens on the one captured.
        with torch.cuda.stream(stream):
            problem = Problem(case, self.device)
            reference = Reference(problem, passes)
            for which in passes:
                cell = _cell("graph", case, which)
                calls = self._checked(cell, problem, reference, which)
                calls |= _warmed(problem.ceilings(which))
                torch.cuda.synchronize(self.device)
                graphs = {}
                for name, call in calls.items():
                    try:
                        graphs[name] = capture(call, stream, CALLS_PER_GRAPH)
                    except Exception as error:
                        if name not in cell["providers"]:
                            raise
                        cell["providers"][name] |= _failure(error)
                times = time_graphs(graphs, CALLS_PER_GRAPH, self.device, self.budget)
                cells.append(_with_times(cell, times, self.device))
                del graphs
        torch.cuda.synchronize(self.device)
        return cells

    def _run_host(self, case: Case, passes: list[Pass]) -> list[Cell]:
        """The time to issue a call, as a function and as a module; the forward with and without
        a gradient to come, and forward and backward together.
        """
        problem = Problem(case, self.device)
        cells = []
        for which in passes:
            reference = Reference(problem, [which])
            for kind in ("function", "module"):
                for with_grad in (False, True) if which == "fwd" else (True,):
                    variant = kind
                    if which == "fwd":
                        variant += ", grad" if with_grad else ", no grad"
                    cell = _cell("host", case, which, variant)

                    def prepare(provider: Provider) -> Call:
                        return _host_call(provider, problem, kind, which, with_grad)  # noqa: B023

                    with torch.set_grad_enabled(with_grad):
                        calls = self._checked(cell, problem, reference, which, prepare)
                        synchronize: Call = (
                            torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
                        )
                        times = time_host(calls, CALLS_PER_HOST_SAMPLE, synchronize, self.budget)
                    cells.append(_with_times(cell, times, self.device))
        return cells

    def _checked(
        self,
        cell: Cell,
        problem: Problem,
        reference: Reference,
        which: Pass,
        prepare: Callable[[Provider], Call] | None = None,
    ) -> dict[str, Call]:
        """The calls of the providers that are right, warmed up; notes what became of each."""
        calls = {}
        for name in self.providers:
            provider = PROVIDERS[name]
            record: dict[str, Any] = {}
            cell["providers"][name] = record
            reason = provider.missing(self.device)
            if reason is not None:
                record |= {"status": "missing", "reason": reason}
                continue
            try:
                call = prepare(provider) if prepare else _prepare(provider, which, problem)
                results = provider.results(which, problem, call())
                poison(results)
                del results
                before = _start_counting(self.device)
                returned = call()
                record |= _memory(self.device, before, returned)
                errors = reference.errors(provider.results(which, problem, returned))
                del returned
                record["errors"] = {key: value.to_json() for key, value in errors.items()}
                status = _worst(errors)
                if status != "ok":
                    off = [key for key, value in errors.items() if value.grade == status]
                    record["reason"] = f"{', '.join(off)} off"
                if status == "wrong":
                    record["status"] = status
                    continue
                for _ in range(2):
                    call()
            except UnsupportedError as error:
                record |= {"status": "unsupported", "reason": str(error)}
                continue
            except Exception as error:
                record |= _failure(error)
                raise_if_lost(self.device, f"{name}: {error}")
                continue
            record["status"] = status
            calls[name] = call
        return calls


def _prepare(provider: Provider, which: Pass, problem: Problem) -> Call:
    prepare = {
        "fwd": provider.forward,
        "infer": provider.inference,
        "bwd": provider.backward,
        "both": provider.both,
    }
    return prepare[which](problem)


def _host_call(
    provider: Provider, problem: Problem, kind: str, which: Pass, with_grad: bool
) -> Call:
    x, weight, bias = problem.leaves() if with_grad else (problem.x, problem.weight, problem.bias)
    if kind == "function":
        norm = provider.norm(problem)

        def forward() -> Tensor:
            return norm(x, weight, bias)
    else:
        module = provider.norm_module(problem)
        if module is None:
            raise UnsupportedError("no module of its own")
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), (weight, bias), strict=True):
                parameter.copy_(value)
        weight, bias = module.parameters()

        def forward() -> Tensor:
            y: Tensor = module(x)
            return y

    if which == "fwd":
        return forward
    leaves, dy = (x, weight, bias), problem.dy

    def both() -> tuple[Tensor, ...]:
        y = forward()
        return (y.detach(), *torch.autograd.grad(y, leaves, dy))

    return both


def _worst(errors: dict[str, Errors]) -> Grade:
    grades: list[Grade] = ["ok", "inaccurate", "wrong"]
    return max((value.grade for value in errors.values()), key=grades.index, default="ok")


def _warmed(calls: dict[str, Call]) -> dict[str, Call]:
    for call in calls.values():
        call()
    return calls


def _start_counting(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _memory(device: torch.device, before: int, returned: object) -> dict[str, int]:
    """The peak of the call, and what of that went beyond its results."""
    if device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated(device) - before
    values = returned if isinstance(returned, tuple | list) else [returned]
    results = sum(value.nbytes for value in values if isinstance(value, Tensor))
    return {"peak_bytes": peak, "extra_bytes": peak - results}


def _failure(error: Exception) -> dict[str, str]:
    lines = str(error).strip().splitlines() or ["no message"]
    reason = "out of memory" if isinstance(error, torch.OutOfMemoryError) else lines[0][:200]
    return {"status": "failed", "reason": f"{type(error).__name__}: {reason}"}


def raise_if_lost(device: torch.device, complaint: str) -> None:
    """Raises DeviceLostError where the GPU no longer answers."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as later:
        raise DeviceLostError(complaint) from later


def _cell(mode: str, case: Case, which: Pass, variant: str | None = None) -> Cell:
    return {
        "mode": mode,
        "pass": which,
        "variant": variant,
        "case": case.to_json(),
        "bytes": case.bytes_moved(which),
        "ceiling": None,
        "plain": None,
        "providers": {},
    }


def _with_times(cell: Cell, times: dict[str, Times], device: torch.device) -> Cell:
    for name, value in times.items():
        if name in ("ceiling", "plain"):
            cell[name] = value.to_json()
        else:
            cell["providers"][name] |= value.to_json()
    return judged(cell, against_goals=device.type == "cuda")


def judged(cell: Cell, *, against_goals: bool) -> Cell:
    """Adds fastnorm's ratio to the ceiling, the goal, whether it is met, and which peers are faster
    by more than the spread of both.
    """
    ours = cell["providers"].get("fastnorm", {})
    ceiling = cell["ceiling"]["us"] if cell["ceiling"] else None
    cell["ratio"] = ceiling / ours["us"] if ceiling and "us" in ours else None
    case = Case.from_json(cell["case"])
    cell["kind"] = kind_of(cell["mode"], case)
    goal = goal_of(cell["mode"], case, cell["pass"]) if against_goals else None
    cell["goal"] = str(goal) if goal else None
    cell["met"] = None
    if goal is not None and "fastnorm" in cell["providers"]:
        if ours["status"] == "ok":
            torchs = cell["providers"].get("torch", {}).get("us")
            cell["met"] = goal.is_met(
                ours["us"] * 1e-6,
                ceiling * 1e-6 if ceiling else None,
                torchs * 1e-6 if torchs else None,
            )
        else:
            cell["met"] = False
    cell["slower_than"] = [
        name
        for name, theirs in cell["providers"].items()
        if name != "fastnorm" and _is_slower(ours, theirs)
    ]
    return cell


def _is_slower(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """By more than the spread of both."""
    return "us" in ours and "us" in theirs and bool(ours["p20_us"] > theirs["p80_us"])


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
