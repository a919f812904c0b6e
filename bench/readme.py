"""Writes the README's results: a short table and the plots of each results file.

    python -m bench.plot bench/results/FILE.json
    python -m bench.readme bench/results/FILE.json [bench/results/OTHER.json ...]

A file is one that `python -m bench --json FILE` wrote, or (a table without plots) one that
`python -m fastnorm --json FILE` wrote. Replaces what stands between the two markers in README.md;
`--print` prints it instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cases import PASS_NAMES, Case, Pass
from bench.measure import Cell, geometric_mean
from bench.plot import LABELS, path_of

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

# The table's lines, where the results hold them.
SHOWN = (
    Case(1048576, 128),
    Case(65536, 768),
    Case(65536, 1024),
    Case(16384, 4095),
    Case(16384, 4096),
    Case(16384, 8192),
    Case(4096, 32768),
    Case(1024, 262144),
    Case(4096, 4096, "fp16"),
    Case(16384, 4096, "fp32"),
    Case(65536, 1024, weight="fp32"),
)
PASSES: tuple[Pass, ...] = ("fwd", "bwd")


def format_bench(run: dict[str, Any], file: Path) -> str:
    """The table and plots of a file of `python -m bench`."""
    source = file.relative_to(ROOT).as_posix()
    cells = [cell for cell in run["cells"] if cell["mode"] == "cold" and cell["ratio"] is not None]
    by_key = {(Case.from_json(cell["case"]), cell["pass"]): cell for cell in cells}
    shown = [case for case in SHOWN if any((case, which) in by_key for which in PASSES)]
    peers = [
        name
        for name in dict.fromkeys(name for cell in cells for name in cell["providers"])
        if any("us" in cell["providers"].get(name, {}) for cell in cells)
    ]
    passes = [which for which in PASSES if any(cell["pass"] == which for cell in cells)]
    commit = (run["commit"] or "unknown")[:12] + (" with changes" if run["dirty"] else "")
    lines = [
        f"{run['device']['name']}, torch {run['torch']}, fastnorm {run['fastnorm']} at {commit}, "
        f"{run['date'][:10]} ([all figures]({source})). Speed in parts of the ceiling's, that of a "
        "copy (forward) or of an elementwise sum (backward) of the same tensors in the same run:",
        "",
    ]
    names = [LABELS.get(name, name) for name in peers]
    header = ["rows x cols"]
    for which in passes:
        header += [f"{PASS_NAMES[which]}: {names[0]}", *names[1:]]
    lines += [f"| {' | '.join(header)} |", "|---|" + "---:|" * (len(header) - 1)]
    for case in shown:
        line = [str(case).replace("x", " x ", 1)]
        for which in passes:
            line += [_ratio(by_key.get((case, which)), name) for name in peers]
        lines.append(f"| {' | '.join(line)} |")
    lines += ["", *(_sentence(cells, which) for which in passes)]
    for which in passes:
        image = path_of(file, which)
        if image.exists():
            where = image.relative_to(ROOT).as_posix()
            lines += ["", f"![{PASS_NAMES[which]}: GB/s over the width of a row]({where})"]
    return "\n".join(lines)


def _ratio(cell: Cell | None, name: str) -> str:
    record = cell["providers"].get(name, {}) if cell else {}
    if cell is None or "us" not in record:
        return "wrong" if record.get("status") == "wrong" else "-"
    text = f"{cell['ceiling']['us'] / record['us']:.0%}"
    return f"**{text}**" if name == "fastnorm" else text


def _sentence(cells: Sequence[Cell], which: Pass) -> str:
    large = [c for c in cells if c["pass"] == which and c["kind"].startswith("large")]
    if not large:
        return ""
    mean = geometric_mean([cell["ratio"] for cell in large])
    worst = min(large, key=lambda cell: cell["ratio"])
    return (
        f"Over all {len(large)} {PASS_NAMES[which]} cases of 128 MB and more fastnorm's geometric "
        f"mean is {mean:.1%} of the ceiling; the worst is {worst['ratio']:.1%}, "
        f"{Case.from_json(worst['case'])}."
    )


def format_main_job(run: dict[str, Any], file: Path) -> str:
    """One table per device of a file of `python -m fastnorm`."""
    source = file.relative_to(ROOT).as_posix()
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


def complaint_about(run: dict[str, Any]) -> str | None:
    """Why no table is to be made of these results."""
    if "cells" not in run:
        return None if run["passed"] else "records failed checks"
    statuses = {cell["providers"].get("fastnorm", {}).get("status") for cell in run["cells"]}
    if statuses & {"wrong", "inaccurate", "failed"} or run["failures"]:
        return "records that fastnorm failed or was wrong"
    return None if "ok" in statuses else "holds no figure of fastnorm"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.readme",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--print", action="store_true", help="print it, change nothing")
    args = parser.parse_args(argv)

    texts = []
    for results in args.results:
        run = json.loads(results.read_text())
        complaint = complaint_about(run)
        if complaint is not None:
            print(f"{results} {complaint}: no table is made of it.", file=sys.stderr)
            return 1
        file = results.resolve()
        if not file.is_relative_to(ROOT):
            print(f"{results} lies outside the repository: nobody could look it up.")
            return 1
        texts.append(format_bench(run, file) if "cells" in run else format_main_job(run, file))
    text = "\n\n".join(texts)
    if args.print:
        print(text)
        return 0
    readme = args.readme.read_text()
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"{args.readme} lacks the line {BEGIN} or {END}.", file=sys.stderr)
        return 1
    args.readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
