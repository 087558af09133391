"""Compiling the CPU kernels with numba: once for each parameter dtype, cached on disk beside their modules."""

from __future__ import annotations

import fcntl
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from struct import Struct
from types import FunctionType, ModuleType
from typing import IO, Any

import numpy as np
from numba import cfunc, types
from numba.core.caching import FunctionCache
from numba.np.numpy_support import from_dtype

from loraplex.kernels import llvm, threads

# Maximum time in seconds that a process waits for another that compiles the same kernel, which takes a few; a process
# that was stopped would hold up all others.
_WAIT_S = 60.0
# Interval in seconds at which the lock is tried.
_RETRY_S = 0.02


class Kernel:
    """A compiled kernel: a C function at `address`, of a pointer to its parameters."""

    def __init__(self, compiled: Any, layout: str) -> None:
        self.address: int = compiled.address
        self.compiled = compiled  # keeps the code
        self._layout = Struct(layout)

    def run(self, *parameters: float) -> None:
        """Call the kernel in all of torch's threads."""
        threads.run_on_all_threads(self.address, self._layout.pack(*parameters))

    def run_alone(self, *parameters: float) -> None:
        """Call the kernel in this thread."""
        threads.run_on_this_thread(self.address, self._layout.pack(*parameters))


def compile_kernel(
    kernel: Callable[..., None],
    constants: Mapping[str, int],
    integers: str,
    reals: str = "",
    emitting: Sequence[ModuleType] = (),
) -> Kernel:
    """Compile a kernel. Takes some seconds where it is not cached.

    Its parameters are 64-bit integers (addresses, counts, strides in bytes), then float32. The `constants` are known
    when it is compiled: they are encoded as the lengths of further fields, whose contents are never read, because numba
    specializes a kernel by its parameters' type (see llvm.KernelArgs). `emitting` are modules whose code it calls.
    """
    numbers, floats = integers.split(), reals.split()
    fields = [(name, "i8") for name in numbers] + [(name, "f4") for name in floats]
    parameters = np.dtype([*fields, *((name, "i1", (length,)) for name, length in constants.items())])
    signature = types.void(types.CPointer(from_dtype(parameters)))
    named = _named(kernel, parameters, emitting)
    try:
        with _one_process_at_a_time(Path(FunctionCache(named).cache_path) / f"{named.__name__}.lock"):
            compiled = cfunc(signature, cache=True)(named)
    except (RuntimeError, OSError):  # no writable cache folder
        compiled = cfunc(signature)(named)
    return Kernel(compiled, f"={len(numbers)}q{len(floats)}f")


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


def _named(
    kernel: Callable[..., None], parameters: np.dtype[Any], emitting: Sequence[ModuleType]
) -> Callable[..., None]:
    """Return the function under a name that contains a digest of its sources and of its parameters' dtype.

    numba's cache is keyed by a function's name and its own file: without the digest it would miss changes of what
    emits code, and two processes that compile for different dtypes could read each other's entry.
    """
    assert isinstance(kernel, FunctionType), "a function of Python"
    digest = sha256(repr(parameters.descr).encode())
    for module in (llvm, *emitting, inspect.getmodule(kernel)):
        digest.update(inspect.getsource(module).encode() if module else b"")
    named = FunctionType(kernel.__code__, kernel.__globals__)
    # numba's cache goes by the qualified name, which a copy takes from the code.
    named.__qualname__ = named.__name__ = f"{kernel.__name__}_{digest.hexdigest()[:16]}"
    return named
