"""Batch invariance on CUDA: a row's numbers have the same bits alone and beside any others.

cuBLAS chooses tiles, and how it splits sums, by the number of rows, so that a row's last bits depend on its company.
Here every output is summed over the inner features in the same order, in tiles that depend on the layer alone:

    y [rows, out] = x [rows, in] W^T      one program: 64 rows, some columns; all inner features, 64 after the other

Attention then computes decode rows as chunks of one token, and adapters' rows are in low tiles. What else a model
computes is known to keep a row's bits, or the model is refused. Imported only where there is Triton.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from loraplex.worker.engine.decoder.cuda import NormKernel
from loraplex.worker.engine.device import KernelCall
from loraplex.worker.engine.lora.base_layers import FusedPart
from loraplex.worker.engine.quantized.layers import AnyLinear, QuantizedEmbedding, QuantizedLinear, is_linear
from loraplex.worker.engine_api import ModelUnusableError

# Rows of a tile, the least that Hopper's tensor cores take, and inner features of a product.
_ROWS, _FEATURES = 64, 64
# Columns of a tile: the most with which a layer's tiles of a few rows still occupy so many multiprocessors.
_COLUMNS = (128, 64, 32)
_PROGRAMS = 128
# Modules with weights of their own that compute each row by itself.
_BY_ROW = (nn.Embedding, nn.LayerNorm, QuantizedEmbedding)


@triton.jit(do_not_specialize=["rows"])
def multiply_rows(  # type: ignore[no-untyped-def]
    y, x, weight, bias, rows, columns, features, x_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y [rows, columns]. Grid: rows, columns; programs that read the same weights run together."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, features, FEATURES):
        feature = first + tl.arange(0, FEATURES)
        inside = feature < features
        part = tl.load(
            x + row[:, None] * x_stride + feature[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0
        )
        factors = tl.load(
            weight + column[None, :] * features + feature[:, None],
            mask=inside[:, None] & (column < columns)[None, :],
            other=0.0,
        )
        # "ieee": without rounding float32 to TF32.
        sums = tl.dot(part, factors, sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y + row[:, None] * columns + column[None, :],
        sums.to(y.dtype.element_ty),
        mask=(row < rows)[:, None] & (column < columns)[None, :],
    )


def multiply_call(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> KernelCall:
    """Return the launch that fills y [rows, out], contiguous, of x [rows, in] and a weight [out, in], contiguous."""
    (rows, columns), features = y.shape, x.shape[1]
    tile = next((size for size in _COLUMNS if columns >= size * _PROGRAMS), _COLUMNS[-1])
    return KernelCall(
        multiply_rows,
        (triton.cdiv(rows, _ROWS), triton.cdiv(columns, tile)),
        {
            "y": y, "x": x, "weight": weight, "bias": bias, "rows": rows, "columns": columns, "features": features,
            "x_stride": x.stride(0),
        },
        {"ROWS": _ROWS, "COLUMNS": tile, "FEATURES": _FEATURES if x.dtype.itemsize < 4 else _FEATURES // 2},
        warps=4,
        stages=4,
    )  # fmt: skip


class InvariantLinear(nn.Module):
    """A linear layer whose rows do not depend on each other: [..., in_features] to [..., out_features]."""

    def __init__(self, linear: AnyLinear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._quantized = isinstance(linear, QuantizedLinear)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the transposed weight, and add the bias where there is one."""
        weight: Any = self.weight
        numbers: Tensor = weight.dequantize(x.dtype) if self._quantized else weight
        rows = x.reshape(-1, self.in_features)
        y = torch.empty(len(rows), self.out_features, dtype=x.dtype, device=x.device)
        if len(rows):
            multiply_call(y, rows, numbers, self.bias).launch()
        return y.view(*x.shape[:-1], self.out_features)


def use_invariant_products(model: nn.Module) -> None:
    """Replace the products of a model whose linear layers and kernels are in place.

    Raises ModelUnusableError for a model with modules that may compute a row by what is beside it.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, FusedPart):
            if not isinstance(module.product.base, InvariantLinear):
                module.product.base = InvariantLinear(module.product.base)  # type: ignore[arg-type]
        elif is_linear(module):
            model.set_submodule(name, InvariantLinear(module))
        elif list(module.parameters(recurse=False)) and not isinstance(module, (*_BY_ROW, InvariantLinear)):
            own = getattr(vars(module).get("forward"), "__self__", None)
            if not isinstance(own, NormKernel):
                raise ModelUnusableError(
                    f"--batch-invariant: the rows of {name}, a {type(module).__name__}, may depend on each other; "
                    "serve this model without it"
                )
