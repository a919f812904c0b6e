"""CUDA graphs: of the forward, of training steps, by make_graphed_callables, on side streams.

test_cuda.py captures a training step with each kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from reference import name_of, ops, random
from torch import Tensor, nn

import fastnorm

pytestmark = pytest.mark.cuda

ROWS, COLS = 257, 1000


def _warm_up(call: Callable[[], object], stream: torch.cuda.Stream) -> None:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("side_stream", [False, True], ids=["", "side stream"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_forward(dtype: torch.dtype, side_stream: bool) -> None:
    """Captured on its own stream, replayed on this one or another, on data that came later."""
    norm = fastnorm.LayerNorm(COLS, device="cuda")
    x = torch.zeros(ROWS, COLS, dtype=dtype, device="cuda")
    with torch.no_grad():
        _warm_up(lambda: norm(x), torch.cuda.Stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = norm(x)
        stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
        for seed in (5, 6):
            data = random((ROWS, COLS), dtype, "cuda", seed=seed)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                x.copy_(data)
                graph.replay()
                replayed = y.clone()
            torch.cuda.current_stream().wait_stream(stream)
            assert replayed.equal(norm(data))
            torch.cuda.synchronize()


# A kernel of each kind that may start while the one before it still runs; and its number of rows.
CHAINED = [(4000, 256), (4000, 1000), (700, 4096), (700, 1001), (700, 2501), (9, 40_000), (9, 4095)]


@pytest.mark.parametrize("captured", [False, True], ids=["", "captured"])
@pytest.mark.parametrize(("rows", "cols"), CHAINED)
def test_a_chain_of_norms(rows: int, cols: int, captured: bool) -> None:
    """Each reads what the one before has just written, forward and backward, and writes where
    others have just read: as if each waited for the one before.
    """
    weight, bias = (random((cols,), torch.bfloat16, "cuda", seed=s) for s in (1, 2))
    x = random((rows, cols), torch.bfloat16, "cuda")
    grad_out = random((rows, cols), torch.bfloat16, "cuda", seed=3)
    links = 6

    def chain(after: Callable[[], None]) -> list[Tensor]:
        results: list[Tensor] = []
        y = x
        for _ in range(links):
            y, mean, rstd = ops.layer_norm_forward(y, [cols], weight, bias, 1e-5, None)
            after()
            results += [y, mean, rstd]
        grad = grad_out
        for i in reversed(range(links)):
            read = results[3 * i - 3] if i > 0 else x
            grad, dw, db = ops.layer_norm_backward(
                grad, read, [cols], *results[3 * i + 1 : 3 * i + 3], weight, bias, 1e-5,
                [True, True, True],
            )  # fmt: skip
            after()
            results += [grad, dw, db]
        return results

    alone = chain(torch.cuda.synchronize)
    if not captured:
        for _ in range(20):
            together = chain(lambda: None)
            assert all(a.equal(b) for a, b in zip(alone, together))
        return
    _warm_up(lambda: chain(lambda: None), torch.cuda.Stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        together = chain(lambda: None)
    for _ in range(20):
        for t in together:
            t.zero_()
        graph.replay()
        assert all(a.equal(b) for a, b in zip(alone, together))


@pytest.mark.parametrize("before", ["memset", "copy from the host", "two streams"])
def test_captured_after_what_is_no_kernel(before: str) -> None:
    norm = fastnorm.LayerNorm(COLS, device="cuda").requires_grad_(False)
    source = random((ROWS, COLS), torch.float32, "cpu").pin_memory()
    x = torch.empty(ROWS, COLS, device="cuda")
    other = torch.cuda.Stream()

    def prepare() -> None:
        if before == "memset":
            x.zero_()
        elif before == "copy from the host":
            x.copy_(source, non_blocking=True)
        else:
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                x[1::2].fill_(3.0)
            x[::2].fill_(2.0)
            torch.cuda.current_stream().wait_stream(other)

    def step() -> Tensor:
        prepare()
        return norm(x)

    _warm_up(step, torch.cuda.Stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for _ in range(3):
        y.zero_()
        x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert y.equal(norm(x))
        assert y.isfinite().all()


def test_a_training_step_with_its_optimizer() -> None:
    """Whole network capture: forward, backward and update replayed are the eager steps."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(64, COLS), fastnorm.LayerNorm(COLS), nn.Linear(COLS, 1))]
    models.append(copy.deepcopy(models[0]))
    optimizers = []
    for model in models:
        model.cuda()
        optimizers.append(torch.optim.SGD(model.parameters(), lr=1e-3))
    x = random((ROWS, 64), torch.float32, "cuda")
    state = copy.deepcopy(models[0].state_dict())

    def step(which: int) -> None:
        models[which](x).square().mean().backward()
        optimizers[which].step()
        for parameter in models[which].parameters():
            parameter.grad.zero_()

    _warm_up(lambda: step(0), torch.cuda.Stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(0)
    for model in models:
        model.load_state_dict(state)
    for seed in (5, 6, 7):
        x.copy_(random((ROWS, 64), torch.float32, "cuda", seed=seed))
        graph.replay()
        step(1)
    torch.cuda.synchronize()
    for graphed, eager in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(graphed, eager)


@pytest.mark.parametrize("side_stream", [False, True], ids=["", "side stream"])
def test_make_graphed_callables(side_stream: bool) -> None:
    """Forward and backward as graphs inside an eager program."""
    norm = fastnorm.LayerNorm(COLS, device="cuda")
    eager = copy.deepcopy(norm)
    sample = random((ROWS, COLS), torch.float32, "cuda").requires_grad_()
    graphed = torch.cuda.make_graphed_callables(norm, (sample,))
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for seed in (5, 6):
            x = random((ROWS, COLS), torch.float32, "cuda", seed=seed)
            grad_out = random((ROWS, COLS), torch.float32, "cuda", seed=seed + 10)
            results: list[list[Tensor]] = []
            for module in (graphed, eager):
                leaf = x.clone().requires_grad_()
                y = module(leaf * 1)
                gradients = torch.autograd.grad(y, [leaf, *module.parameters()], grad_out)
                results.append([y.detach().clone(), *(g.clone() for g in gradients)])
            for ours, plain in zip(*results):
                assert ours.equal(plain)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
