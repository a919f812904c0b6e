"""Times LayerNorms against each other and against the memory's ceiling, after checking each.

    python -m bench --set quick
    python -m bench --set full --passes fwd,bwd --json bench/results/h200_bench.json
    python -m bench --rows 4096,65536 --cols 1024,8192 --dtypes bf16,fp32
    python -m bench --widths 100 --megabytes 134,17 --providers fastnorm,torch --seconds 0.02
    python -m bench --latency --host

docs/roofline.md says what is measured, and how.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench import environment, merge
from bench.cases import COLD, DTYPES, PASSES, SETS, Mode, Pass, Work, cross, part_of, widths
from bench.measure import Bench, DeviceLostError, raise_if_lost
from bench.providers import DEFAULT, PROVIDERS
from bench.report import heading, report
from bench.timing import Budget


def _list(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def _numbers(text: str) -> list[int]:
    return [int(item) for item in _list(text)]


def _shapes(text: str) -> list[tuple[int, int]]:
    shapes = []
    for item in _list(text):
        rows, _, cols = item.partition("x")
        shapes.append((int(rows), int(cols)))
    return shapes


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not 1 <= int(part) <= int(parts):
        raise ValueError
    return int(part), int(parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is timed")
    what.add_argument("--passes", type=_list, help=f"of {','.join(PASSES)} (default: fwd,bwd)")
    what.add_argument("--set", type=_list, dest="sets", help=f"of {','.join(SETS)}")
    what.add_argument("--rows", type=_numbers, help="with --cols: every row number times ...")
    what.add_argument("--cols", type=_numbers, help="... every row width")
    what.add_argument("--shapes", type=_shapes, help="such as 65536x1024,4096x8192")
    what.add_argument("--widths", type=int, help="so many row widths, from one to --most")
    what.add_argument("--most", type=int, default=65536, help="of them the widest (65536)")
    what.add_argument("--megabytes", type=_numbers, default=[134], help="of x, per width (134)")
    what.add_argument("--dtypes", type=_list, help=f"of {','.join(DTYPES)}")
    what.add_argument("--weight", choices=DTYPES, help="dtype of weight and bias (the input's)")
    what.add_argument("--latency", action="store_true", help="in CUDA graphs, from a warm cache")
    what.add_argument("--host", action="store_true", help="the host's time to issue a call")
    what.add_argument("--providers", type=_list, help=f"of {','.join(PROVIDERS)} (installed ones)")
    what.add_argument("--part", type=_part, default=(1, 1), help="2/3: the second third of it")
    how = parser.add_argument_group("how")
    how.add_argument("--device", help="cpu, cuda, cuda:N (default: cuda where there is one)")
    how.add_argument("--seconds", type=float, default=0.3, help="of sampling per cell")
    how.add_argument("--threads", type=int, help="of the CPU")
    how.add_argument(
        "--compile-jobs",
        type=int,
        help="processes that compile ahead what is compiled at run time (default: up to 10)",
    )
    how.add_argument("--compile-only", type=_part, help=argparse.SUPPRESS)
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=Path, metavar="FILE", help="written after every case")
    out.add_argument("--memory", action="store_true", help="also show the peak of memory")
    return parser


def _works(args: argparse.Namespace, passes: list[Pass]) -> list[Work]:
    """What was asked for, each piece once."""
    shapes = list(args.shapes or [])
    if args.rows or args.cols:
        if not (args.rows and args.cols):
            raise ValueError("--rows and --cols go together")
        shapes += [(rows, cols) for rows in args.rows for cols in args.cols]
    sets = list(args.sets or [])
    works: list[Work] = []
    dtypes = args.dtypes or ["bf16"]
    cases = list(cross(shapes, dtypes, args.weight))
    for dtype in dtypes if args.widths else ():
        for megabytes in args.megabytes:
            elements = megabytes * 10**6 // DTYPES[dtype].itemsize
            drawn = widths(args.widths, args.most)
            shapes = [(max(1, elements // cols), cols) for cols in drawn]
            cases += cross(shapes, [dtype], args.weight)
    if cases:
        modes: list[Mode] = (["graph"] if args.latency else []) + (["host"] if args.host else [])
        works += [Work(mode, case) for mode in modes or [COLD] for case in cases]
    else:
        sets += (["graph"] if args.latency else []) + (["host"] if args.host else [])
        if not sets:
            sets = ["quick"]
    for name in sets:
        works += SETS[name]
    if not cases and args.dtypes:
        works = [work for work in works if work.case.dtype in args.dtypes]
    works = [work for work in dict.fromkeys(works) if work.passes(passes)]
    return part_of(works, *args.part)


def _parse(
    argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, torch.device, list[str], list[Pass], list[Work]]:
    parser = _parser()
    args = parser.parse_args(argv)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    passes: list[Pass] = [which for which in PASSES if which in (args.passes or ("fwd", "bwd"))]
    for option, given, known in (
        ("--passes", args.passes, PASSES),
        ("--set", args.sets, SETS),
        ("--dtypes", args.dtypes, DTYPES),
        ("--providers", args.providers, PROVIDERS),
    ):
        for item in given or ():
            if item not in known:
                parser.error(f"{option}: {item!r} is none of {', '.join(known)}")
    providers = args.providers
    if providers is None:
        providers = [
            name
            for name, provider in PROVIDERS.items()
            if name in DEFAULT or provider.missing(device) is None
        ]
    if args.json is not None and not args.json.resolve().parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.resolve().parent}")
    try:
        works = _works(args, passes)
    except ValueError as error:
        parser.error(str(error))
    return args, device, providers, passes, works


def _compile_ahead(argv: Sequence[str], jobs: int) -> None:
    """Lets processes compile parts of the work side by side; what they make lies on disk."""
    begin = time.perf_counter()
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "bench", *argv, f"--compile-only={job + 1}/{jobs}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for job in range(jobs)
    ]
    failed = 0
    for child in tqdm(children, desc="compiling ahead", unit="process", leave=False):
        failed += child.wait() != 0
    seconds = time.perf_counter() - begin
    note = f"; {failed} of them failed, what they left out is compiled later" if failed else ""
    print(f"{jobs} processes compiled ahead in {seconds:.0f} s{note}", flush=True)


def _compile_part(bench: Bench, works: list[Work], passes: list[Pass]) -> int:
    import torch._inductor.config as config

    config.compile_threads = 1
    # Which of several kernels is fastest is for the process to find that has the GPU to itself.
    config.autotune_local_cache = False
    for work in works:
        bench.compile(work, passes)
    return 0


def _run(
    bench: Bench, works: list[Work], passes: list[Pass], run: dict[str, Any], path: Path | None
) -> None:
    with tqdm(works, unit="case", dynamic_ncols=True) as progress:
        for work in progress:
            progress.set_description(f"{work.mode} {work.case}")
            begin = time.perf_counter()
            try:
                cells = bench.run(work, passes)
            except DeviceLostError:
                raise
            except Exception as error:
                # The case is lost; the others are not, as long as the GPU still answers.
                complaint = f"{work.mode} {work.case}: {type(error).__name__}: {error}"
                progress.write(f"failed: {complaint}")
                run["failures"].append(complaint)
                raise_if_lost(bench.device, complaint)
                continue
            for cell in cells:
                cell["wall_seconds"] = round((time.perf_counter() - begin) / len(cells), 2)
            run["cells"] += cells
            if path is not None:
                merge.write(path, run)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 where fastnorm failed or was wrong."""
    args, device, providers, passes, works = _parse(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if device.type == "cpu":
        environment.keep_freed_memory()
    bench = Bench(device, providers, Budget(args.seconds))
    if args.compile_only is not None:
        return _compile_part(bench, part_of(works, *args.compile_only), passes)

    run = environment.describe(device, providers)
    run["failures"] = []
    run["cells"] = []
    print(f"{heading(run)}\n{len(works)} cases, passes {', '.join(passes)}", flush=True)
    jobs = args.compile_jobs
    if jobs is None:
        jobs = min((os.cpu_count() or 2) - 2, len(works) // 3, 10)
    if device.type == "cuda" and "compile" in providers and jobs > 1:
        _compile_ahead(sys.argv[1:] if argv is None else argv, jobs)
    lost = None
    try:
        _run(bench, works, passes, run, args.json)
    except DeviceLostError as error:
        lost = error
    if device.type == "cuda" and lost is None:
        run["device"]["state_after"] = environment.gpu_state(device)
    if args.json is not None:
        merge.write(args.json, run)
    print(f"\n{report(run, memory=args.memory)}")
    if lost is not None:
        print(f"The GPU's context is lost, the rest was not run. {lost}", file=sys.stderr)
        return 1
    ours = [cell["providers"].get("fastnorm", {"status": "ok"}) for cell in run["cells"]]
    passed = all(record["status"] in ("ok", "unsupported") for record in ours)
    return 0 if passed and not run["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())
