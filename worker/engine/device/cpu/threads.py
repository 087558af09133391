"""Running a C function on torch's own OpenMP threads.

Threads of our own would compete with torch's, which spin on the same cores for a while after each operator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch


def run_on_all_threads(function: int, argument: bytes) -> None:
    """Call a C function of one pointer, given by its address, once in each of torch's intra-op threads."""
    threads = torch.get_num_threads()
    parallel = _parallel()
    if threads == 1 or parallel is None:
        _ONE(function)(argument)
    else:
        parallel(function, argument, threads, 0)


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
