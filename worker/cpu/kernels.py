"""How the kernels are compiled: by numba, once for each type of parameters, and kept beside their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numba import cfunc, types
from numba.np.numpy_support import from_dtype

from worker.cpu import vectors


def parameters(
    integers: Sequence[str], reals: Sequence[str], made_for: Mapping[str, int], pieces: ModuleType
) -> np.dtype[Any]:
    """What a kernel is given: 64-bit integers (addresses, numbers, strides in bytes) and float32.

    The kernel is compiled for the numbers in `made_for`: they are the lengths of the last fields, and nobody looks at
    what is in those. `pieces` are the intrinsics of its own that it is made of.
    """
    # numba keeps what it compiled of the kernel's file, and would not see that another one, which it uses, has changed.
    digest = sha256()
    for module in (vectors, pieces):
        digest.update(Path(str(module.__file__)).read_bytes())
    lengths = {**made_for, "pieces " + digest.hexdigest()[:16]: 1}
    return np.dtype(
        [(name, "i8") for name in integers]
        + [(name, "f4") for name in reals]
        + [(name, "i1", (length,)) for name, length in lengths.items()]
    )


def compiled(kernel: Callable[..., None], given: np.dtype[Any]) -> Any:
    """A function of a pointer to such parameters: its `address` is C's. Takes some seconds, once."""
    signature = types.void(types.CPointer(from_dtype(given)))
    try:
        return cfunc(signature, cache=True)(kernel)
    except RuntimeError:  # nowhere to keep it
        return cfunc(signature)(kernel)
