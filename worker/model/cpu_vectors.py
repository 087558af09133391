"""Pieces of the CPU's attention kernel as LLVM's vector instructions, which numba makes of no loop over addresses.

Each is an intrinsic: numba calls it with the types of what it is given, and it writes the code for one shape, which it
knows from the type of `parameters` (see cpu_kernel.parameters): nothing of a shape is left to find out at run time.
"""

# numba looks at the functions' names and bytecode; it needs no annotations, and has no types for mypy to check.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# How numbers lie in memory; the kind is the length of a field.
KINDS = {"float32": 1, "bfloat16": 2, "float16": 3}
# So many numbers of a product are written out in a row, without a loop.
_UNROLLED = 2048
_LANES = 16
_FAST = ("fast",)
_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)


def _length(typed: Any, name: str) -> int:
    return int(typed.dtype.fields[name].type.shape[0])


def heads_at_once(shared: int, dim: int) -> int:
    """A divisor of `shared`: for so many heads a product is written out."""
    return next(
        heads for heads in range(shared, 0, -1) if heads == 1 or (shared % heads == 0 and heads * dim <= _UNROLLED)
    )


def _pieces(dim: int) -> Iterator[tuple[int, int]]:
    """The vectors [first, first + lanes) that make up so many numbers."""
    first = 0
    while first < dim:
        lanes = _LANES
        while lanes > dim - first:
            lanes //= 2
        yield first, lanes
        first += lanes


def _vector(of: Any, lanes: int) -> Any:
    return ir.VectorType(of, lanes)


def _at(b: Any, address: Any, offset: int, of: Any) -> Any:
    return b.inttoptr(b.add(address, ir.Constant(_I64, offset)), of.as_pointer())


def _load(b: Any, address: Any, offset: int, of: Any, align: int) -> Any:
    loaded = b.load(_at(b, address, offset, of))
    loaded.align = align
    return loaded


def _store(b: Any, value: Any, address: Any, offset: int, align: int) -> None:
    b.store(value, _at(b, address, offset, value.type)).align = align


def _floats(b: Any, address: Any, first: int, lanes: int) -> Any:
    return _load(b, address, 4 * first, _vector(_F32, lanes), 4)


def _widened(b: Any, kind: int, address: Any, first: int, lanes: int) -> Any:
    """Numbers of a kind as float32."""
    if kind == KINDS["float32"]:
        return _floats(b, address, first, lanes)
    if kind == KINDS["float16"]:
        return b.fpext(_load(b, address, 2 * first, _vector(ir.HalfType(), lanes), 2), _vector(_F32, lanes))
    halves = b.zext(_load(b, address, 2 * first, _vector(_I16, lanes), 2), _vector(_I32, lanes))
    return b.bitcast(b.shl(halves, _all(16, lanes)), _vector(_F32, lanes))


def _all(number: int, lanes: int) -> Any:
    return ir.Constant(_vector(_I32, lanes), [number] * lanes)


def _narrowed(b: Any, kind: int, floats: Any, lanes: int) -> Any:
    """Float32 as numbers of a kind, rounded to the nearest, ties to even."""
    if kind == KINDS["float32"]:
        return floats
    if kind == KINDS["float16"]:
        return b.fptrunc(floats, _vector(ir.HalfType(), lanes))
    bits = b.bitcast(floats, _vector(_I32, lanes))
    odd = b.and_(b.lshr(bits, _all(16, lanes)), _all(1, lanes))
    rounded = b.add(bits, b.add(odd, _all(0x7FFF, lanes)))
    return b.trunc(b.lshr(rounded, _all(16, lanes)), _vector(_I16, lanes))


def _spread(b: Any, number: Any, lanes: int) -> Any:
    vector = _vector(_F32, lanes)
    one = b.insert_element(ir.Constant(vector, ir.Undefined), number, ir.Constant(_I32, 0))
    return b.shuffle_vector(one, one, _all(0, lanes))


def _sum(b: Any, vector: Any, lanes: int) -> Any:
    while lanes > 1:
        lanes //= 2
        halves = [
            b.shuffle_vector(vector, vector, ir.Constant(_vector(_I32, lanes), list(range(at, at + lanes))))
            for at in (0, lanes)
        ]
        vector = b.fadd(*halves, flags=_FAST)
    return b.extract_element(vector, ir.Constant(_I32, 0))


@intrinsic
def dots(typingctx, parameters, queries, key, scores, stride):
    """scores[row * stride] = queries[row] . key, for so many rows as are written out at once; queries are float32."""
    dim, kind = _length(parameters, "of_key_dim"), _length(parameters, "of_kind")
    rows = heads_at_once(_length(parameters, "of_shared"), dim)

    def generate(context, b, signature, arguments):
        _, queries, key, scores, stride = arguments
        keys = [(first, lanes, _widened(b, kind, key, first, lanes)) for first, lanes in _pieces(dim)]
        for row in range(rows):
            sums: dict[int, Any] = {}
            for first, lanes, piece in keys:
                product = b.fmul(_floats(b, queries, row * dim + first, lanes), piece, flags=_FAST)
                sums[lanes] = b.fadd(sums[lanes], product, flags=_FAST) if lanes in sums else product
            total = ir.Constant(_F32, 0.0)
            for lanes, vector in sums.items():
                total = b.fadd(total, _sum(b, vector, lanes), flags=_FAST)
            _store(b, total, b.add(scores, b.mul(stride, ir.Constant(_I64, row))), 0, 4)
        return context.get_dummy_value()

    return types.void(parameters, queries, key, scores, stride), generate


def _weighing(positions: int) -> Any:
    @intrinsic
    def weighed(typingctx, parameters, sums, weights, stride, value, value_stride):
        """sums[row] += weights[row * stride + i] * value[i * value_stride], for so many rows; i: so many positions."""
        dim, kind = _length(parameters, "of_value_dim"), _length(parameters, "of_kind")
        rows = heads_at_once(_length(parameters, "of_shared"), _length(parameters, "of_key_dim"))

        def generate(context, b, signature, arguments):
            _, sums, weights, stride, value, value_stride = arguments
            values = [b.add(value, b.mul(value_stride, ir.Constant(_I64, at))) for at in range(positions)]
            of_rows = [b.add(weights, b.mul(stride, ir.Constant(_I64, row))) for row in range(rows)]
            factors = [[_load(b, row, 4 * at, _F32, 4) for at in range(positions)] for row in of_rows]
            for first, lanes in _pieces(dim):
                pieces = [_widened(b, kind, at, first, lanes) for at in values]
                for row in range(rows):
                    total = _floats(b, sums, row * dim + first, lanes)
                    for factor, piece in zip(factors[row], pieces, strict=True):
                        total = b.fadd(total, b.fmul(_spread(b, factor, lanes), piece, flags=_FAST), flags=_FAST)
                    _store(b, total, sums, 4 * (row * dim + first), 4)
            return context.get_dummy_value()

        return types.void(parameters, sums, weights, stride, value, value_stride), generate

    return weighed


weigh, weigh_four = _weighing(1), _weighing(4)


@intrinsic
def widen(typingctx, parameters, floats, numbers, factor):
    """A query as float32, times a factor."""
    dim, kind = _length(parameters, "of_key_dim"), _length(parameters, "of_kind")

    def generate(context, b, signature, arguments):
        _, floats, numbers, factor = arguments
        for first, lanes in _pieces(dim):
            wide = b.fmul(_widened(b, kind, numbers, first, lanes), _spread(b, factor, lanes), flags=_FAST)
            _store(b, wide, floats, 4 * first, 4)
        return context.get_dummy_value()

    return types.void(parameters, floats, numbers, factor), generate


@intrinsic
def narrow(typingctx, parameters, numbers, floats, factor):
    """What a head attends to, times a factor, as numbers."""
    dim, kind = _length(parameters, "of_value_dim"), _length(parameters, "of_kind")
    size = 4 if kind == KINDS["float32"] else 2

    def generate(context, b, signature, arguments):
        _, numbers, floats, factor = arguments
        for first, lanes in _pieces(dim):
            product = b.fmul(_floats(b, floats, first, lanes), _spread(b, factor, lanes), flags=_FAST)
            _store(b, _narrowed(b, kind, product, lanes), numbers, size * first, size)
        return context.get_dummy_value()

    return types.void(parameters, numbers, floats, factor), generate


@intrinsic
def take(typingctx, counter):
    """A counter's number, which nobody else gets."""

    def generate(context, b, signature, arguments):
        return b.atomic_rmw("add", b.inttoptr(arguments[0], _I64.as_pointer()), ir.Constant(_I64, 1), "seq_cst")

    return types.int64(counter), generate


def _pointer_to(what: types.Type) -> Any:
    @intrinsic
    def pointer(typingctx, address):
        """An address as a pointer, for carray."""

        def generate(context, b, signature, arguments):
            return b.inttoptr(arguments[0], context.get_value_type(types.CPointer(what)))

        return types.CPointer(what)(address), generate

    return pointer


floats_at, integers_at = _pointer_to(types.float32), _pointer_to(types.int64)


@intrinsic
def power_of_two(typingctx, exponent):
    """2 ** exponent as a float32, for -126 to 127."""

    def generate(context, b, signature, arguments):
        biased = b.add(b.trunc(arguments[0], _I32), ir.Constant(_I32, 127))
        return b.bitcast(b.shl(biased, ir.Constant(_I32, 23)), _F32)

    return types.float32(exponent), generate
