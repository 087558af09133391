"""Memory for kernels that is kept from call to call: new memory for each would be page faults."""

from __future__ import annotations

import torch


class Workspace:
    """Grows when more is asked for."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32)

    def address(self, floats: int) -> int:
        """Of so many float32, with anything in them, good until the next call."""
        if len(self._memory) < floats:
            self._memory = torch.empty(floats, dtype=torch.float32)
        return self._memory.data_ptr()
