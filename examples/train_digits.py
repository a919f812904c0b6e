"""Train a small pre-norm transformer on handwritten digits with fastnorm.LayerNorm.

    python examples/train_digits.py
    python examples/train_digits.py --compare    # with torch.nn.LayerNorm trained beside it

The data are the 1797 images of 8 x 8 pixels that scikit-learn brings along. Exits with 1 when the
test accuracy is below 95 %, or when --compare finds the two trainings to disagree.
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

import fastnorm

REQUIRED_ACCURACY = 0.95

# Two trainings that differ in rounding alone start out equal and drift apart exponentially, as any
# two runs of a chaotic system do. So the losses are held against each other step by step only while
# rounding is all there is to see, and the outcomes at the end by what they are for.
COMPARED_STEPS = 50
LOSS_TOLERANCE = 1e-5
ACCURACY_TOLERANCE = 0.01


class Block(nn.Module):
    """Self-attention and a two-layer perceptron, each behind a norm and around a skip."""

    def __init__(self, width: int, heads: int, norm: type[nn.LayerNorm]) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = norm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = norm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(tokens)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, width / heads)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        tokens = tokens + self.projection(attended)
        return tokens + self.mlp(self.mlp_norm(tokens))


class DigitTransformer(nn.Module):
    """The eight rows of pixels as tokens, a few blocks, a final norm, the mean, a linear layer."""

    def __init__(
        self, norm: type[nn.LayerNorm], width: int = 64, depth: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, width)
        self.position = nn.Parameter(0.5 * torch.randn(8, width))
        self.blocks = nn.Sequential(*(Block(width, heads, norm) for _ in range(depth)))
        self.final_norm = norm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.blocks(self.embedding(images) + self.position)
        return self.head(self.final_norm(tokens).mean(dim=1))


class Trainer:
    """A model with its optimizer, schedule and the loss of every step."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1
        )
        self.losses: list[float] = []

    def step(self, images: Tensor, labels: Tensor) -> float:
        loss = F.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())
        return self.losses[-1]

    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        self.model.eval()
        with torch.no_grad():
            correct = self.model(images).argmax(dim=1) == labels
        self.model.train()
        return correct.double().mean().item()


def load_data(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels; the split is always the same."""
    digits = load_digits()
    parts = train_test_split(
        digits.images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    train_images, test_images, train_labels, test_labels = parts

    def images(values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float32, device=device) / 8 - 1

    def labels(values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=device)

    return images(train_images), labels(train_labels), images(test_images), labels(test_labels)


def train(
    trainers: list[Trainer], images: Tensor, labels: Tensor, epochs: int, batch_size: int
) -> None:
    """Give every trainer the same batches in the same order."""
    steps_per_epoch = len(images) // batch_size
    with tqdm(total=epochs * steps_per_epoch, desc="training", unit="step") as bar:
        for _ in range(epochs):
            order = torch.randperm(len(images)).to(images.device)
            for batch in order[: steps_per_epoch * batch_size].split(batch_size):
                losses = [trainer.step(images[batch], labels[batch]) for trainer in trainers]
                bar.set_postfix(loss=f"{losses[0]:.4f}", refresh=False)
                bar.update()


def print_curves(ours: list[float], theirs: list[float], lines: int = 12) -> None:
    """Some steps of both curves, denser at the start."""
    last = len(ours) - 1
    shown = sorted({round(last ** (i / (lines - 1))) - (i == 0) for i in range(lines)})
    print(f"\n{'step':>6}  {'fastnorm':>12}  {'torch':>12}  {'relative difference':>20}")
    for step in shown:
        difference = relative_difference(ours[step], theirs[step])
        print(f"{step:6d}  {ours[step]:12.8f}  {theirs[step]:12.8f}  {difference:20.2e}")


def relative_difference(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / abs(theirs)


def agree(trainers: list[Trainer], accuracies: list[float]) -> bool:
    """Print both loss curves and how far they are apart; say whether that is rounding."""
    ours, theirs = (trainer.losses for trainer in trainers)
    differences = [relative_difference(a, b) for a, b in zip(ours, theirs, strict=True)]
    early = max(differences[:COMPARED_STEPS])
    print_curves(ours, theirs)
    print(f"\nLargest relative difference of the losses: {early:.2e} in the first", end=" ")
    print(f"{COMPARED_STEPS} steps, {max(differences):.2e} in all {len(differences)}")
    print(f"Test accuracy: fastnorm {accuracies[0]:.2%}, torch {accuracies[1]:.2%}")
    if not early <= LOSS_TOLERANCE:
        print(f"FAILED. The first {COMPARED_STEPS} losses differ by more than {LOSS_TOLERANCE}.")
        return False
    if not abs(accuracies[0] - accuracies[1]) <= ACCURACY_TOLERANCE:
        print(f"FAILED. The test accuracies differ by more than {ACCURACY_TOLERANCE:.0%}.")
        return False
    print("The two trainings agree.")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compare", action="store_true", help="train with torch.nn.LayerNorm beside it"
    )
    args = parser.parse_args()
    device = torch.device(args.device)

    train_images, train_labels, test_images, test_labels = load_data(device)
    steps = args.epochs * (len(train_images) // args.batch_size)
    torch.manual_seed(args.seed)
    models: list[nn.Module] = [DigitTransformer(fastnorm.LayerNorm).to(device)]
    if args.compare:
        reference = DigitTransformer(nn.LayerNorm).to(device)
        reference.load_state_dict(copy.deepcopy(models[0].state_dict()))
        models.append(reference)
    torch.manual_seed(args.seed)  # so that the batches are the same with and without --compare
    trainers = [Trainer(model, steps) for model in models]
    train(trainers, train_images, train_labels, args.epochs, args.batch_size)
    accuracies = [trainer.accuracy(test_images, test_labels) for trainer in trainers]

    print(f"Test accuracy after {args.epochs} epochs: {accuracies[0]:.2%}")
    if args.compare and not agree(trainers, accuracies):
        return 1
    if accuracies[0] < REQUIRED_ACCURACY:
        print(f"FAILED. The test accuracy is below {REQUIRED_ACCURACY:.0%}.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
