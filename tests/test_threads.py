"""Threads and processes: many callers at once, DataLoader workers, an exit in the middle of work.

The same for a minute each: `python -m pytest tests/test_threads.py -m slow`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from reference import random
from torch import Tensor

import fastnorm
from fastnorm import _C

THREADS = 16
SHAPES = ((7, 5), (33, 768), (130, 100), (3, 40_000), (515, 24))


def _step(shape: tuple[int, int], dtype: torch.dtype, device: str, seed: int) -> list[Tensor]:
    x = random(shape, dtype, device, seed=seed).requires_grad_()
    weight = random(shape[1:], dtype, device, seed=seed + 1).requires_grad_()
    bias = random(shape[1:], dtype, device, seed=seed + 2).requires_grad_()
    y = fastnorm.functional.layer_norm(x, shape[1:], weight, bias)
    y.backward(random(shape, dtype, device, seed=seed + 3))
    return [y.detach(), *(t.grad for t in (x, weight, bias) if t.grad is not None)]


def _work(device: str, seconds: float) -> int:
    """How many forward and backward steps all threads did; each is right to the bit."""
    problems = [
        (shape, dtype, 10 * i)
        for i, (shape, dtype) in enumerate(
            (shape, dtype) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)
        )
    ]
    expected = [_step(shape, dtype, device, seed) for shape, dtype, seed in problems]
    wrong: list[BaseException] = []
    steps = [0] * THREADS
    end = time.monotonic() + seconds

    def work(thread: int) -> None:
        try:
            stream = torch.cuda.Stream() if device == "cuda" else None
            with torch.cuda.stream(stream):
                while time.monotonic() < end and not wrong:
                    i = (thread + steps[thread]) % len(problems)
                    shape, dtype, seed = problems[i]
                    results = _step(shape, dtype, device, seed)
                    for ours, other in zip(results, expected[i]):
                        assert ours.equal(other)
                    steps[thread] += 1
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    assert min(steps) > 0
    return sum(steps)


def test_many_threads(device: str) -> None:
    _work(device, 3)


@pytest.mark.slow
def test_many_threads_for_a_minute(device: str) -> None:
    print(f"{_work(device, 60)} steps by {THREADS} threads on {device}")


class _Normalized(torch.utils.data.Dataset):
    """Samples that need a forward and a backward to make."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        y, dx, *_ = _step((65, 768), torch.float32, "cpu", index)
        return torch.stack([y, dx])


def check_workers(start: str) -> None:
    dataset = _Normalized()
    expected = torch.stack([dataset[i] for i in range(len(dataset))])
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=4, num_workers=2, multiprocessing_context=start, timeout=120
    )
    assert torch.cat(list(loader)).equal(expected)


def _run(program: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_data_loader_workers(start: str) -> None:
    """Also where the parent has used its threads before it forked. In a process of its own, because
    autograd refuses to run in a fork of one where it had started threads, as other tests do.
    """
    run = _run(
        "import sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import test_threads\n"
        "test_threads.check_workers(sys.argv[2])\n",
        str(Path(__file__).parent),
        start,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture
def other_fastnorm(tmp_path: Path) -> Path:
    """Another copy of the installed package, in a folder of its own."""
    package = Path(fastnorm.__file__).parent
    copy = tmp_path / "fastnorm"
    copy.mkdir()
    for file in (*package.glob("*.py"), Path(_C.__file__)):
        (copy / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_import_beside_another_fastnorm(other_fastnorm: Path) -> None:
    """A second copy of the package, under the name of the first, gets the first one's library."""
    run = _run(
        "import sys, torch, fastnorm\n"
        "first = fastnorm.__file__\n"
        "for name in [n for n in sys.modules if n.partition('.')[0] == 'fastnorm']:\n"
        "    del sys.modules[name]\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import fastnorm\n"
        "print(fastnorm.__file__ != first)\n"
        "print(fastnorm.LayerNorm(3)(torch.ones(2, 3)).sum().item())\n",
        str(other_fastnorm),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.split() == ["True", "0.0"]


def test_exit_during_work(device: str) -> None:
    """The main thread is at its end while others are in kernels and in backward."""
    run = _run(
        "import sys, threading, time, torch, fastnorm\n"
        "ready, stop = threading.Barrier(5), threading.Event()\n"
        "def work():\n"
        "    norm = fastnorm.LayerNorm(1000, device=sys.argv[1])\n"
        "    x = torch.randn(2000, 1000, device=sys.argv[1], requires_grad=True)\n"
        "    norm(x).sum().backward()\n"
        "    ready.wait()\n"
        "    while not stop.is_set():\n"
        "        norm(x).sum().backward()\n"
        "for _ in range(4):\n"
        "    threading.Thread(target=work).start()\n"
        "ready.wait()\n"
        "threading.Timer(0.3, stop.set).start()\n"
        "print('the end', flush=True)\n",
        device,
    )
    assert run.returncode == 0, (run.returncode, run.stdout, run.stderr)
    assert run.stdout == "the end\n"
    assert "Traceback" not in run.stderr, run.stderr
