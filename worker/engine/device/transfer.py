"""Transfers of small values to the device and back that do not wait for the device.

A copy from pageable host memory waits for all work queued on the device. These copies go through pinned memory of
torch's caching host allocator, which reuses a block only after the copies from it are done: values of one step are
never overwritten while the device still reads them, however far ahead the host is. All copies, and all kernels that
read them, are on the current stream of the thread that runs steps, so they happen in the order of the calls; a buffer
at a fixed address (worker.engine.model.decode_buffers) is overwritten after the step before has read it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy (nested) lists of numbers, or a numpy array that must not change afterwards, to the device."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def download(values: Tensor) -> Tensor:
    """Return a host copy of the values, complete once the stream has reached this call: see record_event."""
    if values.device.type != "cuda":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that completes when all work queued so far is done; None on the CPU, where it is done."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
