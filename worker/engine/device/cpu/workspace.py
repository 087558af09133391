"""Scratch memory that kernels keep from call to call: new memory for each call would cost page faults."""

from __future__ import annotations

import torch


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
