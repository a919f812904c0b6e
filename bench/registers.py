"""The compiler's report of registers and spills for every kernel, out of a build's output.

    NVCC_APPEND_FLAGS=-Xptxas=-v pip install -v . 2>&1 | python -m bench.registers --json FILE

Exit code 1 if a kernel spills.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers(?:.*?, (\d+) bytes smem)?")


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel."""

    name: str
    architecture: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


def demangle(names: Iterable[str]) -> list[str]:
    """C++ names as people write them, without namespace and parameters."""
    run = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    # Enumerators among template arguments appear as casts: (fastnorm::cuda::RingSpan)1
    plain = re.sub(r"\(fastnorm::cuda::(\w+)\)(\d+)", r"\1 \2", run.stdout)
    short = (line.removeprefix("void ").split("(fastnorm")[0] for line in plain.splitlines())
    return [name.replace("fastnorm::cuda::", "") for name in short]


def parse(lines: Iterable[str]) -> list[Kernel]:
    """The kernels that a build's output speaks of, in its order."""
    mangled: list[str] = []
    fields: list[dict[str, int | str]] = []
    for line in lines:
        if entry := ENTRY.search(line):
            mangled.append(entry[1])
            fields.append({"architecture": entry[2]})
        elif not fields:
            continue
        elif spills := SPILLS.search(line):
            fields[-1].setdefault("stack_bytes", int(spills[1]))
            fields[-1].setdefault("spill_store_bytes", int(spills[2]))
            fields[-1].setdefault("spill_load_bytes", int(spills[3]))
        elif registers := REGISTERS.search(line):
            fields[-1].setdefault("registers", int(registers[1]))
            fields[-1].setdefault("shared_bytes", int(registers[2] or 0))
    return [
        Kernel(name=name, **each)  # type: ignore[arg-type]
        for name, each in zip(demangle(mangled), fields, strict=True)
        if "registers" in each
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write every kernel's figures to this file")
    arguments = parser.parse_args()
    kernels = parse(sys.stdin)
    if not kernels:
        print("The input has no report: build with NVCC_APPEND_FLAGS=-Xptxas=-v", file=sys.stderr)
        return 2
    if arguments.json:
        # By name, so that two builds can be compared, in whatever order their files were compiled.
        by_name = sorted(kernels, key=lambda kernel: (kernel.name, kernel.architecture))
        lines = ",\n".join(json.dumps(asdict(kernel)) for kernel in by_name)
        arguments.json.write_text(f"[\n{lines}\n]\n")
    spilling = [kernel for kernel in kernels if kernel.spill_store_bytes]
    print(
        f"{len(kernels)} kernels, at most {max(kernel.registers for kernel in kernels)} registers; "
        f"{len(spilling)} spill"
    )
    for kernel in spilling:
        print(f"  {kernel.spill_store_bytes:4} bytes  {kernel.name} ({kernel.architecture})")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
