"""Products with quantized weights on CUDA: one launch reads the codes as they are and multiplies, for every scheme.

    y[row, output] = sum over groups of columns of  scale * (x[row] . (codes[output] - zero))  + bias[output]

Codes less their zero point, of 4 bits in eighths, are whole numbers up to 256, or numbers of 8 bits, which every dtype
of x holds exactly: so no weight is rounded, and the sums are float32. A program computes a tile of rows and outputs,
group after group. Where rows are few, a layer with too few outputs to occupy the device is cut along its columns:

    columns    │ split 0 │ split 1 │ ...      a program each; a second launch adds their sums in this order

The splits depend on the layer's shape alone, so that a row's bits do not depend on how many rows there are, but for the
height of the tile. Imported only where Triton is installed.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex.worker.engine.device import KernelCall
from loraplex.worker.engine.quantized.weight import SYMMETRIC_ZERO, QuantizedWeight


class Tile(NamedTuple):
    """Rows and outputs of a program, and the columns that it multiplies at once, `stages` of which it reads ahead."""

    height: int
    width: int
    columns: int
    warps: int
    stages: int


# The first that has as many rows as a step takes; the last for all larger ones. Few outputs where there are few rows:
# then reading the weight takes the time, which all processors of the device are to share.
TILES = (Tile(16, 32, 256, 4, 4), Tile(64, 64, 64, 4, 3), Tile(128, 128, 64, 8, 3))
# Programs that occupy an H100, two to each multiprocessor, and least columns of a split.
_PROGRAMS, _LEAST_SPLIT = 256, 1024
# Columns of a program that adds splits.
_ADDED = 512
# Least columns of one product, which a tensor core multiplies; a group of columns is a multiple.
_LEAST_COLUMNS = 16


@triton.jit
def load_codes(  # type: ignore[no-untyped-def]
    weights, at, inside, row_bytes, BITS: tl.constexpr, FLOATS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return the codes of outputs [WIDTH] from column `at`: [WIDTH, COLUMNS], 0 beyond the last output and column.

    Those of 4 bits are in eighths, as their zero points are: see ZERO_PARTS.
    """
    if BITS == 4:
        place = at // 2 + tl.arange(0, COLUMNS // 2)
        packed = tl.load(weights + place[None, :], mask=inside[:, None] & (place < row_bytes)[None, :], other=0)
        codes = tl.interleave((packed & 15) << 3, (packed >> 4) << 3)
    else:
        column = at + tl.arange(0, COLUMNS)
        codes = tl.load(weights + column[None, :], mask=inside[:, None] & (column < row_bytes)[None, :], other=0)
        if FLOATS:
            # The bits of float8_e4m3fn at the places of float16's, whose exponents begin 8 lower.
            wide = codes.to(tl.int16)
            bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
            codes = bits.to(tl.float16, bitcast=True) * 256.0
    return codes


# Not specialized by the number of rows: each new number would compile a kernel while requests wait.
@triton.jit(do_not_specialize=["rows"])
def multiply_codes(  # type: ignore[no-untyped-def]
    y, x, codes, scales, zeros, bias, rows, outputs, columns, groups, x_stride, row_bytes, split,
    BITS: tl.constexpr, FLOATS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y [splits, rows, outputs]. Grid: block of outputs, tile of rows, split of so many columns.

    GROUP: columns of a group, 0 where all columns are one; ZERO: the zero point where `zeros` is None; PARTS: groups
    that are read together, each COLUMNS // PARTS wide.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    output = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    live, inside = row < rows, output < outputs
    inputs = x + row.to(tl.int64)[:, None] * x_stride
    weights = codes + output.to(tl.int64)[:, None] * row_bytes
    of_groups = output.to(tl.int64) * groups
    sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
    first = tl.program_id(2) * split
    for at in range(first, tl.minimum(first + split, columns), COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        numbers = tl.load(inputs + column[None, :], mask=live[:, None] & (column < columns)[None, :], other=0.0)
        part = load_codes(weights, at, inside, row_bytes, BITS, FLOATS, COLUMNS).to(dtype)
        # "ieee": without rounding float32 to TF32.
        if PARTS > 1:
            # Each group is a product of its own: [PARTS, HEIGHT, WIDTH].
            group = at // GROUP + tl.arange(0, PARTS)
            of_group = of_groups[:, None] + group[None, :]
            known = inside[:, None] & (group < groups)[None, :]
            parts = part.reshape(WIDTH, PARTS, COLUMNS // PARTS)
            if zeros is not None:
                parts -= tl.load(zeros + of_group, mask=known, other=0).to(dtype)[:, :, None]
            else:
                parts -= ZERO
            inputs_of = numbers.reshape(HEIGHT, PARTS, COLUMNS // PARTS).permute(1, 0, 2)
            products = tl.dot(inputs_of, parts.permute(1, 2, 0), input_precision="ieee")
            scale = tl.load(scales + of_group, mask=known, other=0.0)
            sums += tl.sum(products * tl.trans(scale)[:, None, :], 0)
        else:
            of_group = of_groups + (at // GROUP if GROUP else 0)
            if zeros is not None:
                part -= tl.load(zeros + of_group, mask=inside, other=0).to(dtype)[:, None]
            elif ZERO:
                part -= ZERO
            if GROUP:
                product = tl.dot(numbers, tl.trans(part), input_precision="ieee")
                sums += product * tl.load(scales + of_group, mask=inside, other=0.0)[None, :]
            else:
                sums = tl.dot(numbers, tl.trans(part), sums, input_precision="ieee")
    if not GROUP:
        sums *= tl.load(scales + of_groups, mask=inside, other=0.0)[None, :]
    if BITS == 4:
        sums *= 0.125
    if bias is not None:
        sums += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[None, :]
    places = y + (tl.program_id(2).to(tl.int64) * rows + row)[:, None] * outputs + output[None, :]
    tl.store(places, sums.to(y.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def add_splits(y, sums, bias, rows, outputs, splits, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add sums [splits, rows, outputs] in their order to y [rows, outputs]. Grid: block of outputs, row."""
    row, output = tl.program_id(1).to(tl.int64), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = output < outputs
    total = tl.zeros([COLUMNS], tl.float32)
    for split in range(0, splits):
        total += tl.load(sums + (split * rows + row) * outputs + output, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * outputs + output, total.to(y.dtype.element_ty), mask=inside)


def can_multiply(weight: QuantizedWeight) -> bool:
    """Tell whether the kernel takes a weight: groups are whole products of a tensor core, or there is one."""
    return weight.scales.shape[1] == 1 or weight.group % _LEAST_COLUMNS == 0


def split_columns(weight: QuantizedWeight) -> int:
    """Return the columns of a split: whole groups and whole products of every tile."""
    whole = math.lcm(TILES[0].columns, weight.group if weight.scales.shape[1] > 1 else 1)
    splits = max(1, _PROGRAMS // -(-weight.out_features // TILES[1].width))
    columns = max(_LEAST_SPLIT, -(-weight.in_features // splits))
    return -(-columns // whole) * whole


def product_calls(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, y: Tensor) -> list[KernelCall]:
    """Return the launches that compute y [rows, outputs], contiguous, of x [rows, columns], contiguous in a row."""
    tile = next((tile for tile in TILES if len(x) <= tile.height), TILES[-1])
    groups = weight.scales.shape[1]
    columns, parts = tile.columns, 1
    if groups > 1:
        # Of several groups that are read together each is a power of two; else the largest that divides the group.
        together = tile is TILES[0] and weight.group.bit_count() == 1
        parts = max(1, columns // weight.group) if together else 1
        columns = columns if parts > 1 else min(columns, weight.group & -weight.group)
    symmetric = SYMMETRIC_ZERO if weight.bits == 4 else 0
    # Tiles of the largest height are many.
    split = weight.in_features if tile is TILES[-1] else split_columns(weight)
    splits, adding = triton.cdiv(weight.in_features, split), list[KernelCall]()
    if splits > 1:
        sums = torch.empty(splits, *y.shape, dtype=torch.float32, device=y.device)
        sizes = {"rows": len(x), "outputs": weight.out_features, "splits": splits}
        adding.append(
            KernelCall(
                add_splits,
                (triton.cdiv(weight.out_features, _ADDED), len(x)),
                {"y": y, "sums": sums, "bias": bias} | sizes,
                {"COLUMNS": _ADDED},
                warps=4,
                stages=1,
            )
        )
        y, bias = sums, None
    product = KernelCall(
        multiply_codes,
        (triton.cdiv(weight.out_features, tile.width), triton.cdiv(len(x), tile.height), splits),
        {
            "y": y, "x": x, "codes": weight.codes.view(torch.uint8) if _is_float(weight) else weight.codes,
            "scales": weight.scales, "zeros": weight.zeros, "bias": bias, "rows": len(x),
            "outputs": weight.out_features, "columns": weight.in_features, "groups": groups, "x_stride": x.stride(0),
            "row_bytes": weight.codes.stride(0), "split": split,
        },
        {
            "BITS": weight.bits, "FLOATS": _is_float(weight), "ZERO": 0 if weight.zeros is not None else symmetric,
            "GROUP": 0 if groups == 1 else weight.group, "PARTS": parts, "HEIGHT": tile.height, "WIDTH": tile.width,
            "COLUMNS": columns,
        },
        warps=tile.warps,
        stages=tile.stages,
    )  # fmt: skip
    return [product, *adding]


def _is_float(weight: QuantizedWeight) -> bool:
    return weight.codes.is_floating_point()


def multiply(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Compute a linear layer over codes: x [..., columns] to [..., outputs], in the dtype of x."""
    rows = x.reshape(-1, weight.in_features)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    y = torch.empty(len(rows), weight.out_features, dtype=x.dtype, device=x.device)
    if len(rows):
        for call in product_calls(rows, weight, bias, y):
            call.launch()
    return y.view(*x.shape[:-1], weight.out_features)
