"""Plots GB/s over the width of a row, for each provider and the ceiling, from a results file.

    python -m bench.plot bench/results/FILE.json

Writes FILE_forward.png and FILE_backward.png beside it, of the cases of 128 MB and more whose
weights have the input's dtype.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import merge
from bench.cases import DTYPES, PASS_NAMES, Case, Pass
from bench.measure import Cell

# Colours that people with any colour vision tell apart, after Okabe and Ito.
COLOURS = {
    "fastnorm": "#D55E00",
    "torch": "#0072B2",
    "compile": "#009E73",
    "triton": "#CC79A7",
    "liger": "#E69F00",
    "apex": "#56B4E9",
    "apex-fast": "#8C6D31",
    "quack": "#7F7F7F",
}
MARKERS = dict(zip(COLOURS, "osD^vP*X"))
LABELS = {"torch": "PyTorch", "compile": "torch.compile", "triton": "Triton"}
CEILINGS = {"fwd": "ceiling: copy", "bwd": "ceiling: add"}
MIN_WIDTHS = 5  # of a panel
NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def select(cells: Sequence[Cell], which: Pass, dtype: str) -> list[tuple[int, Cell]]:
    """The cells to plot by width; of several with one width that with the most rows."""
    chosen: dict[int, Cell] = {}
    for cell in cells:
        case = Case.from_json(cell["case"])
        if cell["mode"] != "cold" or cell["pass"] != which or case.dtype != dtype:
            continue
        if not cell["kind"].startswith("large") or case != Case(case.rows, case.cols, dtype):
            continue
        other = chosen.get(case.cols)
        if other is None or other["case"]["rows"] < case.rows:
            chosen[case.cols] = cell
    return sorted(chosen.items(), key=lambda item: item[0])


def plot(run: dict[str, Any], which: Pass, path: Path) -> bool:
    """Returns whether there was anything to plot."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    panels = {dtype: select(run["cells"], which, dtype) for dtype in DTYPES}
    panels = {dtype: cells for dtype, cells in panels.items() if len(cells) >= MIN_WIDTHS}
    if not panels:
        return False
    widths = [max(len(cells), 6) for cells in panels.values()]
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(2.5 + 0.42 * sum(widths), 4.6),
        sharey=True,
        squeeze=False,
        width_ratios=widths,
        layout="constrained",
    )
    for axis, (dtype, cells) in zip(axes[0], panels.items()):
        cols = [width for width, _ in cells]
        speeds = [cell["bytes"] / cell["ceiling"]["us"] * 1e-3 for _, cell in cells]
        axis.fill_between(cols, speeds, color="0.93", zorder=0)
        axis.plot(cols, speeds, color="0.25", linestyle="--", linewidth=1.2, label=CEILINGS[which])
        for name, colour in COLOURS.items():
            _plot_provider(axis, cells, name, colour)
        axis.set_xscale("log", base=2)
        # Odd widths stand beside the round ones; only the latter are written out.
        ticks = [width for width in cols if width & (width - 1) == 0]
        axis.set_xticks(ticks)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(_short))
        axis.tick_params(axis="x", rotation=60)
        axis.set_title(NAMES.get(dtype, dtype), fontsize=10)
        axis.set_xlabel("row width N")
        axis.grid(color="0.88", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("GB/s of bytes that must move")
    axes[0][0].set_ylim(bottom=0)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    device = run["device"]["name"]
    figure.suptitle(
        f"LayerNorm {PASS_NAMES[which]}, {device}, inputs of 128 MB and more "
        "(hollow: N not a multiple of 8)",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def _plot_provider(axis: Any, cells: Sequence[tuple[int, Cell]], name: str, colour: str) -> None:
    points = [
        (cols, cell["bytes"] / cell["providers"][name]["us"] * 1e-3)
        for cols, cell in cells
        if "us" in cell["providers"].get(name, {})
    ]
    if not points:
        return
    own = name == "fastnorm"
    style = {"color": colour, "marker": MARKERS[name], "markersize": 5.5 if own else 4.5}
    style["zorder"] = 4 if own else 3
    round_ones = [point for point in points if point[0] % 8 == 0]
    others = [point for point in points if point[0] % 8]
    label = LABELS.get(name, name)
    axis.plot(*zip(*(round_ones or others)), linewidth=2 if own else 1.2, label=label, **style)
    if others:
        axis.plot(*zip(*others), linestyle="none", markerfacecolor="white", **style)


def _short(width: float, _: object) -> str:
    return f"{width / 1024:.0f}k" if width >= 1024 else f"{width:.0f}"


def path_of(results_file: Path, which: Pass) -> Path:
    return results_file.with_name(f"{results_file.stem}_{PASS_NAMES[which]}.png")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.plot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    args = parser.parse_args(argv)
    plotted = False
    passes: tuple[Pass, ...] = ("fwd", "bwd")
    for file in args.files:
        run = merge.read(file)
        for which in passes:
            path = path_of(file, which)
            if plot(run, which, path):
                print(path)
                plotted = True
    if not plotted:
        print("There is no width to plot: run the set `large`.", file=sys.stderr)
    return 0 if plotted else 1


if __name__ == "__main__":
    sys.exit(main())
