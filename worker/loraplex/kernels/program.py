"""A step of all decoder layers as one call: the calls of their kernels, recorded, and made one after the other in C.

    thread 1   norm │ q|k|v   │ rotate │ attention │ o    │ ...
    thread 2        │ q|k|v   │        │ attention │ o    │ ...
                    └── the last thread that leaves a call ends it, and zeroes the kernels' counters

Threads that are in a call share its work. One that comes later, because other processes had its core, goes on with the
call that is made then. Between two kernels pass less than a microsecond, where a call from Python takes 10 to 20.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from llvmlite import ir
from numba import carray
from numpy.typing import NDArray

from loraplex.kernels.compilation import Kernel, compile_kernel
from loraplex.kernels.llvm import (
    I64,
    compare_exchange,
    emits,
    fetch_add,
    int64_pointer,
    kernel_part,
    load_counter,
    wait_for,
)
from loraplex.kernels.threads import ThreadCall

# `inside` are the numbers of threads that are in each call, `ended` is the number of calls that have ended.
_INTEGERS = "table count inside ended zeroes zeroed"
# The number of threads in a call that has ended.
_ENDED = -1


class Program:
    """Recorded calls, made in their order. What their arguments point to must stay where it is."""

    def __init__(self, calls: Sequence[ThreadCall], counters: Sequence[NDArray[np.int64]]) -> None:
        """Copy the calls; `counters` are those of all kernels, which are zero for each call."""
        size = max(len(call.argument) for call in calls)
        size += -size % 8
        # Each call's argument as 64-bit integers.
        self.arguments = np.zeros((len(calls), size // 8), np.int64)
        places = self.arguments.ctypes.data + size * np.arange(len(calls))
        lines = [(call.function, place, call.alone) for call, place in zip(calls, places.tolist(), strict=True)]
        self._table = np.array(lines, np.int64)
        self.arguments[:] = [as_integers(call, size // 8) for call in calls]
        # The numbers `inside`, and behind them `ended`.
        self._progress = np.zeros(len(calls) + 1, np.int64)
        self._counters = counters
        self._zeroes = np.array([(one.ctypes.data, len(one)) for one in counters], np.int64)
        table, inside, zeroes = (part.ctypes.data for part in (self._table, self._progress, self._zeroes))
        self._parameters = table, len(calls), inside, inside + 8 * len(calls), zeroes, len(counters)

    def run(self) -> None:
        """Make the calls."""
        for one in self._counters:
            one[:] = 0
        self._progress[:] = 0
        _compiled().run(*self._parameters)


def as_integers(call: ThreadCall, length: int) -> NDArray[np.int64]:
    """Return a call's argument as 64-bit integers, with zeros behind it."""
    return np.frombuffer(call.argument.ljust(8 * length, b"\0"), np.int64)


@cache
def _compiled() -> Kernel:
    return compile_kernel(_run, {}, _INTEGERS)


@emits()
def _call(b, function, argument):
    """Call a C function of one pointer."""
    kind = ir.FunctionType(ir.VoidType(), [I64])
    b.call(b.inttoptr(function, kind.as_pointer()), [argument])


@kernel_part()
def _zero(at):
    lines = carray(int64_pointer(at.zeroes), (at.zeroed, 2))
    for index in range(at.zeroed):
        counters = carray(int64_pointer(lines[index, 0]), (lines[index, 1],))
        for counter in range(len(counters)):
            counters[counter] = 0


@kernel_part()
def _enter(inside, alone):
    """Tell whether this thread is in a call from now on: it has not ended, and another is not alone in it."""
    while True:
        threads = load_counter(inside)
        if threads == _ENDED or (alone and threads):
            return False
        if compare_exchange(inside, threads, threads + 1) == threads:
            return True


@kernel_part()
def _leave(inside):
    """Tell whether this thread was the last in a call, which has ended by that."""
    while True:
        threads = load_counter(inside)
        others = threads - 1 if threads > 1 else _ENDED
        if compare_exchange(inside, threads, others) == threads:
            return others == _ENDED


def _run(p):
    at = carray(p, 1)[0]
    table = carray(int64_pointer(at.table), (at.count, 3))
    index = 0
    while index < at.count:
        inside = at.inside + 8 * index
        if _enter(inside, table[index, 2]):
            _call(table[index, 0], table[index, 1])
            if _leave(inside):
                _zero(at)
                fetch_add(at.ended)
        wait_for(at.ended, index + 1)
        index = load_counter(at.ended)
