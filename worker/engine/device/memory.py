"""Free memory of a device, for weights and KV blocks."""

from __future__ import annotations

import contextlib
import ctypes

import torch

from worker.sizing import available_host_bytes

# Share of the available host memory that adapters may take by default: one part in this many.
_HOST_ADAPTER_SHARE = 8


def available_bytes(device: torch.device) -> int:
    """Return how many bytes may still be taken on the device; on the CPU inside the limit of the control group."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_host_bytes()


def host_adapter_bytes(chosen: int) -> int:
    """Return how many bytes adapters may take in host memory; `chosen`: 0, or so many."""
    return chosen or available_host_bytes() // _HOST_ADAPTER_SHARE


def return_freed_memory() -> None:
    """Return freed memory of this process to the system, after much was freed: glibc keeps it otherwise."""
    # Other C libraries have no such function.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
