"""Results files: written whole or not at all, and merged.

    python -m bench.merge PART1.json PART2.json ... -o WHOLE.json [--report]

Merging joins the cells of parts of one run; where two files hold the same cell, the later file's
stands. The parts must be of the same machine, versions and commit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SAME = ("schema", "commit", "dirty", "fastnorm", "torch", "cuda", "triton")


def write(path: Path, run: dict[str, Any]) -> None:
    """Through a second file, so that a run cut short leaves the last whole state."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(run, indent=1) + "\n")
    os.replace(beside, path)


def read(path: Path) -> dict[str, Any]:
    run: dict[str, Any] = json.loads(path.read_text())
    if run.get("schema") != "fastnorm-bench-1":
        raise ValueError(f"{path} was not written by `python -m bench`")
    return run


def merge(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One run of all cells; raises ValueError where the parts do not belong together."""
    first = runs[0]
    for run in runs[1:]:
        for key in SAME:
            if run[key] != first[key]:
                raise ValueError(f"the parts differ in {key}: {first[key]} and {run[key]}")
        if run["device"]["name"] != first["device"]["name"]:
            raise ValueError("the parts are of different devices")
    cells = {}
    for run in runs:
        for cell in run["cells"]:
            kind = (cell["mode"], cell["pass"], cell["variant"], *cell["case"].values())
            cells[kind] = cell
    providers = {name: version for run in runs for name, version in run["providers"].items()}
    commands = [run["command"] for run in runs]
    failures = [failure for run in runs for failure in run["failures"]]
    return first | {
        "providers": providers,
        "parts": commands,
        "failures": failures,
        "cells": list(cells.values()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.merge", description=__doc__)
    parser.add_argument("parts", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, help="where the whole is written")
    parser.add_argument("--report", action="store_true", help="print the tables of the whole")
    args = parser.parse_args(argv)
    try:
        whole = merge([read(path) for path in args.parts])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if args.output is not None:
        write(args.output, whole)
    if args.report:
        from bench.report import report

        print(report(whole, memory=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
