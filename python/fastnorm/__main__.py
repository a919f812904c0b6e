"""`python -m fastnorm`: what was built, whether it is right here, and how fast."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from fastnorm import _C, _report, _selfcheck, _timing


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[torch.device]]:
    parser = argparse.ArgumentParser(prog="python -m fastnorm", description=__doc__)
    parser.add_argument(
        "--device",
        default="all",
        help="cpu, cuda (every GPU), cuda:N, or all that is found (the default)",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all results to FILE")
    parser.add_argument("--quick", action="store_true", help="time fewer shapes, each shorter")
    args = parser.parse_args(argv)
    if args.json is not None and not args.json.resolve().parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.resolve().parent}")
    try:
        return args, _devices(args.device)
    except ValueError as error:
        parser.error(str(error))


def _devices(wanted: str) -> list[torch.device]:
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    if wanted == "all":
        if gpus and _C.build_info()["cuda"] is None:
            print("This fastnorm was built without CUDA: the GPUs here are left out.\n")
            gpus = []
        return [torch.device("cpu"), *gpus]
    if wanted == "cpu":
        return [torch.device("cpu")]
    try:
        device = torch.device(wanted)
    except RuntimeError:
        device = torch.device("meta")
    if device.type != "cuda":
        raise ValueError(f"--device: {wanted!r} is none of cpu, cuda, cuda:N, all")
    if _C.build_info()["cuda"] is None:
        raise ValueError(f"--device: this fastnorm was built without CUDA, so {wanted} cannot run")
    found = gpus if device.index is None else [gpu for gpu in gpus if gpu == device]
    if not found:
        raise ValueError(f"--device: {wanted} was asked for; PyTorch finds {len(gpus)} GPUs here")
    return found


def _check(device: torch.device) -> list[_selfcheck.Outcome]:
    total = len(_selfcheck.MODES) * len(_selfcheck.LAYOUTS)
    outcomes = []
    with tqdm(total=total, desc=f"checking {device}", unit="case", leave=False) as bar:
        for outcome in _selfcheck.check_device(device):
            outcomes.append(outcome)
            bar.update()
    return outcomes


def _time(device: torch.device, *, quick: bool) -> list[_timing.Timing]:
    timings: list[_timing.Timing] = []
    problems = _timing.problems(device, quick=quick)
    with tqdm(problems, desc=f"timing {device}", unit="shape", leave=False) as bar:
        for problem in bar:
            try:
                timings += _timing.time_problem(device, problem, quick=quick)
            except torch.OutOfMemoryError:
                bar.write(f"{problem.rows} x {problem.cols} does not fit in {device}: left out.")
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return timings


def main(argv: Sequence[str] | None = None) -> int:
    """Run the main job; return the exit code."""
    args, devices = _parse(argv)
    run = _report.describe_run(devices)
    print(_report.heading(run), flush=True)

    outcomes: list[_selfcheck.Outcome] = []
    timings: list[_timing.Timing] = []
    failures: list[str] = []
    for device in devices:
        of_device = _check(device)
        outcomes += of_device
        print(f"\n{device}: largest error against float64, of what is allowed")
        print(_report.check_table(of_device), flush=True)
        failures += [
            f"On {outcome.device} with {outcome.mode}, {outcome.layout}: {outcome.complaint}."
            for outcome in of_device
            if outcome.complaint is not None
        ]

    raised = {outcome.device for outcome in outcomes if not outcome.errors}
    timed: set[str] = set()  # GPUs of one name are timed once
    for device, description in zip(devices, run["devices"], strict=True):
        if str(device) in raised or description["name"] in timed:
            continue
        timed.add(description["name"])
        try:
            of_device_timings = _time(device, quick=args.quick)
        except RuntimeError as error:
            failures.append(f"Timing on {device} raised {type(error).__name__}: {error}.")
            continue
        timings += of_device_timings
        print(f"\n{device}: {description['name']}, median times")
        print(_report.timing_table(of_device_timings), flush=True)
    print("\nceiling: a copy of the tensor (forward), the sum of two such tensors (backward)")

    if args.json is not None:
        run["passed"] = not failures
        run["failures"] = failures
        run["checks"] = [asdict(outcome) for outcome in outcomes]
        run["timings"] = [asdict(timing) for timing in timings]
        args.json.write_text(json.dumps(run, indent=1) + "\n")

    if failures:
        print()
        for failure in failures:
            print(f"FAILED. {failure}")
        return 1
    print(f"\nAll {len(outcomes)} checks passed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
