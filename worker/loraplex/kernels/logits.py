"""The CPU's kernels over logits. A row is a task, taken by the next free thread.

Masks of grammars: logits become -inf where a row's mask has no bit. torch's masked_fill_ needs a byte for each id
instead, and takes several times as long. Words of 32 ids that are all allowed are skipped.

Best ids: the first of a row's largest logits. torch's max takes five times as long and more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numpy.typing import NDArray
from torch import Tensor

from loraplex.kernels.compilation import Kernel, compile_kernel
from loraplex.kernels.llvm import (
    F32,
    I1,
    I32,
    I64,
    KINDS,
    LANES,
    broadcast,
    each_vector,
    emits,
    fetch_add,
    fold_lanes,
    int32_pointer,
    int64,
    int64_pointer,
    kind_bytes,
    load,
    load_as_float32,
    store,
    vector_of,
    vector_type,
)

# Number of ids of a word of a mask.
_IDS = 32
# 64-bit integers of a line of the table `rows`: the addresses of a row's logits and of its mask.
_ROW_FIELDS = 2
# Parameters of the masking kernel: `minus_infinity` is the address of _IDS elements, `counter` that of the number of
# tasks taken, a 64-bit integer.
_MASKING = "rows row_count vocab number_bytes minus_infinity counter"
# Parameters of the kernel of best ids: `ids` is the address of an int64 for each row.
_BEST = "logits row_bytes row_count vocab ids counter"
# Minimum number of logits that threads share.
_SHARED = 65_536


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
    return compile_kernel(_apply, {"of_bytes": number_bytes}, _MASKING)


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


def best_ids(logits: Tensor, kind: str) -> Tensor:
    """Return the best id of each row of logits [rows, vocab], of a dtype in KINDS: int64 [rows].

    It is -1 where the largest logit is not finite, or one of the row is not a number.
    """
    assert logits.stride(-1) == 1, "the logits of a row are contiguous"
    rows, vocab = logits.shape
    ids, counter = torch.empty(rows, dtype=torch.int64), np.zeros(1, dtype=np.int64)
    kernel = compile_best(kind)
    (kernel.run if rows > 1 and rows * vocab >= _SHARED else kernel.run_alone)(
        *(logits.data_ptr(), logits.stride(0) * logits.element_size(), rows, vocab),
        *(ids.data_ptr(), counter.ctypes.data),
    )
    return ids


@cache
def compile_best(kind: str) -> Kernel:
    """Compile the kernel for a dtype in KINDS. Threads called with the same `counter` share the rows."""
    return compile_kernel(_choose, {"of_kind": KINDS[kind]}, _BEST)


@emits(types.int64)
def _best_of(b, p, logits, count):
    """Return the best id of a row."""
    kind = p.constant("of_kind")
    states = {lanes: _Best(b, lanes) for lanes in (LANES, 1)}

    def emit(index, lanes, vectors):
        address = b.add(logits, b.mul(index, int64(kind_bytes(kind))))
        for vector in range(vectors):
            first = b.add(index, int64(vector * lanes))
            states[lanes].add(load_as_float32(b, kind, address, vector * lanes, lanes), first)

    each_vector(b, count, emit, 4)
    (most, place, bad), (last, last_place, last_bad) = (state.reduce() for state in states.values())
    # The ids of single lanes are the last.
    is_last = b.fcmp_ordered(">", last, most)
    most, place = b.select(is_last, last, most), b.select(is_last, last_place, place)
    infinity = ir.Constant(F32, float("inf"))
    finite = b.and_(b.fcmp_ordered("<", most, infinity), b.fcmp_ordered(">", most, ir.Constant(F32, float("-inf"))))
    usable = b.and_(finite, b.not_(b.or_(bad, last_bad)))
    return b.select(usable, b.sext(place, I64), int64(-1))


class _Best:
    """The largest number of each lane, the first index at which it is, and whether a number was none."""

    def __init__(self, b: Any, lanes: int) -> None:
        self._b, self._lanes = b, lanes
        self._first = ir.Constant(vector_type(I32, lanes), list(range(lanes)))
        starts = (vector_of(F32, float("-inf"), lanes), vector_of(I32, 0, lanes), vector_of(I1, 0, lanes))
        self._memory = [cgutils.alloca_once(b, start.type) for start in starts]
        for start, memory in zip(starts, self._memory, strict=True):
            b.store(start, memory)

    def add(self, numbers: Any, index: Any) -> None:
        """Look at the numbers from an index on."""
        b, lanes = self._b, self._lanes
        most, place, bad = map(b.load, self._memory)
        larger = b.fcmp_ordered(">", numbers, most)
        here = b.add(broadcast(b, b.trunc(index, I32), lanes), self._first)
        news = b.select(larger, numbers, most), b.select(larger, here, place), b.fcmp_unordered("uno", numbers, numbers)
        for new, memory in zip((*news[:2], b.or_(bad, news[2])), self._memory, strict=True):
            b.store(new, memory)

    def reduce(self) -> tuple[Any, Any, Any]:
        """Return the largest number of all lanes, its first index, and whether any was none."""
        b, lanes = self._b, self._lanes
        numbers, places, bad = map(b.load, self._memory)
        most = fold_lanes(b, numbers, lanes, lambda one, other: b.select(b.fcmp_ordered(">", one, other), one, other))
        among = b.select(
            b.fcmp_ordered("==", numbers, broadcast(b, most, lanes)), places, vector_of(I32, 2**31 - 1, lanes)
        )
        place = fold_lanes(b, among, lanes, lambda one, other: b.select(b.icmp_signed("<", one, other), one, other))
        return most, place, fold_lanes(b, bad, lanes, b.or_)


def _choose(p):
    at = carray(p, 1)[0]
    while True:
        row = fetch_add(at.counter)
        if row >= at.row_count:
            return
        ids = carray(int64_pointer(at.ids), (at.row_count,))
        ids[row] = _best_of(p, at.logits + row * at.row_bytes, at.vocab)
