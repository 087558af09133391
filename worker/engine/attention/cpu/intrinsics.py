"""Pieces of the CPU's attention kernel as vector instructions: intrinsics for one shape, whole products at a time.

See worker.engine.device.cpu.llvm; the shape is in the type of cpu_kernel's parameters, so nothing of it is left
to find out at run time.
"""

# numba looks at the functions' names and bytecode; it needs no annotations, and has no types for mypy to check.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from worker.engine.device.cpu.llvm import (
    F32,
    FAST,
    I32,
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
    widened,
)

# So many numbers of a product are written out in a row, without a loop.
_UNROLLED = 2048


def heads_at_once(shared: int, dim: int) -> int:
    """A divisor of `shared`: for so many heads a product is written out."""
    return next(
        heads for heads in range(shared, 0, -1) if heads == 1 or (shared % heads == 0 and heads * dim <= _UNROLLED)
    )


def _pieces(dim: int) -> Iterator[tuple[int, int]]:
    """The vectors [first, first + lanes) that make up so many numbers."""
    first = 0
    while first < dim:
        lanes = LANES
        while lanes > dim - first:
            lanes //= 2
        yield first, lanes
        first += lanes


@intrinsic
def dots(typingctx, parameters, queries, key, scores, stride):
    """scores[row * stride] = queries[row] . key, for so many rows as are written out at once; queries are float32."""
    dim, kind = length(parameters, "of_key_dim"), length(parameters, "of_kind")
    rows = heads_at_once(length(parameters, "of_shared"), dim)

    def generate(context, b, signature, arguments):
        _, queries, key, scores, stride = arguments
        keys = [(first, lanes, widened(b, kind, key, first, lanes)) for first, lanes in _pieces(dim)]
        for row in range(rows):
            sums: dict[int, Any] = {}
            for first, lanes, piece in keys:
                product = b.fmul(floats(b, queries, row * dim + first, lanes), piece, flags=FAST)
                sums[lanes] = b.fadd(sums[lanes], product, flags=FAST) if lanes in sums else product
            total = ir.Constant(F32, 0.0)
            for lanes, part in sums.items():
                total = b.fadd(total, sum_of(b, part, lanes), flags=FAST)
            store(b, total, b.add(scores, b.mul(stride, integer(row))), 0, 4)
        return context.get_dummy_value()

    return types.void(parameters, queries, key, scores, stride), generate


def _weighing(positions: int) -> Any:
    @intrinsic
    def weighed(typingctx, parameters, sums, weights, stride, value, value_stride):
        """sums[row] += weights[row * stride + i] * value[i * value_stride], for so many rows; i: so many positions."""
        dim, kind = length(parameters, "of_value_dim"), length(parameters, "of_kind")
        rows = heads_at_once(length(parameters, "of_shared"), length(parameters, "of_key_dim"))

        def generate(context, b, signature, arguments):
            _, sums, weights, stride, value, value_stride = arguments
            values = [b.add(value, b.mul(value_stride, integer(at))) for at in range(positions)]
            of_rows = [b.add(weights, b.mul(stride, integer(row))) for row in range(rows)]
            factors = [[load(b, row, 4 * at, F32, 4) for at in range(positions)] for row in of_rows]
            for first, lanes in _pieces(dim):
                pieces = [widened(b, kind, at, first, lanes) for at in values]
                for row in range(rows):
                    total = floats(b, sums, row * dim + first, lanes)
                    for factor, piece in zip(factors[row], pieces, strict=True):
                        total = b.fadd(total, b.fmul(spread(b, factor, lanes), piece, flags=FAST), flags=FAST)
                    store(b, total, sums, 4 * (row * dim + first), 4)
            return context.get_dummy_value()

        return types.void(parameters, sums, weights, stride, value, value_stride), generate

    return weighed


weigh, weigh_four = _weighing(1), _weighing(4)


@intrinsic
def widen(typingctx, parameters, wide, numbers, factor):
    """A query as float32, times a factor."""
    dim, kind = length(parameters, "of_key_dim"), length(parameters, "of_kind")

    def generate(context, b, signature, arguments):
        _, wide, numbers, factor = arguments
        for first, lanes in _pieces(dim):
            product = b.fmul(widened(b, kind, numbers, first, lanes), spread(b, factor, lanes), flags=FAST)
            store(b, product, wide, 4 * first, 4)
        return context.get_dummy_value()

    return types.void(parameters, wide, numbers, factor), generate


@intrinsic
def narrow(typingctx, parameters, numbers, wide, factor):
    """What a head attends to, times a factor, as numbers."""
    dim, kind = length(parameters, "of_value_dim"), length(parameters, "of_kind")
    size = bytes_of(kind)

    def generate(context, b, signature, arguments):
        _, numbers, wide, factor = arguments
        for first, lanes in _pieces(dim):
            product = b.fmul(floats(b, wide, first, lanes), spread(b, factor, lanes), flags=FAST)
            store(b, narrowed(b, kind, product, lanes), numbers, size * first, size)
        return context.get_dummy_value()

    return types.void(parameters, numbers, wide, factor), generate


@intrinsic
def power_of_two(typingctx, exponent):
    """2 ** exponent as a float32, for -126 to 127."""

    def generate(context, b, signature, arguments):
        biased = b.add(b.trunc(arguments[0], I32), ir.Constant(I32, 127))
        return b.bitcast(b.shl(biased, ir.Constant(I32, 23)), F32)

    return types.float32(exponent), generate
