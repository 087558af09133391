"""The engines of bench.quantized: in a chosen layout of the linear layers, and timed while they decode."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from bench.bare_engine import BareEngine
from bench.mkldnn import PackedLinear
from bench.rounds import Timed
from bench.workload import Request
from loraplex.worker.engine.linear.layouts import laid_out, panels
from loraplex.worker.engine.model import loader

# Bytes that are read to measure the memory's bandwidth: far more than a cache holds.
_READ_BYTES = 512 * 2**20
# Blocks of an engine's KV cache: enough for 8 rows. By default each of many engines would take what it finds.
_KV_BLOCKS = 128
# torch's own operators in the model's dtype, which processors without AVX-512 compute slowest.
WORST = "torch bfloat16"


@dataclass(frozen=True)
class ForcedLayout:
    """An unquantized layout: the dtype that the model is loaded in and computes in, and what lays out a layer."""

    name: str
    dtype: str
    lay_out: Callable[[Any, torch.dtype], Any]


LAYOUTS = (
    ForcedLayout(WORST, "bfloat16", lambda linear, _: linear),
    ForcedLayout("mkldnn float32", "float32", lambda linear, _: PackedLinear(linear)),
    ForcedLayout("float32 panels", "float32", panels),
    ForcedLayout("bfloat16 panels", "bfloat16", panels),
    ForcedLayout("bfloat16 panels in float32", "float32", laid_out),
)


class DecodingEngine(BareEngine):
    """An engine whose runs are timed from the moment that all requests have their first token."""

    def run(self, requests: Sequence[Request]) -> Timed:
        """Answer the requests, and time what follows the prompts."""
        self.add_requests(requests)
        begun: set[str] = set()
        ended = tokens = 0
        start = time.perf_counter()
        while ended < len(requests):
            outputs = self.step()
            if len(begun) < len(requests):
                begun.update(output.sequence_id for output in outputs)
                start, tokens = time.perf_counter(), 0
            else:
                tokens += sum(len(output.token_ids) for output in outputs)
            ended += sum(output.finish is not None for output in outputs)
        return Timed(tokens, time.perf_counter() - start)


def decoding(
    model: Path, rows: int, dtype: str, quantize: str, layout: str | None
) -> AbstractContextManager[DecodingEngine]:
    """Return an engine of decodes; `layout` names the one of LAYOUTS that it is to compute in."""
    if layout is None:
        return closing(DecodingEngine(model, (), rows, dtype=dtype, quantize=quantize, kv_blocks=_KV_BLOCKS))
    chosen = next(one for one in LAYOUTS if one.name == layout)
    with patch.object(loader, "laid_out", chosen.lay_out):
        return closing(DecodingEngine(model, (), rows, dtype=chosen.dtype, quantize=quantize, kv_blocks=_KV_BLOCKS))


def serving(
    model: Path, adapters: Sequence[Path], rows: int, dtype: str, quantize: str
) -> AbstractContextManager[BareEngine]:
    """Return an engine of whole requests."""
    return closing(BareEngine(model, adapters, rows, dtype=dtype, quantize=quantize, kv_blocks=_KV_BLOCKS))


class BandwidthMeter:
    """Measures how fast memory is read with all threads, and keeps all measurements."""

    def __init__(self) -> None:
        self._numbers = torch.ones(_READ_BYTES // 4)
        self._measured: list[float] = []

    def measure(self) -> None:
        """Read everything; the faster of two passes counts."""
        self._measured.append(max(self._pass() for _ in range(2)))

    def _pass(self) -> float:
        start = time.perf_counter()
        self._numbers.sum()
        return _READ_BYTES / (time.perf_counter() - start)

    def bytes_per_s(self) -> float:
        """Return the median of all measurements."""
        return median(self._measured)

    def row(self) -> Mapping[str, Any]:
        """Return the row of a report."""
        rates = [rate / 1e9 for rate in self._measured]
        return {
            "case": "memory, read by all threads",
            "unit": "GB/s",
            "median": median(rates),
            "low": min(rates),
            "high": max(rates),
            "runs": len(rates),
        }
