"""The tables that people read, from the cells of a results file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.cases import PASS_NAMES, PASSES, Case, Mode, Pass
from bench.goals import goal_of, memory_goal
from bench.measure import Cell, geometric_mean

SHORT_STATUS = {"unsupported": "-", "missing": "none", "failed": "failed", "wrong": "WRONG"}


def table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """The first `words` columns and the last hold words, the others figures.

    By tabulate, or tab-separated where that is not installed.
    """
    try:
        from tabulate import tabulate
    except ImportError:
        return "\n".join("\t".join(line) for line in (header, *rows))
    align = ["left"] * words + ["right"] * (len(header) - words - 1) + ["left"]
    return tabulate(rows, header, colalign=align, disable_numparse=True)


def report(run: dict[str, Any], *, memory: bool = False) -> str:
    """Every table there is something for, the summary last."""
    parts = [heading(run)]
    for mode in ("cold", "graph", "host"):
        for which in PASSES:
            cells = [c for c in run["cells"] if c["mode"] == mode and c["pass"] == which]
            if cells:
                parts.append(_title(mode, which) + "\n" + _cells_table(cells))
    if memory:
        parts.append(_memory_table(run["cells"]))
    parts.append(_reasons(run["cells"]))
    parts.append(summary(run["cells"]))
    return "\n\n".join(part for part in parts if part)


def heading(run: dict[str, Any]) -> str:
    device = run["device"]
    commit = (run["commit"] or "no commit")[:12] + (" with changes" if run["dirty"] else "")
    known = {name: version for name, version in run["providers"].items() if version}
    versions = ", ".join(f"{name} {version}" for name, version in known.items())
    details = (
        f"driver {device['driver']}"
        if device["type"] == "cuda"
        else (f"{device['threads']} threads, {device['instruction_set']}")
    )
    return f"{device['name']}, {details}; {versions}; {commit}, {run['date'][:10]}"


def _title(mode: str, which: Pass) -> str:
    return {
        "cold": f"{PASS_NAMES[which]}: speed in parts of the ceiling's",
        "graph": f"{PASS_NAMES[which]} in a CUDA graph, warm cache: microseconds per call",
        "host": f"{PASS_NAMES[which]}: microseconds that the host takes to issue a call",
    }[mode]


def _cells_table(cells: Sequence[Cell]) -> str:
    names = list(dict.fromkeys(name for cell in cells for name in cell["providers"]))
    mode = cells[0]["mode"]
    has_plain = any(cell["plain"] for cell in cells)
    if mode == "cold":
        header = ["rows x cols", "ceiling GB/s", "ceiling us", *(["plain"] if has_plain else [])]
        header += [*names, "spread", "goal", ""]
    else:
        header = ["rows x cols", *(["ceiling"] if mode == "graph" else []), *names, "spread", ""]
    rows = []
    for cell in cells:
        case = str(Case.from_json(cell["case"]))
        line = [case if cell["variant"] is None else f"{case}, {cell['variant']}"]
        ceiling = cell["ceiling"]["us"] if cell["ceiling"] else None
        if mode == "cold":
            line += [f"{cell['bytes'] / ceiling * 1e-3:.0f}", f"{ceiling:.1f}"]
            if has_plain:
                line.append(f"{ceiling / cell['plain']['us']:.3f}" if cell["plain"] else "")
        elif mode == "graph":
            line.append(f"{ceiling:.2f}")
        for name in names:
            record = cell["providers"].get(name, {"status": "missing"})
            if "us" not in record:
                line.append(SHORT_STATUS.get(record["status"], record["status"]))
            else:
                figure = ceiling / record["us"] if mode == "cold" else record["us"]
                mark = "~" if record["status"] == "inaccurate" else ""
                line.append(f"{mark}{figure:.3f}" if mode == "cold" else f"{mark}{figure:.2f}")
        line.append(_spread(cell["providers"].get("fastnorm", {})))
        if mode == "cold":
            line.append((cell["goal"] or "").split(",")[0])
        line.append(_mark(cell))
        rows.append(line)
    return table(header, rows)


def _spread(record: dict[str, Any]) -> str:
    """Half the way from the 20th to the 80th percentile, in parts of the median."""
    if "us" not in record:
        return ""
    return f"±{(record['p80_us'] - record['p20_us']) / 2 / record['us']:.1%}"


def _mark(cell: Cell) -> str:
    words = [] if cell["met"] is None else ["met" if cell["met"] else "MISSED"]
    if cell["slower_than"]:
        words.append(f"slower than {', '.join(cell['slower_than'])}")
    return "; ".join(words)


def _memory_table(cells: Sequence[Cell]) -> str:
    """What a call takes beyond its results, in parts of x."""
    cold = [cell for cell in cells if cell["mode"] == "cold"]
    known = [c for c in cold if any("extra_bytes" in r for r in c["providers"].values())]
    if not known:
        return "Memory is counted on GPUs alone."
    names = list(dict.fromkeys(name for cell in known for name in cell["providers"]))
    rows = []
    for cell in known:
        case = Case.from_json(cell["case"])
        line = [f"{case}", PASS_NAMES[cell["pass"]]]
        for name in names:
            extra = cell["providers"].get(name, {}).get("extra_bytes")
            line.append("" if extra is None else f"{extra / case.x_bytes:.2%}")
        ours = cell["providers"].get("fastnorm", {}).get("extra_bytes")
        goal = memory_goal(case) if cell["pass"] == "bwd" else None
        line += ["", ""]
        if goal is not None and ours is not None:
            line[-2:] = f"<= {goal:.0%}", "met" if ours <= goal * case.x_bytes else "MISSED"
        rows.append(line)
    header = ["rows x cols", "", *names, "goal", ""]
    return "peak memory beyond the results, in parts of x\n" + table(header, rows, words=2)


def _reasons(cells: Sequence[Cell]) -> str:
    """Why there is no time, once for each provider and reason."""
    seen: dict[tuple[str, str, str], int] = {}
    for cell in cells:
        for name, record in cell["providers"].items():
            if record["status"] != "ok":
                key = name, record["status"], record.get("reason", "")
                seen[key] = seen.get(key, 0) + 1
    return "\n".join(
        f"{name}: {status} ({reason}), in {count} cells"
        for (name, status, reason), count in seen.items()
    )


def summary(cells: Sequence[Cell]) -> str:
    """Per pass and kind of case: geometric mean, the worst, and how many goals are met."""
    rows = []
    modes: tuple[Mode, ...] = ("cold", "graph", "host")
    for mode in modes:
        for which in PASSES:
            of_pass = [c for c in cells if c["mode"] == mode and c["pass"] == which]
            kinds: dict[str, list[Cell]] = {}
            for cell in of_pass:
                goal = goal_of(mode, Case.from_json(cell["case"]), which)
                kinds.setdefault(goal.kind if goal else cell["kind"], []).append(cell)
            rows += [_summary_line(which, kind, of_kind) for kind, of_kind in kinds.items()]
    header = ["pass", "cases", "number", "mean", "worst", "goal", "met", "peers faster in"]
    header.append("worst case")
    return "fastnorm: ratios to the ceiling\n" + table(header, rows, words=2)


def _summary_line(which: Pass, kind: str, cells: Sequence[Cell]) -> list[str]:
    rated = [cell for cell in cells if cell["ratio"] is not None]
    mean = geometric_mean([cell["ratio"] for cell in rated]) if rated else None
    worst = min(rated, key=lambda cell: cell["ratio"]) if rated else None
    judged = [cell for cell in cells if cell["met"] is not None]
    met = f"{sum(cell['met'] for cell in judged)}/{len(judged)}" if judged else ""
    goal = goal_of(cells[0]["mode"], Case.from_json(cells[0]["case"]), which)
    if judged and goal is not None and goal.mean is not None and mean is not None:
        met += ", mean met" if mean >= goal.mean else ", mean MISSED"
    return [
        PASS_NAMES[which],
        kind,
        str(len(cells)),
        "" if mean is None else f"{mean:.3f}",
        "" if worst is None else f"{worst['ratio']:.3f}",
        str(goal) if judged else "",
        met,
        str(sum(bool(cell["slower_than"]) for cell in cells)),
        "" if worst is None else str(Case.from_json(worst["case"])),
    ]
