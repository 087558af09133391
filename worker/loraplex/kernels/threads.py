"""Runs a C function on torch's own OpenMP threads, with scratch memory that stays from call to call.

Threads of our own would compete with torch's, which spin on the same cores for a while after each operator. It stands
apart from `compilation`, which needs numba: a worker on a GPU may lack that.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class ThreadCall:
    """A call of a C function, given by its address, with a pointer to `argument`; in one thread if `alone`."""

    function: int
    argument: bytes
    alone: bool


def run_on_all_threads(function: int, argument: bytes) -> None:
    """Call a C function of one pointer, given by its address, once in each of torch's intra-op threads."""
    threads = torch.get_num_threads()
    parallel = _parallel()
    if _recorder.calls is not None:
        _recorder.calls.append(ThreadCall(function, argument, alone=False))
    elif threads == 1 or parallel is None:
        _ONE(function)(argument)
    else:
        parallel(function, argument, threads, 0)


def run_on_this_thread(function: int, argument: bytes) -> None:
    """Call a C function of one pointer, given by its address."""
    if _recorder.calls is not None:
        _recorder.calls.append(ThreadCall(function, argument, alone=True))
    else:
        _ONE(function)(argument)


@contextmanager
def recorded_calls() -> Iterator[list[ThreadCall]]:
    """Record the calls that this thread makes, instead of making them."""
    before, calls = _recorder.calls, list[ThreadCall]()
    _recorder.calls = calls
    try:
        yield calls
    finally:
        _recorder.calls = before


class _Recorder(threading.local):
    """The calls that a thread records; None where it makes them."""

    calls: list[ThreadCall] | None = None


_recorder = _Recorder()
_ONE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _parallel() -> Callable[[int, bytes, int, int], None] | None:
    """Return libgomp's GOMP_parallel, which LLVM's and Intel's OpenMP provide too; None if torch has no OpenMP."""
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except AttributeError:
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


class Workspace:
    """A float32 buffer that grows to the largest size asked for."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32)

    @property
    def memory(self) -> torch.Tensor:
        """Return the buffer, as it is now: whoever keeps it keeps its addresses valid."""
        return self._memory

    def address(self, floats: int) -> int:
        """Return the address of `floats` uninitialized float32, valid until the next call."""
        if len(self._memory) < floats:
            self._memory = torch.empty(floats, dtype=torch.float32)
        return self._memory.data_ptr()
