"""The layout of a linear layer's weight on the CPU: by the kind of processor, checked once against the definition.

Nothing is timed: workers of one kind that timed layouts on busy machines would choose different ones, with other bits,
and a stream that moves would turn. Panels are at least as fast as the operators of torch and mkldnn wherever these were
compared (bench.quantized), and in panels a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as multiply

from loraplex.worker.engine.device import dtype_name, return_freed_memory
from loraplex.worker.engine.lora.base_layers import FusedPart, FusedProduct, can_fuse, fuse, fusion_candidates
from loraplex.worker.engine.quantized.layers import AnyLinear, QuantizedLinear, is_linear, linear_of
from loraplex.worker.engine.quantized.weight import quantize, round_inputs

# Maximum difference from the definition, relative to the largest output, that rounding explains: by the dtype that is
# computed in, and of inputs in fixed point.
_TOLERANCE, _FIXED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}, 1e-4
# Outputs and columns of the layers that layouts are checked with: whole tiles of AMX, and parts of them. An odd
# number of outputs has no bias.
_CHECKED_SHAPES = (96, 96), (33, 80)


def codes_name(linear: QuantizedLinear) -> str:
    """Return the name of the codes of a quantized weight, for example int8."""
    codes = linear.weight.codes
    return dtype_name(codes.dtype) if codes.is_floating_point() else f"int{linear.weight.bits}"


def laid_out(linear: AnyLinear, compute: torch.dtype) -> nn.Module | None:
    """Return the layer that takes a linear layer's place, for inputs of dtype `compute`, or the layer itself.

    None: this processor has no kernel for the codes of a quantized weight. No weight is rounded. Inputs are rounded to
    8 bits where the scheme says so; and to 16 bits for codes in a model that has no more, where the processor has no
    AMX: with 32 rows it takes five sixths of the time of products of bfloat16, and three quarters of float32's.
    """
    if isinstance(linear, QuantizedLinear):
        if linear.weight.codes.is_floating_point():
            return None
        kind, bits = codes_name(linear), 8 if linear.weight.dynamic else 0
        if not bits and compute == torch.bfloat16 and not multiplies_tiles() and _panels_work(kind, compute, 16):
            bits = 16
        return panels(linear, compute, bits) if _panels_work(kind, compute, bits) else None
    stored = linear.weight.dtype
    if stored not in _TOLERANCE:
        return linear
    if _panels_work(dtype_name(stored), compute):
        # Half the bytes, and the same bits.
        narrow = compute == torch.float32 and _panels_work("bfloat16", compute) and _narrow(linear)
        return panels(narrow or linear, compute)
    return _cast(linear, compute)


def replace_linears(model: nn.Module, make: Callable[[AnyLinear], nn.Module]) -> None:
    """Replace every linear layer of a CPU model, one by one, so that the weights are never held twice.

    A weight that another module uses too stays there as well.
    """
    # Without the layers themselves: a list of these would keep all weights until the end.
    for module in [module for module in model.modules() if not is_linear(module)]:
        if _replace_children(module, make):
            # The weights that were replaced: the heap has no use for gaps of their sizes.
            return_freed_memory()


def _replace_children(module: nn.Module, make: Callable[[AnyLinear], nn.Module]) -> bool:
    """Replace the linear layers that a module has itself; tell whether there are any."""
    linears = {name: child for name, child in module.named_children() if is_linear(child)}
    for names in fusion_candidates(linears):
        group = [linears[name] for name in names]
        if len(group) > 1 and can_fuse(group):
            # Layers that are called with the same input are one product: fewer calls, and none of them small.
            product = FusedProduct(make(fuse(group)), [linear.out_features for linear in group])
            for index, name in enumerate(names):
                setattr(module, name, FusedPart(product, index))
        else:
            for name, linear in zip(names, group, strict=True):
                setattr(module, name, make(linear))
    return bool(linears)


def multiplies_bfloat16() -> bool:
    """Tell whether the processor has instructions for products of bfloat16, which panels then use."""
    try:
        from loraplex.kernels import tiles, weight_vectors
    except ImportError:
        return False
    products = tiles.bfloat16_products(tiles.COLUMNS)
    return products != weight_vectors.FLOATS and _panels_work("bfloat16", torch.bfloat16)


def multiplies_tiles() -> bool:
    """Tell whether the processor multiplies tiles of bfloat16."""
    try:
        from loraplex.kernels import tiles
    except ImportError:
        return False
    return tiles.can_use_tiles()


def panels_work(stored: torch.dtype, compute: torch.dtype) -> bool:
    """Tell whether panels of a float weight give the right products of inputs of a dtype on this machine."""
    dtypes = (torch.float32, torch.bfloat16)
    return stored in dtypes and compute in dtypes and _panels_work(dtype_name(stored), compute)


def panels(linear: AnyLinear, compute: torch.dtype, bits: int = 0) -> nn.Module:
    """Return the layer over panels; a weight that has no format as panels stays as it is.

    `bits` are those that inputs are rounded to, 8 or 16; 0: they stay floats.
    """
    from loraplex.worker.engine.linear.layer import (  # numba is there only where the CPU computes
        FixedLinear,
        PanelLinear,
        can_be_panels,
    )

    if not can_be_panels(linear):
        return linear
    return FixedLinear(linear, compute, bits) if bits else PanelLinear(linear, compute)


def _cast(linear: AnyLinear, dtype: torch.dtype) -> nn.Linear:
    """Return a float layer with its weight and bias in a dtype."""
    assert isinstance(linear, nn.Linear), "the layouts of float weights are for these"
    if linear.weight.dtype == dtype == getattr(linear.bias, "dtype", dtype):
        return linear
    return linear_of(linear.weight.to(dtype), None if linear.bias is None else linear.bias.to(dtype))


def _narrow(linear: AnyLinear) -> nn.Linear | None:
    """Return the layer with a bfloat16 weight; None where that would round it."""
    if not isinstance(linear, nn.Linear) or linear.weight.dtype != torch.float32:
        return None
    narrow = linear.weight.detach().bfloat16()
    if not torch.equal(narrow.float(), linear.weight):
        return None
    return linear_of(narrow, linear.bias)


@cache
def _panels_work(kind: str, compute: torch.dtype, bits: int = 0) -> bool:
    """Tell whether panels of a kind of weight give the right products on this machine."""
    try:
        from numba.core.errors import NumbaError

        from loraplex.kernels.weight_vectors import FIXED_POINT_COMPILES
    except ImportError:
        return False
    if bits and not FIXED_POINT_COMPILES:
        return False
    tolerance = _FIXED if bits and compute == torch.float32 else _TOLERANCE[compute]
    try:
        checked = [_checked_linear(kind, *shape, dynamic=bits == 8) for shape in _CHECKED_SHAPES]
        return all(_is_right(one, panels(one, compute, bits), tolerance, compute) for one in checked)
    except (NumbaError, AttributeError, RuntimeError, NotImplementedError):
        return False


def _checked_linear(kind: str, outputs: int, columns: int, *, dynamic: bool) -> Any:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, columns, generator=generator)
    bias = None if outputs % 2 else torch.randn(outputs, generator=generator)
    if kind.startswith("int"):
        bits = int(kind.removeprefix("int"))
        codes = quantize(weight, bits, None if bits == 8 else 32, symmetric=outputs % 2 == 0 or (dynamic and bits == 8))
        return QuantizedLinear(replace(codes, dynamic=dynamic), bias)
    linear = nn.Linear(columns, outputs, bias=bias is not None).requires_grad_(False)
    linear.weight.copy_(weight)
    if bias is not None:
        linear.bias.copy_(bias)
    return linear.to(getattr(torch, kind))


def _is_right(linear: AnyLinear, layer: nn.Module, tolerance: float, compute: torch.dtype) -> bool:
    weight = linear.weight.dequantize() if isinstance(linear, QuantizedLinear) else linear.weight.float()
    bias: Tensor | None = None if linear.bias is None else linear.bias.float()
    for rows in (1, 7, 40):
        x = torch.randn(rows, linear.in_features, generator=torch.Generator().manual_seed(rows)).to(compute)
        inputs = round_inputs(x) if isinstance(linear, QuantizedLinear) and linear.weight.dynamic else x.float()
        expected = multiply(inputs, weight, bias)
        if (layer(x).float() - expected).abs().max() > tolerance * expected.abs().max():
            return False
    return True
