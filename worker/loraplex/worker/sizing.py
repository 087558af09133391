"""The dtype of a model, the memory and cores of this machine, by the same rules for the engine and `loraplex plan`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# The dtypes that are served, with the bytes of a number.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The dtypes of a safetensors header.
_STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Where the kernel shows the limits of this process's control group (version 2).
CONTROL_GROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 62


def own_dtype(config: Mapping[str, Any], stored: str) -> str:
    """Return the dtype of a model by its config.json or, where that has none, by a tensor's dtype in the files."""
    return str(config.get("dtype") or config.get("torch_dtype") or _STORED_DTYPES.get(stored, "float32"))


def cpu_dtype(own: str, *, bfloat16_works: bool = True) -> str:
    """Return the dtype in which a CPU computes a model.

    Products in float16 are slow or missing on CPUs: bfloat16 has a wider range, float32 also the precision.
    """
    if own != "float16":
        return own
    return "bfloat16" if bfloat16_works else "float32"


def slot_numbers(layers: Iterable[tuple[int, int, int]], max_rank: int, max_expert_rank: int) -> int:
    """Return how many numbers an adapter slot on CUDA has for layers: (in_features, out_features, experts or 0)."""
    return sum(
        (max_expert_rank * experts if experts else max_rank) * (inputs + outputs) for inputs, outputs, experts in layers
    )


def available_cores(cores: int) -> int:
    """Return how many of `cores` may be kept busy, inside the CPU limit of the control group, rounded up."""
    try:
        quota, period = map(int, (CONTROL_GROUP / "cpu.max").read_text().split())
    except (OSError, ValueError):  # there is no limit: "max 100000"
        return cores
    return min(cores, -(-quota // period))


def available_host_bytes() -> int:
    """Return how many bytes of memory may still be taken, inside the limit of the control group."""
    return min(_machine_bytes(), _control_group_bytes())


def _machine_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Not Linux: all memory of the machine.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _control_group_bytes() -> int:
    try:
        limit = (CONTROL_GROUP / "memory.max").read_text().strip()
        used = int((CONTROL_GROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return _UNLIMITED
    return _UNLIMITED if limit == "max" else max(0, int(limit) - used)
