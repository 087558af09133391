"""Linear layers by mkldnn's operators over packed weights, which the engine's panels are compared with.

The operators are internal to torch: inductor's freezing uses them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Number of rows that the operator is told to expect; measured, it makes no difference.
_ROWS_HINT = 32


class PackedWeight:
    """A weight [out_features, in_features], packed; called with x [..., in_features] it gives [..., out_features]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS_HINT)
        self._bias = None if bias is None else bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply by the transposed weight, and add the bias where there is one."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


class PackedLinear(nn.Module):
    """A linear layer over a packed weight: [..., in_features] to [..., out_features]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.weight = PackedWeight(linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weight, and add the bias where there is one."""
        y = self.weight(x.reshape(-1, self.in_features))
        return y.view(*x.shape[:-1], y.shape[-1])


def packing_works(dtype: torch.dtype) -> bool:
    """Tell whether mkldnn multiplies packed weights of a dtype on this machine."""
    try:
        PackedWeight(torch.ones(16, 16, dtype=dtype))(torch.ones(1, 16, dtype=dtype))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True
