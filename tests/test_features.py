"""What PyTorch wraps around modules and graphs: checkpoints, hooks, modes, autograd's errors."""

from __future__ import annotations

import copy

import pytest
import torch
from reference import random
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fastnorm
from fastnorm.functional import layer_norm


def test_second_backward_without_retaining_fails(device: str) -> None:
    x = random((4, 6), torch.float32, device).requires_grad_()
    y = layer_norm(x, (6,)).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


@pytest.mark.parametrize("which", [0, 1], ids=["input", "weight"])
def test_in_place_modification_of_what_was_saved_fails(device: str, which: int) -> None:
    leaves = [random((4, 6), torch.float32, device), random((6,), torch.float32, device, seed=1)]
    tensors = [leaf.requires_grad_() * 1 for leaf in leaves]
    y = layer_norm(tensors[0], (6,), tensors[1])
    tensors[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_retained_graph_gives_the_same_gradient_again(device: str) -> None:
    x = random((4, 6), torch.float32, device).requires_grad_()
    y = layer_norm(x, (6,))
    grad_out = torch.ones_like(y).tril()
    first = torch.autograd.grad(y, x, grad_out, retain_graph=True)
    assert first[0].equal(torch.autograd.grad(y, x, grad_out)[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(device: str, reentrant: bool) -> None:
    norm = fastnorm.LayerNorm(6, device=device)
    gradients = []
    for use in (False, True):
        x = random((4, 6), torch.float32, device).requires_grad_()
        y = checkpoint(norm, x, use_reentrant=reentrant) if use else norm(x)
        (y.sin()).sum().backward()
        gradients += [(x.grad, norm.weight.grad.clone())]
        norm.zero_grad()
    assert all(a.equal(b) for a, b in zip(*gradients))


def test_saved_tensor_hooks_see_no_copy_of_the_output(device: str) -> None:
    """What is kept for the backward: input, weight, mean and rstd."""
    kept: list[Tensor] = []
    x = random((64, 96), torch.float32, device).requires_grad_()
    w, b = torch.ones(96, device=device, requires_grad=True), torch.zeros(96, device=device)
    b.requires_grad_()

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer_norm(x, (96,), w, b)
    y.sum().backward()
    assert y.data_ptr() not in {t.data_ptr() for t in kept}
    assert sum(t.numel() for t in kept) <= x.numel() + 2 * 96 + 2 * 64


def test_checkpoint_sequential(device: str) -> None:
    model = nn.Sequential(*(fastnorm.LayerNorm(6, device=device) for _ in range(4)))
    gradients = []
    for use in (False, True):
        x = random((4, 6), torch.float32, device).requires_grad_()
        y = checkpoint_sequential(model, 2, x, use_reentrant=False) if use else model(x)
        gradients.append(torch.autograd.grad(y.sin().sum(), [x, *model.parameters()]))
    assert all(a.equal(b) for a, b in zip(*gradients))


def test_saved_tensor_hooks_may_change_what_is_kept(device: str) -> None:
    """Kept in bfloat16 and unpacked to float32: the gradient is that of the rounded tensors."""
    x = random((64, 96), torch.float32, device).requires_grad_()
    w = random((96,), torch.float32, device, seed=1).requires_grad_()
    grad_out = random((64, 96), torch.float32, device, seed=2)
    expected = torch.autograd.grad(layer_norm(x, (96,), w), (x, w), grad_out)
    with torch.autograd.graph.saved_tensors_hooks(Tensor.bfloat16, Tensor.float):
        y = layer_norm(x, (96,), w)
    assert y.equal(layer_norm(x, (96,), w))
    for got, exact in zip(torch.autograd.grad(y, (x, w), grad_out), expected):
        assert not got.equal(exact)
        torch.testing.assert_close(got, exact, rtol=5e-2, atol=2e-1)


@pytest.mark.parametrize(
    "pin_memory", [False, pytest.param(True, marks=pytest.mark.cuda)], ids=["", "pinned"]
)
def test_save_on_cpu(device: str, pin_memory: bool) -> None:
    x = random((64, 96), torch.float32, device).requires_grad_()
    norm = fastnorm.LayerNorm(96, device=device)
    expected = torch.autograd.grad(norm(x).sin().sum(), [x, *norm.parameters()])
    with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
        y = norm(x).sin().sum()
    for got, plain in zip(torch.autograd.grad(y, [x, *norm.parameters()]), expected):
        assert got.equal(plain)


def test_deepcopy_trains_apart(device: str) -> None:
    norm = fastnorm.LayerNorm(6, device=device)
    copied = copy.deepcopy(norm)
    x = random((4, 6), torch.float32, device)
    copied(x).sin().sum().backward()
    assert norm.weight.grad is None
    with torch.no_grad():
        copied.weight.sub_(copied.weight.grad)
    assert not copied(x).equal(norm(x))
    assert norm(x).equal(layer_norm(x, (6,)))


def test_parametrize(device: str) -> None:
    """A weight that is computed, here kept positive, is read and trained like any other."""

    class Positive(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.exp()

    norm = fastnorm.LayerNorm(6, device=device)
    parametrize.register_parametrization(norm, "weight", Positive())
    x = random((4, 6), torch.float32, device)
    assert norm(x).equal(layer_norm(x, (6,), torch.ones(6, device=device).exp(), norm.bias))
    norm(x).sin().sum().backward()
    assert norm.parametrizations.weight.original.grad.abs().sum() > 0
    parametrize.remove_parametrizations(norm, "weight")
    assert norm(x).equal(layer_norm(x, (6,), norm.weight, norm.bias))


def test_forward_hook_replaces_the_output(device: str) -> None:
    norm = fastnorm.LayerNorm(6, device=device)
    x = random((4, 6), torch.float32, device)
    expected = norm(x) * 2
    handle = norm.register_forward_hook(lambda module, args, output: output * 2)
    assert norm(x).equal(expected)
    handle.remove()
    assert (norm(x) * 2).equal(expected)


def test_backward_hook_sees_and_replaces_gradients(device: str) -> None:
    norm = fastnorm.LayerNorm(6, device=device)
    x = random((4, 6), torch.float32, device).requires_grad_()
    (expected,) = torch.autograd.grad(norm(x).sin().sum(), x)
    norm.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 2,))
    (doubled,) = torch.autograd.grad(norm(x).sin().sum(), x)
    assert doubled.equal(expected * 2)


def test_tensor_and_node_hooks(device: str) -> None:
    x = random((4, 6), torch.float32, device).requires_grad_()
    seen: list[str] = []
    y = layer_norm(x, (6,))
    y.register_hook(lambda gradient: seen.append("output"))
    y.grad_fn.register_prehook(lambda gradients: seen.append("before"))
    y.grad_fn.register_hook(lambda inputs, outputs: seen.append("after"))
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append("accumulated"))
    y.sum().backward()
    assert seen == ["output", "before", "after", "accumulated"]


def test_inference_mode(device: str) -> None:
    norm = fastnorm.LayerNorm(6, device=device)
    x = random((4, 6), torch.float32, device)
    with torch.inference_mode():
        y = norm(x)
        assert y.is_inference()
        assert not y.requires_grad
        inside = norm(y)
    assert y.equal(norm(x).detach())
    assert inside.equal(norm(y.clone()).detach())
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        norm(y)


def test_no_grad(device: str) -> None:
    norm = fastnorm.LayerNorm(6, device=device)
    with torch.no_grad():
        y = norm(random((4, 6), torch.float32, device).requires_grad_())
    assert not y.requires_grad
    assert y.grad_fn is None


def test_fake_tensors_of_a_model(device: str) -> None:
    """Forward and backward without data: shapes, dtypes, device."""
    with FakeTensorMode():
        norm = fastnorm.LayerNorm(6, device=device, out_dtype=torch.bfloat16)
        x = torch.empty(4, 6, device=device, requires_grad=True)
        y = norm(x)
        gradients = torch.autograd.grad(y, [x, *norm.parameters()], torch.empty_like(y))
    assert (y.shape, y.dtype, y.device.type) == ((4, 6), torch.bfloat16, device)
    assert [tuple(g.shape) for g in gradients] == [(4, 6), (6,), (6,)]


def test_meta_device_backward() -> None:
    norm = fastnorm.LayerNorm(6, device="meta")
    x = torch.empty(4, 6, device="meta", requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.is_meta
    assert norm.weight.grad.shape == (6,)


def test_per_sample_gradients(device: str) -> None:
    """vmap(grad(functional_call)) of a model is the loop over its samples."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), fastnorm.LayerNorm(8), nn.Linear(8, 1)).to(device)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    samples = random((5, 3, 6), torch.float32, device)

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(model, parameters, (sample,)).square().sum()

    got = vmap(grad(loss), (None, 0))(parameters, samples)
    for i, sample in enumerate(samples):
        for name, expected in grad(loss)(parameters, sample).items():
            torch.testing.assert_close(got[name][i], expected)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:Error detected in")
def test_anomaly_mode_names_the_node(device: str) -> None:
    x = random((4, 6), torch.float32, device).requires_grad_()
    with torch.autograd.detect_anomaly():
        layer_norm(x, (6,)).sum().backward()
        y = layer_norm(x, (6,), eps=0.0)
        with pytest.raises(RuntimeError, match=r"FastnormLayerNormBackward.*returned nan"):
            y.backward(torch.full_like(y, float("nan")))
