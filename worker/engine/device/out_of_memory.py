"""Recognizing exceptions that mean out of memory: the step is then made smaller, and no sequence fails for it."""

from __future__ import annotations

import torch

# Parts of the messages of torch's CPU allocator, CUDA, cuBLAS and Triton.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether the error means out of memory; torch's CPU allocator has no exception class for it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(sign in text for sign in _OUT_OF_MEMORY)
