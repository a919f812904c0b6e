"""LayerNorm as a module; the counterpart of :class:`torch.nn.LayerNorm`."""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

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
