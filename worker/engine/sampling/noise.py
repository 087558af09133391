"""Sampling noise: a pure function of (seed, choice, position, token id).

There is no generator state: a row draws the same noise alone and in any batch, after a preemption, on another worker
after a crash, on the CPU and on CUDA.
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

_KEY = struct.Struct("<QQQ")
_LANES = struct.Struct("<ii")


def row_key(seed: int, choice: int, position: int) -> tuple[int, int]:
    """Return two signed 32-bit integers, a hash of a position in an answer."""
    digest = hashlib.blake2b(_KEY.pack(seed, choice, position), digest_size=8).digest()
    first, second = _LANES.unpack(digest)
    return first, second


def gumbel_noise(keys: Tensor, ids: Tensor) -> Tensor:
    """Compute standard Gumbel noise: keys [rows, 2] int32 and token ids [rows or 1, n] int32 to float32 [rows, n].

    The token with the largest logit plus noise is a draw from softmax(logits) (the Gumbel-max trick).
    """
    bits = _mix(_mix(ids + keys[:, :1]).add_(keys[:, 1:]))
    # 31 bits as a number in (0, 1); small numbers, which give large noise, keep their precision.
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """Hash 32-bit integers in place, by a bijection in which each input bit flips about half of the output bits.

    The constants are those of lowbias32 (https://nullprogram.com/blog/2018/07/31/). Shifts are logical: int32 keeps its
    sign bit otherwise.
    """
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x
