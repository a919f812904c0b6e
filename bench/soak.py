"""A long training run, with fastnorm and with PyTorch's LayerNorm side by side.

    python -m bench.soak --seconds 570 --json bench/results/h200_soak.json
    python -m bench.soak --seconds 570 --json bench/results/h200_soak.json   # goes on from there
    python -m bench.soak --plot bench/results/h200_soak.png --json bench/results/h200_soak.json

A small GPT learns the repository's own text character by character. Two copies, from one seed, take
each step on the same batch with the same dropout; they differ in the LayerNorm alone. Their state
is kept in build/soak.pt, so that a run may be cut into several. Exit code 1 if a loss is not
finite, memory grew, or the two curves have come apart.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import fastnorm
from bench.environment import describe

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / "build" / "soak.pt"
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "fastnorm": fastnorm.LayerNorm,
    "torch": nn.LayerNorm,
}
POINTS = 2000  # of a curve, at most
APART = 0.03  # of the loss, on average over the last tenth
WARM = 50  # steps after which memory must not grow


@dataclass(frozen=True)
class Size:
    layers: int = 6
    width: int = 384
    heads: int = 6
    context: int = 256
    batch: int = 64
    dropout: float = 0.2
    warmup: int = 200
    learning_rate: float = 1e-3


TINY = Size(layers=2, width=48, heads=2, context=32, batch=8, warmup=10)


class Block(nn.Module):
    def __init__(self, size: Size, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.size = size
        self.norm1, self.norm2 = norm(size.width), norm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width),
            nn.Dropout(size.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        shape = (batch, context, 3, self.size.heads, width // self.size.heads)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, context, width))
        x = x + F.dropout(mixed, self.size.dropout, self.training)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, characters: int, size: Size, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.token = nn.Embedding(characters, size.width)
        self.position = nn.Parameter(0.02 * torch.randn(size.context, size.width))
        self.blocks = nn.Sequential(*(Block(size, norm) for _ in range(size.layers)))
        self.norm = norm(size.width)
        self.head = nn.Linear(size.width, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def read_text() -> str:
    """What the repository says: its pages and its sources."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for folder, suffixes in (("csrc", (".h", ".cpp", ".cu", ".cuh")), ("python", (".py",))):
        paths += sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in suffixes)
    return "\n".join(path.read_text() for path in paths)


class Trainee:
    """A model, its optimizer and what was seen of them."""

    def __init__(self, name: str, characters: int, size: Size, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = GPT(characters, size, NORMS[name]).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=size.learning_rate)
        self.size = size
        self.device = device

    def step(self, number: int, tokens: Tensor) -> Tensor:
        """The loss, not waited for."""
        torch.manual_seed(number)  # the same dropout in both models
        for group in self.optimizer.param_groups:
            group["lr"] = self.size.learning_rate * min(1.0, (number + 1) / self.size.warmup)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()


class Soak:
    def __init__(self, size: Size, device: torch.device) -> None:
        text = read_text()
        characters = sorted(set(text))
        index = {character: i for i, character in enumerate(characters)}
        self.text = torch.tensor([index[c] for c in text], device=device)
        self.size, self.device = size, device
        self.trainees = {name: Trainee(name, len(characters), size, device) for name in NORMS}
        self.number = 0
        self.seconds = 0.0
        self.every = 1  # steps between two points of the curves
        self.curve: list[dict[str, float]] = []
        self.not_finite = 0
        self.memory: list[dict[str, int]] = []

    def batch(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.number)
        length = self.size.context + 1
        starts = torch.randint(len(self.text) - length, (self.size.batch,), generator=generator)
        return torch.stack([self.text[start : start + length] for start in starts.tolist()])

    def run(self, seconds: float) -> None:
        begin = time.monotonic()
        spent = 0.0
        sums = dict.fromkeys(NORMS, torch.zeros((), device=self.device))
        with tqdm(total=round(seconds), unit="s", disable=None) as bar:
            while spent < seconds:
                tokens = self.batch()
                for name, trainee in self.trainees.items():
                    sums[name] = sums[name] + trainee.step(self.number, tokens)
                self.number += 1
                if self.number % self.every == 0:
                    self.note(sums)
                    sums = dict.fromkeys(NORMS, torch.zeros((), device=self.device))
                    now = time.monotonic() - begin
                    bar.update(int(now) - int(spent))
                    spent = now
        self.seconds += spent

    def note(self, sums: dict[str, Tensor]) -> None:
        point: dict[str, float] = {"step": self.number}
        for name, total in sums.items():
            point[name] = total.item() / self.every
            self.not_finite += not math.isfinite(point[name])
        self.curve.append(point)
        if self.device.type == "cuda":
            self.memory.append(
                {
                    "step": self.number,
                    "allocated": torch.cuda.memory_allocated(),
                    "reserved": torch.cuda.memory_reserved(),
                }
            )
        if len(self.curve) >= POINTS:  # half as many, each the mean of two
            pairs = list(zip(self.curve[::2], self.curve[1::2]))
            self.curve = [
                {**b, **{name: (a[name] + b[name]) / 2 for name in NORMS}} for a, b in pairs
            ]
            self.memory = self.memory[1::2]
            self.every *= 2

    def state(self) -> dict[str, Any]:
        return {
            "size": asdict(self.size),
            "models": {
                name: (t.model.state_dict(), t.optimizer.state_dict())
                for name, t in self.trainees.items()
            },
            "progress": {
                name: getattr(self, name)
                for name in ("number", "seconds", "every", "curve", "not_finite", "memory")
            },
        }

    def load(self, state: dict[str, Any]) -> None:
        for name, (model, optimizer) in state["models"].items():
            self.trainees[name].model.load_state_dict(model)
            self.trainees[name].optimizer.load_state_dict(optimizer)
        for name, value in state["progress"].items():
            setattr(self, name, value)

    def figures(self) -> dict[str, Any]:
        tail = self.curve[-max(1, len(self.curve) // 10) :]
        last = {name: sum(point[name] for point in tail) / len(tail) for name in NORMS}
        warm = [point["allocated"] for point in self.memory if point["step"] > WARM]
        return {
            "steps": self.number,
            "seconds": round(self.seconds, 1),
            "tokens": self.number * self.size.batch * self.size.context,
            "loss_of_the_last_tenth": last,
            "apart": abs(last["fastnorm"] - last["torch"]) / last["torch"],
            "not_finite": self.not_finite,
            "allocated_bytes_first": warm[0] if warm else None,
            "allocated_bytes_last": warm[-1] if warm else None,
        }


def complaints(figures: dict[str, Any]) -> list[str]:
    result = []
    if figures["not_finite"]:
        result.append(f"{figures['not_finite']} losses are not finite")
    if not figures["apart"] <= APART:
        result.append(f"the losses are {figures['apart']:.1%} apart")
    first, last = figures["allocated_bytes_first"], figures["allocated_bytes_last"]
    if first is not None and last > first:
        result.append(f"memory grew from {first} to {last} bytes")
    return result


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=[2, 1])
    steps = [point["step"] for point in report["curve"]]
    for name, style in (("torch", "-"), ("fastnorm", "--")):
        left.plot(steps, [point[name] for point in report["curve"]], style, label=name, lw=1.2)
    left.set(xlabel="step", ylabel="training loss", xscale="log")
    left.legend()
    memory = report["memory"]
    for what in ("allocated", "reserved"):
        right.plot(
            [point["step"] for point in memory],
            [point[what] / 2**20 for point in memory],
            label=f"{what}, both models",
        )
    right.set(xlabel="step", ylabel="MiB", ylim=(0, None))
    if memory:
        right.legend()
    figure.suptitle(
        f"{report['environment']['device']['name']}: {report['figures']['steps']} steps, "
        f"{report['figures']['seconds'] / 60:.1f} minutes"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=0, help="how long, both models together")
    parser.add_argument("--tiny", action="store_true", help="a model for trying this out")
    parser.add_argument("--fresh", action="store_true", help="do not go on from build/soak.pt")
    parser.add_argument("--json", type=Path, help="written after a run, read for a plot")
    parser.add_argument("--plot", type=Path, help="draw what the --json file holds")
    arguments = parser.parse_args()
    code = 0
    if arguments.seconds:
        device = torch.device(arguments.device)
        soak = Soak(TINY if arguments.tiny else Size(), device)
        if STATE.exists() and not arguments.fresh:
            state = torch.load(STATE, map_location=device)
            if state["size"] != asdict(soak.size):
                parser.error("build/soak.pt is of a model of another size; see --fresh")
            soak.load(state)
            del state  # as large as both models
        soak.run(arguments.seconds)
        STATE.parent.mkdir(exist_ok=True)
        torch.save(soak.state(), STATE)
        figures = soak.figures()
        problems = complaints(figures)
        if arguments.json:
            report = {
                "environment": describe(device, []),
                "size": asdict(soak.size),
                "figures": figures,
                "complaints": problems,
                "curve": soak.curve,
                "memory": soak.memory,
            }
            arguments.json.write_text(json.dumps(report) + "\n")
        print(json.dumps(figures, indent=1))
        for problem in problems:
            print(f"PROBLEM: {problem}", file=sys.stderr)
        code = 1 if problems else 0
    if arguments.plot:
        plot(json.loads(arguments.json.read_text()), arguments.plot)
    return code


if __name__ == "__main__":
    sys.exit(main())
