"""The kernel that writes keys and values into a KV cache of int8: each token's head with a scale of its own.

The arithmetic is that of the CPU's kernel (worker.engine.attention.cpu.codes), to the bit.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker.engine.attention.cuda.kernels.tiles import tile_size
from worker.engine.attention.kv_cache import KvCache
from worker.engine.attention.paged import LayerCall
from worker.engine.device.kernel_call import KernelCall

# Bits of the smallest magnitude that a scale is made of, 2 ** -119: below it a scale would not be a normal number.
_LEAST_BITS: tl.constexpr = tl.constexpr((127 - 119) << 23)
# Added to a number below 2 ** 22 it leaves the nearest whole number in the lowest bits.
_ROUNDING: tl.constexpr = tl.constexpr(1.5 * 2**23)


@triton.jit
def _store_codes(numbers, codes, scale, DIM: tl.constexpr, DIM_TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    dims = tl.arange(0, DIM_TILE)
    x = tl.load(numbers + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    # Bits of magnitudes, read as integers, keep the numbers' order: infinity above, NaN above all.
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    most = tl.maximum(tl.max(bits, 0), _LEAST_BITS).to(tl.float32, bitcast=True)
    factor = tl.math.div_rn(most, 127.0)
    tl.store(scale, factor)
    rounded = tl.math.div_rn(x, tl.zeros([DIM_TILE], tl.float32) + factor) + _ROUNDING
    tl.store(codes + dims, rounded.to(tl.int32, bitcast=True).to(tl.int8), mask=dims < DIM)


@triton.jit
def write_heads(  # type: ignore[no-untyped-def]
    keys,
    values,
    slots,
    key_codes,
    value_codes,
    key_scales,
    value_scales,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """Write a token's key and value of one head. Grid: token, key head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = tl.load(slots + token).to(tl.int64) * KV_HEADS + head
    key = keys + token * key_stride + head * key_head_stride
    _store_codes(key, key_codes + place * DIM, key_scales + place, DIM, DIM_TILE)
    value = values + token * value_stride + head * value_head_stride
    _store_codes(value, value_codes + place * VALUE_DIM, value_scales + place, VALUE_DIM, VALUE_TILE)


def write_call(call: LayerCall, slots: Tensor, cache: KvCache) -> KernelCall:
    """Return the launch that writes a call's keys and values into slots [tokens] of a cache of int8."""
    key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (call.key, call.value))
    (key_codes, value_codes), (key_scales, value_scales) = cache.slots[call.layer], cache.scales[call.layer]
    tokens, kv_heads, dim = key.shape
    value_dim = value.shape[-1]
    return KernelCall(
        write_heads,
        (tokens, kv_heads),
        {
            "keys": key, "values": value, "slots": slots, "key_codes": key_codes, "value_codes": value_codes,
            "key_scales": key_scales, "value_scales": value_scales,
            "key_stride": key.stride(0), "key_head_stride": key.stride(1),
            "value_stride": value.stride(0), "value_head_stride": value.stride(1),
        },
        {
            "KV_HEADS": kv_heads, "DIM": dim, "DIM_TILE": tile_size(dim), "VALUE_DIM": value_dim,
            "VALUE_TILE": tile_size(value_dim),
        },
        warps=1,
        stages=1,
    )  # fmt: skip
