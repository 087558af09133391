"""A step of all decoder layers as one call: the calls of their kernels, recorded, and made one after the other in C.

    thread 1   norm │ q|k|v   │ rotate │ attention │ o    │ ...
    thread 2   norm │ q|k|v   │ rotate │ attention │ o    │ ...
                    └── a thread waits until all have made the call, and the last of them zeroes the kernels' counters

Between two kernels pass less than a microsecond, where a call from Python takes 10 to 20.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from llvmlite import ir
from numba import carray, types
from numpy.typing import NDArray

from loraplex.kernels.compilation import Kernel, compile_kernel
from loraplex.kernels.llvm import I32, I64, emits, fetch_add, int64_pointer, kernel_part, wait_for
from loraplex.kernels.threads import ThreadCall, team_size

_INTEGERS = "table count arrived released entered zeroes zeroed team"


class Program:
    """Recorded calls, made in their order. What their arguments point to must stay where it is."""

    def __init__(self, calls: Sequence[ThreadCall]) -> None:
        """Copy the calls."""
        self._length = len(calls)
        size = max(len(call.argument) for call in calls)
        size += -size % 8
        # Each call's argument as 64-bit integers.
        self.arguments = np.zeros((len(calls), size // 8), np.int64)
        places = self.arguments.ctypes.data + size * np.arange(len(calls))
        lines = [(call.function, place, call.alone) for call, place in zip(calls, places.tolist(), strict=True)]
        self._table = np.array(lines, np.int64)
        self.arguments[:] = [as_integers(call, size // 8) for call in calls]
        # Threads that have made each call; then the number of calls that all have made, and the threads that began.
        self._progress = np.zeros(len(calls) + 2, np.int64)

    def run(self, counters: Sequence[NDArray[np.int64]]) -> None:
        """Make the calls; `counters` are those of all kernels, which are zero for each call."""
        zeroes = np.array([(one.ctypes.data, len(one)) for one in counters], np.int64)
        for one in counters:
            one[:] = 0
        self._progress[:] = 0
        progress = self._progress.ctypes.data
        released = progress + 8 * self._length
        _compiled().run(
            *(self._table.ctypes.data, self._length, progress, released, released + 8),
            *(zeroes.ctypes.data, len(zeroes), _team()),
        )


def as_integers(call: ThreadCall, length: int) -> NDArray[np.int64]:
    """Return a call's argument as 64-bit integers, with zeros behind it."""
    return np.frombuffer(call.argument.ljust(8 * length, b"\0"), np.int64)


def can_run() -> bool:
    """Tell whether threads can learn how many they are: without, they could not wait for each other."""
    return _team() != 0


@cache
def _team() -> int:
    return team_size()


@cache
def _compiled() -> Kernel:
    return compile_kernel(_run, {}, _INTEGERS)


@emits()
def _call(b, function, argument):
    """Call a C function of one pointer."""
    kind = ir.FunctionType(ir.VoidType(), [I64])
    b.call(b.inttoptr(function, kind.as_pointer()), [argument])


@emits(types.int64)
def _count(b, function):
    """Call a C function without parameters that returns an int."""
    kind = ir.FunctionType(I32, [])
    return b.sext(b.call(b.inttoptr(function, kind.as_pointer()), []), I64)


@kernel_part()
def _zero(at):
    lines = carray(int64_pointer(at.zeroes), (at.zeroed, 2))
    for index in range(at.zeroed):
        counters = carray(int64_pointer(lines[index, 0]), (lines[index, 1],))
        for counter in range(len(counters)):
            counters[counter] = 0


def _run(p):
    at = carray(p, 1)[0]
    team = _count(at.team)
    number = fetch_add(at.entered)
    table = carray(int64_pointer(at.table), (at.count, 3))
    for index in range(at.count):
        if number == 0 or table[index, 2] == 0:
            _call(table[index, 0], table[index, 1])
        if fetch_add(at.arrived + 8 * index) == team - 1:
            _zero(at)
            fetch_add(at.released)
        else:
            wait_for(at.released, index + 1)
