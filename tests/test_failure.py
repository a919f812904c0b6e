"""Failures on a GPU: out of memory, launches that fail, illegal accesses made elsewhere."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from reference import ops, random

import fastnorm

pytestmark = pytest.mark.cuda

ROWS, COLS = 4096, 1024
FAILURES = 1000


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Leaves PyTorch 64 MB beyond what it holds, and nothing free of that."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    fillers = []  # of memory between what earlier tests have left
    for size in (1 << power for power in range(30, 19, -1)):
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            while True:
                fillers.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    limit = torch.cuda.memory_reserved() + (64 << 20)
    torch.cuda.set_per_process_memory_fraction(limit / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    del fillers
    torch.cuda.empty_cache()


def _statistics() -> dict[str, int]:
    torch.cuda.synchronize()
    now = torch.cuda.memory_stats()
    return {
        name: now[f"{name}.all.current"] for name in ("active_bytes", "active", "allocated_bytes")
    }


def test_out_of_memory_in_the_middle_of_a_backward(little_memory: None) -> None:
    """16 MB each for x, y and dy fit; dx does not. A thousand times, and nothing is lost."""
    norm = fastnorm.LayerNorm(COLS, device="cuda")
    x = random((ROWS, COLS), torch.float32, "cuda").requires_grad_()
    small = random((64, COLS), torch.float32, "cuda")
    expected = norm(small).detach()
    grad_out = torch.ones_like(x)
    before = None
    for failure in range(FAILURES):
        y = norm(x)
        filler = torch.empty(10 << 20, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.cuda.OutOfMemoryError):
            y.backward(grad_out)
        del y, filler
        assert x.grad is None
        if failure == 10:
            gc.collect()
            before = _statistics()
    gc.collect()
    assert _statistics() == before
    assert norm(small).equal(expected)
    torch.cuda.set_per_process_memory_fraction(1.0)
    norm(x).backward(grad_out)
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_out_of_memory_in_a_forward(little_memory: None) -> None:
    x = torch.ones(10 << 20, device="cuda").view(-1, COLS)  # 40 MB
    before = _statistics()
    for _ in range(FAILURES):
        with pytest.raises(torch.cuda.OutOfMemoryError):
            ops.layer_norm(x, [COLS])
    assert _statistics() == before
    assert ops.layer_norm(x[:64], [COLS]).eq(0).all()


def _run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.large
def test_a_launch_that_fails_is_reported_at_the_call() -> None:
    """More rows than a grid has blocks, in a kernel that takes a block for each."""
    run = _run(
        "import torch, fastnorm\n"
        "from fastnorm import _C\n"
        "one = torch.ones(1, 4096, device='cuda', dtype=torch.bfloat16)\n"
        "y = torch.ops.fastnorm.layer_norm(one, [4096])\n"
        "x = torch.ones(1, 1, device='cuda', dtype=torch.bfloat16).expand((1 << 31) + 5, 1)\n"
        "_C.force_plan(kernel='split')\n"
        "try:\n"
        "    torch.ops.fastnorm.layer_norm(x, [1])\n"
        "except RuntimeError as error:\n"
        "    print('raised', type(error).__name__, str(error).splitlines()[0])\n"
        "_C.force_plan()\n"
        "again = torch.ops.fastnorm.layer_norm(one, [4096])\n"
        "torch.cuda.synchronize()\n"
        "print('goes on', again.equal(y))\n"
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].startswith("raised"), run.stdout
    assert "memory" not in lines[0], "the call ran out of memory before it could launch"
    assert lines[1] == "goes on True"


ILLEGAL = (
    "import torch, fastnorm\n"
    "x = torch.ones(64, 1024, device='cuda')\n"
    "fastnorm.functional.layer_norm(x, (1024,))\n"
    "torch.cuda.synchronize()\n"
    "kernel = torch.cuda._compile_kernel(\n"
    "    'extern \"C\" __global__ void elsewhere(float* p) { p[1ull << 42] = 1; }', 'elsewhere')\n"
    "kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[x])\n"
)


def test_an_illegal_access_made_elsewhere_is_not_hidden() -> None:
    """The context is lost: the next call says so instead of returning a result."""
    run = _run(
        ILLEGAL + "import time\n"
        "time.sleep(1)\n"
        "try:\n"
        "    y = fastnorm.functional.layer_norm(x, (1024,))\n"
        "    torch.cuda.synchronize()\n"
        "except RuntimeError as error:\n"
        "    print('raised', error)\n"
        "else:\n"
        "    print('nothing', y.sum().item())\n"
    )
    assert "raised" in run.stdout, run.stdout + run.stderr
    assert "illegal" in run.stdout, run.stdout


def test_an_illegal_access_made_elsewhere_is_blamed_on_its_maker() -> None:
    """With blocking launches the error comes from the launch itself, before any of fastnorm's."""
    run = _run(
        ILLEGAL.replace("kernel(grid", "try:\n    kernel(grid") + "    torch.cuda.synchronize()\n"
        "except RuntimeError as error:\n"
        "    print('elsewhere raised', error)\n"
        "else:\n"
        "    print('fastnorm would be blamed')\n",
        CUDA_LAUNCH_BLOCKING="1",
    )
    assert run.stdout.startswith("elsewhere raised"), run.stdout + run.stderr
