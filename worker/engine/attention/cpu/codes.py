"""The CPU's kernel that writes keys and values into a KV cache of int8, compiled by numba for one shape.

    for each token and head:
        scale = largest magnitude / 127
        code = number / scale, rounded to nearest, ties to even

The division is IEEE's, as in the kernel for CUDA, so that equal numbers have equal codes everywhere. One thread writes:
a step's keys and values are few numbers.
"""

# numba compiles these functions from their bytecode, without annotations, so mypy has no types to check.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from functools import cache
from struct import Struct
from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor

from worker.engine.attention.kv_cache import KvCache
from worker.engine.attention.paged import LayerCall
from worker.engine.device.cpu import compilation, threads
from worker.engine.device.cpu.llvm import (
    F32,
    I8,
    I32,
    KINDS,
    ROUNDING,
    broadcast,
    field_length,
    fold_lanes,
    int64_pointer,
    load_as_float32,
    store,
    vector_of,
    vector_pieces,
    vector_type,
)
from worker.engine.device.dtypes import dtype_name

_INTEGERS = (
    "keys key_token key_head values value_token value_head slots tokens kv_heads key_codes value_codes key_scales "
    "value_scales key_dim value_dim"
)
_LAYOUT = Struct("=15q")
# Bits of the smallest magnitude that a scale is made of, 2 ** -119: below it a scale would not be a normal number.
_LEAST_BITS = (127 - 119) << 23


def write_codes(call: LayerCall, slots: Tensor, cache: KvCache) -> None:
    """Write a call's keys and values into slots [tokens] of a cache of int8."""
    key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (call.key, call.value))
    (key_codes, value_codes), (key_scales, value_scales) = cache.slots[call.layer], cache.scales[call.layer]
    tokens, kv_heads, key_dim = key.shape
    number = key.element_size()
    kernel = _kernel(key_dim, value.shape[-1], dtype_name(key.dtype))
    parameters = _LAYOUT.pack(
        *(key.data_ptr(), key.stride(0) * number, key.stride(1) * number),
        *(value.data_ptr(), value.stride(0) * number, value.stride(1) * number),
        *(slots.data_ptr(), tokens, kv_heads, key_codes.data_ptr(), value_codes.data_ptr()),
        *(key_scales.data_ptr(), value_scales.data_ptr(), key_dim, value.shape[-1]),
    )
    threads.run_on_this_thread(kernel.address, parameters)


@cache
def _kernel(key_dim: int, value_dim: int, kind: str) -> Any:
    made_for = {"of_key_dim": key_dim, "of_value_dim": value_dim, "of_kind": KINDS[kind]}
    return compilation.compile_kernel(_write, compilation.parameter_dtype(_INTEGERS.split(), [], made_for))


def _storing(dim_field: str) -> Any:
    @intrinsic
    def store_codes(typingctx, parameters, numbers, codes, scale):
        """Store a head's numbers as codes, and their scale."""
        dim, kind = field_length(parameters, dim_field), field_length(parameters, "of_kind")

        def generate(context, b, signature, arguments):
            _, numbers, codes, scale = arguments
            parts = [
                (first, lanes, load_as_float32(b, kind, numbers, first, lanes)) for first, lanes in vector_pieces(dim)
            ]
            magnitudes = [(lanes, _magnitude_bits(b, part, lanes)) for _, lanes, part in parts]
            most = ir.Constant(I32, _LEAST_BITS)

            def larger(one, other):
                return b.select(b.icmp_signed(">", one, other), one, other)

            for lanes, bits in magnitudes:
                most = larger(most, fold_lanes(b, bits, lanes, larger))
            factor = b.fdiv(b.bitcast(most, F32), ir.Constant(F32, 127.0))
            store(b, factor, scale, 0, 4)
            for first, lanes, part in parts:
                # Only the lowest byte is kept, in which ROUNDING has no bits.
                rounded = b.fadd(b.fdiv(part, broadcast(b, factor, lanes)), vector_of(F32, ROUNDING, lanes))
                bits = b.bitcast(rounded, vector_type(I32, lanes))
                store(b, b.trunc(bits, vector_type(I8, lanes)), codes, first, 1)
            return context.get_dummy_value()

        return types.void(parameters, numbers, codes, scale), generate

    return store_codes


def _magnitude_bits(b, part, lanes):
    """Return the bits of magnitudes: as integers they are ordered as the numbers are, infinity above, NaN above all."""
    return b.and_(b.bitcast(part, vector_type(I32, lanes)), vector_of(I32, 0x7FFFFFFF, lanes))


_store_key, _store_value = _storing("of_key_dim"), _storing("of_value_dim")


def _write(p):
    at = carray(p, 1)[0]
    slots = carray(int64_pointer(at.slots), (at.tokens,))
    for token in range(at.tokens):
        for head in range(at.kv_heads):
            place = slots[token] * at.kv_heads + head
            key = at.keys + token * at.key_token + head * at.key_head
            _store_key(p, key, at.key_codes + place * at.key_dim, at.key_scales + place * 4)
            value = at.values + token * at.value_token + head * at.value_head
            _store_value(p, value, at.value_codes + place * at.value_dim, at.value_scales + place * 4)
