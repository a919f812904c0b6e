"""LayerNorm as a module, the counterpart of :class:`torch.nn.LayerNorm`, and its lazy variant."""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter, is_lazy

from fastnorm.functional import layer_norm


class LayerNorm(torch.nn.LayerNorm):
    """:class:`torch.nn.LayerNorm` that runs fastnorm's kernels.

    The constructor, parameters, ``state_dict``, ``repr`` and hooks are those of
    :class:`torch.nn.LayerNorm`, of which this is a subclass: code that looks for LayerNorm modules,
    to leave them out of weight decay for instance, finds these too.

    Args:
        normalized_shape: the trailing dimensions of the input to normalize over; an int means one.
        eps: added to the variance.
        elementwise_affine: whether there is a learnable weight.
        bias: whether, besides the weight, there is a learnable bias.
        device: of the parameters.
        dtype: of the parameters: the input's or float32 (float64 only with float64 inputs).
        out_dtype: the result's dtype; see :func:`fastnorm.functional.layer_norm`.

    Shape:
        input ``(*, *normalized_shape)``, output the same.
    """

    __constants__ = [*torch.nn.LayerNorm.__constants__, "out_dtype"]

    out_dtype: Optional[torch.dtype]  # noqa: UP045  (TorchScript reads this)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.out_dtype = out_dtype

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("out_dtype", None)

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            out_dtype=self.out_dtype,
        )

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text if self.out_dtype is None else f"{text}, out_dtype={self.out_dtype}"


class LazyLayerNorm(LazyModuleMixin, LayerNorm):
    """:class:`LayerNorm` that takes ``normalized_shape`` from its first input's last dimension.

    Until then ``weight`` and ``bias`` are :class:`torch.nn.UninitializedParameter`; after that call
    the module is a :class:`LayerNorm`, its class included. See
    :class:`torch.nn.modules.lazy.LazyModuleMixin` for what such modules can do before.

    A ``state_dict`` with parameters loaded before the first call gives them their values and
    ``normalized_shape`` their shape, of however many dimensions; the first input then has to fit.

    Args:
        eps, elementwise_affine, bias, device, dtype, out_dtype: as :class:`LayerNorm`.

    Shape:
        input ``(*, N)``, output the same; ``normalized_shape`` becomes ``(N,)``.
    """

    cls_to_become = LayerNorm

    def __init__(
        self,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(0, eps, elementwise_affine=False, out_dtype=out_dtype)
        self.elementwise_affine = elementwise_affine
        if elementwise_affine:
            self.weight = UninitializedParameter(device=device, dtype=dtype)
            if bias:
                self.bias = UninitializedParameter(device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        if not self.has_uninitialized_params():
            super().reset_parameters()

    def initialize_parameters(self, input: Tensor) -> None:
        """Set ``normalized_shape`` and make the parameters that are not there yet.

        Raises:
            RuntimeError: ``input`` has no dimension.
        """
        if input.dim() == 0:
            raise RuntimeError(
                "Expected input to have at least one dimension to normalize over, but got a scalar"
            )
        values = {"weight": 1.0, "bias": 0.0}
        given = [self._parameters[name] for name in values if self._parameters[name] is not None]
        loaded = [parameter.shape for parameter in given if not is_lazy(parameter)]
        self.normalized_shape = tuple(loaded[0] if loaded else input.shape[-1:])
        with torch.no_grad():
            for name, value in values.items():
                parameter = self._parameters[name]
                if is_lazy(parameter):
                    parameter.materialize(self.normalized_shape)
                    parameter.fill_(value)
