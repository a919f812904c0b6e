"""docs/compatibility.md: each row names tests, and each of them exists."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path.insert(0, str(ROOT))

from build_backend import MINIMUM_TORCH  # noqa: E402


def _rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "compatibility.md").read_text().splitlines()
    cells = [line.strip("|").split(" | ") for line in lines if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in cells if row[0].strip() != "what"]


def test_every_row_names_existing_tests() -> None:
    rows = _rows()
    assert len(rows) > 50
    functions: dict[str, set[str]] = {}
    for what, tests, _ in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
        assert named, f"no test is named for {what!r}"
        for file, function in named:
            if file not in functions:
                tree = ast.parse((TESTS / file).read_text())
                functions[file] = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
            assert function in functions[file], f"{file}::{function}, of {what!r}, does not exist"


def test_oldest_torch_is_the_oldest_supported() -> None:
    """What needs no GPU was tried with the oldest torch supported, or the row says why not."""
    for what, _, oldest in _rows():
        assert oldest in (MINIMUM_TORCH, "2.11, GPU") or "before" in what, what


def test_this_torch_is_supported() -> None:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert (major, minor) >= tuple(int(part) for part in MINIMUM_TORCH.split("."))
