"""Compiling the CPU kernels with numba: once for each parameter dtype, cached on disk beside their modules."""

from __future__ import annotations

import fcntl
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import FunctionType, ModuleType
from typing import IO, Any

import numpy as np
from numba import cfunc, types
from numba.core.caching import FunctionCache
from numba.np.numpy_support import from_dtype

from worker.engine.kernels import llvm

# Maximum time in seconds that a process waits for another that compiles the same kernel, which takes a few; a process
# that was stopped would hold up all others.
_WAIT_S = 60.0
# Interval in seconds at which the lock is tried.
_RETRY_S = 0.02


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
        with _one_process_at_a_time(Path(FunctionCache(named).cache_path) / f"{named.__name__}.lock"):
            return cfunc(signature, cache=True)(named)
    except (RuntimeError, OSError):  # no writable cache folder
        return cfunc(signature)(named)


@contextmanager
def _one_process_at_a_time(path: Path) -> Iterator[None]:
    """Hold a lock while a kernel is compiled: processes that start together find in the cache what one has compiled."""
    with path.open("wb") as file:
        give_up = time.monotonic() + _WAIT_S
        while not _locked(file) and time.monotonic() < give_up:
            time.sleep(_RETRY_S)
        yield
        # Processes that wait have the file open already; later ones find the kernel in the cache.
        path.unlink(missing_ok=True)


def _locked(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _named(kernel: Callable[..., None], parameters: np.dtype[Any], *intrinsics: ModuleType) -> Callable[..., None]:
    """Return the function under a name that contains a digest of its sources and of its parameters' dtype.

    numba's cache is keyed by a function's name and its own file: without the digest it would miss changes of the
    intrinsics, and two processes that compile for different dtypes could read each other's entry.
    """
    assert isinstance(kernel, FunctionType), "a function of Python"
    digest = sha256(repr(parameters.descr).encode())
    for module in (llvm, *intrinsics, inspect.getmodule(kernel)):
        digest.update(inspect.getsource(module).encode() if module else b"")
    named = FunctionType(kernel.__code__, kernel.__globals__)
    # numba's cache goes by the qualified name, which a copy takes from the code.
    named.__qualname__ = named.__name__ = f"{kernel.__name__}_{digest.hexdigest()[:16]}"
    return named
