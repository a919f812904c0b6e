"""Write the README's table of results from a file that `python -m fastnorm --json FILE` wrote.

    python bench/readme_table.py bench/results/FILE.json

Replaces what stands between the two markers in README.md; `--print` prints it instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def format_results(run: dict[str, Any], source: str) -> str:
    """One table per device, forward and backward of a shape side by side."""
    parts = []
    for device in run["devices"]:
        timings = [timing for timing in run["timings"] if timing["device"] == device["device"]]
        if not timings:
            continue
        by_problem: dict[tuple[int, int, str], dict[str, dict[str, Any]]] = {}
        for timing in timings:
            problem = (timing["rows"], timing["cols"], timing["dtype"])
            by_problem.setdefault(problem, {})[timing["direction"]] = timing
        lines = [
            f"{device['name']}, torch {run['torch']}, fastnorm {run['fastnorm']}, "
            f"{run['date'][:10]} ([all figures]({source})):",
            "",
            "| rows x cols | dtype | forward: of a copy's speed | over torch "
            "| backward: of a sum's speed | over torch |",
            "|---|---|---:|---:|---:|---:|",
        ]
        for (rows, cols, dtype), directions in by_problem.items():
            cells = [f"{rows} x {cols}", dtype]
            for direction in ("forward", "backward"):
                timing = directions[direction]
                cells.append(f"{timing['ratio_to_ceiling']:.0%}")
                cells.append(f"{timing['speedup_over_torch']:.2f}x")
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="written by `python -m fastnorm --json`")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--print", action="store_true", help="print the table, change nothing")
    args = parser.parse_args()

    run = json.loads(args.results.read_text())
    if not run["passed"]:
        print(f"{args.results} records failed checks: no table is made of it.", file=sys.stderr)
        return 1
    results = args.results.resolve()
    if not results.is_relative_to(ROOT):
        print(f"{args.results} lies outside the repository: nobody could look it up.")
        return 1
    table = format_results(run, results.relative_to(ROOT).as_posix())
    if args.print:
        print(table)
        return 0
    text = args.readme.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"{args.readme} lacks the line {BEGIN} or {END}.", file=sys.stderr)
        return 1
    args.readme.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
