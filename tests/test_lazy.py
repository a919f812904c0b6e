"""fastnorm.LazyLayerNorm: a LayerNorm whose shape the first input gives."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from reference import DTYPES, name_of, random
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

import fastnorm

CONFIGURATIONS = [
    {},
    {"bias": False},
    {"elementwise_affine": False},
    {"eps": 1e-3, "out_dtype": torch.bfloat16},
]


def _config_name(configuration: dict[str, object]) -> str:
    return "-".join(f"{key}={value}" for key, value in configuration.items()) or "default"


def _loaded_from(shape: int | tuple[int, ...]) -> fastnorm.LayerNorm:
    norm = fastnorm.LayerNorm(shape)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    return norm


def test_constructor_is_layer_norms_without_normalized_shape() -> None:
    lazy = list(inspect.signature(fastnorm.LazyLayerNorm.__init__).parameters.values())
    full = list(inspect.signature(fastnorm.LayerNorm.__init__).parameters.values())
    assert lazy == [p for p in full if p.name != "normalized_shape"]


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=_config_name)
def test_becomes_layer_norm(configuration: dict[str, object]) -> None:
    """Class, repr, attributes, parameters and results of one that knew its shape."""
    lazy = fastnorm.LazyLayerNorm(**configuration)
    assert isinstance(lazy, LazyModuleMixin)
    assert isinstance(lazy, nn.LayerNorm)
    assert all(is_lazy(parameter) for parameter in lazy.parameters())
    full = fastnorm.LayerNorm(6, **configuration)
    assert [n for n, _ in lazy.named_parameters()] == [n for n, _ in full.named_parameters()]
    x = random((5, 6), torch.float32, "cpu")
    y = lazy(x)
    assert type(lazy) is fastnorm.LayerNorm
    assert repr(lazy) == repr(full)
    assert lazy.normalized_shape == full.normalized_shape
    assert not lazy._forward_pre_hooks
    assert not lazy._load_state_dict_pre_hooks
    for ours, theirs in zip(lazy.parameters(), full.parameters(), strict=True):
        assert ours.equal(theirs)
        assert type(ours) is nn.Parameter
    assert y.dtype == full(x).dtype
    assert y.equal(full(x))
    assert lazy(x).equal(y)


def test_becomes_layer_norm_by_keyword() -> None:
    lazy = fastnorm.LazyLayerNorm()
    lazy(input=torch.ones(2, 5))
    assert lazy.normalized_shape == (5,)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_device_and_dtype_arguments(device: str, dtype: torch.dtype) -> None:
    lazy = fastnorm.LazyLayerNorm(device=device, dtype=dtype)
    x = random((5, 6), dtype, device)
    assert lazy(x).equal(fastnorm.LayerNorm(6, device=device, dtype=dtype)(x))
    for parameter in lazy.parameters():
        assert (parameter.dtype, parameter.device.type) == (dtype, device)


def test_to_before_the_first_input(device: str) -> None:
    lazy = fastnorm.LazyLayerNorm().to(device).to(torch.bfloat16)
    assert all(is_lazy(parameter) for parameter in lazy.parameters())
    assert lazy(random((5, 6), torch.bfloat16, device)).dtype == torch.bfloat16
    for parameter in lazy.parameters():
        assert (parameter.dtype, parameter.device.type) == (torch.bfloat16, device)


@pytest.mark.parametrize("shape", [6, (3, 4)], ids=str)
def test_state_dict_loaded_before_materialising(shape: int | tuple[int, ...]) -> None:
    """The values survive the first input, and their shape is normalized_shape."""
    source = _loaded_from(shape)
    lazy = fastnorm.LazyLayerNorm()
    lazy.load_state_dict(source.state_dict())
    assert type(lazy) is fastnorm.LazyLayerNorm
    assert lazy.weight.equal(source.weight)
    x = random((5, *source.normalized_shape), torch.float32, "cpu")
    assert lazy(x).equal(source(x))
    assert type(lazy) is fastnorm.LayerNorm
    assert repr(lazy) == repr(source)
    assert lazy.bias.equal(source.bias)


def test_state_dict_of_another_width_than_the_input() -> None:
    lazy = fastnorm.LazyLayerNorm()
    lazy.load_state_dict(_loaded_from(6).state_dict())
    with pytest.raises(RuntimeError, match=r"expected input with shape \[\*, 6\]"):
        lazy(torch.ones(2, 5))


def test_state_dict_of_a_weight_alone() -> None:
    """The bias is made beside the weight that was loaded."""
    source = _loaded_from(6)
    lazy = fastnorm.LazyLayerNorm()
    lazy.load_state_dict({"weight": source.weight}, strict=False)
    lazy(torch.ones(2, 6))
    assert lazy.weight.equal(source.weight)
    assert lazy.bias.equal(torch.zeros(6))


def test_state_dict_loaded_after_materialising() -> None:
    lazy, source = fastnorm.LazyLayerNorm(), _loaded_from(6)
    lazy(torch.ones(2, 6))
    lazy.load_state_dict(source.state_dict())
    x = random((5, 6), torch.float32, "cpu")
    assert lazy(x).equal(source(x))
    with pytest.raises(RuntimeError, match="size mismatch"):
        lazy.load_state_dict(_loaded_from(5).state_dict())


def test_state_dict_saved_before_materialising() -> None:
    """It holds uninitialized parameters, which another lazy module takes."""
    state = fastnorm.LazyLayerNorm().state_dict()
    assert list(state) == ["weight", "bias"]
    assert all(is_lazy(value) for value in state.values())
    lazy = fastnorm.LazyLayerNorm()
    lazy.load_state_dict(state)
    assert lazy(torch.ones(2, 6)).shape == (2, 6)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_before_and_after_materialising(way: str) -> None:
    def copied(module: nn.Module) -> nn.Module:
        return copy.deepcopy(module) if way == "deepcopy" else pickle.loads(pickle.dumps(module))

    lazy = fastnorm.LazyLayerNorm(eps=1e-3, out_dtype=torch.bfloat16)
    other = copied(lazy)
    assert type(other) is fastnorm.LazyLayerNorm
    x = random((5, 6), torch.float32, "cpu")
    assert other(x).dtype == torch.bfloat16
    assert type(other) is fastnorm.LayerNorm
    assert type(lazy) is fastnorm.LazyLayerNorm, "the original is untouched"
    assert is_lazy(lazy.weight)
    assert copied(other)(x).equal(other(x))


def test_reset_parameters() -> None:
    lazy = fastnorm.LazyLayerNorm()
    lazy.reset_parameters()
    assert is_lazy(lazy.weight)
    lazy.load_state_dict(_loaded_from(6).state_dict())
    lazy.reset_parameters()
    assert lazy.weight.equal(torch.ones(6))
    assert lazy.bias.equal(torch.zeros(6))


def test_a_scalar_is_refused() -> None:
    lazy = fastnorm.LazyLayerNorm()
    with pytest.raises(RuntimeError, match="at least one dimension"):
        lazy(torch.tensor(1.0))
    assert is_lazy(lazy.weight), "and the next input may give the shape"
    assert lazy(torch.ones(2, 3)).shape == (2, 3)


def test_a_model_trains_after_a_dry_run(device: str) -> None:
    """The documented way: one forward, then the optimizer."""
    model = nn.Sequential(nn.LazyLinear(8), fastnorm.LazyLayerNorm(), nn.LazyLinear(1)).to(device)
    x = random((5, 6), torch.float32, device)
    model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[1].weight.clone()
    model(x).square().sum().backward()
    optimizer.step()
    assert not model[1].weight.equal(before)


def test_compile_of_a_lazy_module() -> None:
    torch._dynamo.reset()
    lazy = fastnorm.LazyLayerNorm()
    compiled = torch.compile(lazy, backend="aot_eager")
    x = random((5, 6), torch.float32, "cpu")
    assert compiled(x).equal(fastnorm.LayerNorm(6)(x))
    assert lazy.normalized_shape == (6,)
