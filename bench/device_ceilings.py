"""A device's ceilings: bytes of its memory read or written a second, and operations a second of a large matrix product.

Benchmarks measure both again between their runs, as with ceilings.py on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from bench.ceilings import Ceilings

# Calls of an operation in a measurement, whose mean counts.
_REPEATS = 10


class DeviceCeilingMeter:
    """Measures the ceilings and keeps all measurements.

    The meter has two buffers of `buffer_bytes`, which should be far larger than the device's cache, and three matrices
    of `side` x `side` in bfloat16. All are random, because products of zeros are faster.
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
        """Measure both ceilings: bandwidth by the faster of a copy (read and written) and a sum, rate by a product."""
        size = self._from.numel() * self._from.itemsize
        left, right, product = self._matrices
        copied_s = mean_s(self._device, lambda: self._to.copy_(self._from))
        read_s = mean_s(self._device, self._from.sum)
        product_s = mean_s(self._device, lambda: torch.mm(left, right, out=product))
        self.measured.append(Ceilings(max(2 * size / copied_s, size / read_s), 2 * len(left) ** 3 / product_s))

    def median(self) -> Ceilings:
        """Return the medians of all measurements."""
        return Ceilings(
            median(measurement.bytes_per_s for measurement in self.measured),
            median(measurement.operations_per_s for measurement in self.measured),
        )

    def rows(self) -> list[Mapping[str, Any]]:
        """Return the rows of a report."""
        return [
            spread("ceiling: memory", "GB/s", [ceilings.bytes_per_s / 1e9 for ceilings in self.measured]),
            spread(
                "ceiling: bfloat16 product", "TFLOP/s", [ceilings.operations_per_s / 1e12 for ceilings in self.measured]
            ),
        ]


def spread(case: str, unit: str, values: Sequence[float]) -> dict[str, Any]:
    """Return a row of a report: the median, and the spread from lowest to highest."""
    return {
        "case": case, "unit": unit, "median": median(values), "low": min(values), "high": max(values),
        "runs": len(values),
    }  # fmt: skip


def now_s(device: torch.device) -> float:
    """Wait until the device has finished its work, then return the time of perf_counter."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def mean_s(device: torch.device, work: Callable[[], Any]) -> float:
    """Return the mean seconds that `work` takes on the device, after one call as a warm-up."""
    work()
    start = now_s(device)
    for _ in range(_REPEATS):
        work()
    return (now_s(device) - start) / _REPEATS
