"""torch.compile: one graph, few compilations, the results of eager; and compiled autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from reference import name_of, random
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import fastnorm
from fastnorm.functional import layer_norm

COLS = 24


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _results(
    function: Callable[[Tensor], Tensor], x: Tensor, parameters: list[nn.Parameter]
) -> list[Tensor]:
    """The output and the gradients of x and the parameters."""
    x = x.detach().requires_grad_()
    y = function(x)
    grad_out = random(y.shape, y.dtype, str(y.device), seed=3)
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters], grad_out)]


def _model(device: str) -> nn.Module:
    """fastnorm between operators that the compiler fuses."""
    torch.manual_seed(1)
    layers = [nn.Linear(COLS, COLS), fastnorm.LayerNorm(COLS), nn.GELU(), fastnorm.LayerNorm(COLS)]
    return nn.Sequential(*layers).to(device)


def _batch(rows: int, device: str) -> Tensor:
    return random((rows, COLS), torch.float32, device, seed=rows)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_compile(device: str, affine: bool, out_dtype: torch.dtype | None, dynamic: bool) -> None:
    """One graph, forward and backward, equal to eager bit by bit."""
    norm = fastnorm.LayerNorm(COLS, elementwise_affine=affine, device=device, out_dtype=out_dtype)
    compiled = torch.compile(
        copy.deepcopy(norm), backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    for rows in (5, 9):
        results = [
            _results(module, _batch(rows, device), list(module.parameters()))
            for module in (norm, compiled)
        ]
        for eager, graph in zip(*results):
            assert eager.dtype == graph.dtype
            assert eager.stride() == graph.stride()
            assert eager.equal(graph)


def test_compiled_graph_holds_the_operator() -> None:
    """Not its pieces: the compiled program calls fastnorm once."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(layer_norm, backend=backend, fullgraph=True)(torch.ones(2, 3), [3])
    calls = [n for g in graphs for n in g.graph.nodes if n.op == "call_function"]
    assert ["fastnorm" in str(call.target) for call in calls] == [True]


def test_no_graph_breaks(device: str) -> None:
    explanation = torch._dynamo.explain(_model(device))(_batch(5, device))
    assert explanation.graph_count == 1
    assert explanation.graph_break_count == 0


def _inductor(device: str) -> str:
    """What runs on GPUs; on the CPU the C++ compiler would take most of the tests' time."""
    return "inductor" if device == "cuda" else "aot_eager"


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_no_recompilation_per_batch_size(device: str, training: bool) -> None:
    """With dynamic shapes the first batch's program, forward and backward, serves all."""
    counter = CompileCounterWithBackend(_inductor(device))
    model = _model(device)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    parameters = list(model.parameters())
    counts = []
    for rows in (5, 9, 32, 77):
        x = _batch(rows, device)
        if training:
            pairs = zip(_results(compiled, x, parameters), _results(model, x, parameters))
        else:
            with torch.no_grad():
                pairs = zip([compiled(x)], [model(x)])
        for graph, eager in pairs:
            torch.testing.assert_close(graph, eager)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1, "programs compiled up to each batch"


def test_automatic_dynamic_shapes_recompile_once(device: str) -> None:
    """By default the second batch size makes a program for all that follow."""
    counter = CompileCounterWithBackend("aot_eager")
    norm = fastnorm.LayerNorm(COLS, device=device)
    compiled = torch.compile(norm, backend=counter, fullgraph=True)
    counts = []
    for rows in (5, 9, 32, 77):
        assert compiled(_batch(rows, device)).equal(norm(_batch(rows, device)))
        counts.append(counter.frame_count)
    assert len(set(counts[1:])) == 1, "programs compiled up to each batch"


def test_inductor_training_of_a_model(device: str) -> None:
    """fastnorm's operators between the kernels that Inductor generates."""
    model = _model(device)
    parameters = list(model.parameters())
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for rows in (5, 9):
        x = _batch(rows, device)
        for ours, eager in zip(_results(compiled, x, parameters), _results(model, x, parameters)):
            torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_compile_modes(device: str, mode: str) -> None:
    """Replayed on other data, too: as CUDA graphs, where there is a GPU."""
    model = _model(device) if device == "cuda" else fastnorm.LayerNorm(COLS)
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    parameters = list(model.parameters())
    for seed in (5, 6, 7):
        x = random((9, COLS), torch.float32, device, seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        graph = [t.clone() for t in _results(compiled, x, parameters)]
        for ours, eager in zip(graph, _results(model, x, parameters)):
            torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_compile_of_non_contiguous_inputs(device: str, layout: str) -> None:
    wide = random((COLS + 8, COLS + 8), torch.float32, device)
    x = {
        "transposed": wide[:COLS, :9].t(),
        "sliced": wide[:9, 4 : COLS + 4],
        "expanded": wide[:1, :COLS].expand(9, COLS),
    }[layout]
    assert not x.is_contiguous()
    norm = fastnorm.LayerNorm(COLS, device=device)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(norm, backend=counter, fullgraph=True)
    y = compiled(x)
    assert y.equal(norm(x))
    assert y.stride() == norm(x).stride()
    assert counter.frame_count == 1


@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_compile_under_autocast(device: str, autocast_dtype: torch.dtype) -> None:
    """The dtypes of eager, without a graph break."""
    norm = fastnorm.LayerNorm(COLS, device=device)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    x = random((9, COLS), autocast_dtype, device)
    with torch.autocast(device, dtype=autocast_dtype):
        y, expected = compiled(x), norm(x)
    assert y.dtype == expected.dtype
    assert y.equal(expected)


def test_compiled_autograd(device: str) -> None:
    """The backward of an eager forward becomes one graph, for every batch size that follows."""
    model = _model(device)
    counter = CompileCounterWithBackend(_inductor(device))

    def gradients(rows: int) -> list[Tensor]:
        model.zero_grad()
        model(_batch(rows, device)).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    def compiler(graph: torch.fx.GraphModule) -> Any:
        return torch.compile(graph, backend=counter, fullgraph=True, dynamic=True)

    counts = []
    for rows in (9, 5, 17):
        with torch._dynamo.compiled_autograd._enable(compiler):
            compiled = gradients(rows)
        for ours, eager in zip(compiled, gradients(rows)):
            torch.testing.assert_close(ours, eager)
        counts.append(counter.frame_count)
    assert len(set(counts[1:])) == 1, "programs compiled up to each batch"


def test_compiled_autograd_of_a_double_backward(device: str) -> None:
    """Also the nodes of the second order can be collected."""
    norm = fastnorm.LayerNorm(COLS, device=device)

    def compiler(graph: torch.fx.GraphModule) -> Any:
        return torch.compile(graph, backend="aot_eager", fullgraph=True)

    def gradients(backward: AbstractContextManager[Any]) -> list[Tensor]:
        x = _batch(5, device).requires_grad_()
        (dx,) = torch.autograd.grad(norm(x).sin().sum(), x, create_graph=True)
        norm.zero_grad()
        with backward:
            dx.square().sum().backward()
        return [x.grad, norm.weight.grad.clone()]

    compiled = gradients(torch._dynamo.compiled_autograd._enable(compiler))
    for ours, eager in zip(compiled, gradients(nullcontext())):
        torch.testing.assert_close(ours, eager)


def test_activation_checkpointing_in_a_compiled_model(device: str) -> None:
    """The forward runs again in the backward's graph, and nothing breaks the first."""
    model = _model(device)

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(checkpointed, backend=counter, fullgraph=True)
    parameters = list(model.parameters())
    x = _batch(9, device)
    for ours, eager in zip(_results(compiled, x, parameters), _results(model, x, parameters)):
        torch.testing.assert_close(ours, eager)
    assert counter.frame_count == 1
