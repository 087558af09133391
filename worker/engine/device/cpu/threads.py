"""Runs a C function on torch's own threads.

Others would stand beside them: torch's wait for their next work in a loop for a while, on cores that are ours.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch


def run_on_all_threads(function: int, argument: bytes) -> None:
    """Call a function of a pointer, by its address, in as many threads as torch computes with, each once."""
    threads = torch.get_num_threads()
    parallel = _parallel()
    if threads == 1 or parallel is None:
        _ONE(function)(argument)
    else:
        parallel(function, argument, threads, 0)


_ONE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _parallel() -> Callable[[int, bytes, int, int], None] | None:
    """How gcc calls OpenMP, which LLVM's and Intel's understand too; None: torch was built without."""
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except AttributeError:
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel
