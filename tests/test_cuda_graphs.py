"""CUDA graphs: of the forward, of training steps, by make_graphed_callables, on side streams.

test_cuda.py captures a training step with each kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from reference import name_of, random
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
