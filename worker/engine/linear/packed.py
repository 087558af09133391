"""Linear layers with weights packed for the CPU: two to three times as fast as nn.Linear for a few rows.

The mkldnn operators behind it are internal to torch (inductor's freezing uses them). They are called here and
nowhere else, and only after a check at start-up that they give what nn.Linear gives; otherwise nn.Linear stays. In
float32 a row's product does not depend on how many rows stand beside it, which nn.Linear's does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Maximum difference from nn.Linear, relative to the largest output, that rounding explains.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
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
    """Tell whether packed weights give nn.Linear's results on this machine."""
    if dtype not in _TOLERANCE or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    try:
        for out_features, bias in ((96, True), (33, False)):
            linear = nn.Linear(80, out_features, bias=bias, dtype=dtype)
            for parameter in linear.parameters():
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
            packed = PackedLinear(linear)
            for rows in (1, 7, 40):
                x = torch.randn(rows, 80, generator=generator).to(dtype)
                expected = linear(x).float()
                if (packed(x).float() - expected).abs().max() > _TOLERANCE[dtype] * expected.abs().max():
                    return False
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True
