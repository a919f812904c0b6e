"""The head of a report: what was run, on what, when. Reports are kept in tests/reports/."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import fastnorm

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "tests" / "reports"


def _git(*words: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def head(command: str, device: str) -> dict[str, Any]:
    code = (".", ":!tests/reports", ":!bench/results")  # what a run writes itself does not count
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", *code)
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": None if changes is None else bool(changes),
        "fastnorm": fastnorm.__version__,
        "build": fastnorm._C.build_info(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
    }


def sources(*paths: str) -> dict[str, str | None]:
    """Of files and folders of the repository, what tells their committed content from another."""
    return {path: _git("rev-parse", f"HEAD:{path}") for path in paths}


def earlier(name: str, head: dict[str, Any]) -> dict[str, Any]:
    """The report of this name if it is of the same sources, build and device; else nothing."""
    path = REPORTS / name
    report = json.loads(path.read_text()) if path.exists() else {}
    same = all(report.get(key) == head[key] for key in head.keys() - {"date", "commit"})
    return report if same else {}


def write(name: str, report: dict[str, Any]) -> None:
    REPORTS.mkdir(exist_ok=True)
    (REPORTS / name).write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to tests/reports/{name}")
