"""torch.func's transforms inside each other: what a rule of one hides from another shows here.

Derivatives for input, weight and bias in every order, mixed ones too; and vmap outside of two of
them, between them and inside, over every subset of the three.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from reference import composed_layer_norm, random
from torch import Tensor
from torch.func import vmap

from fastnorm.functional import layer_norm

Function = Callable[..., Tensor]
NAMES = ("input", "weight", "bias")
SHAPES = ((2, 3), (3,), (3,))
DERIVATIVES = ("jacrev", "jacfwd")
SAMPLES = 4


def _double(shape: tuple[int, ...], device: str, seed: int) -> Tensor:
    return random(shape, torch.float64, device, seed=seed)


def _loss(norm: Function, device: str) -> Function:
    mix = _double((2, 3), device, seed=7)

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return ((norm(x, (3,), w, b) * mix).sin() * x.cos()).sum()

    return loss


def _derive(
    function: Function, transforms: tuple[str, ...], arguments: tuple[int, ...]
) -> Function:
    for transform, argument in zip(transforms, arguments):
        function = getattr(torch.func, transform)(function, argnums=argument)
    return function


def _summed(function: Function) -> Function:
    return lambda *arguments: function(*arguments).sin().sum()


def _assert_as_composed(derivative: Callable[[Function], Tensor], what: str) -> None:
    expected = derivative(composed_layer_norm)
    torch.testing.assert_close(
        derivative(layer_norm), expected, rtol=1e-9, atol=1e-11, msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.parametrize("transforms", itertools.product(DERIVATIVES, repeat=3), ids="-".join)
def test_third_derivatives(device: str, transforms: tuple[str, ...]) -> None:
    leaves = [_double(shape, device, seed) for seed, shape in enumerate(SHAPES)]
    for arguments in itertools.product(range(3), repeat=3):

        def derivative(norm: Function, arguments: tuple[int, ...] = arguments) -> Tensor:
            return _derive(_loss(norm, device), transforms, arguments)(*leaves)

        _assert_as_composed(derivative, f"by {[NAMES[argument] for argument in arguments]}")


BATCHED = [dims for dims in itertools.product((0, None), repeat=3) if any(d == 0 for d in dims)]


PLACES = {"outside": 2, "between": 1, "inside": 0}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("transforms", itertools.product(DERIVATIVES, repeat=2), ids="-".join)
def test_vmap_of_second_derivatives(device: str, transforms: tuple[str, ...], place: str) -> None:
    """Each pair, the inner one first."""
    for dims, arguments in itertools.product(BATCHED, itertools.product(range(3), repeat=2)):
        leaves = [
            _double(shape if dim is None else (SAMPLES, *shape), device, seed)
            for seed, (shape, dim) in enumerate(zip(SHAPES, dims))
        ]

        def derivative(
            norm: Function,
            dims: tuple[int | None, ...] = dims,
            arguments: tuple[int, ...] = arguments,
            leaves: list[Tensor] = leaves,
        ) -> Tensor:
            within = PLACES[place]  # so many of the derivatives
            function = _derive(_loss(norm, device), transforms[:within], arguments[:within])
            function = vmap(function, dims)
            if within < len(transforms):
                function = _derive(_summed(function), transforms[within:], arguments[within:])
            return function(*leaves)

        what = [name for name, dim in zip(NAMES, dims) if dim == 0]
        _assert_as_composed(
            derivative, f"by {[NAMES[argument] for argument in arguments]}, batched {what}"
        )
