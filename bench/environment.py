"""What a figure needs beside it to be worth anything: machine, versions, commit, date."""

from __future__ import annotations

import ctypes
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import fastnorm
from bench.providers import PROVIDERS

ROOT = Path(__file__).resolve().parent.parent


def _without_folder(word: str) -> str:
    """A file's name for its absolute path: where it lies says nothing about the run."""
    return Path(word).name if Path(word).is_absolute() else word


def describe(device: torch.device, providers: list[str]) -> dict[str, Any]:
    """The head of a results file."""
    build = fastnorm._C.build_info()
    commit, dirty = _commit()
    return {
        "schema": "fastnorm-bench-1",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": ["python", "-m", "bench", *(_without_folder(word) for word in sys.argv[1:])],
        "commit": commit,
        "dirty": dirty,
        "fastnorm": build["version"],
        "build": dict(build),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "providers": {name: PROVIDERS[name].version() for name in providers},
        "device": _describe_cpu() if device.type == "cpu" else _describe_gpu(device),
    }


def gpu_state(device: torch.device) -> dict[str, str]:
    """Clocks, power and temperature at this moment, as nvidia-smi has them."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    names = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,temperature.gpu"
    answer = _ask(
        "nvidia-smi",
        f"--id={f'GPU-{uuid}' if uuid else index}",
        f"--query-gpu={names}",
        "--format=csv,noheader",
    )
    if answer is None:
        return {}
    return dict(zip(names.split(","), (value.strip() for value in answer.split(","))))


def keep_freed_memory() -> None:
    """Tells glibc's malloc never to give memory back to the system, where there is one: no call on
    the CPU is to pay for fresh pages.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_max = -1, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


def _describe_cpu() -> dict[str, Any]:
    return {
        "type": "cpu",
        "name": _cpu_name(),
        "threads": torch.get_num_threads(),
        "instruction_set": fastnorm._C.build_info()["instruction_set"],
        "torch_instruction_set": torch.backends.cpu.get_cpu_capability(),
    }


def _describe_gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    driver = _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "type": "cuda",
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "driver": driver.splitlines()[0].strip() if driver else None,
        "cpu": _cpu_name(),
        "state_before": gpu_state(device),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _commit() -> tuple[str | None, bool | None]:
    """The commit of this checkout (GIT_DIR is heeded) and whether files differ from it."""
    commit = _ask("git", "rev-parse", "HEAD")
    if commit is None:
        return None, None
    environment = dict(os.environ)
    if "GIT_DIR" in environment:
        environment.setdefault("GIT_WORK_TREE", str(ROOT))
    sources = ("csrc", "python", "bench", "setup.py", ":!bench/results")
    changes = _ask("git", "status", "--porcelain", "--", *sources, environment=environment)
    return commit, None if changes is None else changes != ""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ask(*command: str, environment: dict[str, str] | None = None) -> str | None:
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
