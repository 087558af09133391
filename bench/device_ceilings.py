"""What a device can do: bytes of its memory read or written a second, and operations of a large matrix product.

Looked at over and over between the runs that are compared with them, as ceilings.py does it on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from bench.ceilings import Ceilings

_REPEATS = 10


class DeviceCeilingMeter:
    """Measures, and keeps what it measured.

    Holds two buffers of `buffer_bytes`, which should be far larger than the device's cache, and three matrices of
    `side` x `side` in bfloat16. All are filled at random: products of zeros are faster.
    """

    def __init__(self, device: torch.device, buffer_bytes: int, side: int) -> None:
        self._device = device
        generator = torch.Generator(device).manual_seed(0)
        self._from = torch.randn(buffer_bytes // 4, generator=generator, device=device)
        self._to = torch.empty_like(self._from)
        self._matrices = [
            torch.randn(side, side, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(3)
        ]
        self.measured: list[Ceilings] = []

    def measure(self) -> None:
        """One look at each: the better of a copy and a sum, counting bytes read plus bytes written; and a product."""
        size = self._from.numel() * self._from.itemsize
        one, other, out = self._matrices
        copied_s = mean_s(self._device, lambda: self._to.copy_(self._from))
        read_s = mean_s(self._device, self._from.sum)
        product_s = mean_s(self._device, lambda: torch.mm(one, other, out=out))
        self.measured.append(Ceilings(max(2 * size / copied_s, size / read_s), 2 * len(one) ** 3 / product_s))

    def median(self) -> Ceilings:
        """The medians of all looks."""
        return Ceilings(
            median(one.bytes_per_s for one in self.measured), median(one.operations_per_s for one in self.measured)
        )

    def rows(self) -> list[Mapping[str, Any]]:
        """Rows of a report."""
        return [
            spread("ceiling: memory", "GB/s", [one.bytes_per_s / 1e9 for one in self.measured]),
            spread("ceiling: bfloat16 product", "TFLOP/s", [one.operations_per_s / 1e12 for one in self.measured]),
        ]


def spread(case: str, unit: str, values: Sequence[float]) -> dict[str, Any]:
    """A row of a report: the median, and the spread from lowest to highest."""
    return {
        "case": case, "unit": unit, "median": median(values), "low": min(values), "high": max(values),
        "runs": len(values),
    }  # fmt: skip


def now_s(device: torch.device) -> float:
    """The clock, when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def mean_s(device: torch.device, work: Callable[[], Any]) -> float:
    """Seconds that `work` takes on the device, after one call that warms up."""
    work()
    start = now_s(device)
    for _ in range(_REPEATS):
        work()
    return (now_s(device) - start) / _REPEATS
