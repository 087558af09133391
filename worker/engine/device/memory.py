"""Free memory of a device, for weights and KV blocks."""

from __future__ import annotations

import torch

from worker.sizing import available_host_bytes


def available_bytes(device: torch.device) -> int:
    """Return how many bytes may still be taken on the device; on the CPU inside the limit of the control group."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_host_bytes()
