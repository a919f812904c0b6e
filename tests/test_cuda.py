"""What only CUDA has: streams, graphs, devices, and company on the GPU."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_kernels import (
    BACKWARD_KERNELS,
    KERNELS,
    arguments_of,
    skip_without_clusters,
    spaced,
)
from reference import (
    DTYPES,
    SMALL_DTYPES,
    accumulation_dtype,
    assert_no_worse_than_aten,
    aten_backward,
    aten_forward,
    backward_reference,
    check_backward,
    check_forward,
    forward_reference,
    name_of,
    ops,
    random,
)
from torch import Tensor
from variants import plan_here

import fastnorm

pytestmark = pytest.mark.cuda


def test_a_context_with_few_multiprocessors() -> None:
    """Where a grid cannot run as a whole, rows are cut instead."""
    green_contexts = pytest.importorskip("torch.cuda.green_contexts")
    cols = 300_000
    x, grad_out, weight, bias = arguments_of(13, cols, torch.bfloat16)
    try:
        context = green_contexts.GreenContext.create(32, 0)
    except RuntimeError as error:
        pytest.skip(f"no green contexts: {error}")
    context.set_context()
    try:
        check_forward(x, [cols], weight, bias)
        check_backward(grad_out, x, [cols], weight, bias)
    finally:
        context.pop_context()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
def test_forced_kernels_do_not_depend_on_the_batch(
    force: Callable[..., None], kernel: str, dtype: torch.dtype
) -> None:
    skip_without_clusters(kernel)
    force(kernel=kernel)
    for cols in (24, 40, 152, 257, 1000, 1023, 4096):
        x, grad_out, weight, bias = arguments_of(700, cols, dtype)
        outputs = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)
        mask = [True, True, True]
        dx = ops.layer_norm_backward(grad_out, x, [cols], *outputs[1:], weight, bias, 1e-5, mask)[0]
        for rows in (1, 3, 255, 256, 257):
            part = slice(100, 100 + rows)
            some = ops.layer_norm_forward(x[part], [cols], weight, bias, 1e-5, None)
            assert all(a.equal(b[part]) for a, b in zip(some, outputs))
            assert ops.layer_norm_backward(
                grad_out[part], x[part], [cols], *some[1:], weight, bias, 1e-5, mask
            )[0].equal(dx[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
def test_rows_of_nan_spoil_no_other_row(
    force: Callable[..., None], kernel: str, dtype: torch.dtype
) -> None:
    """Many rows pass through the same threads and the same shared memory."""
    skip_without_clusters("ring" if "elements" in kernel else kernel)
    force(kernel=kernel)
    for cols in (40, 257, 1000, 4099):
        x, grad_out, weight, bias = arguments_of(3001, cols, dtype)
        _, mean, rstd = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)
        mask = [True, True, True]
        for each in (lambda t: t, spaced):
            spoilt_x, spoilt_mean, spoilt_grad = x.clone(), mean.clone(), grad_out.clone()
            spoilt_x[::5] = spoilt_mean[::5] = float("nan")
            spoilt_grad[2::7] = float("inf")
            whole, spoilt = (
                ops.layer_norm_backward(
                    each(g), each(rows), [cols], means, rstd, weight, bias, 1e-5, mask
                )[0]
                for rows, means, g in ((x, mean, grad_out), (spoilt_x, spoilt_mean, spoilt_grad))
            )
            sound = torch.ones(len(x), dtype=torch.bool, device="cuda")
            sound[::5] = sound[2::7] = False
            assert whole[sound].equal(spoilt[sound])
            assert not spoilt[~sound].isfinite().any()


def _kernel_names(function: Callable[[], Any]) -> frozenset[str]:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    return frozenset(event.name for event in profile.events())


@pytest.mark.filterwarnings("ignore")
def test_each_forced_kernel_is_another(force: Callable[..., None]) -> None:
    """Otherwise the tests above would run one kernel under several names."""
    kernels = KERNELS if torch.cuda.get_device_capability() >= (9, 0) else ["rows", "split"]
    x, grad_out, weight, bias = arguments_of(64, 1024, torch.float32)
    _, mean, rstd = ops.layer_norm_forward(x, [1024], weight, bias, 1e-5, None)
    runs: dict[str, Callable[[], Any]] = {
        "forward": lambda: ops.layer_norm_forward(x, [1024], weight, bias, 1e-5, None),
        "backward": lambda: ops.layer_norm_backward(
            grad_out, x, [1024], mean, rstd, weight, bias, 1e-5, [True, True, True]
        ),
    }
    for run in runs.values():
        seen = []
        for kernel in kernels:
            force(kernel=kernel, weight_grads="columns")
            seen.append(_kernel_names(run))
        if not any("layer_norm" in name or "fastnorm" in name for names in seen for name in names):
            pytest.skip("the profiler sees no kernels on this machine")
        assert len(set(seen)) == len(kernels)


def test_stream_of_the_caller() -> None:
    """Work queued before on the same stream is seen; launched elsewhere, zeros would be read."""
    x, grad_out, weight, bias = arguments_of(257, 1000, torch.float32)
    expected = check_forward(x, [1000], weight, bias)
    mask = [True, True, True]
    gradients = ops.layer_norm_backward(
        grad_out, x, [1000], *expected[1:], weight, bias, 1e-5, mask
    )
    stream = torch.cuda.Stream()
    late_x, late_grad = torch.zeros_like(x), torch.zeros_like(grad_out)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late_x.copy_(x)
        late_grad.copy_(grad_out)
        outputs = ops.layer_norm_forward(late_x, [1000], weight, bias, 1e-5, None)
        late_gradients = ops.layer_norm_backward(
            late_grad, late_x, [1000], *outputs[1:], weight, bias, 1e-5, mask
        )
    stream.synchronize()
    for ours, other in zip((*outputs, *late_gradients), (*expected, *gradients)):
        assert ours.equal(other)


def _beside_each_other(call: Callable[[], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """Results of calls in several streams, whose blocks take each other's places."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for _ in range(4):
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(call())
        torch.cuda.synchronize()
    return results


@pytest.mark.parametrize("dtype", SMALL_DTYPES, ids=name_of)
def test_blocks_that_keep_together_rely_on_nobody(dtype: torch.dtype) -> None:
    """Blocks of many long rows pause for those that lag behind. Beside other work, for which some
    of them find no place for a while, they end all the same, and results have the bits of few rows
    at a time, whose blocks do not pause.
    """
    skip_without_clusters("ring")
    rows = 1500
    for cols, parameters in ((32_768, dtype), (49_152 * 2 // dtype.itemsize, torch.float32)):
        x, _, weight, bias = arguments_of(rows, cols, dtype)
        weight, bias = weight.to(parameters), bias.to(parameters)
        plan = plan_here("forward", rows, cols, dtype, one_dtype=dtype == parameters)
        assert (plan["kernel"], plan["in_grid"]) == ("ring", False)

        def forward(x: Tensor) -> tuple[Tensor, ...]:
            return ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)  # noqa: B023

        parts = [forward(part) for part in x.split(300)]
        expected = [torch.cat(results) for results in zip(*parts, strict=True)]
        for ours in _beside_each_other(lambda: forward(x)):  # noqa: B023
            assert all(map(torch.equal, ours, expected))


def test_clusters_that_keep_together_rely_on_nobody() -> None:
    """The same of the backward, of float32."""
    skip_without_clusters("ring")
    rows, mask = 1500, [True, True, True]
    for cols in (12_288, 49_152):
        x, grad, weight, bias = arguments_of(rows, cols, torch.float32)
        plan = plan_here("backward", rows, cols, torch.float32)
        assert plan["kernel"] == "ring"
        assert plan["cluster_size"] > 1
        _, mean, rstd = ops.layer_norm_forward(x, [cols], weight, bias, 1e-5, None)

        def backward() -> tuple[Tensor, ...]:
            saved = (mean, rstd, weight, bias)  # noqa: B023
            return ops.layer_norm_backward(grad, x, [cols], *saved, 1e-5, mask)  # noqa: B023

        expected = check_backward(grad, x, [cols], weight, bias)
        for ours in _beside_each_other(backward):
            assert all(map(torch.equal, ours, expected))


def test_calls_do_not_wait_for_the_device() -> None:
    x, grad_out, weight, bias = arguments_of(257, 1000, torch.bfloat16)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = ops.layer_norm_forward(x, [1000], weight, bias.float(), 1e-5, torch.float32)
        ops.layer_norm_backward(
            grad_out, x, [1000], *outputs[1:], weight, bias, 1e-5, [True, True, True]
        )
    finally:
        torch.cuda.set_sync_debug_mode(before)
    torch.cuda.synchronize()


@pytest.mark.parametrize("kernel", [None, *KERNELS])
@pytest.mark.parametrize(("rows", "cols"), [(257, 1000), (4000, 64), (3, 40_000), (2, 300_000)])
def test_graph_capture_and_replay(
    force: Callable[..., None], rows: int, cols: int, kernel: str | None
) -> None:
    """A training step captured once and replayed on other data equals the eager step bit by bit."""
    skip_without_clusters(kernel or "")
    force(kernel=kernel)
    norm = fastnorm.LayerNorm(cols, device="cuda")
    x = torch.zeros(rows, cols, device="cuda", requires_grad=True)
    grad_out = torch.zeros(rows, cols, device="cuda")
    leaves = [x, *norm.parameters()]

    def step() -> tuple[Tensor, ...]:
        y = norm(x)
        return (y, *torch.autograd.grad(y, leaves, grad_out))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (5, 6):
        with torch.no_grad():
            x.copy_(random((rows, cols), torch.float32, "cuda", seed=seed))
            grad_out.copy_(random((rows, cols), torch.float32, "cuda", seed=seed + 10))
        graph.replay()
        torch.cuda.synchronize()
        replayed = [t.clone() for t in captured]
        for ours, eager in zip(replayed, step()):
            assert ours.equal(eager)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_device_of_the_tensors_not_the_current_one() -> None:
    x, grad_out, weight, bias = arguments_of(257, 1000, torch.float32)
    mask = [True, True, True]

    def run(*tensors: Tensor) -> list[Tensor]:
        x, grad_out, weight, bias = tensors
        outputs = ops.layer_norm_forward(x, [1000], weight, bias, 1e-5, None)
        return [
            *outputs,
            *ops.layer_norm_backward(grad_out, x, [1000], *outputs[1:], weight, bias, 1e-5, mask),
        ]

    expected = run(x, grad_out, weight, bias)
    with torch.cuda.device(0):
        others = run(*(t.to("cuda:1") for t in (x, grad_out, weight, bias)))
        assert torch.cuda.current_device() == 0
    for ours, first in zip(others, expected):
        assert ours.device == torch.device("cuda:1")
        assert ours.to("cuda:0").equal(first)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_weight_on_another_gpu_is_refused() -> None:
    x, weight = torch.ones(2, 3, device="cuda:0"), torch.ones(3, device="cuda:1")
    with pytest.raises(RuntimeError, match="cuda:1"):
        ops.layer_norm(x, [3], weight)


def test_threads_of_python_do_not_disturb_each_other() -> None:
    x, grad_out, weight, bias = arguments_of(300, 1000, torch.float32)
    weight.requires_grad_()
    x.requires_grad_()

    def run() -> list[Tensor]:
        y = ops.layer_norm(x, [1000], weight, bias)
        return [y, *torch.autograd.grad(y, (x, weight), grad_out)]

    expected = run()
    results: list[list[Tensor]] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                results.append(run())
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(results) == 80
    assert all(a.equal(b) for result in results for a, b in zip(result, expected))


def test_memory_is_given_back() -> None:
    arguments = arguments_of(500, 70_000, torch.bfloat16)

    def run() -> None:
        x, grad_out, weight, bias = arguments
        outputs = ops.layer_norm_forward(x, [70_000], weight, bias, 1e-5, None)
        ops.layer_norm_backward(
            grad_out, x, [70_000], *outputs[1:], weight, bias, 1e-5, [True, True, True]
        )

    run()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        run()
    assert torch.cuda.memory_allocated() == before


def test_an_expanded_gradient_is_not_copied() -> None:
    """Rows with stride zero are read in place: no memory of the input's size beyond dx."""
    rows, cols = 20_000, 1024
    x = torch.ones(rows, cols, device="cuda")
    grad_out = torch.ones(1, cols, device="cuda").expand(rows, cols)
    _, mean, rstd = ops.layer_norm_forward(x, [cols], None, None, 1e-5, None)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.layer_norm_backward(grad_out, x, [cols], mean, rstd, None, None, 1e-5, [True, False, False])
    used = torch.cuda.max_memory_allocated() - before
    assert used < 1.5 * x.numel() * x.element_size()


SANITIZER_SHAPES = [(5, 1), (3, 7), (9, 33), (130, 24), (3, 255), (2, 1027), (33, 64)]


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("weight_grads", ["fused", "columns"])
@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
def test_small_shapes_for_the_sanitizer(
    force: Callable[..., None], kernel: str, weight_grads: str, dtype: torch.dtype
) -> None:
    """Every kernel on ragged shapes, with references computed on the CPU to keep this short."""
    skip_without_clusters(kernel)
    force(kernel=kernel, weight_grads=weight_grads)
    arithmetic = accumulation_dtype(dtype)
    for (rows, cols), narrowed in itertools.product(SANITIZER_SHAPES, (False, True)):
        x, grad_out = random((rows, cols), dtype, "cpu"), random((rows, cols), dtype, "cpu", seed=3)
        weight, bias = random((cols,), dtype, "cpu", seed=1), random((cols,), dtype, "cpu", seed=2)
        on_gpu = [t.cuda() for t in (x, grad_out, weight, bias)]
        if narrowed:
            on_gpu[:2] = [spaced(t) for t in on_gpu[:2]]
        outputs = ops.layer_norm_forward(on_gpu[0], [cols], *on_gpu[2:], 1e-5, None)
        gradients = ops.layer_norm_backward(
            on_gpu[1], on_gpu[0], [cols], *outputs[1:], *on_gpu[2:], 1e-5, [True, True, True]
        )
        theirs = (
            *aten_forward(x, [cols], weight, bias, 1e-5),
            *aten_backward(grad_out, x, [cols], weight, 1e-5),
        )
        references = (
            *forward_reference(x, [cols], weight, bias, 1e-5),
            *backward_reference(grad_out, x, [cols], weight, 1e-5),
        )
        names = ("y", "mean", "rstd", "dx", "dw", "db")
        dtypes = (dtype, arithmetic, arithmetic, dtype, dtype, dtype)
        for what, ours, aten, reference, result_dtype in zip(
            names, (*outputs, *gradients), theirs, references, dtypes
        ):
            assert_no_worse_than_aten(
                f"{what} of {rows} x {cols}", ours.cpu(), aten, reference, result_dtype, arithmetic
            )
