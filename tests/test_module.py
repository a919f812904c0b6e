"""fastnorm.LayerNorm stands wherever torch.nn.LayerNorm stood."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from reference import DTYPES, name_of, random
from torch import nn

import fastnorm

CONFIGURATIONS = [
    {},
    {"bias": False},
    {"elementwise_affine": False},
    {"eps": 1e-3},
    {"elementwise_affine": False, "bias": False},
]


def _filled(norm: nn.LayerNorm) -> nn.LayerNorm:
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    return norm


def _config_name(configuration: dict[str, object]) -> str:
    return "-".join(f"{key}={value}" for key, value in configuration.items()) or "default"


def test_is_a_layer_norm() -> None:
    norm = fastnorm.LayerNorm(6)
    assert isinstance(norm, nn.LayerNorm)
    assert isinstance(norm, nn.Module)


def test_constructor_is_pytorchs_plus_out_dtype() -> None:
    ours = list(inspect.signature(fastnorm.LayerNorm.__init__).parameters.values())
    theirs = list(inspect.signature(nn.LayerNorm.__init__).parameters.values())
    assert [(p.name, p.default, p.kind) for p in ours[:-1]] == [
        (p.name, p.default, p.kind) for p in theirs
    ]
    assert (ours[-1].name, ours[-1].default, ours[-1].kind) == (
        "out_dtype", None, inspect.Parameter.KEYWORD_ONLY,
    )  # fmt: skip


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=_config_name)
@pytest.mark.parametrize("shape", [6, [6], (3, 4), torch.Size([2, 3])], ids=str)
def test_attributes_and_repr(shape: object, configuration: dict[str, object]) -> None:
    ours, theirs = fastnorm.LayerNorm(shape, **configuration), nn.LayerNorm(shape, **configuration)
    assert repr(ours) == repr(theirs)
    assert ours.normalized_shape == theirs.normalized_shape
    assert ours.eps == theirs.eps
    assert ours.elementwise_affine == theirs.elementwise_affine
    assert [name for name, _ in ours.named_parameters()] == [
        name for name, _ in theirs.named_parameters()
    ]
    assert (ours.weight is None, ours.bias is None) == (theirs.weight is None, theirs.bias is None)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert a.equal(b)


def test_repr_shows_out_dtype() -> None:
    assert "out_dtype=torch.bfloat16" in repr(fastnorm.LayerNorm(6, out_dtype=torch.bfloat16))


def test_a_pickle_without_out_dtype_loads() -> None:
    norm = fastnorm.LayerNorm(6)
    state = {k: v for k, v in norm.__dict__.items() if k != "out_dtype"}
    old = fastnorm.LayerNorm.__new__(fastnorm.LayerNorm)
    old.__setstate__(state)
    assert old.out_dtype is None
    x = random((5, 6), torch.float32, "cpu")
    assert old(x).equal(norm(x))


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=_config_name)
def test_state_dict_goes_both_ways(configuration: dict[str, object]) -> None:
    for a, b in [(fastnorm.LayerNorm, nn.LayerNorm), (nn.LayerNorm, fastnorm.LayerNorm)]:
        source, target = _filled(a((3, 4), **configuration)), b((3, 4), **configuration)
        assert list(source.state_dict()) == list(target.state_dict())
        target.load_state_dict(source.state_dict(), strict=True)
        x = random((5, 3, 4), torch.float32, "cpu")
        torch.testing.assert_close(source(x), target(x))


def test_state_dict_of_a_whole_model_goes_both_ways() -> None:
    def model(norm: type[nn.LayerNorm]) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), norm(6), nn.Linear(6, 4), norm(4, bias=False))

    ours, theirs = model(fastnorm.LayerNorm), model(nn.LayerNorm)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = random((5, 6), torch.float32, "cpu")
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=_config_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_forward_and_factory_arguments(
    device: str, dtype: torch.dtype, configuration: dict[str, object]
) -> None:
    ours = _filled(fastnorm.LayerNorm(64, **configuration, device=device, dtype=dtype))
    theirs = nn.LayerNorm(64, **configuration, device=device, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    for parameter in ours.parameters():
        assert parameter.dtype == dtype
        assert parameter.device.type == device
    x = random((5, 64), dtype, device)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
def test_out_dtype(device: str, out_dtype: torch.dtype) -> None:
    norm = fastnorm.LayerNorm(64, device=device, dtype=torch.bfloat16, out_dtype=out_dtype)
    assert norm.out_dtype == out_dtype
    x = random((5, 64), torch.bfloat16, device)
    y = norm(x)
    assert y.dtype == out_dtype
    expected = torch.ops.fastnorm.layer_norm(x, [64], norm.weight, norm.bias, out_dtype=out_dtype)
    assert y.equal(expected)


def test_mixed_dtypes(device: str) -> None:
    """float32 parameters and bfloat16 rows, without autocast, also where ATen refuses them."""
    norm = fastnorm.LayerNorm(64, device=device)
    assert norm(random((5, 64), torch.bfloat16, device)).dtype == torch.bfloat16


def test_hooks() -> None:
    norm, seen = fastnorm.LayerNorm(6), []
    norm.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    norm.register_forward_hook(lambda module, args, output: seen.append("forward"))
    norm.register_full_backward_pre_hook(lambda module, grad: seen.append("backward pre"))
    norm.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append("backward"))
    norm(random((5, 6), torch.float32, "cpu").requires_grad_()).sum().backward()
    assert seen == ["pre", "forward", "backward pre", "backward"]


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=_config_name)
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies(way: str, configuration: dict[str, object]) -> None:
    norm = _filled(fastnorm.LayerNorm(6, **configuration, out_dtype=torch.bfloat16))
    if way == "deepcopy":
        copied = copy.deepcopy(norm)
    elif way == "pickle":
        copied = pickle.loads(pickle.dumps(norm))
    else:
        file = io.BytesIO()
        torch.save(norm, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert type(copied) is fastnorm.LayerNorm
    assert repr(copied) == repr(norm)
    x = random((5, 6), torch.float32, "cpu")
    assert copied(x).equal(norm(x))
    assert copied(x).dtype == torch.bfloat16
    for a, b in zip(copied.parameters(), norm.parameters()):
        assert a.data_ptr() != b.data_ptr()


def test_to_another_dtype_and_device(device: str) -> None:
    norm = fastnorm.LayerNorm(6).to(device).to(torch.bfloat16)
    y = norm(random((5, 6), torch.bfloat16, device))
    assert (y.dtype, y.device.type) == (torch.bfloat16, device)
    assert norm.double()(random((5, 6), torch.float64, device)).dtype == torch.float64
    assert norm.half().weight.dtype == torch.float16


def test_meta_device() -> None:
    norm = fastnorm.LayerNorm(6, device="meta")
    y = norm(torch.empty(5, 6, device="meta"))
    assert y.is_meta
    assert y.shape == (5, 6)
    real = norm.to_empty(device="cpu")
    real.reset_parameters()
    assert (real.weight == 1).all()
    assert (real.bias == 0).all()


def test_reset_parameters() -> None:
    norm = _filled(fastnorm.LayerNorm(6))
    norm.reset_parameters()
    assert (norm.weight == 1).all()
    assert (norm.bias == 0).all()


def test_wrong_shape_says_what_pytorch_says() -> None:
    texts = []
    for cls in (fastnorm.LayerNorm, nn.LayerNorm):
        with pytest.raises(RuntimeError) as raised:
            cls(6)(torch.ones(2, 5))
        texts.append(str(raised.value))
    assert texts[0] == texts[1]


def test_a_training_step_is_pytorchs(device: str) -> None:
    """Two optimizer steps of a small model with either norm end at the same parameters."""
    ends = []
    for cls in (fastnorm.LayerNorm, nn.LayerNorm):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 24), cls(24), nn.GELU(), nn.Linear(24, 3)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = random((40, 12), torch.float32, device)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    for ours, theirs in zip(*ends):
        torch.testing.assert_close(ours, theirs)
