"""The benchmark: what it covers, that it marks wrong results, its files and tables; on the CPU."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import __main__ as command  # noqa: E402
from bench import build, measure, merge, readme, timing, vmap  # noqa: E402
from bench.cases import PASSES, SETS, Case, Work, part_of, widths  # noqa: E402
from bench.goals import GOALS, goal_of, kind_of, memory_goal  # noqa: E402
from bench.measure import Bench, judged  # noqa: E402
from bench.problem import Problem  # noqa: E402
from bench.providers import PROVIDERS, Provider  # noqa: E402
from bench.readme import complaint_about  # noqa: E402
from bench.report import report, summary  # noqa: E402

CPU = torch.device("cpu")
SMALL = Case(24, 40, "fp32")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Waiting for threads on a busy machine would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_cli(tmp_path: Path, *options: str) -> dict[str, Any]:
    file = tmp_path / "results.json"
    argv = ["--device", "cpu", "--seconds", "0.001", "--json", str(file), *options]
    assert command.main(argv) == 0
    run: dict[str, Any] = json.loads(file.read_text())
    return run


def test_full_set_covers_enough_shapes_in_each_pass_and_every_goal() -> None:
    works = SETS["full"]
    for which in ("fwd", "bwd"):
        shapes = {
            (work.case.rows, work.case.cols)
            for work in works
            if work.mode == "cold" and work.passes([which])
        }
        assert len(shapes) >= 40
    reached = {
        (which, kind_of(work.mode, work.case))
        for work in works
        for which in work.passes(list(PASSES))
    }
    assert set(GOALS) <= reached


@pytest.mark.parametrize(("name", "low", "high"), [("large", 128e6, 2e9), ("medium", 8e6, 128e6)])
def test_the_sets_of_a_size_hold_that_size(name: str, low: float, high: float) -> None:
    for work in SETS[name]:
        assert low <= work.case.x_bytes < high, str(work.case)
        assert kind_of("cold", work.case).startswith(name), str(work.case)


def test_parts_are_the_whole() -> None:
    works = list(SETS["full"])
    parts = [part_of(works, part, 3) for part in (1, 2, 3)]
    assert sorted(str(work) for part in parts for work in part) == sorted(map(str, works))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_widths_are_spread_and_the_same_each_time() -> None:
    drawn = widths(60, 65536)
    assert drawn == widths(60, 65536) == sorted(set(drawn))
    assert drawn[0] == 1
    assert 60_000 < drawn[-1] <= 65536
    assert len(drawn) > 50
    for power in range(16):  # three or four for each, where there are so many
        assert sum(2**power <= cols < 2 ** (power + 1) for cols in drawn) >= min(2**power, 2)
    assert sum(cols % 64 == 0 for cols in drawn) >= 10 <= sum(cols % 8 != 0 for cols in drawn)


def test_bytes_that_must_move() -> None:
    case = Case(10, 100, "bf16", out="fp32")
    assert case.bytes_moved("fwd") == 1000 * (2 + 4)
    assert case.bytes_moved("bwd") == 1000 * (2 + 4 + 2)
    assert Case(10, 100, "fp32", grads="dw+db").bytes_moved("bwd") == 1000 * (4 + 4)
    assert Case(10, 100, "fp32", expanded_dy=True).bytes_moved("bwd") == 1000 * 8 + 400


def test_a_problem_lies_in_memory_as_its_case_says() -> None:
    problem = Problem(Case(8, 33, "fp32", row_stride=40, offset=1), CPU)
    for rows in (problem.x, problem.dy):
        assert rows.shape == (8, 33)
        assert rows.stride() == (40, 1)
        assert rows.storage_offset() == 1
    assert Problem(Case(8, 33, expanded_dy=True), CPU).dy.stride() == (0, 1)


@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        Case(24, 40, "bf16", weight="fp32"),
        Case(24, 40, "fp16", out="fp32"),
        Case(24, 40, "fp64"),
        Case(24, 40, "fp32", row_stride=48, offset=1),
        Case(24, 40, "fp32", expanded_dy=True),
        Case(24, 40, "fp32", grads="dx"),
        Case(24, 40, "fp32", grads="dw+db"),
    ],
    ids=str,
)
def test_fastnorm_passes_in_every_kind_of_case(case: Case) -> None:
    bench = Bench(CPU, ["fastnorm", "torch"], timing.Budget(1e-3, 2, 2))
    cells = bench.run(Work("cold", case), list(PASSES))
    assert len(cells) == (1 if case.concerns_backward_alone else 3 + case.is_short)
    for cell in cells:
        assert cell["providers"]["fastnorm"]["status"] == "ok"
        assert cell["providers"]["torch"]["status"] in ("ok", "inaccurate")
        assert cell["ratio"] == cell["ceiling"]["us"] / cell["providers"]["fastnorm"]["us"]


class Spoilt(Provider):
    """PyTorch, but for one thing."""

    def __init__(self, spoil: str) -> None:
        self.name, self.spoil, self.calls = spoil, spoil, 0

    def forward(self, problem: Problem) -> Any:
        layer_norm = torch.nn.functional.layer_norm

        def call() -> torch.Tensor:
            self.calls += 1
            y = layer_norm(problem.x, problem.shape, problem.weight, problem.bias)
            if self.spoil == "one element":
                y[7, 9] += 0.01
            elif self.spoil == "one row not written":
                y[5] = float("nan")
            elif self.spoil == "raises":
                raise RuntimeError("no such kernel")
            return y

        return call


@pytest.mark.parametrize(
    ("spoil", "status"),
    [
        ("nothing", "ok"),
        ("one element", "wrong"),
        ("one row not written", "wrong"),
        ("raises", "failed"),
    ],
)
def test_a_wrong_provider_is_marked_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, spoil: str, status: str
) -> None:
    monkeypatch.setitem(PROVIDERS, "spoilt", Spoilt(spoil))
    bench = Bench(CPU, ["fastnorm", "spoilt"], timing.Budget(1e-3, 2, 2))
    (cell,) = bench.run(Work("cold", SMALL), ["fwd"])
    record = cell["providers"]["spoilt"]
    assert record["status"] == status
    assert ("us" in record) == (status == "ok")
    assert "us" in cell["providers"]["fastnorm"]
    run = {"cells": [cell], "failures": []}
    assert complaint_about(run) is None
    cell["providers"]["fastnorm"] = record
    assert (complaint_about(run) is None) == (status == "ok")


def test_what_is_left_in_memory_is_not_taken_for_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(Provider):
        """Writes its result once and hands out the same memory ever after."""

        name = "lazy"

        def forward(self, problem: Problem) -> Any:
            y = torch.nn.functional.layer_norm(
                problem.x, problem.shape, problem.weight, problem.bias
            )
            return lambda: y

    monkeypatch.setitem(PROVIDERS, "lazy", Lazy())
    (cell,) = Bench(CPU, ["lazy"], timing.Budget(1e-3, 2, 2)).run(Work("cold", SMALL), ["fwd"])
    assert cell["providers"]["lazy"]["status"] == "wrong"


def _cell(ours: float, theirs: float, ceiling: float, case: Case, mode: str = "cold") -> Any:
    def times(us: float) -> dict[str, float]:
        return {"us": us, "p20_us": us - 1, "p80_us": us + 1}

    return {
        "mode": mode,
        "pass": "fwd",
        "variant": None,
        "case": case.to_json(),
        "bytes": case.bytes_moved("fwd"),
        "ceiling": times(ceiling),
        "plain": None,
        "providers": {
            "fastnorm": {"status": "ok", **times(ours)},
            "torch": {"status": "ok", **times(theirs)},
        },
    }


@pytest.mark.parametrize(
    ("mode", "ours", "theirs", "ceiling", "met", "slower"),
    [
        ("cold", 100, 200, 97.1, True, []),
        ("cold", 100, 200, 96.9, False, []),
        ("cold", 100, 99, 97.1, True, []),  # within the spread of both
        ("cold", 100, 97, 97.1, True, ["torch"]),
        ("graph", 1.9, 3, 0.9, True, []),
        ("graph", 4.6, 9, 3, False, []),
        ("host", 10, 10, 1, True, []),
        ("host", 10.1, 10, 1, False, []),
    ],
)
def test_goals(
    mode: str, ours: float, theirs: float, ceiling: float, met: bool, slower: list[str]
) -> None:
    cell = judged(_cell(ours, theirs, ceiling, Case(65536, 1024), mode), against_goals=True)
    assert cell["met"] is met
    assert cell["slower_than"] == slower


def test_goals_depend_on_the_case() -> None:
    few_rows = goal_of("cold", Case(1024, 131072), "bwd")
    many_rows = goal_of("cold", Case(65536, 1024), "bwd")
    assert few_rows is not None
    assert many_rows is not None
    assert (few_rows.ratio, many_rows.ratio) == (0.90, 0.95)
    assert goal_of("cold", Case(8, 8), "fwd") == GOALS["fwd", "special"]
    assert memory_goal(Case(65536, 1024)) == 0.02
    assert memory_goal(Case(8192, 16384)) == 0.08
    assert memory_goal(Case(4096, 1024)) is None


def test_summary_has_mean_and_worst() -> None:
    cells = [
        judged(_cell(100, 200, ceiling, Case(65536, cols)), against_goals=True)
        for cols, ceiling in ((1024, 100), (2048, 81))
    ]
    text = summary(cells)
    assert "0.900" in text
    assert "0.810" in text
    assert "65536x2048" in text
    assert "1/2, mean MISSED" in text


def test_the_command_and_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_cli(tmp_path, "--rows", "8,16", "--cols", "24", "--dtypes", "fp32,bf16", "--memory")
    assert len(run["cells"]) == 2 * 2 * 2
    assert {"date", "commit", "dirty", "torch", "cuda", "triton", "command"} <= set(run)
    assert run["device"]["type"] == "cpu"
    for cell in run["cells"]:
        ours = cell["providers"]["fastnorm"]
        assert ours["p20_us"] <= ours["us"] <= ours["p80_us"]
        assert cell["providers"]["compile"]["status"] == "missing"
        assert cell["goal"] is None  # the goals are a GPU's
    assert "16x24 bf16" in capsys.readouterr().out


def test_the_host_s_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CALLS_PER_HOST_SAMPLE", 2)
    run = run_cli(tmp_path, "--shapes", "2x8", "--dtypes", "fp32", "--host", "--passes", "fwd,bwd")
    assert [(cell["pass"], cell["variant"]) for cell in run["cells"]] == [
        ("fwd", "function, no grad"),
        ("fwd", "function, grad"),
        ("fwd", "module, no grad"),
        ("fwd", "module, grad"),
        ("both", "function"),
        ("both", "module"),
    ]
    assert all("us" in cell["providers"]["fastnorm"] for cell in run["cells"])


def test_merging_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--shapes", "4x8,4x16,4x24", "--passes", "fwd", "--dtypes", "fp32")
    runs = [run_cli(tmp_path, *options, "--part", f"{part}/2") for part in (1, 2)]
    assert [len(run["cells"]) for run in runs] == [2, 1]
    files = []
    for index, run in enumerate([*runs, runs[0]]):
        files.append(str(tmp_path / f"{index}.json"))
        merge.write(Path(files[-1]), run)
    whole = tmp_path / "whole.json"
    assert merge.main([*files, "-o", str(whole), "--report"]) == 0
    assert sorted(cell["case"]["cols"] for cell in merge.read(whole)["cells"]) == [8, 16, 24]
    assert "4x24 fp32" in capsys.readouterr().out
    with pytest.raises(ValueError, match="differ in commit"):
        merge.merge([runs[0], runs[1] | {"commit": "another"}])


def test_tables_do_without_their_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_cli(tmp_path, "--shapes", "4x8")
    monkeypatch.setitem(sys.modules, "tabulate", None)
    assert "4x8 bf16\t" in report(run, memory=True)


@pytest.mark.parametrize(
    "options",
    [["--passes", "up"], ["--set", "huge"], ["--rows", "4"], ["--shapes", "4"], ["--part", "3/2"]],
    ids=" ".join,
)
def test_wrong_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(["--device", "cpu", *options])
    assert stopped.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_the_readme_s_tables_are_those_of_its_results() -> None:
    text = (ROOT / "README.md").read_text().partition(readme.BEGIN)[2].partition(readme.END)[0]
    sources = re.findall(r"\[all figures\]\((.*?)\)", text)
    assert sources
    if not (ROOT / "bench/results").exists():
        pytest.skip("a source distribution has no results")
    written = []
    for source in dict.fromkeys(sources):
        run = json.loads((ROOT / source).read_text())
        assert complaint_about(run) is None
        write = readme.format_bench if "cells" in run else readme.format_main_job
        written.append(write(run, ROOT / source))
    assert text.strip() == "\n\n".join(written)


def test_turns_are_taken_evenly_and_by_all() -> None:
    turns = list(timing._turns(["a", "b", "c"], 4))
    assert turns == list("abcbcacababc")


def test_the_gpu_s_timer_samples_each_call_between_its_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a GPU that is but a clock: a spin of n cycles takes n, a flush 1000."""
    clock = SimpleNamespace(now=0)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = clock.now

        def elapsed_time(self, other: Event) -> float:
            return (other.time - self.time) * 1e-3

    class Flush:
        def zero_(self) -> None:
            clock.now += 1000

    def advance(by: int) -> None:
        clock.now += by

    properties = SimpleNamespace(L2_cache_size=400 * 2**20)
    allocated = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", advance)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.inference_mode(False))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(timing.torch, "empty", lambda size, **_: allocated.append(size) or Flush())
    timer = timing.ColdTimer(CPU)
    assert allocated == [800 * 2**20]
    budget = timing.Budget(1e9, 15, 31)
    times = timer.time({"a": lambda: advance(7), "b": lambda: advance(300)}, budget)
    assert {name: time.samples for name, time in times.items()} == {"a": 31, "b": 31}
    assert times["a"].median == pytest.approx(7e-6)
    assert times["b"].p80 == pytest.approx(300e-6)


def test_the_cases_of_a_file_are_read_back() -> None:
    for name in SETS:
        for work in SETS[name]:
            assert Case.from_json(json.loads(json.dumps(work.case.to_json()))) == work.case
    assert dataclasses.replace(SMALL, weight="bf16") != SMALL


def test_what_sources_cost_to_compile(tmp_path: Path) -> None:
    """The last compilation of each object that is there, the slowest first."""
    directory = tmp_path / "libfastnorm"
    (directory / "csrc").mkdir(parents=True)
    log = ["# ninja log v5"]
    for name, start, end in [("slow", 0, 2500), ("fast", 100, 400), ("fast", 100, 350)]:
        path = directory / "csrc" / f"{name}.o"
        path.write_bytes(b"x" * 1500)
        log.append(f"{start}\t{end}\t17\t{path}\tabc")
    log.append(f"0\t9000\t17\t{directory}/csrc/deleted.o\tabc")
    (directory / ".ninja_log").write_text("\n".join(log) + "\n")
    units = build.units_of(tmp_path)
    assert [unit.name for unit in units] == ["csrc/slow", "csrc/fast"]
    assert [unit.seconds for unit in units] == [2.5, 0.25]
    assert build.table(units).splitlines()[2:] == [
        "| csrc/slow | 2.5 | 2 |",
        "| csrc/fast | 0.2 | 2 |",
        "| all 2 | 3 | 3 |",
    ]


def test_vmap_against_the_batched_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(vmap.CASES, "cpu", [vmap.Case(3, 4, 8, "fp32"), vmap.Case(3, 4, 8, "bf16")])
    file = tmp_path / "vmap.json"
    vmap.main(["--device", "cpu", "--seconds", "0.001", "--json", str(file)])
    cells = json.loads(file.read_text())["cells"]
    assert len(cells) == 2 * len(vmap.NORMS) * 3
    for cell in cells:
        assert cell["ratio"] == pytest.approx(cell["vmap"]["us"] / cell["batched"]["us"])
    assert capsys.readouterr().out.count("gradients of each sample") == 2 * len(vmap.NORMS)


def test_vmap_benchmark_notices_a_wrong_result() -> None:
    case = vmap.Case(3, 4, 8, "fp32")
    calls = vmap.pairs(case, vmap.layer_norm, CPU)
    mapped, batched = calls["inputs"]
    calls["inputs"] = (mapped, lambda: batched() + 1)
    with pytest.raises(AssertionError):
        vmap.check(case, calls)
