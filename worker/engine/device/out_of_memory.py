"""Whether an exception is about memory that is not there: then the step is made smaller, and nobody is at fault."""

from __future__ import annotations

import torch

# What the host's allocator, CUDA's calls, cuBLAS and Triton say, each in its own words.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch or Python has raised this for want of memory; torch's CPU allocator has no class for it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(sign in text for sign in _OUT_OF_MEMORY)
