"""How the kernels are compiled: by numba, once for each type of parameters, and kept beside their files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from numba import cfunc, types
from numba.np.numpy_support import from_dtype

from worker.engine.device.cpu import llvm


def parameter_dtype(integers: Sequence[str], reals: Sequence[str], made_for: Mapping[str, int]) -> np.dtype[Any]:
    """What a kernel is given: 64-bit integers (addresses, numbers, strides in bytes) and float32.

    The kernel is compiled for the numbers in `made_for`: they are the lengths of the last fields, and nobody looks at
    what is in those.
    """
    return np.dtype(
        [(name, "i8") for name in integers]
        + [(name, "f4") for name in reals]
        + [(name, "i1", (length,)) for name, length in made_for.items()]
    )


def compile_kernel(kernel: Callable[..., None], given: np.dtype[Any], pieces: ModuleType) -> Any:
    """A function of a pointer to such parameters: its `address` is C's. Takes some seconds, once.

    `pieces` are the intrinsics of its own that it is made of.
    """
    signature = types.void(types.CPointer(from_dtype(given)))
    named = _named(kernel, given, pieces)
    try:
        return cfunc(signature, cache=True)(named)
    except RuntimeError:  # nowhere to keep it
        return cfunc(signature)(named)


def _named(kernel: Callable[..., None], given: np.dtype[Any], pieces: ModuleType) -> Callable[..., None]:
    """The same function, by a name that nothing else has which would be compiled to something else.

    numba keeps what it compiles by a function's name: it would not see that the pieces have changed, and of two
    processes that compile it for two types one might get the other's.
    """
    assert isinstance(kernel, FunctionType), "a function of Python"
    digest = sha256(repr(given.descr).encode())
    for module in (llvm, pieces, inspect.getmodule(kernel)):
        digest.update(inspect.getsource(module).encode() if module else b"")
    named = FunctionType(kernel.__code__, kernel.__globals__)
    # numba's cache goes by the qualified name, which a copy takes from the code.
    named.__qualname__ = named.__name__ = f"{kernel.__name__}_{digest.hexdigest()[:16]}"
    return named
