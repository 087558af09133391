"""Vector instructions of the CPU's attention kernel, unrolled for one shape.

See worker.engine.device.cpu.llvm. Head dims, the number of query heads per key head, the dtype and that of kept keys
and values are compile-time constants in the type of the kernel's parameters (kernel.attention_parameters). Strides are
in bytes.
"""

# numba compiles these functions from their bytecode, without annotations, so mypy has no types to check.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from worker.engine.device.cpu.llvm import (
    F32,
    FAST,
    I32,
    KINDS,
    broadcast,
    field_length,
    int64,
    kind_bytes,
    load,
    load_as_float32,
    load_floats,
    round_to_kind,
    store,
    sum_lanes,
    vector_pieces,
)

# Maximum number of elements of a product that is unrolled, to bound the code's size and its compile time.
_UNROLLED = 2048


def heads_at_once(shared: int, dim: int) -> int:
    """Return the largest divisor of `shared` whose heads, of `dim` elements each, are unrolled together."""
    return next(
        heads for heads in range(shared, 0, -1) if heads == 1 or (shared % heads == 0 and heads * dim <= _UNROLLED)
    )


@intrinsic
def score_rows(typingctx, parameters, queries, key, scale, scores, stride):
    """Compute scores[row * stride] = queries[row] . key for heads_at_once rows; queries are float32.

    A key of int8 is multiplied by the float32 at `scale`.
    """
    dim, kind = field_length(parameters, "of_key_dim"), field_length(parameters, "of_kept")
    rows = heads_at_once(field_length(parameters, "of_shared"), dim)

    def generate(context, b, signature, arguments):
        _, queries, key, scale, scores, stride = arguments
        factor = load(b, scale, 0, F32, 4) if kind == KINDS["int8"] else None
        keys = [(first, lanes, load_as_float32(b, kind, key, first, lanes)) for first, lanes in vector_pieces(dim)]
        for row in range(rows):
            sums: dict[int, Any] = {}
            for first, lanes, piece in keys:
                product = b.fmul(load_floats(b, queries, row * dim + first, lanes), piece, flags=FAST)
                sums[lanes] = b.fadd(sums[lanes], product, flags=FAST) if lanes in sums else product
            total = ir.Constant(F32, 0.0)
            for lanes, part in sums.items():
                total = b.fadd(total, sum_lanes(b, part, lanes), flags=FAST)
            if factor is not None:
                total = b.fmul(total, factor, flags=FAST)
            store(b, total, b.add(scores, b.mul(stride, int64(row))), 0, 4)
        return context.get_dummy_value()

    return types.void(parameters, queries, key, scale, scores, stride), generate


def _adding_values(positions: int) -> Any:
    @intrinsic
    def add_values(  # noqa: PLR0913, PLR0917 - an address and a stride of each operand
        typingctx, parameters, sums, weights, stride, value, value_stride, scale, scale_stride
    ):
        """Compute sums[row] += weights[row * stride + i] * value[i * value_stride] for heads_at_once rows and all i.

        Values of int8 are multiplied by the float32 at scale[i * scale_stride].
        """
        dim, kind = field_length(parameters, "of_value_dim"), field_length(parameters, "of_kept")
        rows = heads_at_once(field_length(parameters, "of_shared"), field_length(parameters, "of_key_dim"))

        def generate(context, b, signature, arguments):
            _, sums, weights, stride, value, value_stride, scale, scale_stride = arguments
            values = [b.add(value, b.mul(value_stride, int64(at))) for at in range(positions)]
            of_rows = [b.add(weights, b.mul(stride, int64(row))) for row in range(rows)]
            factors = [[load(b, row, 4 * at, F32, 4) for at in range(positions)] for row in of_rows]
            if kind == KINDS["int8"]:
                scales = [load(b, b.add(scale, b.mul(scale_stride, int64(at))), 0, F32, 4) for at in range(positions)]
                factors = [
                    [b.fmul(factor, of, flags=FAST) for factor, of in zip(row, scales, strict=True)] for row in factors
                ]
            for first, lanes in vector_pieces(dim):
                pieces = [load_as_float32(b, kind, at, first, lanes) for at in values]
                for row in range(rows):
                    total = load_floats(b, sums, row * dim + first, lanes)
                    for factor, piece in zip(factors[row], pieces, strict=True):
                        total = b.fadd(total, b.fmul(broadcast(b, factor, lanes), piece, flags=FAST), flags=FAST)
                    store(b, total, sums, 4 * (row * dim + first), 4)
            return context.get_dummy_value()

        return types.void(parameters, sums, weights, stride, value, value_stride, scale, scale_stride), generate

    return add_values


add_value, add_four_values = _adding_values(1), _adding_values(4)


@intrinsic
def widen_query(typingctx, parameters, wide, numbers, factor):
    """Convert a query to float32, multiplied by a factor."""
    dim, kind = field_length(parameters, "of_key_dim"), field_length(parameters, "of_kind")

    def generate(context, b, signature, arguments):
        _, wide, numbers, factor = arguments
        for first, lanes in vector_pieces(dim):
            product = b.fmul(load_as_float32(b, kind, numbers, first, lanes), broadcast(b, factor, lanes), flags=FAST)
            store(b, product, wide, 4 * first, 4)
        return context.get_dummy_value()

    return types.void(parameters, wide, numbers, factor), generate


@intrinsic
def store_attended(typingctx, parameters, numbers, wide, factor):
    """Convert a head's sum of values, multiplied by a factor, to the kernel's dtype."""
    dim, kind = field_length(parameters, "of_value_dim"), field_length(parameters, "of_kind")
    size = kind_bytes(kind)

    def generate(context, b, signature, arguments):
        _, numbers, wide, factor = arguments
        for first, lanes in vector_pieces(dim):
            product = b.fmul(load_floats(b, wide, first, lanes), broadcast(b, factor, lanes), flags=FAST)
            store(b, round_to_kind(b, kind, product, lanes), numbers, size * first, size)
        return context.get_dummy_value()

    return types.void(parameters, numbers, wide, factor), generate


@intrinsic
def power_of_two(typingctx, exponent):
    """Return 2 ** exponent as a float32, for exponents from -126 to 127."""

    def generate(context, b, signature, arguments):
        biased = b.add(b.trunc(arguments[0], I32), ir.Constant(I32, 127))
        return b.bitcast(b.shl(biased, ir.Constant(I32, 23)), F32)

    return types.float32(exponent), generate
