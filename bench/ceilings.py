"""The machine's ceilings: bytes read and operations a second, the best of whatever does not depend on our kernels.

    bytes        torch's sum of numbers, mkldnn's linear layers with one row
    operations   a bare loop of the widest instruction (processor.py), mkldnn's linear layers with many rows

Benchmarks measure both again between their runs, because the ceilings of a shared machine change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import linear

from bench.mkldnn import PackedWeight, packing_works

# Features of the measured layer: the MLP of qwen2-0.4b.
_OUT, _IN = 4864, 896
# Bytes of all weights: far more than a processor's cache, so that no weight is still cached at its next use.
WEIGHTS_BYTES = 384 * 2**20
_DTYPE = torch.bfloat16
# Number of weights that the arithmetic's products use in turn.
_ROWS_WEIGHTS = 3


@dataclass(frozen=True)
class CeilingSize:
    """The bytes of weights that are read, and the rows of the products that are computed."""

    weights_bytes: int = WEIGHTS_BYTES
    rows: int = 512


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second that are read, and operations a second in bfloat16; a multiply-add counts as two operations."""

    bytes_per_s: float
    operations_per_s: float


class CeilingMeter:
    """Measures the ceilings and keeps all measurements; its weights stay in memory as long as it does."""

    def __init__(self, size: CeilingSize) -> None:
        self._rows = size.rows
        weight_bytes = _OUT * _IN * _DTYPE.itemsize
        count = max(_ROWS_WEIGHTS, size.weights_bytes // weight_bytes)
        packs = packing_works(_DTYPE)
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(_OUT, _IN, generator=generator).to(_DTYPE)
        self._linears = [PackedWeight(weight) if packs else _plain(weight.clone()) for _ in range(count)]
        self._bytes = count * weight_bytes
        self._numbers = torch.ones(self._bytes // 4)
        self.measured: list[Ceilings] = []

    @torch.inference_mode()
    def measure(self) -> None:
        """Measure both ceilings, in a fraction of a second. The better of two passes counts: the first may be cold."""
        x = torch.randn(1, _IN).to(_DTYPE)
        many = torch.randn(self._rows, _IN).to(_DTYPE)
        read_s = min(_pass_s(*read) for read in (([torch.sum], self._numbers), (self._linears, x)) for _ in range(2))
        compute_s = min(_pass_s(self._linears[:_ROWS_WEIGHTS], many) for _ in range(2))
        operations = 2 * self._rows * _OUT * _IN * _ROWS_WEIGHTS
        bare = max(arithmetic_per_s("bfloat16") for _ in range(2))
        self.measured.append(Ceilings(self._bytes / read_s, max(bare, operations / compute_s)))

    def median(self) -> Ceilings:
        """Return the medians of all measurements."""
        return Ceilings(
            median(measurement.bytes_per_s for measurement in self.measured),
            median(measurement.operations_per_s for measurement in self.measured),
        )

    def rows(self) -> list[dict[str, object]]:
        """Return the rows of a report: the median, and the spread from lowest to highest."""
        bandwidths = [measurement.bytes_per_s / 1e9 for measurement in self.measured]
        rates = [measurement.operations_per_s / 1e9 for measurement in self.measured]
        return [
            {
                "case": case,
                "unit": unit,
                "median": median(values),
                "low": min(values),
                "high": max(values),
                "runs": len(values),
            }
            for case, unit, values in (
                ("ceiling: memory read", "GB/s", bandwidths),
                ("ceiling: arithmetic in bfloat16", "GFLOP/s", rates),
            )
        ]


def arithmetic_per_s(dtype: str) -> float:
    """Measure the bare loop for products of a dtype, or, where the processor has none, that of float32."""
    # Compiled with numba, which a machine with a GPU may not have.
    from bench import processor

    return processor.operations_per_s(dtype) or processor.operations_per_s("float32")


def _plain(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: linear(x, weight)


def _pass_s(layers: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> float:
    start = time.perf_counter()
    for layer in layers:
        layer(x)
    return time.perf_counter() - start
