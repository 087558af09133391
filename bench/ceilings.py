"""What the machine can do: bytes read and operations done a second, through the fastest linear layer there is.

The two are measured over and over between the runs that are compared with them: on a shared machine they change.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import linear

from worker.engine.model.packed import PackedWeight, packing_works

_OUT, _IN = 4864, 896
# All of them together are far larger than a cache: none of them is still there when its turn comes again.
WEIGHTS_BYTES = 384 * 2**20
_DTYPE = torch.bfloat16
_ROWS = 512
_ROWS_WEIGHTS = 3


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second with one row, and operations a second with many; a multiplication and an addition are two."""

    bytes_per_s: float
    operations_per_s: float


class CeilingMeter:
    """Measures, and keeps what it measured. Holds its weights in memory for as long as it lives."""

    def __init__(self, weights_bytes: int = WEIGHTS_BYTES) -> None:
        weight_bytes = _OUT * _IN * _DTYPE.itemsize
        count = max(_ROWS_WEIGHTS, weights_bytes // weight_bytes)
        packs = packing_works(_DTYPE)
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(_OUT, _IN, generator=generator).to(_DTYPE)
        self._linears = [PackedWeight(weight) if packs else _plain(weight.clone()) for _ in range(count)]
        self._bytes = count * weight_bytes
        self.measured: list[Ceilings] = []

    @torch.inference_mode()
    def measure(self) -> None:
        """One look at each ceiling, a fraction of a second; the better of two passes, so that none is cold."""
        x = torch.randn(1, _IN).to(_DTYPE)
        many = torch.randn(_ROWS, _IN).to(_DTYPE)
        read_s = min(_pass_s(self._linears, x) for _ in range(2))
        compute_s = min(_pass_s(self._linears[:_ROWS_WEIGHTS], many) for _ in range(2))
        operations = 2 * _ROWS * _OUT * _IN * _ROWS_WEIGHTS
        self.measured.append(Ceilings(self._bytes / read_s, operations / compute_s))

    def median(self) -> Ceilings:
        """The medians of all looks."""
        return Ceilings(
            median(one.bytes_per_s for one in self.measured), median(one.operations_per_s for one in self.measured)
        )

    def rows(self) -> list[dict[str, object]]:
        """Rows of a report: median, and the spread from lowest to highest."""
        bandwidths = [one.bytes_per_s / 1e9 for one in self.measured]
        rates = [one.operations_per_s / 1e9 for one in self.measured]
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
                ("ceiling: weights read, 1 row", "GB/s", bandwidths),
                (f"ceiling: arithmetic, {_ROWS} rows", "GFLOP/s", rates),
            )
        ]


def _plain(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: linear(x, weight)


def _pass_s(linears: list[PackedWeight | Callable[[Tensor], Tensor]], x: Tensor) -> float:
    start = time.perf_counter()
    for one in linears:
        one(x)
    return time.perf_counter() - start
