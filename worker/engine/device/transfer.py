"""Small values to the device and back without a wait for what runs there.

A copy from ordinary host memory waits for all that the device has been given. These go through pinned memory of
torch's host allocator, which takes a piece back only when the copies that use it are done: so what one step stages is
never overwritten while the device still reads it, however far ahead the host is. All copies and all kernels that use
their results are on one stream, the current one of the thread that steps, and so happen in the order of the calls; a
buffer at a fixed address (worker.engine.model.decode_buffers) is overwritten after the step before has read it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A list (of lists) of numbers or a numpy array, as a tensor on the device; an array must not change afterwards."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def download(values: Tensor) -> Tensor:
    """The values on the host, there once the stream has come to this point: see `record_event`."""
    if values.device.type != "cuda":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """An event that has happened when the device has done all that it has been given; None: it has already."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
