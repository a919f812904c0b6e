"""Runs the long profile of test_properties.py and keeps what it found in tests/reports/.

    python tests/property_report.py --device cpu
    python tests/property_report.py --device cuda --processes 16

Exit code 1 if an example failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report

HERE = Path(__file__).resolve().parent


def start(
    device: str, examples: int, seed: int, log: Path, output: Path
) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "pytest", "-q", str(HERE / "test_properties.py"), "-k", device,
        "--hypothesis-profile=long", f"--hypothesis-seed={seed}", "-p", "no:cacheprovider",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "FASTNORM_PROPERTIES_LOG": str(log),
        "FASTNORM_EXAMPLES": str(examples),
        "OMP_NUM_THREADS": "1",  # waking threads would take most of the time
    }
    with output.open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def merge(logs: list[dict[str, Any]]) -> dict[str, Any]:
    examples: dict[str, int] = {}
    worst: dict[str, dict[str, float]] = {}
    for log in logs:
        for what, count in log["examples"].items():
            examples[what] = examples.get(what, 0) + count
        for what, figures in log["worst"].items():
            known = worst.setdefault(what, dict(figures))
            for name, value in figures.items():
                known[name] = max(known[name], value)
    return {"examples": examples, "worst": worst}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--examples", type=int, default=20_000, help="of each property, in all")
    parser.add_argument("--seed", type=int, help="of the first process; unset: drawn")
    arguments = parser.parse_args()
    seed = random.randrange(1 << 30) if arguments.seed is None else arguments.seed
    share = -(-arguments.examples // arguments.processes)
    command = f"python tests/property_report.py --device {arguments.device}"
    head = report.head(command, arguments.device)
    begin = time.monotonic()
    failures: list[str] = []
    logs = []
    with tempfile.TemporaryDirectory() as folder:
        shards = []
        for i in range(arguments.processes):
            log, output = Path(folder, f"{i}.json"), Path(folder, f"{i}.txt")
            shards.append((start(arguments.device, share, seed + i, log, output), log, output))
        for process, log, output in shards:
            if process.wait() != 0:
                failures.append(output.read_text()[-4000:])
            if log.exists():
                logs.append(json.loads(log.read_text()))
    merged = merge(logs)
    report.write(
        f"properties_{arguments.device}.json",
        {
            **head,
            "hypothesis": importlib.metadata.version("hypothesis"),
            "seeds": [seed + i for i in range(arguments.processes)],
            "seconds": round(time.monotonic() - begin),
            "examples": merged["examples"],
            "failures": len(failures),
            "meaning": {
                "of_limit": "the worst error in parts of what is allowed; 1 is the limit",
                "of_aten": "the worst error beyond rounding in units of PyTorch's; 2 is the limit",
            },
            "worst": merged["worst"],
        },
    )
    for failure in failures:
        print(failure)
    for what, figures in merged["worst"].items():
        print(f"{what:28} {figures['of_limit']:6.3f} of the limit")
    print(f"examples: {merged['examples']}; failures: {len(failures)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
