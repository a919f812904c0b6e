"""Runs Python code in a process of its own: what was saved has to load without what made it."""

from __future__ import annotations

import subprocess
import sys


def run(code: str, *arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Runs `code` with `sys.argv[1:]` as given; its exit status is the caller's to judge."""
    return subprocess.run(
        # So that a crash says where it was, and what was printed before it is seen.
        [sys.executable, "-u", "-X", "faulthandler", "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def check(code: str, *arguments: object, timeout: float = 300) -> str:
    """Runs `code` as `run` does and returns what it printed; fails unless it succeeded."""
    done = run(code, *arguments, timeout=timeout)
    assert done.returncode == 0, f"exit status {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout
