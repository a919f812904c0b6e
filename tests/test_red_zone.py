"""Not one byte is written outside the results, and every byte of them is.

The allocator serves a call from memory that was filled with poison before. Afterwards all of that
memory is looked at through its address: only what was allocated in the meantime, byte by byte, may
have changed. Two runs with different poison have the same bits: no byte of a result is left
unwritten, and none depends on memory beyond the arguments, which lie in poison, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reference import DTYPES, name_of, ops, random
from torch import Tensor

from fastnorm import _C

pytestmark = pytest.mark.cuda

POISONS = (0xFF, 0x7B)  # NaN in every dtype; large numbers
# Small results come from blocks of 2 MB that the allocator divides, larger ones from 20 MB.
POOL = (*[1 << 19] * 16, 12 << 20, 12 << 20)

Block = tuple[int, int]  # address and bytes


class Memory:
    """Device memory at an address, for torch.as_tensor."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def _bytes_at(block: Block) -> Tensor:
    return torch.as_tensor(Memory(*block), device="cuda")


def _segments(pool: torch.cuda.MemPool) -> list[Block]:
    return [(segment["address"], segment["total_size"]) for segment in pool.snapshot()]


def _allocated(since: int) -> list[Block]:
    """What was asked of the allocator after its first `since` events."""
    return [(e["addr"], e["size"]) for e in _events()[since:] if e["action"] == "alloc"]


def _events() -> list[dict[str, Any]]:
    return torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]


@pytest.fixture
def history() -> Iterator[None]:
    if torch.cuda.device_count() > 1:
        pytest.skip("runs in test_with_one_gpu: with several, PyTorch's memory history may crash")
    torch.cuda.memory._record_memory_history(
        "all", context=None, stacks="python", clear_history=True
    )
    yield
    torch.cuda.memory._record_memory_history(None)
    _C.force_plan()


def _in_poison(t: Tensor, poison: int, aligned: bool) -> Tensor:
    """The same numbers with 4 KB of poison before, behind and, if not aligned, between rows."""
    rows, cols = t.shape
    margin, gap, offset = 4096 // t.element_size(), 0 if aligned else 3, 0 if aligned else 1
    size = (rows * (cols + gap) + 2 * margin + offset) * t.element_size()
    buffer = torch.full((size,), poison, dtype=torch.uint8, device="cuda").view(t.dtype)
    view = buffer.as_strided((rows, cols), (cols + gap, 1), margin + offset)
    return view.copy_(t)


def _run(arguments: list[Tensor], poison: int, aligned: bool) -> tuple[list[Tensor], int]:
    """The results of a forward and a backward, and how many bytes were looked at."""
    x, grad_out = (_in_poison(t, poison, aligned) for t in arguments[:2])
    weight, bias = (_in_poison(t[None], poison, aligned)[0] for t in arguments[2:])
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        blocks = [torch.full((size,), poison, dtype=torch.uint8, device="cuda") for size in POOL]
        del blocks
    torch.cuda.synchronize()
    segments = _segments(pool)
    before = len(_events())
    with torch.cuda.use_mem_pool(pool):
        outputs = ops.layer_norm_forward(x, x.shape[1:], weight, bias, 1e-5, None)
        gradients = ops.layer_norm_backward(
            grad_out, x, x.shape[1:], *outputs[1:], weight, bias, 1e-5, [True, True, True]
        )
    torch.cuda.synchronize()
    allocated = _allocated(before)
    assert _segments(pool) == segments, "POOL is too small: the allocator asked for more memory"
    results = [*outputs, *gradients]
    taken = dict(allocated)
    for t in results:
        assert taken[t.data_ptr()] == t.untyped_storage().nbytes()
    seen = 0
    for address, size in segments:
        untouched = torch.ones(size, dtype=torch.bool, device="cuda")
        for begin, length in allocated:
            if address <= begin < address + size:
                untouched[begin - address : begin - address + length] = False
        changed = (_bytes_at((address, size)) != poison) & untouched
        assert not changed.any(), f"{int(changed.sum())} bytes outside were written"
        seen += int(untouched.sum())
    kept = [t.cpu() for t in results]
    del outputs, gradients, results
    return kept, seen


REQUESTS: list[dict[str, Any]] = [
    {},
    {"kernel": "rows", "weight_grads": "fused"},
    {"kernel": "cluster", "weight_grads": "fused"},
    {"kernel": "cluster", "weight_grads": "columns"},
    {"kernel": "few_rows"},
    {"kernel": "few_rows", "cluster_size": 2},
    {"kernel": "few_elements", "cluster_size": 2},
    {"kernel": "ring", "weight_grads": "fused"},
    {"kernel": "ring", "weight_grads": "fused", "cluster_size": 2},
    {"kernel": "ring", "weight_grads": "columns"},
    {"kernel": "elements", "cluster_size": 2},
    {"kernel": "elements", "weight_grads": "columns"},
    {"kernel": "split", "weight_grads": "columns"},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: name_of(list(request.values())))
def test_only_results_are_written_and_all_of_them(
    history: None, request_: dict[str, Any], dtype: torch.dtype
) -> None:
    for rows, cols in ((3, 1), (5, 7), (131, 33), (37, 257), (1031, 64), (19, 1027), (3, 8200)):
        arguments = [
            random((rows, cols), dtype, "cpu", shift=0.3),
            random((rows, cols), dtype, "cpu", seed=3),
            random((cols,), dtype, "cpu", seed=1),
            random((cols,), dtype, "cpu", seed=2),
        ]
        for aligned in (True, False):
            _C.force_plan(**request_)
            runs = [_run(arguments, poison, aligned) for poison in POISONS]
            _C.force_plan()
            (first, seen), (second, _) = runs
            assert seen > 1 << 20
            for what, ours, other in zip(("y", "mean", "rstd", "dx", "dw", "db"), first, second):
                same = ours.view(torch.uint8) == other.view(torch.uint8)
                assert same.all(), f"{int((~same).sum())} bytes of {what} depend on the poison"


def test_a_write_outside_is_seen(history: None) -> None:
    """The check itself: a byte changed behind a result's last is found."""
    poisoned = 1 << 19  # of the 2 MB that the allocator takes for small tensors
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        block = torch.full((poisoned,), 0xFF, dtype=torch.uint8, device="cuda")
        del block
    torch.cuda.synchronize()
    before = len(_events())
    with torch.cuda.use_mem_pool(pool):
        result = torch.zeros(1001, dtype=torch.uint8, device="cuda")
    assert _allocated(before) == [(result.data_ptr(), 1001)]
    ((address, _),) = _segments(pool)
    _bytes_at((result.data_ptr() + 1001, 1)).fill_(0)
    found = (_bytes_at((address, poisoned)) != 0xFF).nonzero().flatten() + address
    assert found.tolist() == [result.data_ptr() + i for i in range(1002)]


def test_with_one_gpu() -> None:
    """All of these tests in a process that sees the first of several GPUs alone."""
    if torch.cuda.device_count() == 1:
        pytest.skip("all tests of this file have run in this process")
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": first, "PYTEST_ADDOPTS": ""},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
