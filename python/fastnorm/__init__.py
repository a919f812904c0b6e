"""LayerNorm for PyTorch: `torch.ops.fastnorm`, `fastnorm.functional` and `fastnorm.LayerNorm`."""

from fastnorm._checks import load_extension

_C = load_extension()

from fastnorm import _vmap, functional, onnx  # noqa: E402  (the operators are registered from here on)
from fastnorm.modules import LayerNorm, LazyLayerNorm  # noqa: E402

_vmap.register()

__version__: str = _C.build_info()["version"]

__all__ = ["LayerNorm", "LazyLayerNorm", "__version__", "functional", "onnx"]
