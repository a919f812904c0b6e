"""Two GPUs: the device of the tensors, threads, streams, DistributedDataParallel. Needs both."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import name_of, ops, random
from torch import Tensor

import fastnorm

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

MASK = [True, True, True]
COLS = (24, 1000, 4096, 40_000)


def _arguments(cols: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    rows = 257 if cols < 5000 else 5
    return [
        random((rows, cols), dtype, device, shift=0.3),
        random((rows, cols), dtype, device, seed=3),
        random((cols,), dtype, device, seed=1),
        random((cols,), dtype, device, seed=2),
    ]


def _results(x: Tensor, grad_out: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    cols = list(weight.shape)
    outputs = ops.layer_norm_forward(x, cols, weight, bias, 1e-5, None)
    gradients = ops.layer_norm_backward(grad_out, x, cols, *outputs[1:], weight, bias, 1e-5, MASK)
    return [*outputs, *gradients]


def _assert_equal(ours: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(ours, expected):
        assert one.cpu().equal(other.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=name_of)
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("current", [0, 1])
def test_the_other_device_is_current(current: int, cols: int, dtype: torch.dtype) -> None:
    with torch.cuda.device(current):
        first = _results(*_arguments(cols, dtype, "cuda:0"))
        second = _results(*_arguments(cols, dtype, "cuda:1"))
        assert torch.cuda.current_device() == current
    assert {t.device.index for t in first} == {0}
    assert {t.device.index for t in second} == {1}
    _assert_equal(second, first)


@pytest.mark.parametrize("which", ["weight", "bias", "grad_out", "mean", "rstd"])
def test_a_tensor_on_the_other_device_is_refused(which: str) -> None:
    x, grad_out, weight, bias = _arguments(24, torch.float32, "cuda:0")
    _, mean, rstd = ops.layer_norm_forward(x, [24], weight, bias, 1e-5, None)
    tensors = {"grad_out": grad_out, "mean": mean, "rstd": rstd, "weight": weight, "bias": bias}
    tensors[which] = tensors[which].to("cuda:1")
    grad_out, mean, rstd, weight, bias = tensors.values()
    with pytest.raises(RuntimeError, match=f"{which}.*cuda:0.*cuda:1"):
        ops.layer_norm_backward(grad_out, x, [24], mean, rstd, weight, bias, 1e-5, MASK)
    if which in ("weight", "bias"):
        with pytest.raises(RuntimeError, match=f"{which}.*cuda:0.*cuda:1"):
            ops.layer_norm_forward(x, [24], weight, bias, 1e-5, None)


def test_a_model_on_each_device_from_two_threads() -> None:
    expected = {cols: _results(*_arguments(cols, torch.float32, "cuda:0")) for cols in COLS}
    wrong: list[BaseException] = []

    def work(device: str) -> None:
        try:
            arguments = {cols: _arguments(cols, torch.float32, device) for cols in COLS}
            for _ in range(50):
                results = {cols: _results(*arguments[cols]) for cols in COLS}
            norm = fastnorm.LayerNorm(1000, device=device)
            x = random((257, 1000), torch.float32, device).requires_grad_()
            for _ in range(50):
                norm(x).sum().backward()
            assert x.grad is not None
            assert x.grad.device == torch.device(device)
            for cols in COLS:
                _assert_equal(results[cols], expected[cols])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(f"cuda:{i}",)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


@pytest.mark.parametrize("index", [0, 1])
def test_side_streams_and_record_stream(index: int) -> None:
    """Memory freed here while another stream still works in it is not given out too early."""
    target = f"cuda:{index}"
    expected = _results(*_arguments(4096, torch.float32, target))
    with torch.cuda.device(index):
        side = torch.cuda.Stream()
        for _ in range(20):
            arguments = _arguments(4096, torch.float32, target)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000)
                results = _results(*arguments)
            for t in arguments:
                t.record_stream(side)
            del arguments, t
            # What would take the freed memory and overwrite it.
            taken = [torch.full((257, 4096), float("nan"), device=target) for _ in range(4)]
            torch.cuda.current_stream().wait_stream(side)
            _assert_equal(results, expected)
            del taken


def _run(program: str, **environment: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_blocking_launches() -> None:
    _run(
        "import torch, test_multi_gpu as t\n"
        "first = t._results(*t._arguments(1000, torch.float32, 'cuda:0'))\n"
        "t._assert_equal(t._results(*t._arguments(1000, torch.float32, 'cuda:1')), first)\n",
        CUDA_LAUNCH_BLOCKING="1",
    )


# --- DistributedDataParallel ----------------------------------------------------------------------

COLS_OF_MODEL = 320


def _model(device: str) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(64, COLS_OF_MODEL),
        fastnorm.LayerNorm(COLS_OF_MODEL),
        torch.nn.GELU(),
        torch.nn.Linear(COLS_OF_MODEL, COLS_OF_MODEL),
        fastnorm.LayerNorm(COLS_OF_MODEL, bias=False),
        torch.nn.Linear(COLS_OF_MODEL, 8),
    ).to(device=device, dtype=torch.float64)


def _train(model: torch.nn.Module, batch: Callable[[int], Tensor], steps: int = 5) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _batch(step: int) -> Tensor:
    return random((48, 64), torch.float64, "cpu", seed=100 + step)


def _worker(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=2)
    device = f"cuda:{rank}"
    try:
        model = torch.nn.parallel.DistributedDataParallel(_model(device), device_ids=[rank])
        ours = _train(model, lambda step: _batch(step)[24 * rank : 24 * (rank + 1)].to(device))
        expected = _train(_model(device), lambda step: _batch(step).to(device))
        for one, other in zip(ours, expected):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    finally:
        torch.distributed.destroy_process_group()


def test_ddp_equals_one_gpu_on_the_joined_batch() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_worker, (port,), nprocs=2)
