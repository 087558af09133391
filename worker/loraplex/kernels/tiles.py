"""Products of a tile of rows and a panel by AMX: tdpbf16ps multiplies 16 rows x 32 columns by 32 columns x 16 outputs.

    tiles 0, 1   sums of rows 0 to 15, outputs 0 to 15 and 16 to 31        2, 3   the same of rows 16 to 31
    tiles 4, 5   32 columns of rows 0 to 15 and 16 to 31                   6, 7   the same columns of the outputs

A panel of bfloat16 is [columns / 2, PANEL] words of two columns, which is what the instruction reads as its second
operand, with PANEL words from row to row. A row's sums are made of its own products in the order of the columns, 32 by
32, so that its bits are the same alone and beside others.

For processors without AMX, where nothing of it can run, tests compile the same code over tiles in memory.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from loraplex.kernels.llvm import (
    F32,
    FEATURES,
    I8,
    I16,
    I32,
    I64,
    KernelArgs,
    broadcast,
    cases,
    emits,
    int64,
    kernel_part,
    load,
    store,
    vector_of,
    vector_type,
)
from loraplex.kernels.weight_vectors import EMULATED, FLOATS, HALVES, HAS_PAIRS, PAIRS, PANEL, TILES, V

# Rows of a tile's sums, columns of a product, and rows that are multiplied together.
_HALF, COLUMNS, ROWS = 16, 32, 32
# Bytes of a row of a tile, of a row of a panel, and of an emulated tile.
_LINE, _PANEL_LINE, _TILE = 64, 4 * PANEL, 1024
# Bytes of the memory that `configure` needs: the configuration, and, where tiles are emulated, eight tiles behind it.
MEMORY_BYTES = _LINE + 8 * _TILE
# Linux' number of arch_prctl on x86-64, its request for a feature of the state, and the number of tiles' data.
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18


def can_use_tiles() -> bool:
    """Ask the system to let this process use tiles; False where processor or system have none."""
    if not {"+amx-tile", "+amx-bf16"} <= set(FEATURES) or platform.system() != "Linux":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0)


@cache
def bfloat16_products(columns: int) -> int:
    """Return the fastest products of bfloat16 inputs that this processor has, for multiples of so many columns."""
    if V == 16 and columns % COLUMNS == 0 and can_use_tiles():
        return TILES
    return PAIRS if HAS_PAIRS else FLOATS


def of_tiles(p: KernelArgs) -> bool:
    """Tell, where code is emitted, whether a kernel's products are of tiles."""
    return p.constant("of_products") in (TILES, EMULATED)


@emits(types.int64)
def uses_tiles(b, p):
    """Return 1 where a kernel's products are of tiles."""
    return int64(int(of_tiles(p)))


def _run(b: Any, instruction: str, *values: Any) -> None:
    """Emit an instruction of tiles; `values` are its addresses and strides."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * len(values))
    constraints = ",".join(["r"] * len(values) + ["~{memory}"])
    b.call(ir.InlineAsm(kind, instruction, constraints, side_effect=True), values)


def _emulated(b: Any, memory: Any, tile: int) -> Any:
    return b.add(memory, int64(_LINE + _TILE * tile))


def _rows_of(b: Any, memory: Any, tile: int) -> Any:
    return b.zext(load(b, memory, 48 + tile, I8, 1), I64)


@emits()
def configure(b, p, memory, rows):
    """Configure this thread's tiles for 1 to ROWS rows, in memory of MEMORY_BYTES; all tiles are 0 then."""
    first = b.select(b.icmp_signed("<", rows, int64(_HALF)), rows, int64(_HALF))
    second = b.sub(rows, first)
    second = b.select(b.icmp_signed("<", second, int64(1)), int64(1), second)
    of_rows = [first, first, second, second, first, second, int64(_HALF), int64(_HALF)]
    _configure(b, p, memory, [(rows, _LINE) for rows in of_rows])


@emits()
def configure_columns(b, p, memory, rows):
    """Configure this thread's tiles for `add_columns` of up to 16 rows; see `configure`."""
    _configure(b, p, memory, [*[(rows, 4)] * 4, (rows, _LINE), *[(int64(_HALF), 4)] * 3])


def _configure(b: Any, p: KernelArgs, memory: Any, sizes: Sequence[tuple[Any, int]]) -> None:
    for at in range(0, _LINE, 8):
        store(b, int64(1 if at == 0 else 0), memory, at, 8)  # the first byte is the palette
    for tile, (rows, line) in enumerate(sizes):
        store(b, ir.Constant(I16, line), memory, 16 + 2 * tile, 2)
        store(b, b.trunc(rows, I8), memory, 48 + tile, 1)
    if p.constant("of_products") != EMULATED:
        _run(b, "ldtilecfg ($0)", memory)


@emits()
def release(b, p):
    """Release this thread's tiles: the processor need not keep them any more."""
    if p.constant("of_products") != EMULATED:
        _run(b, "tilerelease")


def _zero(b: Any, p: KernelArgs, memory: Any, tile: int) -> None:
    if p.constant("of_products") != EMULATED:
        _run(b, f"tilezero %tmm{tile}")
        return
    for at in range(0, _TILE, _LINE):
        store(b, vector_of(I32, 0, 16), _emulated(b, memory, tile), at, 4)


def _move(
    b: Any, p: KernelArgs, memory: Any, tile: int, address: Any, stride: Any, *, out: bool, line: int = _LINE
) -> None:
    """Load a tile from rows of memory, or store it there; its rows have `line` bytes."""
    if p.constant("of_products") != EMULATED:
        of = f"tilestored %tmm{tile}, ($0,$1,1)" if out else f"tileloadd ($0,$1,1), %tmm{tile}"
        _run(b, of, address, stride)
        return
    with cgutils.for_range(b, _rows_of(b, memory, tile)) as loop:
        there = b.add(address, b.mul(loop.index, stride))
        here = b.add(_emulated(b, memory, tile), b.mul(loop.index, int64(_LINE)))
        of, to = (here, there) if out else (there, here)
        store(b, load(b, of, 0, vector_type(I32, line // 4), 1), to, 0, 1)


def _multiply(b: Any, p: KernelArgs, memory: Any, sums: int, rows: int, weights: int) -> None:
    """Add the products of two tiles to a third."""
    if p.constant("of_products") != EMULATED:
        _run(b, f"tdpbf16ps %tmm{weights}, %tmm{rows}, %tmm{sums}")
        return
    places = [_emulated(b, memory, tile) for tile in (sums, rows, weights)]
    with cgutils.for_range(b, _rows_of(b, memory, sums)) as row:
        at_sums, at_x = (b.add(place, b.mul(row.index, int64(_LINE))) for place in places[:2])
        # Even and odd columns are added up apart, then to each other.
        parts = [cgutils.alloca_once_value(b, vector_of(F32, 0.0, 16)) for _ in range(2)]
        for part in parts:
            b.store(vector_of(F32, 0.0, 16), part)
        with cgutils.for_range(b, int64(COLUMNS // 2)) as pair:
            all_x = broadcast(b, load(b, b.add(at_x, b.mul(pair.index, int64(4))), 0, I32, 4), 16)
            words = load(b, b.add(places[2], b.mul(pair.index, int64(_LINE))), 0, vector_type(I32, 16), 4)
            for part, of in zip(parts, (even_of, odd_of), strict=True):
                b.store(b.fadd(b.load(part), b.fmul(of(b, all_x, 16), of(b, words, 16))), part)
        total = b.fadd(*(b.load(part) for part in parts))
        store(b, b.fadd(load(b, at_sums, 0, vector_type(F32, 16), 4), total), at_sums, 0, 4)


def even_of(b: Any, words: Any, lanes: int) -> Any:
    """Return float32 of the first bfloat16 of each word."""
    return b.bitcast(b.shl(words, vector_of(I32, 16, lanes)), vector_type(F32, lanes))


def odd_of(b: Any, words: Any, lanes: int) -> Any:
    """Return float32 of the second bfloat16 of each word."""
    return b.bitcast(b.and_(words, vector_of(I32, 0xFFFF0000, lanes)), vector_type(F32, lanes))


@emits()
def begin_sums(b, p, memory):
    """Set the sums of all rows to 0."""
    for tile in range(4):
        _zero(b, p, memory, tile)


@emits()
def _add(b, p, memory, x, x_bytes, weights):
    """Add the products of COLUMNS columns of up to 16 rows."""
    _move(b, p, memory, 6, weights, int64(_PANEL_LINE), out=False)
    _move(b, p, memory, 7, b.add(weights, int64(_LINE)), int64(_PANEL_LINE), out=False)
    _move(b, p, memory, 4, x, x_bytes, out=False)
    _multiply(b, p, memory, 0, 4, 6)
    _multiply(b, p, memory, 1, 4, 7)


@emits()
def _add_second(b, p, memory, x, x_bytes):
    """Add the products of the same columns of the rows from 16 on."""
    _move(b, p, memory, 5, x, x_bytes, out=False)
    _multiply(b, p, memory, 2, 5, 6)
    _multiply(b, p, memory, 3, 5, 7)


@kernel_part()
def add_products(p, memory, rows, x, x_bytes, weights):
    """Add the products of COLUMNS columns of rows x and of a panel, both bfloat16, for so many rows as configured."""
    _add(p, memory, x, x_bytes, weights)
    if rows > _HALF:
        _add_second(p, memory, x + _HALF * x_bytes, x_bytes)


@emits()
def add_columns(b, p, memory, count, rows, rows_bytes, x, x_bytes):
    """Add the products of COLUMNS columns of up to 16 rows and of 1 or 4 rows x, which are columns of their sums."""
    _move(b, p, memory, 4, rows, rows_bytes, out=False)
    for several in cases(b, count, (1, 4)):
        for one in range(several):
            tile = 5 + one % 3
            _move(b, p, memory, tile, b.add(x, b.mul(x_bytes, int64(one))), int64(4), out=False, line=4)
            _multiply(b, p, memory, one, 4, tile)


@emits()
def write_column(b, p, memory, column, sums):
    """Write one of up to 4 columns of sums of `add_columns`: float32 [rows]."""
    for tile in cases(b, column, range(4)):
        _move(b, p, memory, tile, sums, int64(4), out=True, line=4)


def _moving(first: int, *, out: bool) -> Any:
    @emits()
    def move(b, p, memory, sums):
        """Write the sums of up to 16 rows [rows, PANEL], or go on with them."""
        for tile in range(2):
            _move(b, p, memory, first + tile, b.add(sums, int64(_LINE * tile)), int64(_PANEL_LINE), out=out)

    return move


# Of the first 16 rows, and of those from 16 on.
_write_first, _write_second = (_moving(first, out=True) for first in (0, 2))
_read_first, _read_second = (_moving(first, out=False) for first in (0, 2))


@kernel_part()
def write_sums(p, memory, rows, sums):
    """Write the sums float32 [rows, PANEL]."""
    _write_first(p, memory, sums)
    if rows > _HALF:
        _write_second(p, memory, sums + _HALF * PANEL * 4)


@kernel_part()
def read_sums(p, memory, rows, sums):
    """Go on with the sums float32 [rows, PANEL] that `write_sums` wrote."""
    _read_first(p, memory, sums)
    if rows > _HALF:
        _read_second(p, memory, sums + _HALF * PANEL * 4)


# Order of a panel whose words are made of two lines of numbers: of each 16 bytes of both lines the first four numbers
# are interleaved, which go into the first half, and the last four, which go into the second. That takes half of the
# instructions of the numbers' own order, which `load_panel` restores.
_INTERLEAVED = [
    [8 * lane + 4 * half + word + PANEL * line for lane in range(V // 4) for word in range(4) for line in range(2)]
    for half in HALVES
]
_IN_ORDER = [number // 8 * 4 + number % 4 + V * (number % 8 // 4) for number in range(PANEL)]


def store_pairs(b: Any, one: Any, other: Any, words: Any, offset: int) -> None:
    """Store words [PANEL] of two lines of PANEL bfloat16, as int16, in the order of `load_panel`."""
    for half, mask in enumerate(_INTERLEAVED):
        pairs = b.shuffle_vector(one, other, ir.Constant(vector_type(I32, PANEL), mask))
        store(b, pairs, words, offset + 4 * V * half, 4)


def load_panel(b: Any, sums: Any) -> list[Any]:
    """Load a row of sums of a panel that `store_pairs` stored: its numbers in their own order, by V."""
    halves = [load(b, sums, 4 * V * half, vector_type(F32, V), 4) for half in HALVES]
    masks = (ir.Constant(vector_type(I32, V), _IN_ORDER[V * half : V * half + V]) for half in HALVES)
    return [b.shuffle_vector(*halves, mask) for mask in masks]


@emits()
def copy_columns(b, p, rows, x, x_bytes, out):
    """Copy COLUMNS columns of rows x to [rows, COLUMNS]."""
    with cgutils.for_range(b, rows) as loop:
        line = load(b, b.add(x, b.mul(loop.index, x_bytes)), 0, vector_type(I32, 16), 1)
        store(b, line, b.add(out, b.mul(loop.index, int64(_LINE))), 0, 4)
