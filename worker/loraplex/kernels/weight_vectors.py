"""Vector code that kernels share: reads weights from panels, multiplies pairs of bfloat16, writes rows of outputs.

A half is one vector of a panel, V lanes: one register. The formats keep two consecutive columns of an output in a
32-bit word, the first in the lower half, so that one load gives vectors of both columns, or pairs of int16:

    bfloat16   word                                     float32 = word << 16, word & 0xffff0000
    int8       two bytes, extended to a word of int16   float32 of the same two, times 65536
    int4       two int16 of four nibbles, the lowest    so, for eight columns
               those of the first two columns

For products of bytes, uint8 has four columns in a word: int8 plus CODE_OFFSET. uint4 has eight: the nibbles of four
bytes, the first four columns in the low ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from struct import pack, unpack
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from loraplex.kernels.llvm import (
    F32,
    FEATURES,
    I8,
    I16,
    I32,
    I64,
    KernelArgs,
    emits,
    int64,
    kernel_part,
    kind_bytes,
    load,
    load_as_float32,
    load_floats,
    round_to_kind,
    store,
    vector_of,
    vector_type,
)

# The products that a kernel is compiled for: of float32, of pairs or tiles of bfloat16; tiles in memory are for tests.
FLOATS, PAIRS, TILES, EMULATED = 1, 2, 3, 4
# Codes of the formats, for kernels compiled for one of them.
FORMATS = {"float32": 1, "bfloat16": 2, "int8": 3, "int4": 4, "uint8": 5, "uint4": 6}
# Consecutive columns of one output that are stored side by side, or, in float32, that one pass of the loop takes.
UNIT_COLUMNS = {"float32": 2, "bfloat16": 2, "int8": 2, "int4": 8, "uint8": 4, "uint4": 8}
# Bytes of a unit of one output.
UNIT_BYTES = {"float32": 8, "bfloat16": 4, "int8": 2, "int4": 4, "uint8": 4, "uint4": 4}
# Parameters of both kernels that differ from call to call, and, behind them, those of a layer; then come each kernel's
# own. `scratch` is memory of the threads; `scale_panel` and `scale_step` are the bytes from one panel's scales to the
# next, and from one segment's.
CALL_INTEGERS = "x rows y counters tasks scratch"
LAYER_INTEGERS = (
    "columns segment weights panel_bytes panels outputs scales zeros scale_panel scale_step bias y_bytes y_size x_bytes"
)
# Number that the upper int16 of a sum of q counts. The fixed-point kernel multiplies zero points, at most 256 in size,
# with sums of up to panels.SEGMENT_COLUMNS int16, as two int16 each.
ZERO_STEP = 128
# Factor of codes of 4 bits and their zero points, which have fractions, in the fixed-point kernel. 8 would do, and 16
# takes a shift less.
INT4_SCALE = 16
# The same in products of bytes, where codes less their zero points, plus CODE_OFFSET, must fit a byte.
UINT4_SCALE = 8
# Vectors of a panel: with fewer, each activation that is loaded would serve too few products.
PANEL_VECTORS = 2


# Number of float32 in a vector register, and of outputs of a panel.
V = 16 if "+avx512f" in FEATURES else 8
PANEL = PANEL_VECTORS * V
# Whether the processor has the instruction of fixed_linear.py; LLVM ends the process where it has not.
FIXED_POINT_COMPILES = ("+avx512bw" if V == 16 else "+avx2") in FEATURES
# Whether the processor has AVX-512 VNNI: it adds products of four uint8 and int8 (vpdpbusd) or two int16 (vpdpwssd).
HAS_BYTES = V == 16 and "+avx512vnni" in FEATURES
# What is added to codes less zero points for these products, and the formats for them.
CODE_OFFSET = 128
OF_BYTES = ("uint8", "uint4")
# Whether the processor multiplies pairs of bfloat16: vdpbf16ps, of AVX-512.
HAS_PAIRS = V == 16 and "+avx512bf16" in FEATURES
HALVES = range(PANEL_VECTORS)
FLOAT32, BFLOAT16, INT4 = (FORMATS[name] for name in ("float32", "bfloat16", "int4"))
_UNITS = {FORMATS[name]: (UNIT_COLUMNS[name], UNIT_BYTES[name] * PANEL) for name in FORMATS}
# Bytes ahead of its use at which a weight is fetched: 10% faster from memory with 8 rows, measured with 1 and 2 KiB.
AHEAD = 2048
_LINE = 64
# The bfloat16 of 65536 times each code of four bits, twice.
_INT4_TABLE = ir.Constant(
    vector_type(I16, 32), [unpack(">H", pack(">f", 65536.0 * (index % 16))[:2])[0] for index in range(32)]
)


def unit_sizes(format_code: int) -> tuple[int, int]:
    """Return the columns of a unit, and the bytes of a unit of a panel."""
    return _UNITS[format_code]


def load_half(b: Any, format_code: int, address: Any, half: int) -> list[Any]:
    """Load a half of a unit: float32 of each column, or words of two columns."""
    if format_code == FLOAT32:
        return [load_floats(b, address, PANEL * column + V * half, V) for column in range(2)]
    if format_code == BFLOAT16:
        return [load(b, address, 4 * V * half, vector_type(I32, V), 4)]
    return [b.bitcast(pairs, vector_type(I32, V)) for pairs in load_pairs(b, format_code, address, half)]


def load_pairs(b: Any, format_code: int, address: Any, half: int, *, scaled: bool = False) -> list[Any]:
    """Load a half of a unit of codes as int16, of two columns a vector; `scaled`: those of 4 bits times INT4_SCALE."""
    wide = vector_type(I16, 2 * V)
    if format_code != INT4:
        return [b.sext(load(b, address, 2 * V * half, vector_type(I8, 2 * V), 1), wide)]
    codes = load(b, address, 4 * V * half, wide, 4)
    if scaled:
        first = b.shl(codes, vector_of(I16, 4, 2 * V))
        last = [b.lshr(codes, vector_of(I16, bits, 2 * V)) for bits in (4, 8)]
        return [b.and_(nibbles, vector_of(I16, 0xF0, 2 * V)) for nibbles in (first, codes, *last)]
    shifted = [codes, *(b.lshr(codes, vector_of(I16, bits, 2 * V)) for bits in (4, 8, 12))]
    return [*(b.and_(nibbles, vector_of(I16, 15, 2 * V)) for nibbles in shifted[:3]), shifted[3]]


def column_of(b: Any, format_code: int, half: list[Any], column: int, zeros: Any) -> Any:
    """Return float32 of a column of a half that load_half gave, less `zeros`, where there are any."""
    if format_code == FLOAT32:
        return half[column]
    word = half[column // 2]
    bits = b.and_(word, vector_of(I32, 0xFFFF0000, V)) if column % 2 else b.shl(word, vector_of(I32, 16, V))
    if format_code == BFLOAT16:
        return b.bitcast(bits, vector_type(F32, V))
    value = b.sitofp(bits, vector_type(F32, V))
    return value if zeros is None else b.fsub(value, zeros)


def pair_of(b: Any, format_code: int, half: list[Any], pair: int, zeros: Any) -> Any:
    """Return words of two bfloat16 columns of a half that load_half gave, less `zeros`; of codes times 65536."""
    if format_code == BFLOAT16:
        return half[pair]
    if format_code == INT4 and zeros is None and V == 16 and FIXED_POINT_COMPILES:
        # vpermw: in a third of the instructions.
        codes = b.bitcast(half[pair], vector_type(I16, 2 * V))
        kind = ir.FunctionType(codes.type, [codes.type, codes.type])
        look_up = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.permvar.hi.512")
        return b.bitcast(b.call(look_up, [_INT4_TABLE, codes]), vector_type(I32, V))
    columns = (column_of(b, format_code, half, 2 * pair + at, zeros) for at in (0, 1))
    low, high = (b.bitcast(column, vector_type(I32, V)) for column in columns)
    # Codes less zeros, of 4 bits in eighths, have at most eight bits: the lower half of their float32 is empty.
    return b.or_(high, b.lshr(low, vector_of(I32, 16, V)))


def transposed(b: Any, lines: Sequence[Any]) -> list[Any]:
    """Transpose V vectors of V words."""
    lines, step = list(lines), 1
    while step < V:
        # In each pair of lines, blocks of `step` words off the diagonal change places.
        low = [at if not at & step else V + at - step for at in range(V)]
        high = [at + step if not at & step else V + at for at in range(V)]
        masks = [ir.Constant(vector_type(I32, V), mask) for mask in (low, high)]
        for one in range(V):
            if not one & step:
                pair = lines[one], lines[one + step]
                lines[one], lines[one + step] = (b.shuffle_vector(*pair, mask) for mask in masks)
        step *= 2
    return lines


def dot_pairs(b: Any, total: Any, one: Any, other: Any) -> Any:
    """Add the products of the two bfloat16 in each word to float32; needs HAS_PAIRS."""
    kind = ir.FunctionType(total.type, [one.type, other.type, total.type])
    return b.call(ir.InlineAsm(kind, "vdpbf16ps $2, $1, $0", "=v,v,v,0"), [one, other, total])


def fetch(b: Any, address: Any, offset: int, size: int) -> None:
    """Ask for the cache lines of `size` bytes at an address and offset."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    # Read, into all levels of the cache, data.
    hints = [ir.Constant(I32, number) for number in (0, 3, 1)]
    for line in range(0, size, _LINE):
        b.call(prefetch, [b.inttoptr(b.add(address, int64(offset + line)), pointer), *hints])


def keep_order(b: Any) -> None:
    """Keep LLVM from moving loads across this place: it would load so much early that sums no longer fit registers."""
    b.call(ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", side_effect=True), [])


@contextmanager
def each_segment(b: Any, p: KernelArgs) -> Iterator[tuple[Any, Any, Any]]:
    """Emit a loop over the segments of a row; gives the first column, the last + 1, and the segment's number."""
    columns, segment = map(p.load, ("columns", "segment"))
    with each_part(b, int64(0), columns, segment) as part:
        yield part


@contextmanager
def each_part(b: Any, begin: Any, end: Any, size: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Emit a loop over the parts of so many columns of [begin, end); gives what `each_segment` does."""
    with cgutils.for_range_slice(b, begin, end, size, I64) as (first, number):
        stop = b.add(first, size)
        yield first, b.select(b.icmp_signed("<", stop, end), stop, end), number


@contextmanager
def each_vector_of(b: Any, kind: int, x: Any, first: Any, stop: Any) -> Iterator[tuple[Any, Any]]:
    """Emit a loop over V columns of a row at a time; gives their float32 and the index of the first."""
    with cgutils.for_range_slice(b, first, stop, int64(V), I64) as (index, _):
        yield load_as_float32(b, kind, b.add(x, b.mul(index, int64(kind_bytes(kind)))), 0, V), index


@kernel_part()
def tile_rows(left, most):
    """Return the rows of the next of as even tiles as can be, of at most `most` rows: 4 and 4 rather than 6 and 2."""
    tiles = (left + most - 1) // most
    return (left + tiles - 1) // tiles


class TileSums:
    """The sums of a tile, a vector for each row and half. LLVM keeps them in registers."""

    def __init__(self, b: Any, of: Any, rows: int) -> None:
        self._b = b
        self._nothing = vector_of(of, 0, V)
        self.places = [(row, half) for row in range(rows) for half in HALVES]
        self._memory = {place: cgutils.alloca_once(b, vector_type(of, V)) for place in self.places}

    def clear(self) -> None:
        """Set all sums to 0."""
        for memory in self._memory.values():
            self._b.store(self._nothing, memory)

    def __getitem__(self, place: tuple[int, int]) -> Any:
        """Return the sum of a row and half."""
        return self._b.load(self._memory[place])

    def __setitem__(self, place: tuple[int, int], value: Any) -> None:
        """Replace the sum of a row and half."""
        self._b.store(value, self._memory[place])

    def write(self, address: Any) -> None:
        """Write all sums, [rows, PANEL]."""
        for row, half in self.places:
            store(self._b, self[row, half], address, 4 * (PANEL * row + V * half), 4)


@emits()
def write_row(b, p, sums, bias, y, width):
    """Write a row's outputs of a panel, of which the first `width` exist: sums + bias, in the kernel's dtype."""
    kind = p.constant("of_kind")
    size = kind_bytes(kind)

    def emit(lanes, offset):
        at = b.mul(offset, int64(4))
        value = b.fadd(load_floats(b, b.add(sums, at), 0, lanes), load_floats(b, b.add(bias, at), 0, lanes))
        store(b, round_to_kind(b, kind, value, lanes), b.add(y, b.mul(offset, int64(size))), 0, size)

    full = b.icmp_signed("==", width, int64(PANEL))
    with b.if_else(full) as (then, otherwise):
        with then:
            for half in HALVES:
                emit(V, int64(V * half))
        with otherwise, cgutils.for_range_slice(b, int64(0), width, int64(1), I64) as (index, _):
            emit(1, index)
