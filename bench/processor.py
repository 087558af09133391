"""Measure the processor's maximum rate of arithmetic by bare loops of its widest instructions in registers.

    float32    vfmadd231ps   2 operations for each of V lanes, V = 16 with AVX-512, 8 with AVX2
    bfloat16   vdpbf16ps     4; with AMX tdpbf16ps, 16,384 for tiles of 16 x 32 and 32 x 16
    int8       vpdpbusd      8, with AVX-512 VNNI

Each instruction adds to so many sums in turn that none waits for the one before it.
"""

from __future__ import annotations

import time
from functools import cache

import numpy as np
import torch
from llvmlite import ir
from numba import carray
from numba.core import cgutils

from loraplex.kernels import tiles, weight_vectors
from loraplex.kernels.compilation import Kernel, compile_kernel
from loraplex.kernels.llvm import FEATURES, I32, emits, fetch_add, kernel_part, load, store, vector_type
from loraplex.kernels.tiles import add_products, begin_sums, configure, release, uses_tiles, write_sums
from loraplex.kernels.weight_vectors import FLOATS, PAIRS, TILES, V

# Products of int8, beside those of the engine's kernels.
_CODES = 5
_INSTRUCTIONS = {FLOATS: "vfmadd231ps", PAIRS: "vdpbf16ps", _CODES: "vpdpbusd"}
# Sums in registers: AVX2 has 16, and two are the factors.
_SUMS = 16 if V == 16 else 12
# Operations of a pass of each loop; a multiply-add is two.
_OPERATIONS = {FLOATS: _SUMS * 2 * V, PAIRS: _SUMS * 4 * V, _CODES: _SUMS * 8 * V, TILES: 4 * 2 * 16 * 32 * 16}
# Passes of a measurement: some milliseconds, so that few of them lose their core to somebody else.
_PASSES = {FLOATS: 400_000, PAIRS: 400_000, _CODES: 400_000, TILES: 100_000}
# Bytes of a thread's memory: sums, rows and columns of tiles, and what `configure` needs.
_SUM_BYTES, _ROW_BYTES, _MEMORY_BYTES = 4096, 2048, 20 * 1024


@cache
def products() -> dict[str, int]:
    """Return the widest products that this processor has, by the dtype of what they multiply."""
    if not {"+avx2", "+fma"} <= set(FEATURES):
        return {}
    of_bfloat16 = tiles.bfloat16_products(tiles.COLUMNS)
    has_codes = V == 16 and "+avx512vnni" in FEATURES
    found = {"float32": FLOATS, "bfloat16": of_bfloat16, "int8": _CODES if has_codes else FLOATS}
    return {dtype: kind for dtype, kind in found.items() if kind != FLOATS or dtype == "float32"}


def operations_per_s(dtype: str) -> float:
    """Measure the operations a second of the widest products of a dtype in all threads; 0.0 if there are none."""
    kind = products().get(dtype)
    if kind is None:
        return 0.0
    threads = torch.get_num_threads()
    memory, counters = np.zeros(threads * _MEMORY_BYTES // 8, np.int64), np.zeros(1, np.int64)
    loop = _compiled(kind)
    start = time.perf_counter()
    loop.run(_PASSES[kind], memory.ctypes.data, counters.ctypes.data)
    return threads * _PASSES[kind] * _OPERATIONS[kind] / (time.perf_counter() - start)


@cache
def _compiled(kind: int) -> Kernel:
    return compile_kernel(_loop, {"of_products": kind}, "passes memory counters", emitting=(weight_vectors, tiles))


@emits()
def _multiply_registers(b, p, passes, memory):
    """Add products to sums in turn. These begin with what is in memory, so that LLVM does not take them for one."""
    instruction = _INSTRUCTIONS.get(p.constant("of_products"))
    if instruction is None:
        return
    kind = vector_type(I32, V)
    register = "v" if V == 16 else "x"
    product = ir.InlineAsm(
        ir.FunctionType(kind, [kind] * 3), f"{instruction} $2, $1, $0", f"={register},{register},{register},0"
    )
    one, other = (load(b, memory, 4 * V * (_SUMS + at), kind, 4) for at in range(2))
    sums = [cgutils.alloca_once(b, kind) for _ in range(_SUMS)]
    for at, total in enumerate(sums):
        b.store(load(b, memory, 4 * V * at, kind, 4), total)
    with cgutils.for_range(b, passes):
        for total in sums:
            b.store(b.call(product, [one, other, b.load(total)]), total)
    for at, total in enumerate(sums):
        store(b, b.load(total), memory, 4 * V * at, 4)


@kernel_part()
def _multiply_tiles(p, passes, memory):
    """Add the products of two tiles of rows and two of columns, all of them in a core's first-level cache."""
    x, weights, tile_memory = memory + _SUM_BYTES, memory + _SUM_BYTES + _ROW_BYTES, memory + 2 * _SUM_BYTES
    configure(p, tile_memory, tiles.ROWS)
    begin_sums(p, tile_memory)
    for _ in range(passes):
        add_products(p, tile_memory, tiles.ROWS, x, 2 * tiles.COLUMNS, weights)
    write_sums(p, tile_memory, tiles.ROWS, memory)
    release(p)


def _loop(p):
    at = carray(p, 1)[0]
    memory = at.memory + fetch_add(at.counters) * _MEMORY_BYTES
    if uses_tiles(p):
        _multiply_tiles(p, at.passes, memory)
    else:
        _multiply_registers(p, at.passes, memory)
