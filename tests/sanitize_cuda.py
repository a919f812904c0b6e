"""Every variant of the CUDA kernels under compute-sanitizer; see variants.py.

    python tests/sanitize_cuda.py --processes 60 --seconds 540

First each tool must find an error planted for it, and the calls run once without a tool, under the
profiler, to see that they reach every kernel that the library holds. Then all calls run under
memcheck, initcheck, synccheck and racecheck, spread over processes and all GPUs, with the caching
allocator off.
The summary is kept in tests/reports/. A run of the same sources goes on from there: what an
earlier one finished without a report is not run again. Exit code 0 if every call ran under every
tool without one report and every kernel was seen (with --matching, those of its calls).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import torch
import variants

from fastnorm import _C

TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")
# Each a list of calls under one tool. Racecheck takes longer than the others: see calls_of.
ONE_ROW, LARGER = "racecheck of one row", "racecheck of more"
RUNS = {**{tool: tool for tool in TOOLS}, ONE_ROW: "racecheck", LARGER: "racecheck"}
DEVICES = torch.cuda.device_count()
# A process needs ten seconds to start, but under racecheck calls of the same cost take from one to
# twenty.
SHARES = {run: 120 if tool == "racecheck" else 60 for run, tool in RUNS.items()}
OPTIONS = {
    # Of a block; the ring has 80. With 65536 synccheck took seven times as long.
    "synccheck": ("--num-cuda-barriers", "128"),
    # Of six calls at a time each took 3 s, and 1.6 s where racecheck does not analyse what it
    # finds. Its workers run on the CPU, as many as there are cores: one for each of many processes.
    "racecheck": (
        "--num-cuda-barriers", "128", "--racecheck-report", "hazard",
        "--racecheck-num-workers", "1",
    ),
}  # fmt: skip
LAST = 25  # seconds that a call may take which is the last before time runs out
SLOW = 11.0  # half a second: calls of a higher cost run under racecheck where there is none else
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", re.MULTILINE)

# --- what runs under a tool -----------------------------------------------------------------------

PLANTED = {
    "memcheck": ("out[64 + threadIdx.x] = 1;", "a write past the end"),
    "racecheck": (
        "__shared__ float s[64]; s[threadIdx.x] = threadIdx.x; "
        "out[threadIdx.x] = s[(threadIdx.x + 32) % 64];",
        "shared memory written and read by different threads",
    ),
    "initcheck": ("out[threadIdx.x] = in[threadIdx.x];", "a read of memory never written"),
    "synccheck": ("__syncwarp(1u); out[threadIdx.x] = 1;", "a barrier of lanes that are not in it"),
}


def run_planted(tool: str) -> None:
    body, _ = PLANTED[tool]
    source = f'extern "C" __global__ void planted(float* out, const float* in) {{ {body} }}'
    kernel = torch.cuda._compile_kernel(source, "planted")
    out, uninitialized = torch.empty(64, device="cuda"), torch.empty(64, device="cuda")
    kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[out, uninitialized])
    torch.cuda.synchronize()


def calls_of(run: str, matching: str) -> list[variants.Call]:
    """First one or two for each instantiation, then the others, those of the same kernels together.
    Racecheck has the cheapest of each, one row of each width that the one or two leave out, and
    then the second ones.
    """
    device = variants.Device.current()
    calls = list(variants.calls(device))
    cheapest, dearest = variants.two_of_each(calls, device, SLOW)
    first = {*cheapest, *dearest}
    if run == "racecheck":
        calls = cheapest
    elif run == LARGER:
        calls = dearest
    elif run == ONE_ROW:
        calls = variants.widths_left_out(calls, list(first))
    return sorted(
        (call for call in calls if re.search(matching, str(call))),
        key=lambda call: (
            call not in first, str(call.dtype), str(call.other), call.direction, call.cols,
        ),
    )  # fmt: skip


def share_of(run: str, calls: list[variants.Call], i: int, number: int) -> list[variants.Call]:
    """One of `number` shares that take about as long as each other."""
    costs = [call.cost if RUNS[run] == "racecheck" else 1.0 for call in calls]
    total = sum(costs)
    before = itertools.accumulate(costs, initial=0.0)
    return [call for call, b in zip(calls, before) if i == min(number - 1, int(number * b / total))]


def run_share(share: Path, deadline: float, output: Path) -> None:
    calls = pickle.loads(share.read_bytes())
    ran, wrong = 0, []
    for call in calls:
        if time.time() > deadline:
            break
        results = variants.run(call)
        if not all(t.isfinite().all() for t in results):
            wrong.append(str(call))
        ran += 1
    torch.cuda.synchronize()
    output.write_text(json.dumps({"ran": ran, "not_finite": wrong}))


# --- which kernels there are, and which were seen -------------------------------------------------


def plain_name(name: str) -> str:
    """A kernel's name with its template arguments, as demangled by whatever tool."""
    name = re.sub(r"\((?:int|bool|fastnorm::cuda::\w+|unsigned char)\)", "", name)
    name = name.removeprefix("void ").split("(fastnorm")[0]
    for word in ("fastnorm::cuda::", "(anonymous namespace)::", "RingSpan ", " "):
        name = name.replace(word, "")
    return name.replace("true", "1").replace("false", "0")


def compiled_kernels() -> set[str] | None:
    """Of the library, by cuobjdump; None where there is none."""
    if shutil.which("cuobjdump") is None:
        return None
    library = Path(_C.__file__).parent / "lib" / "libfastnorm.so"
    listing = subprocess.run(
        ["cuobjdump", "-res-usage", str(library)], capture_output=True, text=True, check=False
    )
    mangled = sorted(set(re.findall(r"Function (\w+):", listing.stdout + listing.stderr)))
    if not mangled:
        return None
    names = subprocess.run(
        ["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True
    )
    return {plain_name(line) for line in names.stdout.splitlines()}


def seen_kernels(matching: str, output: Path) -> None:
    """Runs all calls under the profiler and writes the names of the kernels of this library."""
    seen: set[str] = set()
    calls = [*calls_of("racecheck", matching), *calls_of(LARGER, matching)]  # others have all
    for begin in range(0, len(calls), 500):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for call in calls[begin : begin + 500]:
                variants.run(call)
            torch.cuda.synchronize()
        seen |= {event.name for event in profile.events() if "fastnorm" in event.name}
    output.write_text(json.dumps(sorted(plain_name(name) for name in seen)))


# --- the whole ------------------------------------------------------------------------------------


@dataclass
class Job:
    process: subprocess.Popen[bytes]
    log: Path
    output: Path


def start(tool: str | None, words: list[str], folder: Path, name: str, device: int = 0) -> Job:
    log, output = folder / f"{name}.log", folder / f"{name}.json"
    command = [sys.executable, __file__, *words, "--output", str(output)]
    if tool is not None:
        command = [
            "compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20",
            *OPTIONS.get(tool, ()), *command,
        ]  # fmt: skip
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(DEVICES)))).split(",")
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": visible[device % len(visible)],
    }  # fmt: skip
    if tool is not None:
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Job(process, log, output)


def wait(job: Job, until: float) -> int:
    """Ends the tool and what it runs where they take longer."""
    try:
        return job.process.wait(max(1.0, until - time.time()))
    except subprocess.TimeoutExpired:
        os.killpg(job.process.pid, signal.SIGKILL)
        return job.process.wait()


def reports_in(log: str) -> int | None:
    """How many the tool counted; None where it did not get so far as to count."""
    counts = [int(one or other) for one, other in SUMMARY.findall(log)]
    return sum(counts) if counts else None


def check_planted(folder: Path, until: float) -> dict[str, Any]:
    jobs = {tool: start(tool, ["--planted", tool], folder, f"planted_{tool}") for tool in TOOLS}
    results = {}
    for tool, job in jobs.items():
        wait(job, until)
        log = job.log.read_text(errors="replace")
        found = reports_in(log)
        results[tool] = {"planted": PLANTED[tool][1], "found": bool(found)}
        if not found:
            print(f"{tool} did not find {PLANTED[tool][1]}:\n{log[-3000:]}")
    return results


def check_run(
    run: str,
    matching: str,
    processes: int,
    folder: Path,
    until: float,
    earlier: dict[str, Any],
) -> dict[str, Any]:
    """In more shares than processes, for no cost of a call fits all tools."""
    begin = time.time()
    tool = RUNS[run]
    calls = calls_of(run, matching)
    number = min(SHARES[run], (4 if tool == "racecheck" else 2) * processes)
    number = min(number, max(1, len(calls) // 4))
    listed = hashlib.sha256(repr((number, OPTIONS.get(tool), calls)).encode()).hexdigest()[:16]
    if earlier.get("listed") != listed:
        earlier = {"ran_of_shares": [0] * number, "seconds": 0}
    ran = list(earlier["ran_of_shares"])
    shares = [share_of(run, calls, i, number) for i in range(number)]
    result: dict[str, Any] = {
        "listed": listed, "calls": len(calls), "ran_of_shares": ran, "reports": 0, "not_finite": [],
        "first_report": "",
    }  # fmt: skip

    def finish(i: int) -> tuple[int, Job, int] | None:
        if time.time() > until - LAST:
            return None
        share = folder / f"{run}_{i}.calls"  # to list them takes ten seconds
        share.write_bytes(pickle.dumps(shares[i][ran[i] :]))
        words = ["--share", str(share), "--deadline", str(until - LAST)]
        job = start(tool, words, folder, f"{run}_{i}", i)
        return i, job, wait(job, until)

    with ThreadPoolExecutor(processes) as pool:
        unfinished = [i for i in range(number) if ran[i] < len(shares[i])]
        for i, job, code in filter(None, pool.map(finish, unfinished)):
            log = job.log.read_text(errors="replace")
            found = reports_in(log)
            done = json.loads(job.output.read_text()) if job.output.exists() else {}
            result["reports"] += found or 0
            if found and not result["first_report"]:
                result["first_report"] = f"{job.log.name}\n{log[:3000]}"
            result["not_finite"] += done.get("not_finite", [])
            if code == 0 and found == 0 and not done["not_finite"]:
                ran[i] += done["ran"]
            else:
                end = "out of time" if not found and code <= 0 else f"exit code {code}"
                print(f"---- {job.log.name}, {end}\n{log[:3000]}", flush=True)
    result["ran"] = sum(ran)
    result["seconds"] = earlier["seconds"] + round(time.time() - begin)
    return result


def coverage(job: Job, matching: str, until: float) -> dict[str, Any]:
    """Which kernels were seen, and, unless only some calls run, which were missing."""
    compiled = compiled_kernels()
    wait(job, until)
    if not job.output.exists():
        print(job.log.read_text(errors="replace")[-3000:])
        return {"compiled": len(compiled or ()), "seen": None, "missing": None, "by": None}
    seen = set(json.loads(job.output.read_text()))
    missing = None if compiled is None or not seen or matching else sorted(compiled - seen)
    return {
        "compiled": len(compiled or ()), "seen": len(seen), "missing": missing, "by": "racecheck",
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=540, help="for everything")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--matching", default="", help="of the calls those that this finds")
    parser.add_argument("--report", default="sanitizer_cuda.json", help="in tests/reports")
    parser.add_argument("--share", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--planted", choices=TOOLS, help=argparse.SUPPRESS)
    parser.add_argument("--seen", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.planted:
        run_planted(arguments.planted)
        return 0
    if arguments.seen:
        seen_kernels(arguments.matching, arguments.output)
        return 0
    if arguments.share is not None:
        run_share(arguments.share, arguments.deadline, arguments.output)
        return 0

    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH", file=sys.stderr)
        return 2
    head = report.head("python tests/sanitize_cuda.py", "cuda")
    head["matching"] = arguments.matching
    head["sources"] = report.sources("csrc")
    version = subprocess.run(
        ["compute-sanitizer", "--version"], capture_output=True, text=True, check=False
    )
    head["compute_sanitizer"] = version.stdout.strip().splitlines()[-2:]
    end = time.time() + arguments.seconds
    last = report.earlier(arguments.report, head)
    results: dict[str, Any] = dict(last.get("tools", {}))
    covered = last.get("kernels", {"missing": None})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        watching = (
            None
            if covered["missing"] == [] and covered.get("by") == "racecheck"
            else start(None, ["--seen", "--matching", arguments.matching], folder, "seen")
        )
        planted = check_planted(folder, time.time() + arguments.seconds / 5)
        for run in arguments.runs:
            earlier = results.get(run, {})
            results[run] = check_run(
                run, arguments.matching, arguments.processes, folder, end, earlier
            )
            # After each of them, so that what it found is not lost if the next one's time runs out.
            content = {**head, "planted": planted, "tools": results, "kernels": covered}
            report.write(arguments.report, content)
        if watching is not None:
            found = coverage(watching, arguments.matching, end + 20)
            if found["seen"] is not None or "seen" not in covered:  # else time ran out
                content["kernels"] = covered = found
            report.write(arguments.report, content)
    passed = all(p["found"] for p in planted.values())
    passed &= covered["missing"] == [] or arguments.matching != ""
    passed &= set(results) == set(RUNS)
    print(f"\n{'tool':20} {'calls':>7} {'ran':>7} {'reports':>8} {'seconds':>8}")
    for run, result in results.items():
        print(
            f"{run:20} {result['calls']:7} {result['ran']:7} {result['reports']:8} "
            f"{result['seconds']:8}"
        )
        passed &= result["calls"] == result["ran"] > 0 and result["reports"] == 0
    missing = covered["missing"]
    print(
        f"planted errors found: {sum(p['found'] for p in planted.values())} of {len(planted)}; "
        f"kernels seen: {covered['seen']} of {covered['compiled']}"
        + (f", not: {', '.join(missing[:5])} ..." if missing else "")
    )
    print("passed" if passed else "NOT passed")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
