"""What each source costs to compile: seconds and object size, from a build's own records.

    python setup.py build_ext --inplace
    PYTHONPATH=python python -m bench.build

Takes the newest build under build/ (or the one named) and replaces what stands between the two
markers in docs/building.md; `--print` prints it instead.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "building.md"
BEGIN, END = "<!-- units: begin -->", "<!-- units: end -->"


@dataclass(frozen=True)
class Unit:
    """One compiled source."""

    name: str  # such as csrc/cuda/forward_float16
    seconds: float
    object_bytes: int


def last_compilations(ninja_log: Iterable[str]) -> dict[Path, float]:
    """Seconds of the last compilation of each object that ninja's log speaks of."""
    seconds = {}
    for line in ninja_log:
        if line.startswith("#"):
            continue
        start, end, _, output, _ = line.rstrip("\n").split("\t")
        seconds[Path(output)] = (int(end) - int(start)) / 1000
    return seconds


def units_of(build: Path) -> list[Unit]:
    """The compiled sources of a build directory, the slowest first."""
    units = []
    for log in sorted(build.glob("*/.ninja_log")):
        for path, seconds in last_compilations(log.read_text().splitlines()).items():
            if path.exists():
                name = path.relative_to(log.parent).with_suffix("").as_posix()
                units.append(Unit(name, seconds, path.stat().st_size))
    return sorted(units, key=lambda unit: -unit.seconds)


def newest_build() -> Path:
    """The directory under build/ in which something was compiled last."""
    logs = sorted(ROOT.glob("build/temp*/*/.ninja_log"), key=lambda log: log.stat().st_mtime)
    if not logs:
        sys.exit("Nothing is under build/: run `python setup.py build_ext --inplace` first.")
    return logs[-1].parent.parent


def table(units: Sequence[Unit]) -> str:
    """Markdown: a line per source and one for all of them."""
    lines = ["| source | seconds | object, KB |", "|---|---:|---:|"]
    lines += [f"| {u.name} | {u.seconds:.1f} | {u.object_bytes / 1000:.0f} |" for u in units]
    seconds = sum(unit.seconds for unit in units)
    size = sum(unit.object_bytes for unit in units)
    return "\n".join([*lines, f"| all {len(units)} | {seconds:.0f} | {size / 1000:.0f} |"])


def description() -> str:
    """Of the fastnorm that was built, and the machine."""
    from fastnorm import _C, _report

    build = _C.build_info()
    cuda = "CPU alone"
    if build["cuda"] is not None:
        cuda = f"CUDA {build['cuda']} for {', '.join(build['cuda_architectures'])}"
    return (
        f"fastnorm {build['version']}, torch {build['torch']}, {cuda}, {build['compiler']}; "
        f"{_report._cpu_name()}, {len(os.sched_getaffinity(0))} cores:"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.build", description=__doc__)
    parser.add_argument("build", nargs="?", type=Path, help="such as build/temp.linux-x86_64-...")
    parser.add_argument("--print", action="store_true", help="print instead of writing")
    args = parser.parse_args(argv)
    units = units_of((args.build or newest_build()).resolve())
    text = f"{description()}\n\n{table(units)}"
    if args.print:
        print(text)
        return 0
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
