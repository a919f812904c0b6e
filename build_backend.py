"""The PEP 517 backend: setuptools' own, which asks for torch when there is none to build against.

pip builds in an isolated environment whose `sys.path` lacks the site-packages that fastnorm is
being installed into. `find_installed_torch` looks there all the same, so that fastnorm is built
against the torch it will run with; only where there is none does pip fetch one.
"""

from __future__ import annotations

import importlib.machinery
import site
import sys
import sysconfig
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  (the backend's other hooks, as they are)
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

MINIMUM_TORCH = "2.7"


def find_installed_torch() -> str | None:
    """Return the directory that holds an installed torch and has to be added to `sys.path` for it.

    `""` when torch can be imported as things are, None when there is none.
    """
    if importlib.machinery.PathFinder.find_spec("torch") is not None:
        return ""
    directories = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    directories += site.getsitepackages()
    if sys.prefix == sys.base_prefix:
        directories.append(site.getusersitepackages())
    for directory in directories:
        if importlib.machinery.PathFinder.find_spec("torch", [directory]) is not None:
            return directory
    return None


def _torch_if_missing() -> list[str]:
    return [] if find_installed_torch() is not None else [f"torch>={MINIMUM_TORCH}"]


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _torch_if_missing()


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _torch_if_missing()
