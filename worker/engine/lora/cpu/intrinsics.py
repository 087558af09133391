"""Vector instructions of the CPU's LoRA kernel: shrink_RxK and expand_R, for R rows and K ranks at a time.

See worker.engine.device.cpu.llvm. `shrunk` is float32; x, y, A, B, gain and shift have the kernel's dtype. Strides are
in bytes, lengths in elements.
"""

# numba compiles these functions from their bytecode, without annotations, so mypy has no types to check.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from itertools import chain
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from worker.engine.device.cpu.llvm import (
    CONTRACT,
    F32,
    I32,
    I64,
    LANES,
    broadcast,
    each_vector,
    field_length,
    int64,
    kind_bytes,
    load,
    load_as_float32,
    load_field,
    round_to_kind,
    store,
    sum_lanes,
    vector_of,
)


def _lines(b: Any, address: Any, stride: Any, count: int) -> list[Any]:
    return [b.add(address, b.mul(stride, int64(index))) for index in range(count)]


def _bytes(b: Any, count: Any, size: int) -> Any:
    return b.mul(count, int64(size))


def _offset(b: Any, address: Any, index: Any, size: int) -> Any:
    return b.add(address, _bytes(b, index, size))


def _shrinking(rows: int, ranks: int) -> Any:
    @intrinsic
    def shrink(typingctx, parameters, x, weights, count, out):
        """Compute out[row, rank] = x[row] . weights[rank] for `rows` rows and `ranks` contiguous ranks of A."""
        kind = field_length(parameters, "of_kind")
        size = kind_bytes(kind)

        def generate(context, b, signature, arguments):
            p, x, weights, count, out = arguments
            of_x = _lines(b, x, load_field(b, parameters, p, "x_bytes"), rows)
            of_weights = _lines(b, weights, _bytes(b, count, size), ranks)
            of_out = _lines(b, out, load_field(b, parameters, p, "shrunk_bytes"), rows)

            def zeros(lanes):
                return cgutils.alloca_once_value(b, vector_of(F32, 0.0, lanes))

            # For each pair of row and rank a vector of sums, and a scalar sum of the elements that fill no vector.
            pairs = [(row, rank) for row in range(rows) for rank in range(ranks)]
            sums = {(pair, lanes): zeros(lanes) for pair in pairs for lanes in (LANES, 1)}

            def body(index, lanes, _):
                xs = [load_as_float32(b, kind, _offset(b, line, index, size), 0, lanes) for line in of_x]
                ws = [load_as_float32(b, kind, _offset(b, line, index, size), 0, lanes) for line in of_weights]
                for pair in pairs:
                    place = sums[pair, lanes]
                    product = b.fmul(xs[pair[0]], ws[pair[1]], flags=CONTRACT)
                    b.store(b.fadd(b.load(place), product, flags=CONTRACT), place)

            each_vector(b, count, body)
            for row, rank in pairs:
                whole, rest = (b.load(sums[(row, rank), lanes]) for lanes in (LANES, 1))
                last = b.extract_element(rest, ir.Constant(I32, 0))
                total = b.fadd(sum_lanes(b, whole, LANES), last, flags=CONTRACT)
                store(b, total, of_out[row], 4 * rank, 4)
            return context.get_dummy_value()

        return types.void(parameters, x, weights, count, out), generate

    return shrink


def _expanding(rows: int, vectors: int, *, rescaled: bool) -> Any:
    @intrinsic
    def expand(typingctx, parameters, y, factors, ranks, weights, change, count):
        """Compute y[row] += sum over ranks of factors[row, rank] * weights[rank] for `rows` rows, rounded once.

        `weights` are the address of B's first rank and the stride of ranks. With `rescaled`, y + gain * y + shift takes
        the place of y; `change` are the addresses of gain and shift.
        """
        kind = field_length(parameters, "of_kind")
        size = kind_bytes(kind)

        def generate(context, b, signature, arguments):
            p, y, factors, ranks, weights, change, count = arguments
            weights, weights_stride, gain, shift = (
                b.extract_value(two, at) for two in (weights, change) for at in (0, 1)
            )
            of_y = _lines(b, y, load_field(b, parameters, p, "y_bytes"), rows)
            of_factors = _lines(b, factors, load_field(b, parameters, p, "shrunk_bytes"), rows)

            def body(index, lanes, vectors):
                parts = [part * lanes for part in range(vectors)]
                zeros = vector_of(F32, 0.0, lanes)
                totals = [[cgutils.alloca_once_value(b, zeros) for _ in parts] for _ in of_y]
                for place in chain(*totals):
                    b.store(zeros, place)
                first = _offset(b, weights, index, size)
                with cgutils.for_range_slice(b, int64(0), ranks, int64(1), I64) as (rank, _):
                    line = b.add(first, b.mul(rank, weights_stride))
                    ws = [load_as_float32(b, kind, line, part, lanes) for part in parts]
                    for places, of_row in zip(totals, of_factors, strict=True):
                        factor = broadcast(b, load(b, _offset(b, of_row, rank, 4), 0, F32, 4), lanes)
                        for place, piece in zip(places, ws, strict=True):
                            b.store(b.fadd(b.load(place), b.fmul(factor, piece, flags=CONTRACT), flags=CONTRACT), place)
                gains, shifts = (_offset(b, address, index, size) for address in (gain, shift))
                for places, of_row in zip(totals, of_y, strict=True):
                    here = _offset(b, of_row, index, size)
                    for place, part in zip(places, parts, strict=True):
                        own, total = load_as_float32(b, kind, here, part, lanes), b.load(place)
                        if rescaled:
                            gained = b.fmul(own, load_as_float32(b, kind, gains, part, lanes), flags=CONTRACT)
                            shifted = b.fadd(gained, load_as_float32(b, kind, shifts, part, lanes), flags=CONTRACT)
                            total = b.fadd(total, shifted, flags=CONTRACT)
                        value = round_to_kind(b, kind, b.fadd(own, total, flags=CONTRACT), lanes)
                        store(b, value, here, part * size, size)

            each_vector(b, count, body, vectors)
            return context.get_dummy_value()

        return types.void(parameters, y, factors, ranks, weights, change, count), generate

    return expand


# Number of rows of one adapter that share each read of its weights.
ROWS = 4
shrink_1x1, shrink_1x4 = _shrinking(1, 1), _shrinking(1, 4)
shrink_4x1, shrink_4x4 = _shrinking(ROWS, 1), _shrinking(ROWS, 4)
expand_1, expand_4 = _expanding(1, 24, rescaled=False), _expanding(ROWS, 4, rescaled=False)
expand_dora_1, expand_dora_4 = _expanding(1, 24, rescaled=True), _expanding(ROWS, 4, rescaled=True)
