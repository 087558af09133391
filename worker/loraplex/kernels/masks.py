"""The CPU's kernel that applies the masks of grammars: logits become -inf where a row's mask has no bit.

torch's masked_fill_ needs a byte for each id instead, and takes several times as long. A row is a task, taken by the
next free thread. Words of 32 ids that are all allowed are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray
from numpy.typing import NDArray
from torch import Tensor

from loraplex.kernels.compilation import Kernel, compile_kernel
from loraplex.kernels.llvm import (
    emits,
    fetch_add,
    int32_pointer,
    int64_pointer,
    load,
    store,
    vector_type,
)

# Number of ids of a word of a mask.
_IDS = 32
# 64-bit integers of a line of the table `rows`: the addresses of a row's logits and of its mask.
_ROW_FIELDS = 2
# `minus_infinity` is the address of _IDS elements, `counter` that of the number of tasks taken, a 64-bit integer.
_INTEGERS = "rows row_count vocab number_bytes minus_infinity counter"


def apply_masks(logits: Tensor, rows: Sequence[int], masks: Sequence[NDArray[np.int32]]) -> None:
    """Set logits [rows, vocab] in place to -inf where the masks, int32 [words], of these rows have no bit."""
    vocab, size = logits.shape[-1], logits.element_size()
    # The kernel checks nothing: with other sizes it would read and write outside these arrays.
    assert logits.stride(-1) == 1, "the logits of a row are contiguous"
    assert all(mask.flags.c_contiguous and len(mask) * _IDS >= vocab for mask in masks), "a bit for each id"
    first, stride = logits.data_ptr(), logits.stride(0) * size
    addresses = [(first + row * stride, mask.ctypes.data) for row, mask in zip(rows, masks, strict=True)]
    table, counter = np.array(addresses, dtype=np.int64), np.zeros(1, dtype=np.int64)
    minus_infinity = torch.full((_IDS,), float("-inf"), dtype=logits.dtype)
    compile_masking(size).run(
        *(table.ctypes.data, len(rows), vocab, size, minus_infinity.data_ptr(), counter.ctypes.data)
    )


@cache
def compile_masking(number_bytes: int) -> Kernel:
    """Compile the kernel for logits of 2 or 4 bytes each. Threads called with the same `counter` share the rows."""
    return compile_kernel(_apply, {"of_bytes": number_bytes}, _INTEGERS)


def _forbidding(lanes: int) -> Any:
    @emits()
    def forbid(b, p, logits, bits):
        """Set so many logits from an address on to -inf where the lowest bits of an int32 are 0."""
        size = p.constant("of_bytes")

        # -inf and logits are taken for integers, which are as long in every dtype.
        vector = vector_type(ir.IntType(8 * size), lanes)
        lowest = bits if lanes == _IDS else b.trunc(bits, ir.IntType(lanes))
        allowed = b.bitcast(lowest, vector_type(ir.IntType(1), lanes))
        minus_infinity = load(b, p.load("minus_infinity"), 0, vector, size)
        store(b, b.select(allowed, load(b, logits, 0, vector, size), minus_infinity), logits, 0, size)

    return forbid


_forbid_id, _forbid_word = _forbidding(1), _forbidding(_IDS)


def _apply(p):
    at = carray(p, 1)[0]
    words, rest, size = at.vocab // _IDS, at.vocab % _IDS, at.number_bytes
    while True:
        index = fetch_add(at.counter)
        if index >= at.row_count:
            return
        line = carray(int64_pointer(at.rows), (at.row_count, _ROW_FIELDS))[index]
        logits, mask = line[0], carray(int32_pointer(line[1]), (words + 1,))
        for word in range(words):
            if mask[word] != -1:
                _forbid_word(p, logits + word * _IDS * size, mask[word])
        for token in range(rest):
            _forbid_id(p, logits + (words * _IDS + token) * size, np.int32(mask[words] >> token))
