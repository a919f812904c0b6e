"""LayerNorm for PyTorch: `torch.ops.fastnorm`, `fastnorm.functional` and `fastnorm.LayerNorm`."""

from pathlib import Path

from fastnorm._checks import load_extension

_C = load_extension()

from fastnorm import _sharding, _vmap, functional, onnx  # noqa: E402  (the operators are registered from here on)
from fastnorm.modules import LayerNorm, LazyLayerNorm  # noqa: E402

_vmap.register()
_sharding.register()

__version__: str = _C.build_info()["version"]

cmake_prefix_path: str = str(Path(__file__).resolve().parent)
"""What to add to ``CMAKE_PREFIX_PATH`` for ``find_package(fastnorm)`` in a C++ project."""

__all__ = [
    "LayerNorm",
    "LazyLayerNorm",
    "__version__",
    "cmake_prefix_path",
    "functional",
    "onnx",
]
