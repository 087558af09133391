"""The CPU's kernel for linear layers over codes with activations in fixed point.

for each row, taken by the next free thread:  x[row] as int16, a factor for each segment
when all rows are converted, for each task (some panels), taken by the next free thread:
    for each panel, for each tile of rows:  y[row, outputs] = sums + bias, rounded once to y's dtype

    x[row, column] ≈ factor[row, segment] * q[row, column]          q = round(x / factor), at most 32767 in size
    sums[row, output] = sum over segments of factor * scale[output] * (sum of q * code - zero * sum of q)

Zero points of 4 bits have fractions: codes and zero points are multiplied by INT4_SCALE, and scales are divided by it.

With activations of 8 bits q is at most 127 in size, and `inputs` columns, some segments, share a factor. Where the
processor has vpdpbusd, which multiplies four pairs, codes less zeros are uint8 then, plus CODE_OFFSET, which counts as
the zero of all. Of int8, which has one scale for an output, scale * (all segments) is computed last.

The inner sums are of integers, and exact. One instruction multiplies and adds two pairs, twice what float32 does and,
with VNNI (vpdpwssd), as many as of bfloat16; but int8 becomes int16 in one instruction, and bfloat16 in seven. What is
lost is the rounding of x to 16 bits beside the largest of its segment; bfloat16 keeps 8.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import carray
from numba.core import cgutils

from loraplex.kernels import weight_vectors
from loraplex.kernels.compilation import Kernel, compile_kernel
from loraplex.kernels.llvm import (
    CONTRACT,
    F32,
    I8,
    I16,
    I32,
    I64,
    KINDS,
    ROUNDING,
    ROUNDING_BITS,
    KernelArgs,
    broadcast,
    cases,
    emits,
    fetch_add,
    int64,
    kernel_part,
    load,
    load_floats,
    store,
    vector_of,
    vector_type,
    wait_for,
)
from loraplex.kernels.weight_vectors import (
    CODE_OFFSET,
    FORMATS,
    HALVES,
    HAS_BYTES,
    LAYER_INTEGERS,
    OF_BYTES,
    PANEL,
    UINT4_SCALE,
    ZERO_STEP,
    TileSums,
    V,
    each_part,
    each_segment,
    each_vector_of,
    fetch,
    load_pairs,
    tile_rows,
    unit_sizes,
    write_row,
)

# Largest number of the fixed point, by the bits of activations.
_LARGEST = {8: 127.0, 16: 32767.0}
# A segment whose numbers are all below this counts as zeros: their inverse would not be finite.
_SMALLEST = 1e-30


@emits()
def to_fixed(b, p, x, q, factors):
    """Convert a row of x, in the kernel's dtype, to q, its factors, and behind them, at `sums_of_q`, the sums of q.

    Numbers that are not finite make the factor not a number, and with it all outputs of the row.
    """
    kind, of_bytes = p.constant("of_kind"), _is_of_bytes(p)
    largest = ir.Constant(F32, _LARGEST[p.constant("of_bits")])
    columns, inputs, segment, sums_of_q = map(p.load, ("columns", "inputs", "segment", "sums_of_q"))
    with each_part(b, int64(0), columns, inputs) as (first, stop, _):
        size, check = _measure(b, kind, x, first, stop)
        with each_part(b, first, stop, segment) as (begin, end, _):
            total = _convert(b, kind, x, q, begin, end, b.fdiv(largest, size), I8 if of_bytes else I16)
            at = b.add(factors, b.mul(b.udiv(begin, segment), int64(4)))
            store(b, b.fadd(b.fdiv(size, largest), check), at, 0, 4)
            less = b.mul(total, ir.Constant(I32, -CODE_OFFSET)) if of_bytes else _as_pair(b, total)
            store(b, less, b.add(at, sums_of_q), 0, 4)


def _is_of_bytes(p: KernelArgs) -> bool:
    return p.constant("of_format") in [FORMATS[name] for name in OF_BYTES]


def _measure(b: Any, kind: int, x: Any, first: Any, stop: Any) -> tuple[Any, Any]:
    """Return the largest size of a segment, never 0, and 0, which is not a number where one of the segment is not."""
    nothing = vector_of(F32, 0.0, V)
    largest, check = (cgutils.alloca_once_value(b, nothing) for _ in range(2))
    b.store(nothing, largest)
    b.store(nothing, check)
    with each_vector_of(b, kind, x, first, stop) as (value, _):
        size = b.bitcast(b.and_(b.bitcast(value, vector_type(I32, V)), vector_of(I32, 0x7FFFFFFF, V)), value.type)
        before = b.load(largest)
        b.store(b.select(b.fcmp_ordered(">", size, before), size, before), largest)
        b.store(b.fadd(b.load(check), b.fmul(value, nothing)), check)
    greatest = _reduce(b, "fmax", b.load(largest), F32)
    some = b.fcmp_ordered(">", greatest, ir.Constant(F32, _SMALLEST))
    zero = _reduce(b, "fadd", b.load(check), F32, ir.Constant(F32, 0.0))
    return b.select(some, greatest, ir.Constant(F32, 1.0)), zero


def _convert(b: Any, kind: int, x: Any, q: Any, first: Any, stop: Any, inverse: Any, of: Any) -> Any:
    """Write q of a segment as integers of the type `of`; return its sum."""
    total = cgutils.alloca_once_value(b, vector_of(I32, 0, V))
    b.store(vector_of(I32, 0, V), total)
    factor = broadcast(b, inverse, V)
    with each_vector_of(b, kind, x, first, stop) as (value, index):
        bits = b.bitcast(b.fadd(b.fmul(value, factor), vector_of(F32, ROUNDING, V)), vector_type(I32, V))
        whole = b.sub(bits, vector_of(I32, ROUNDING_BITS, V))
        b.store(b.add(b.load(total), whole), total)
        size = of.width // 8
        store(b, b.trunc(whole, vector_type(of, V)), b.add(q, b.mul(index, int64(size))), 0, size)
    return _reduce(b, "add", b.load(total), I32)


def _as_pair(b: Any, total: Any) -> Any:
    """Return a sum of q as two int16 in a word: total = ZERO_STEP * the upper + the lower one."""
    low = b.and_(total, ir.Constant(I32, ZERO_STEP - 1))
    high = b.ashr(total, ir.Constant(I32, ZERO_STEP.bit_length() - 1))
    return b.or_(low, b.shl(high, ir.Constant(I32, 16)))


def _reduce(b: Any, how: str, vector: Any, of: Any, *start: Any) -> Any:
    """Return the lanes of a vector, reduced by LLVM's operation `how`."""
    name = f"llvm.vector.reduce.{how}.v{V}{'f32' if of is F32 else 'i32'}"
    kind = ir.FunctionType(of, [*(one.type for one in start), vector.type])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), [*start, vector])


_SUM_OF_PAIRS = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
# Minimum columns that one pass of a tile's loop adds; a segment has whole passes, see COLUMNS_STEP. Without VNNI, of
# several sums in a row LLVM makes two instructions of AVX-512 each, where the processor has one.
_PASS_COLUMNS = 8 if V == 8 or HAS_BYTES else 2
# Maximum rows of a tile: the sums of more do not fit AVX2's 16 registers, beside the codes of four columns. With 12 in
# AVX-512's 32, the sums of segments would go to memory: 512 rows take 5% longer.
TILE_ROWS = 8 if HAS_BYTES else 4
# Columns that one pass adds by products of bytes: a segment has whole passes.
_BYTES_STEP = 16


@emits()
def multiply(b, p, count, q, factors, weights, scales, next_weights, sums):
    """Write sums float32 [count, PANEL] for rows in fixed point and a panel.

    `factors` are the factors of the rows' segments, and behind them, at `sums_of_q`, the sums of their q. Meanwhile
    this tile's part of the next panel's weights is fetched to the cache, from `next_weights` on.
    """
    multiply_rows = _multiply_bytes if _is_of_bytes(p) else _multiply_rows
    for rows in cases(b, count, range(1, TILE_ROWS + 1)):
        multiply_rows(b, p, rows, q, factors, weights, scales, next_weights, sums)


def _multiply_rows(
    b: Any, p: KernelArgs, rows: int, q: Any, factors: Any, weights: Any, scales: Any, next_weights: Any, sums: Any
) -> None:
    code = p.constant("of_format")
    has_zeros = p.constant("of_zeros") > 1
    unit, unit_bytes = unit_sizes(code)
    columns = max(unit, _PASS_COLUMNS)
    names = ("q_bytes", "factor_bytes", "sums_of_q", "scale_step", "spread")
    q_bytes, factor_bytes, sums_of_q, step, spread = (p.load(name) for name in names)
    to_zeros = b.sub(*(p.load(name) for name in ("zeros", "scales")))
    lines = [b.add(q, b.mul(q_bytes, int64(row))) for row in range(rows)]
    of_rows = [b.add(factors, b.mul(factor_bytes, int64(row))) for row in range(rows)]
    totals, parts = TileSums(b, F32, rows), TileSums(b, I32, rows)
    totals.clear()
    with each_segment(b, p) as (first, stop, number):
        of_segment, of_factor = b.mul(number, step), b.mul(number, int64(4))
        places = [b.add(of_row, of_factor) for of_row in of_rows]
        scale = b.add(scales, of_segment)
        zero = _load_pairs(b, b.add(scale, to_zeros)) if has_zeros else None
        _begin(b, zero, [b.add(place, sums_of_q) for place in places], parts)
        with cgutils.for_range_slice(b, first, stop, int64(columns), I64) as (index, _):
            place, offset = b.mul(index, int64(unit_bytes // unit)), b.mul(index, int64(2))
            address, size = b.add(weights, place), unit_bytes * columns // unit
            fetch(b, b.add(next_weights, b.lshr(place, spread)), 0, size)
            _add_columns(b, code, columns, address, [b.add(line, offset) for line in lines], parts)
        _end(b, parts, totals, places, scale)
    totals.write(sums)


def _multiply_bytes(
    b: Any, p: KernelArgs, rows: int, q: Any, factors: Any, weights: Any, scales: Any, next_weights: Any, sums: Any
) -> None:
    names = ("q_bytes", "factor_bytes", "sums_of_q", "scale_step", "spread")
    q_bytes, factor_bytes, sums_of_q, step, spread = (p.load(name) for name in names)
    to_zeros = b.sub(*(p.load(name) for name in ("zeros", "scales")))
    has_zeros = p.constant("of_zeros") > 1
    unit, unit_bytes = unit_sizes(p.constant("of_format"))
    lines = [b.add(q, b.mul(q_bytes, int64(row))) for row in range(rows)]
    of_rows = [b.add(factors, b.mul(factor_bytes, int64(row))) for row in range(rows)]
    totals, parts = TileSums(b, F32, rows), TileSums(b, I32, rows)
    totals.clear()
    size = _BYTES_STEP // unit * unit_bytes
    with each_segment(b, p) as (first, stop, number):
        places = [b.add(of_row, b.mul(number, int64(4))) for of_row in of_rows]
        scale = b.add(scales, b.mul(number, step))
        zeros = _load_words(b, b.add(scale, to_zeros)) if has_zeros else None
        for row, half in parts.places:
            parts[row, half] = broadcast(b, load(b, b.add(places[row], sums_of_q), 0, I32, 4), V)
        with cgutils.for_range_slice(b, first, stop, int64(_BYTES_STEP), I64) as (index, _):
            place = b.mul(b.udiv(index, int64(unit)), int64(unit_bytes))
            address = b.add(weights, place)
            fetch(b, b.add(next_weights, b.lshr(place, spread)), 0, size)
            for at in range(0, _BYTES_STEP, unit):
                words = _load_words(b, b.add(address, int64(at // unit * unit_bytes)))
                vectors = _less_zeros(b, words, zeros) if zeros else [words]
                for number_of_four, halves in enumerate(vectors):
                    for row, line in enumerate(lines):
                        all_q = broadcast(b, load(b, b.add(line, index), at + 4 * number_of_four, I32, 4), V)
                        for half in HALVES:
                            parts[row, half] = _add_products_of_bytes(b, parts[row, half], halves[half], all_q)
        of_outputs = [load_floats(b, scale, V * half, V) for half in HALVES] if has_zeros else None
        for row, half in parts.places:
            factor = broadcast(b, load(b, places[row], 0, F32, 4), V)
            value = b.fmul(b.sitofp(parts[row, half], vector_type(F32, V)), factor, flags=CONTRACT)
            if of_outputs:
                value = b.fmul(value, of_outputs[half], flags=CONTRACT)
            totals[row, half] = b.fadd(totals[row, half], value, flags=CONTRACT)
    for half in HALVES if not has_zeros else ():
        scale = load_floats(b, scales, V * half, V)
        for row in range(rows):
            totals[row, half] = b.fmul(totals[row, half], scale)
    totals.write(sums)


def _load_words(b: Any, address: Any) -> list[Any]:
    return [load(b, address, 4 * V * half, vector_type(I32, V), 4) for half in HALVES]


def _less_zeros(b: Any, words: list[Any], zeros: list[Any]) -> list[list[Any]]:
    """Return the low and the high nibbles of both halves, times UINT4_SCALE, less their zero points, as uint8."""
    mask = vector_of(I32, 0x01010101 * 15 * UINT4_SCALE, V)
    low = [b.and_(b.shl(word, vector_of(I32, 3, V)), mask) for word in words]
    high = [b.and_(b.lshr(word, vector_of(I32, 1, V)), mask) for word in words]
    as_bytes = vector_type(I8, 4 * V)
    return [
        [b.add(*(b.bitcast(one, as_bytes) for one in pair)) for pair in zip(nibbles, zeros, strict=True)]
        for nibbles in (low, high)
    ]


def _add_products_of_bytes(b: Any, total: Any, codes: Any, q: Any) -> Any:
    """Add the products of the four uint8 and int8 in each word to int32; needs HAS_BYTES."""
    kind = ir.FunctionType(total.type, [total.type] * 3)
    add = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.vpdpbusd.512")
    return b.call(add, [total, b.bitcast(codes, total.type), q])


def _begin(b: Any, zeros: list[Any] | None, sums_of_q: list[Any], sums: TileSums) -> None:
    """Set the sums to - zero * sum of q, with one product of pairs: see ZERO_STEP."""
    if zeros is None:
        sums.clear()
        return
    for row, address in enumerate(sums_of_q):
        both = _broadcast_pair(b, load(b, address, 0, I32, 4))
        for half in HALVES:
            sums[row, half] = _sum_of_pairs(b, both, zeros[half])


def _add_columns(b: Any, code: int, columns: int, address: Any, lines: list[Any], sums: TileSums) -> None:
    """Add the products of some columns with the rows' int16 at `lines`, pair by pair."""
    unit, unit_bytes = unit_sizes(code)
    for first in range(0, columns, unit):
        halves = [
            load_pairs(b, code, b.add(address, int64(first // unit * unit_bytes)), half, scaled=True) for half in HALVES
        ]
        for pair in range(unit // 2):
            for row, line in enumerate(lines):
                both = _broadcast_pair(b, load(b, line, 2 * first + 4 * pair, I32, 4))
                for half in HALVES:
                    sums[row, half] = _add_sum_of_pairs(b, sums[row, half], both, halves[half][pair])


def _end(b: Any, parts: TileSums, totals: TileSums, factors: list[Any], scales: Any) -> None:
    """Add the sums of a segment to the totals; `factors` are the addresses of the rows' factors."""
    for row, half in parts.places:
        value = b.fmul(b.sitofp(parts[row, half], vector_type(F32, V)), load_floats(b, scales, V * half, V))
        factor = broadcast(b, load(b, factors[row], 0, F32, 4), V)
        totals[row, half] = b.fadd(totals[row, half], b.fmul(value, factor, flags=CONTRACT), flags=CONTRACT)


def _add_sum_of_pairs(b: Any, total: Any, one: Any, other: Any) -> Any:
    """Add the products of int16 neighbours to int32 [V], in the order of the code.

    LLVM left to itself adds up products first, whose number does not fit the registers.
    """
    if HAS_BYTES:
        kind = ir.FunctionType(total.type, [total.type] * 3)
        add = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.vpdpwssd.512")
        return b.call(add, [total, b.bitcast(one, total.type), b.bitcast(other, total.type)])
    added = b.add(total, _sum_of_pairs(b, one, other))
    return b.call(ir.InlineAsm(ir.FunctionType(added.type, [added.type]), "", "=v,0", side_effect=True), [added])


def _load_pairs(b: Any, address: Any) -> list[Any]:
    return [load(b, address, 4 * V * half, vector_type(I16, 2 * V), 4) for half in HALVES]


def _sum_of_pairs(b: Any, one: Any, other: Any) -> Any:
    """Multiply int16 and add neighbours: int32 [V]."""
    pairs = vector_type(I16, 2 * V)
    kind = ir.FunctionType(vector_type(I32, V), [pairs, pairs])
    return b.call(cgutils.get_or_insert_function(b.module, kind, _SUM_OF_PAIRS[V]), [one, other])


def _broadcast_pair(b: Any, pair: Any) -> Any:
    """Return a vector with two int16, given as a word, side by side in every place."""
    first = b.insert_element(ir.Constant(vector_type(I32, V), ir.Undefined), pair, ir.Constant(I32, 0))
    words = b.shuffle_vector(first, first, vector_of(I32, 0, V))
    return b.bitcast(words, vector_type(I16, 2 * V))


# Counters that threads share, 64-bit integers at these byte offsets: tasks taken, threads that have begun, rows taken,
# rows converted.
COUNTERS = 4
_TASKS, _THREADS, _TAKEN, _CONVERTED = 0, 8, 16, 24

# `memory` is the rows' q; behind it are the factors of all rows, and behind those of each row the sums of its q. A tile
# fetches a part of the next panel, a 2 ** `spread`-th.
CALL_INTEGERS = f"{weight_vectors.CALL_INTEGERS} memory spread"
INTEGERS = f"{CALL_INTEGERS} {LAYER_INTEGERS} inputs q_bytes factor_bytes sums_of_q scratch_bytes"


@cache
def compile_fixed(format_name: str, kind: str, *, zeros: bool, bits: int = 16) -> Kernel:
    """Compile the kernel for a format, a dtype in KINDS, and activations of 8 or 16 bits.

    Threads called with the same zeroed counters share it.
    """
    constants = {"of_format": FORMATS[format_name], "of_kind": KINDS[kind], "of_zeros": 1 + zeros, "of_bits": bits}
    return compile_kernel(_multiply, constants, INTEGERS, emitting=(weight_vectors,))


def spread(rows: int) -> int:
    """Return the kernel's parameter `spread`: the logarithm of the number of tiles, rounded down."""
    return (-(-rows // TILE_ROWS)).bit_length() - 1


@kernel_part()
def _panel(p, at, panel, factors, sums):
    weights = at.weights + panel * at.panel_bytes
    scales = at.scales + panel * at.scale_panel
    first = panel * PANEL
    width = min(PANEL, at.outputs - first)
    # Memory gives the next panel evenly, while this one's tiles are computed: with the first tile alone it is too slow.
    next_weights = weights + at.panel_bytes
    row = 0
    while row < at.rows:
        count = tile_rows(at.rows - row, TILE_ROWS)
        of_rows = factors + row * at.factor_bytes
        multiply(p, count, at.memory + row * at.q_bytes, of_rows, weights, scales, next_weights, sums)
        next_weights += at.panel_bytes >> at.spread
        for index in range(count):
            y = at.y + (row + index) * at.y_bytes + first * at.y_size
            write_row(p, sums + index * PANEL * 4, at.bias + first * 4, y, width)
        row += count


def _multiply(p):
    at = carray(p, 1)[0]
    counters = at.counters
    factors = at.memory + at.rows * at.q_bytes
    sums = at.scratch + fetch_add(counters + _THREADS) * at.scratch_bytes
    while True:
        row = fetch_add(counters + _TAKEN)
        if row >= at.rows:
            break
        to_fixed(p, at.x + row * at.x_bytes, at.memory + row * at.q_bytes, factors + row * at.factor_bytes)
        fetch_add(counters + _CONVERTED)
    wait_for(counters + _CONVERTED, at.rows)
    while True:
        task = fetch_add(counters + _TASKS)
        if task >= at.tasks:
            return
        for panel in range(at.panels * task // at.tasks, at.panels * (task + 1) // at.tasks):
            _panel(p, at, panel, factors, sums)
