"""Not one byte is written outside the results, and every byte of them is.

The allocator serves a call from memory that was filled with poison before. Afterwards all of that
memory is looked at through its address: only the results' bytes may have changed, and as many in
one piece as the plan asks for to work with. Two runs with different poison have the same bits: no
byte of a result is left unwritten, and none depends on memory beyond the arguments, which lie in
poison, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from reference import DTYPES, name_of, ops, random
from torch import Tensor
from variants import GRID, plan_here

pytestmark = pytest.mark.cuda

POISONS = (0xFF, 0x7B)  # NaN in every dtype; large numbers
# Small results come from blocks of 2 MB that the allocator divides, larger ones from 20 MB.
POOL = (*[1 << 19] * 16, 12 << 20, 12 << 20)
GRANULE = 512  # what the allocator aligns memory to

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


@pytest.fixture(scope="module")
def pool() -> torch.cuda.MemPool:
    """One for all: PyTorch crashed where each call had its own, after some hundred of them."""
    return torch.cuda.MemPool()


def _poisoned(pool: torch.cuda.MemPool, poison: int) -> list[Block]:
    """The pool's free memory, filled with poison, in pieces that do not touch."""
    with torch.cuda.use_mem_pool(pool):
        blocks = [torch.full((size,), poison, dtype=torch.uint8, device="cuda") for size in POOL]
    torch.cuda.synchronize()
    pieces: list[Block] = []
    for address, size in sorted((block.data_ptr(), block.numel()) for block in blocks):
        if pieces and sum(pieces[-1]) == address:
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + size)
        else:
            pieces.append((address, size))
    return pieces


def _in_poison(t: Tensor, poison: int, aligned: bool) -> Tensor:
    """The same numbers with 4 KB of poison before, behind and, if not aligned, between rows."""
    rows, cols = t.shape
    margin, gap, offset = 4096 // t.element_size(), 0 if aligned else 3, 0 if aligned else 1
    size = (rows * (cols + gap) + 2 * margin + offset) * t.element_size()
    buffer = torch.full((size,), poison, dtype=torch.uint8, device="cuda").view(t.dtype)
    view = buffer.as_strided((rows, cols), (cols + gap, 1), margin + offset)
    return view.copy_(t)


def _watched(
    pool: torch.cuda.MemPool,
    run: Callable[[], Sequence[Tensor]],
    poison: int,
    workspace_bytes: int,
) -> tuple[list[Tensor], int]:
    """Copies of the results, made in poison, and how many bytes around them were looked at."""
    pieces = _poisoned(pool, poison)
    reserved = torch.cuda.memory_reserved()
    with torch.cuda.use_mem_pool(pool):
        results = run()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == reserved, "POOL is too small: there is more memory now"
    taken = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in results]
    changes, seen, found = [], 0, 0
    for address, size in pieces:
        changed = _bytes_at((address, size)) != poison
        for begin, length in taken:
            if address <= begin < address + size:
                changed[begin - address : begin - address + length] = False
                seen -= length
                found += 1
        changes += (changed.nonzero().flatten() + address).aminmax() if changed.any() else ()
        seen += size
    assert found == len(taken)
    if changes:
        first, last = int(min(changes)), int(max(changes))
        begin = first // GRANULE * GRANULE
        assert last < begin + workspace_bytes, (
            f"of bytes outside the results, some in {last - begin + 1} were written, and there are "
            f"{workspace_bytes} to work with"
        )
    return [t.clone() for t in results], seen


def _workspace(direction: str, x: Tensor, aligned: bool, request: dict[str, Any]) -> int:
    """Bytes."""
    whole = aligned and x.shape[1] * x.element_size() % 16 == 0
    call = {"aligned": whole, "of_sums_dtype": x.element_size() >= 4, **request}
    return plan_here(direction, *x.shape, x.dtype, **call)["workspace_bytes"]


def _run(
    pool: torch.cuda.MemPool,
    arguments: list[Tensor],
    poison: int,
    aligned: bool,
    request: dict[str, Any],
) -> tuple[list[Tensor], int]:
    """The results of a forward and a backward, and how many bytes were looked at."""
    x, grad_out = (_in_poison(t, poison, aligned) for t in arguments[:2])
    weight, bias = (_in_poison(t[None], poison, aligned)[0] for t in arguments[2:])
    outputs, seen = _watched(
        pool,
        lambda: ops.layer_norm_forward(x, x.shape[1:], weight, bias, 1e-5, None),
        poison,
        _workspace("forward", x, aligned, request),
    )
    mean, rstd = outputs[1:]
    gradients, more = _watched(
        pool,
        lambda: ops.layer_norm_backward(
            grad_out, x, x.shape[1:], mean, rstd, weight, bias, 1e-5, [True, True, True]
        ),
        poison,
        _workspace("backward", x, aligned, request),
    )
    return [t.cpu() for t in (*outputs, *gradients)], seen + more


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
    {"kernel": "ring", "weight_grads": "fused", "cluster_size": GRID},
    {"kernel": "ring", "weight_grads": "columns"},
    {"kernel": "elements", "cluster_size": 2},
    {"kernel": "elements", "weight_grads": "columns"},
    {"kernel": "split", "weight_grads": "columns"},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: name_of(list(request.values())))
def test_only_results_are_written_and_all_of_them(
    pool: torch.cuda.MemPool,
    force: Callable[..., None],
    request_: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    shapes = ((3, 1), (5, 7), (131, 33), (37, 257), (1031, 64), (19, 1027), (3, 8200))
    for rows, cols in (*shapes, (131, 136), (101, 20)):
        arguments = [
            random((rows, cols), dtype, "cpu", shift=0.3),
            random((rows, cols), dtype, "cpu", seed=3),
            random((cols,), dtype, "cpu", seed=1),
            random((cols,), dtype, "cpu", seed=2),
        ]
        for aligned in (True, False):
            force(**request_)
            runs = [_run(pool, arguments, poison, aligned, request_) for poison in POISONS]
            force()
            (first, seen), (second, _) = runs
            assert seen > 1 << 20
            for what, ours, other in zip(("y", "mean", "rstd", "dx", "dw", "db"), first, second):
                same = ours.view(torch.uint8) == other.view(torch.uint8)
                assert same.all(), f"{int((~same).sum())} bytes of {what} depend on the poison"


def test_a_write_outside_is_seen(pool: torch.cuda.MemPool) -> None:
    """The check itself: one byte behind a result, and one more than there are to work with."""

    def write(result_bytes: int, beyond: int, workspace_bytes: int) -> list[Tensor]:
        result = torch.zeros(result_bytes, dtype=torch.uint8, device="cuda")
        _bytes_at((result.data_ptr(), result_bytes + beyond)).fill_(0)
        torch.zeros(workspace_bytes, dtype=torch.uint8, device="cuda")
        return [result]

    for poison in POISONS:
        (result,), seen = _watched(pool, lambda: write(1001, 0, 0), poison, 0)
        assert result.shape == (1001,)
        assert seen > 1 << 20
        _watched(pool, lambda: write(1001, 0, 700), poison, 700)
        for beyond, workspace, allowed in ((1, 0, 0), (0, 701, 700), (1, 700, 700)):
            with pytest.raises(AssertionError, match="bytes outside the results"):
                _watched(pool, lambda b=beyond, w=workspace: write(1001, b, w), poison, allowed)
