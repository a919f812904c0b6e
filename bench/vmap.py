"""Times torch.func.vmap of LayerNorm against the plain call on the whole batch.

    python -m bench.vmap [--device cuda] [--json bench/results/h200_vmap.json]

What vmap costs is the ratio to the batched call of the same operands: Python's work for each call
(`host`), and on the device what the batching rules add to the kernels, which for a batch of inputs
is nothing. Gradients for each sample have no batched counterpart: they are compared with one
gradient for the whole batch. PyTorch's LayerNorm is timed beside fastnorm's in the same way.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap
from tqdm import tqdm

from bench import environment
from bench.cases import DTYPES
from bench.problem import Call
from bench.report import table
from bench.timing import Budget, ColdTimer, Times, time_cpu, time_host
from fastnorm.functional import layer_norm

Norm = Callable[..., Tensor]
NORMS: dict[str, Norm] = {"fastnorm": layer_norm, "torch": F.layer_norm}
CALLS_PER_HOST_SAMPLE = 20
# Of the largest value: PyTorch's rules round intermediates to the dtype, in another order.
ROUNDINGS = 16


@dataclass(frozen=True)
class Case:
    samples: int
    rows: int
    cols: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.samples}x{self.rows}x{self.cols} {self.dtype}"


CASES = {
    "cuda": [Case(64, 512, 1024, "bf16"), Case(64, 512, 1024, "fp32"), Case(1024, 4, 256, "fp32")],
    "cpu": [Case(16, 64, 256, "fp32"), Case(256, 1, 64, "fp32")],
}


def pairs(case: Case, norm: Norm, device: torch.device) -> dict[str, tuple[Call, Call]]:
    """What is compared: by vmap, and in one call for the whole batch."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, DTYPES[case.dtype])

    shape = (case.cols,)
    x, w, b = random(case.samples, case.rows, case.cols), random(case.cols), random(case.cols)
    weights = random(case.samples, case.cols)

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return norm(x, shape, w, b)

    def loss(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return function(x, w, b).float().square().sum()

    gradient = grad(loss, argnums=(0, 1, 2))
    return {
        "inputs": (
            lambda: vmap(function, (0, None, None))(x, w, b),
            lambda: function(x, w, b),
        ),
        "inputs and weights": (
            lambda: vmap(function, (0, 0, None))(x, weights, b),
            lambda: norm(x, shape) * weights[:, None] + b,
        ),
        "gradients of each sample": (
            lambda: vmap(gradient, (None, None, 0))(w, b, x),
            lambda: gradient(w, b, x),
        ),
    }


def check(case: Case, calls: dict[str, tuple[Call, Call]]) -> None:
    """Both of a pair give the same but for rounding; of the gradients, those of the inputs."""
    for what, (mapped, batched) in calls.items():
        got, expected = mapped(), batched()
        if what == "gradients of each sample":
            got, expected = got[2], expected[2]
        largest = expected.abs().max().item()
        limit = ROUNDINGS * torch.finfo(DTYPES[case.dtype]).eps * largest
        error = (got - expected).abs().max().item()
        if not error <= limit:
            raise AssertionError(f"{case}, {what}: vmap is off by {error}, more than {limit}")


def measure(case: Case, device: torch.device, budget: Budget) -> list[dict[str, Any]]:
    calls: dict[str, Call] = {}
    for name, norm in NORMS.items():
        of_norm = pairs(case, norm, device)
        check(case, of_norm)
        for what, (mapped, batched) in of_norm.items():
            calls[f"{name}|{what}|vmap"] = mapped
            calls[f"{name}|{what}|batched"] = batched
    modes: dict[str, dict[str, Times]] = {}
    if device.type == "cuda":
        modes["device"] = ColdTimer(device).time(calls, budget)
        modes["host"] = time_host(
            calls, CALLS_PER_HOST_SAMPLE, lambda: torch.cuda.synchronize(device), budget
        )
    else:
        modes["cpu"] = time_cpu(calls, budget)
    cells = []
    for mode, times in modes.items():
        for key in calls:
            name, what, way = key.split("|")
            if way == "batched":
                continue
            both = {way: times[f"{name}|{what}|{way}"] for way in ("vmap", "batched")}
            cells.append(
                {
                    "case": asdict(case),
                    "mode": mode,
                    "provider": name,
                    "what": what,
                    **{way: t.to_json() for way, t in both.items()},
                    "ratio": both["vmap"].median / both["batched"].median,
                }
            )
    return cells


def report(cells: list[dict[str, Any]]) -> str:
    rows = []
    for cell in cells:
        rows.append(
            [
                str(Case(**cell["case"])),
                cell["what"],
                f"{cell['vmap']['us']:.1f}",
                f"{cell['batched']['us']:.1f}",
                f"{cell['ratio']:.2f}",
                f"{cell['mode']}, {cell['provider']}",
            ]
        )
    return table(["case", "vmap over", "vmap us", "batched us", "ratio", "time"], rows, words=2)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.vmap", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=2.0, help="of sampling per case and mode")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    cells = []
    if device.type == "cpu":
        environment.keep_freed_memory()
    for case in tqdm(CASES[device.type], disable=None):
        cells += measure(case, device, Budget(arguments.seconds))
    print(report(cells))
    if arguments.json:
        head = environment.describe(device, ["fastnorm"]) | {"schema": "fastnorm-vmap-1"}
        head["command"][2] = "bench.vmap"
        arguments.json.write_text(json.dumps(head | {"cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
