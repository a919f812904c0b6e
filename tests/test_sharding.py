"""DTensor, sequence parallelism, fully_shard and DistributedDataParallel, on two processes.

The processes are started once and go through all checks together; each is a test of its own.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import fresh_process
import pytest
import torch
from reference import random
from torch import Tensor, nn
from torch import distributed as dist

import fastnorm
from fastnorm.functional import layer_norm

if not dist.is_available():
    pytest.skip("this PyTorch was built without torch.distributed", allow_module_level=True)

from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

SIZE = 2
SHAPE = (4, 6, 8)
Mesh = dist.device_mesh.DeviceMesh
Check = Callable[[Mesh], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def _arguments(mesh: Mesh, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """input, weight, bias and the gradient of the output."""
    shapes = (SHAPE, SHAPE[-1:], SHAPE[-1:], SHAPE)
    return tuple(random(s, dtype, mesh.device_type, seed=i) for i, s in enumerate(shapes))


def _distributed(tensor: Tensor, mesh: Mesh, placement: Placement) -> DTensor:
    return distribute_tensor(tensor.detach(), mesh, [placement]).requires_grad_()


def _communications(function: Callable[[], object]) -> int:
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as mode:
        function()
    return mode.get_total_counts()


@check
def sharded_rows(mesh: Mesh) -> None:
    """Each shard by itself: the same bits, nothing sent; dw and db are the shards' sums."""
    x, w, b, grad = _arguments(mesh)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    y = layer_norm(leaves[0], (8,), *leaves[1:])
    dx, dw, db = torch.autograd.grad(y, leaves, grad)

    def step(inputs: tuple[DTensor, ...], grad: DTensor, results: list[DTensor]) -> None:
        output = layer_norm(inputs[0], (8,), *inputs[1:])
        results.extend((output, *torch.autograd.grad(output, inputs, grad)))

    for dim in (0, 1):
        weight, bias = (_distributed(t, mesh, Replicate()) for t in (w, b))
        inputs = (_distributed(x, mesh, Shard(dim)), weight, bias)
        got: list[DTensor] = []
        sharded_grad = distribute_tensor(grad, mesh, [Shard(dim)])
        assert _communications(partial(step, inputs, sharded_grad, got)) == 0
        assert [t.placements[0] for t in got[:2]] == [Shard(dim)] * 2
        assert all(t.placements[0].is_partial() for t in got[2:])
        assert got[0].full_tensor().equal(y)
        assert got[1].full_tensor().equal(dx)
        torch.testing.assert_close(got[2].full_tensor(), dw)
        torch.testing.assert_close(got[3].full_tensor(), db)


@check
def sharded_columns(mesh: Mesh) -> None:
    """What is normalized is brought together first, and so is a sharded weight."""
    x, w, b, _ = _arguments(mesh)
    expected = layer_norm(x, (8,), w, b)
    columns = _distributed(x, mesh, Shard(2))
    weight, bias = (_distributed(t, mesh, Shard(0)) for t in (w, b))
    output = layer_norm(columns, (8,), weight, bias)
    assert output.full_tensor().equal(expected)
    output.sum().backward()
    assert weight.grad.full_tensor().shape == w.shape


@check
def normalized_shape(mesh: Mesh) -> None:
    """Each has its own rule, for the same sharding of the same input."""
    x = _arguments(mesh)[0]
    shards = distribute_tensor(x, mesh, [Shard(1)])
    for shape in (SHAPE[-1:], SHAPE[-2:], SHAPE, SHAPE[-1:]):
        output = layer_norm(shards, shape)
        assert output.placements[0] == (Shard(1) if len(shape) == 1 else Replicate())
        assert output.full_tensor().equal(layer_norm(x, shape))


@check
def missing_and_frozen(mesh: Mesh) -> None:
    x, w, b, _ = _arguments(mesh)
    for weight, bias in ((w, None), (None, b), (None, None), (w, b)):
        for trained in (("x",), ("w", "b"), ("x", "b"), ("x", "w", "b")):
            leaves = {"x": x, "w": weight, "b": bias}
            given = {k: t for k, t in leaves.items() if t is not None and k in trained}
            if not given:
                continue

            def gradients(
                place: Callable[[str, Tensor], Tensor],
                leaves: dict[str, Tensor | None] = leaves,
                given: dict[str, Tensor] = given,
            ) -> list[Tensor]:
                tensors = {
                    k: t if t is None else place(k, t).requires_grad_(k in given)
                    for k, t in leaves.items()
                }
                output = layer_norm(tensors["x"], (8,), tensors["w"], tensors["b"])
                return list(torch.autograd.grad(output.square().sum(), [tensors[k] for k in given]))

            ours = gradients(
                lambda k, t: distribute_tensor(t, mesh, [Shard(0) if k == "x" else Replicate()])
            )
            for one, other in zip(ours, gradients(lambda _, t: t.clone())):
                torch.testing.assert_close(one.full_tensor(), other)


@check
def dtypes(mesh: Mesh) -> None:
    x, w, b, _ = _arguments(mesh)
    shards = distribute_tensor(x.bfloat16(), mesh, [Shard(1)])
    weight, bias = (distribute_tensor(t, mesh, [Replicate()]) for t in (w, b))
    for out_dtype in (None, torch.float32, torch.float16):
        output = layer_norm(shards, (8,), weight, bias, out_dtype=out_dtype)
        expected = layer_norm(x.bfloat16(), (8,), w, b, out_dtype=out_dtype)
        assert output.dtype == expected.dtype
        assert output.full_tensor().equal(expected)


@check
def uneven_shards(mesh: Mesh) -> None:
    """More rows in one than in the other, and none in the other."""
    for rows in (3, 1):
        x = random((rows, 8), torch.float32, mesh.device_type)
        w = random((8,), torch.float32, mesh.device_type, seed=1)
        whole = w.clone().requires_grad_()
        layer_norm(x, (8,), whole).square().sum().backward()
        weight = _distributed(w, mesh, Replicate())
        output = layer_norm(distribute_tensor(x, mesh, [Shard(0)]), (8,), weight)
        assert output.full_tensor().equal(layer_norm(x, (8,), w))
        output.square().sum().backward()
        torch.testing.assert_close(weight.grad.full_tensor(), whole.grad)


@check
def second_derivatives(mesh: Mesh) -> None:
    def gradient(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        output = layer_norm(x, (8,), w, b).sin().sum()
        (dx,) = torch.autograd.grad(output, x, create_graph=True)
        return torch.autograd.grad(dx.sin().sum(), x)[0]

    x, w, b, _ = (t.double() for t in _arguments(mesh))
    expected = gradient(*(t.clone().requires_grad_() for t in (x, w, b)))
    shards = _distributed(x, mesh, Shard(0))
    weight, bias = (_distributed(t, mesh, Replicate()) for t in (w, b))
    torch.testing.assert_close(gradient(shards, weight, bias).full_tensor(), expected)


class _Block(nn.Module):
    def __init__(self, norm: type[nn.LayerNorm]) -> None:
        super().__init__()
        self.norm = norm(8)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def _block(mesh: Mesh, norm: type[nn.LayerNorm] = fastnorm.LayerNorm) -> _Block:
    torch.manual_seed(1)
    block = _Block(norm).to(mesh.device_type)
    nn.init.normal_(block.norm.weight)
    nn.init.normal_(block.norm.bias)
    return block


def _assert_same_gradients(ours: nn.Module, expected: nn.Module, scale: float = 1) -> None:
    others = dict(expected.named_parameters())
    for name, parameter in ours.named_parameters():
        one, other = (
            t.grad.full_tensor() if isinstance(t.grad, DTensor) else t.grad
            for t in (parameter, others[name])
        )
        torch.testing.assert_close(one, other * scale, msg=partial("{}: {}".format, name))


@check
def sequence_parallel(mesh: Mesh) -> None:
    """As in a tensor-parallel transformer: the norm on shards of the sequence."""
    from torch.distributed.tensor import parallel

    x = _arguments(mesh)[0]
    block = _block(mesh)
    block(x).square().sum().backward()
    plan = {
        "norm": parallel.SequenceParallel(),
        "up": parallel.ColwiseParallel(input_layouts=Shard(1)),
        "down": parallel.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    sharded = parallel.parallelize_module(_block(mesh), mesh, plan)
    output = sharded(distribute_tensor(x, mesh, [Shard(1)]))
    torch.testing.assert_close(output.full_tensor(), copy.deepcopy(block)(x))
    output.square().sum().backward()
    _assert_same_gradients(sharded, block)


@check
def fully_sharded(mesh: Mesh) -> None:
    """As with PyTorch's LayerNorm: Gloo sums gradients in PyTorch 2.7 and averages them later."""
    from torch.distributed.fsdp import fully_shard

    x = _arguments(mesh)[0].chunk(SIZE)[mesh.get_rank()]
    blocks = [
        fully_shard(_block(mesh, norm), mesh=mesh) for norm in (fastnorm.LayerNorm, nn.LayerNorm)
    ]
    for block in blocks:
        block(x).square().sum().backward()
    _assert_same_gradients(*blocks)


@check
def distributed_data_parallel(mesh: Mesh) -> None:
    block = _block(mesh)
    x = _arguments(mesh)[0]
    block(x).square().sum().backward()
    parallel = nn.parallel.DistributedDataParallel(_block(mesh))
    parallel(x.chunk(SIZE)[mesh.get_rank()]).square().sum().backward()
    _assert_same_gradients(parallel.module, block, 1 / SIZE)


# ---- the processes ------------------------------------------------------------------------------


def _work(rank: int, folder: str, device: str) -> None:
    """Runs all checks and leaves what went wrong in each."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=120),
    )
    mesh = init_device_mesh(device, (SIZE,))
    for name, function in CHECKS.items():
        torch.manual_seed(0)
        try:
            function(mesh)
            said = ""
        except Exception:
            said = traceback.format_exc()
        Path(folder, f"{name}.{rank}").write_text(said)
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def reports(device: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes have left what they found."""
    if device == "cuda" and torch.cuda.device_count() < SIZE:
        pytest.skip("needs two CUDA devices")
    folder = tmp_path_factory.getbasetemp() / f"sharding_{device}"
    folder.mkdir()
    torch.multiprocessing.spawn(_work, (str(folder), device), nprocs=SIZE)
    return folder


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_processes(reports: Path, name: str) -> None:
    for rank in range(SIZE):
        said = (reports / f"{name}.{rank}").read_text()
        assert not said, f"process {rank}:\n{said}"


def test_a_look_at_dtensor_before_it_is_imported() -> None:
    """A search for the module is not yet its import."""
    code = """
import importlib.util, sys
import fastnorm, torch
assert "torch.distributed.tensor" not in sys.modules
finders = len(sys.meta_path)
for _ in range(2):
    assert importlib.util.find_spec("torch.distributed.tensor") is not None
from torch.distributed.tensor import DTensor
rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
assert torch.ops.fastnorm.layer_norm_backward.default in rules
assert len(sys.meta_path) < finders
"""
    fresh_process.check(code)


def test_a_dtensor_without_rules() -> None:
    """A torch whose interface is another one: importing its DTensor warns and works."""
    code = """
import sys, types, warnings
import fastnorm
sys.modules["torch.distributed.tensor.experimental"] = types.ModuleType("experimental")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch.distributed.tensor
print(torch.distributed.tensor.DTensor.__name__)
print([str(w.message) for w in caught if "fastnorm" in str(w.message)])
"""
    name, warned = fresh_process.check(code).splitlines()
    assert name == "DTensor"
    assert "have no sharding rules" in warned
