"""What the main job says: the machine and the build, and plain-text tables."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastnorm import _C
from fastnorm._selfcheck import Outcome
from fastnorm._timing import Timing


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell, the first ones left and the others right aligned."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def format_line(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([format_line(header), rule, *(format_line(row) for row in rows)])


def check_table(outcomes: Sequence[Outcome]) -> str:
    """Per dtypes, the largest error of each result as a share of the allowed one."""
    rows = []
    for mode in dict.fromkeys(outcome.mode for outcome in outcomes):
        of_mode = [outcome for outcome in outcomes if outcome.mode == mode]
        cells = [mode, str(len(of_mode))]
        for result in ("y", "dx", "dw", "db"):
            shares = [outcome.share_of_allowed(result) for outcome in of_mode]
            known = [share for share in shares if share is not None]
            cells.append(f"{max(known):.0%}" if known else "-")
        passed = all(outcome.complaint is None for outcome in of_mode)
        rows.append([*cells, "pass" if passed else "FAIL"])
    return table(["dtypes", "shapes", "y", "dx", "dw", "db", ""], rows)


def timing_table(timings: Sequence[Timing]) -> str:
    """One line per direction and shape."""
    header = [
        "",
        "rows x cols",
        "dtype",
        "fastnorm",
        "torch",
        "ceiling",
        "GB/s",
        "ratio to ceiling",
        "speed-up over torch",
    ]
    rows = [
        [
            timing.direction,
            f"{timing.rows} x {timing.cols}",
            timing.dtype,
            _duration(timing.fastnorm_seconds),
            _duration(timing.torch_seconds),
            _duration(timing.ceiling_seconds),
            f"{timing.gigabytes_per_second:.0f}",
            f"{timing.ratio_to_ceiling:.2f}",
            f"{timing.speedup_over_torch:.2f}",
        ]
        for timing in sorted(timings, key=lambda timing: timing.direction != "forward")
    ]
    return table(header, rows)


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms"


def describe_device(device: torch.device) -> dict[str, Any]:
    """Name and properties of one device."""
    if device.type == "cpu":
        return {
            "device": str(device),
            "name": _cpu_name(),
            "threads": torch.get_num_threads(),
            "instruction_set": _C.build_info()["instruction_set"],
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": str(device),
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": _driver_version(),
    }


def describe_run(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Everything that a figure needs beside it to be worth anything."""
    build = _C.build_info()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "fastnorm": build["version"],
        "commit": _commit(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "build": dict(build),
        "devices": [describe_device(device) for device in devices],
    }


def heading(run: dict[str, Any]) -> str:
    """The description of the run for people."""
    build = run["build"]
    cuda = "no CUDA"
    if build["cuda"]:
        cuda = f"CUDA {build['cuda']} for {', '.join(build['cuda_architectures'])}"
    lines = [
        f"fastnorm {run['fastnorm']}, built with torch {build['torch']}, {cuda}, "
        f"{build['compiler']}",
        f"running with torch {run['torch']}, Python {run['python']}",
    ]
    for device in run["devices"]:
        if device["device"] == "cpu":
            details = f"{device['threads']} threads, {device['instruction_set']}"
        else:
            details = f"compute capability {device['compute_capability']}, "
            details += f"{device['memory_bytes'] / 2**30:.0f} GiB"
            if device["driver"]:
                details += f", driver {device['driver']}"
        lines.append(f"  {device['device']}: {device['name']}, {details}")
    return "\n".join(lines)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver_version() -> str | None:
    try:
        match = re.search(
            r"\s(\d+\.\d+(?:\.\d+)?)\s", Path("/proc/driver/nvidia/version").read_text()
        )
        if match:
            return match.group(1)
    except OSError:
        pass
    answer = _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0].strip() if answer else None


def _commit() -> str | None:
    """The commit of the fastnorm checkout one stands in, `-dirty` when changed; else None."""
    root = _ask("git", "rev-parse", "--show-toplevel")
    if not root or not os.path.isfile(os.path.join(root, "csrc/include/fastnorm/version.h")):
        return None
    return _ask("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _ask(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
