"""Compiling the CPU kernels with numba: once for each parameter dtype, cached on disk beside their modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from numba import cfunc, types
from numba.np.numpy_support import from_dtype

from worker.engine.device.cpu import counters, llvm


def parameter_dtype(integers: Sequence[str], reals: Sequence[str], made_for: Mapping[str, int]) -> np.dtype[Any]:
    """Return the dtype of a kernel's parameters: 64-bit integers (addresses, counts, strides in bytes), then float32.

    `made_for` are compile-time constants. They are encoded as the lengths of further fields, whose contents are never
    read, because numba specializes a kernel by its parameters' type (see llvm.field_length).
    """
    return np.dtype(
        [(name, "i8") for name in integers]
        + [(name, "f4") for name in reals]
        + [(name, "i1", (length,)) for name, length in made_for.items()]
    )


def compile_kernel(kernel: Callable[..., None], parameters: np.dtype[Any], *intrinsics: ModuleType) -> Any:
    """Compile a kernel to a C function of a pointer to its parameters, whose address is the result's `address`.

    Takes some seconds where it is not cached. `intrinsics` are the modules of the kernel's own intrinsics.
    """
    signature = types.void(types.CPointer(from_dtype(parameters)))
    named = _named(kernel, parameters, *intrinsics)
    try:
        return cfunc(signature, cache=True)(named)
    except RuntimeError:  # no writable cache folder
        return cfunc(signature)(named)


def _named(kernel: Callable[..., None], parameters: np.dtype[Any], *intrinsics: ModuleType) -> Callable[..., None]:
    """Return the function under a name that contains a digest of its sources and of its parameters' dtype.

    numba's cache is keyed by a function's name and its own file: without the digest it would miss changes of the
    intrinsics, and two processes that compile for different dtypes could read each other's entry.
    """
    assert isinstance(kernel, FunctionType), "a function of Python"
    digest = sha256(repr(parameters.descr).encode())
    for module in (llvm, counters, *intrinsics, inspect.getmodule(kernel)):
        digest.update(inspect.getsource(module).encode() if module else b"")
    named = FunctionType(kernel.__code__, kernel.__globals__)
    # numba's cache goes by the qualified name, which a copy takes from the code.
    named.__qualname__ = named.__name__ = f"{kernel.__name__}_{digest.hexdigest()[:16]}"
    return named
