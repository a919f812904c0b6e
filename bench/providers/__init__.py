"""The providers: every implementation that is timed, by name."""

from __future__ import annotations

from bench.providers.apex import ApexFast, ApexFused
from bench.providers.base import Provider, UnsupportedError
from bench.providers.compiled import Compiled
from bench.providers.eager import Torch
from bench.providers.fastnorm import Fastnorm
from bench.providers.liger import Liger
from bench.providers.quack import Quack
from bench.providers.triton import Triton

PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Fastnorm(),
        Torch(),
        Compiled(),
        Triton(),
        Liger(),
        ApexFused(),
        ApexFast(),
        Quack(),
    )
}
# What is always there; the others are timed where they are installed.
DEFAULT = ("fastnorm", "torch", "compile", "triton")

__all__ = ["DEFAULT", "PROVIDERS", "Provider", "UnsupportedError"]
