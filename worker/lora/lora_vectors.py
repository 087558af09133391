"""Pieces of the CPU's LoRA kernel as vector instructions: products and sums of as many numbers as there are.

See worker.cpu.vectors. Rows of x, sums and what is made of them are float32; weights and outputs are numbers of the
kind that the kernel is made for. Strides are in bytes, lengths in numbers.
"""

# numba looks at the functions' names and bytecode; it needs no annotations, and has no types for mypy to check.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from worker.cpu.vectors import (
    F32,
    I32,
    I64,
    LANES,
    bytes_of,
    floats,
    integer,
    length,
    load,
    narrowed,
    spread,
    store,
    sum_of,
    vector,
    widened,
)

# A dot product is so many sums of vectors at the same time: one alone would wait for itself.
_CHAINS = 2
# A product and the sum that it goes into may be one instruction; nothing is put in another order, so that a row's
# numbers are the same however many rows are computed with it.
_FUSED = ("contract",)


def _each(b: Any, count: Any, body: Callable[[Any, int, int], None], unrolled: int = 1) -> None:
    """Call body(index, lanes, vectors) for all of `count` numbers: so many vectors of so many lanes from the index."""
    start = integer(0)
    for lanes, vectors in dict.fromkeys([(LANES, unrolled), (LANES, 1), (1, 1)]):
        step = integer(lanes * vectors)
        end = b.sub(count, b.srem(count, step))
        with cgutils.for_range_slice(b, start, end, step, I64) as (index, _):
            body(index, lanes, vectors)
        start = end


def _lines(b: Any, address: Any, stride: Any, count: int) -> list[Any]:
    return [b.add(address, b.mul(stride, integer(index))) for index in range(count)]


def _bytes(b: Any, count: Any, size: int) -> Any:
    return b.mul(count, integer(size))


def _offset(b: Any, address: Any, index: Any, size: int) -> Any:
    return b.add(address, _bytes(b, index, size))


def _dots(rows: int, ranks: int) -> Any:
    @intrinsic
    def dots(typingctx, parameters, x, weights, count, out, out_stride):
        """out[row, rank] = x[row] . weights[rank], for so many rows and ranks, all but out's rows side by side."""
        kind = length(parameters, "of_kind")

        def generate(context, b, signature, arguments):
            _, x, weights, count, out, out_stride = arguments
            of_x = _lines(b, x, _bytes(b, count, 4), rows)
            of_weights = _lines(b, weights, _bytes(b, count, bytes_of(kind)), ranks)

            def zeros(lanes):
                return cgutils.alloca_once_value(b, ir.Constant(vector(F32, lanes), [0.0] * lanes))

            # Sums in vectors, one chain of additions for each; and of the numbers that fill no vector.
            pairs = [(row, rank) for row in range(rows) for rank in range(ranks)]
            sums = {pair: [zeros(LANES) for _ in range(_CHAINS)] for pair in pairs}
            rest = {pair: [zeros(1)] for pair in pairs}

            def body(index, lanes, vectors):
                for part in range(vectors):
                    first = part * lanes
                    xs = [floats(b, _offset(b, line, index, 4), first, lanes) for line in of_x]
                    ws = [
                        widened(b, kind, _offset(b, line, index, bytes_of(kind)), first, lanes) for line in of_weights
                    ]
                    for pair in pairs:
                        place = (sums if lanes == LANES else rest)[pair][part]
                        product = b.fmul(xs[pair[0]], ws[pair[1]], flags=_FUSED)
                        b.store(b.fadd(b.load(place), product, flags=_FUSED), place)

            _each(b, count, body, _CHAINS)
            for row, rank in pairs:
                total = b.load(sums[row, rank][0])
                for place in sums[row, rank][1:]:
                    total = b.fadd(total, b.load(place), flags=_FUSED)
                last = b.extract_element(b.load(rest[row, rank][0]), ir.Constant(I32, 0))
                total = b.fadd(sum_of(b, total, LANES), last, flags=_FUSED)
                store(b, total, b.add(out, b.mul(out_stride, integer(row))), 4 * rank, 4)
            return context.get_dummy_value()

        return types.void(parameters, x, weights, count, out, out_stride), generate

    return dots


def _weigh(rows: int, ranks: int) -> Any:
    @intrinsic
    def weigh(typingctx, parameters, sums, factors, factors_stride, weights, weights_stride, count):
        """sums[row] += sum over ranks of factors[row, rank] * weights[rank]; the rows of sums lie side by side."""
        kind = length(parameters, "of_kind")

        def generate(context, b, signature, arguments):
            _, sums, factors, factors_stride, weights, weights_stride, count = arguments
            of_sums, of_weights = _lines(b, sums, _bytes(b, count, 4), rows), _lines(b, weights, weights_stride, ranks)
            by_row = [
                [load(b, line, 4 * rank, F32, 4) for rank in range(ranks)]
                for line in _lines(b, factors, factors_stride, rows)
            ]

            def body(index, lanes, _):
                ws = [widened(b, kind, _offset(b, line, index, bytes_of(kind)), 0, lanes) for line in of_weights]
                for line, factors_of_row in zip(of_sums, by_row, strict=True):
                    place = _offset(b, line, index, 4)
                    total = floats(b, place, 0, lanes)
                    for factor, piece in zip(factors_of_row, ws, strict=True):
                        total = b.fadd(total, b.fmul(spread(b, factor, lanes), piece, flags=_FUSED), flags=_FUSED)
                    store(b, total, place, 0, 4)

            _each(b, count, body)
            return context.get_dummy_value()

        return types.void(parameters, sums, factors, factors_stride, weights, weights_stride, count), generate

    return weigh


# So many rows of one adapter share what is read of it.
ROWS = 4
dots, dots_of_rows, dots_of_rows_two = _dots(1, 1), _dots(ROWS, 1), _dots(ROWS, 2)
weigh, weigh_four = _weigh(1, 1), _weigh(1, 4)
weigh_rows, weigh_rows_four = _weigh(ROWS, 1), _weigh(ROWS, 4)


@intrinsic
def widen(typingctx, parameters, wide, numbers, count):
    """So many numbers as float32."""
    kind = length(parameters, "of_kind")

    def generate(context, b, signature, arguments):
        _, wide, numbers, count = arguments

        def body(index, lanes, _):
            piece = widened(b, kind, _offset(b, numbers, index, bytes_of(kind)), 0, lanes)
            store(b, piece, _offset(b, wide, index, 4), 0, 4)

        _each(b, count, body)
        return context.get_dummy_value()

    return types.void(parameters, wide, numbers, count), generate


def _adding(*, rescaled: bool) -> Any:
    @intrinsic
    def added(typingctx, parameters, numbers, wide, gain, shift, count):
        """Numbers += wide, rounded once; `rescaled` they are first multiplied by 1 + gain, and shift added."""
        kind = length(parameters, "of_kind")
        size = bytes_of(kind)

        def generate(context, b, signature, arguments):
            _, numbers, wide, gain, shift, count = arguments

            def body(index, lanes, _):
                place = _offset(b, numbers, index, size)
                own, total = widened(b, kind, place, 0, lanes), floats(b, _offset(b, wide, index, 4), 0, lanes)
                if rescaled:
                    gained = b.fmul(own, widened(b, kind, _offset(b, gain, index, size), 0, lanes), flags=_FUSED)
                    shifted = b.fadd(gained, widened(b, kind, _offset(b, shift, index, size), 0, lanes), flags=_FUSED)
                    total = b.fadd(total, shifted, flags=_FUSED)
                store(b, narrowed(b, kind, b.fadd(own, total, flags=_FUSED), lanes), place, 0, size)

            _each(b, count, body)
            return context.get_dummy_value()

        return types.void(parameters, numbers, wide, gain, shift, count), generate

    return added


add, rescale_and_add = _adding(rescaled=False), _adding(rescaled=True)
