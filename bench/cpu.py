"""Times fastnorm's CPU operators side by side with PyTorch's, after checking them against float64.

    python bench/cpu.py [--threads N] [--json FILE]

The ceiling of the forward is a copy of the tensor (read x, write y), that of the backward (dx, dw
and db) the elementwise sum of two tensors (read x and dy, write dx). The calls of a row take turns;
medians are shown. Freed memory is kept by the process, so that no call pays for fresh pages.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import pathlib
import platform
import subprocess
import sys
from typing import Any

import torch
from tqdm import tqdm

from fastnorm import _C
from fastnorm._timing import Call, time_on_cpu

SHAPES = ((256, 1024), (4096, 4096), (32768, 1024), (100000, 64), (64, 65536))
DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-5
SECONDS = 1.5
MIN_REPEATS, MAX_REPEATS = 7, 1000

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Problem:
    """One shape and dtype: its tensors, and the calls to time."""

    def __init__(self, rows: int, cols: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(dtype)

        self.shape = [cols]
        self.x, self.dy = random(rows, cols), random(rows, cols)
        self.weight, self.bias = random(cols), random(cols)
        self.ours = self.forward()
        self.atens = self.aten_forward()

    def forward(self) -> Result:
        return torch.ops.fastnorm.layer_norm_forward(
            self.x, self.shape, self.weight, self.bias, EPS, None
        )

    def backward(self) -> Result:
        _, mean, rstd = self.ours
        return torch.ops.fastnorm.layer_norm_backward(
            self.dy, self.x, self.shape, mean, rstd, self.weight, self.bias, EPS, [True] * 3
        )

    def aten_forward(self) -> Result:
        return torch.ops.aten.native_layer_norm(self.x, self.shape, self.weight, self.bias, EPS)

    def aten_backward(self) -> Result:
        _, mean, rstd = self.atens
        return torch.ops.aten.native_layer_norm_backward(
            self.dy, self.x, self.shape, mean, rstd, self.weight, self.bias, [True] * 3
        )

    def calls(self) -> dict[str, dict[str, Call]]:
        return {
            "forward": {
                "fastnorm": self.forward,
                "torch": self.aten_forward,
                "ceiling": lambda: self.x.clone(),
            },
            "backward": {
                "fastnorm": self.backward,
                "torch": self.aten_backward,
                "ceiling": lambda: torch.add(self.x, self.dy),
            },
        }

    def reference(self) -> dict[str, torch.Tensor]:
        """y, dx, dw and db in float64."""
        x, dy, weight = self.x.double(), self.dy.double(), self.weight.double()
        centred = x - x.mean(1, keepdim=True)
        rstd = (centred.square().mean(1, keepdim=True) + EPS).rsqrt()
        normalized = centred * rstd
        grad = dy * weight
        projection = (grad * normalized).mean(1, keepdim=True)
        return {
            "y": normalized * weight + self.bias.double(),
            "dx": rstd * (grad - grad.mean(1, keepdim=True) - normalized * projection),
            "dw": (dy * normalized).sum(0),
            "db": dy.sum(0),
        }

    def check(self) -> None:
        """Raises where fastnorm's error is over twice PyTorch's and two roundings of the result."""
        ours = (self.ours[0], *self.backward())
        atens = (self.atens[0], *self.aten_backward())
        for (name, exact), our, aten in zip(self.reference().items(), ours, atens, strict=True):
            error = (our.double() - exact).abs().max().item()
            rounding = torch.finfo(our.dtype).eps * exact.abs().max().item()
            allowed = 2 * (aten.double() - exact).abs().max().item() + rounding
            if not error <= allowed:
                rows, cols = self.x.shape
                raise SystemExit(
                    f"{name} of {rows}x{cols} {self.x.dtype}: error {error:.3g} against float64, "
                    f"{allowed:.3g} allowed"
                )


def keep_freed_memory() -> None:
    """Tells glibc's malloc never to give memory back to the system, where there is one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_max = -1, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


def cpu_model() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def commit() -> str | None:
    """The checkout's commit, or None outside of one."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=pathlib.Path(__file__).parent,
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def environment() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_model(),
        "instruction_set": _C.build_info()["instruction_set"],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "torch_instruction_set": torch.backends.cpu.get_cpu_capability(),
    }


def measure() -> list[dict[str, Any]]:
    results = []
    problems = [(shape, dtype) for dtype in DTYPES for shape in SHAPES]
    with tqdm(problems, unit="case") as progress:
        for (rows, cols), dtype in progress:
            name = str(dtype).removeprefix("torch.")
            progress.set_description(f"{rows}x{cols} {name}")
            problem = Problem(rows, cols, dtype)
            problem.check()
            for direction, calls in problem.calls().items():
                times = time_on_cpu(
                    calls, seconds=SECONDS, min_repeats=MIN_REPEATS, max_repeats=MAX_REPEATS
                )
                results.append(
                    {
                        "direction": direction,
                        "rows": rows,
                        "cols": cols,
                        "dtype": name,
                        **{f"{call}_us": seconds * 1e6 for call, seconds in times.items()},
                        "times_faster_than_torch": times["torch"] / times["fastnorm"],
                        "fraction_of_ceiling": times["ceiling"] / times["fastnorm"],
                    }
                )
    return results


def table(results: list[dict[str, Any]]) -> str:
    header = ("", "shape", "dtype", "fastnorm us", "torch us", "copy/add us", "vs torch", "ceiling")
    lines = ["{:<9} {:<11} {:<9} {:>11} {:>11} {:>11} {:>9} {:>8}".format(*header)]
    lines += [
        "{direction:<9} {shape:<11} {dtype:<9} {fastnorm_us:>11.1f} {torch_us:>11.1f} "
        "{ceiling_us:>11.1f} {times_faster_than_torch:>8.2f}x {fraction_of_ceiling:>8.2f}".format(
            shape=f"{result['rows']}x{result['cols']}", **result
        )
        for result in results
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, help="threads to use (default: PyTorch's choice)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write results here")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    about = environment()
    print(", ".join(f"{key} {value}" for key, value in about.items()), file=sys.stderr)
    results = measure()
    print(table(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**about, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
