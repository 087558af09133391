"""Attention in torch, a row after the other: the oracle of the kernels, and slower."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from worker.model.attention import LayerCall
from worker.model.kv_cache import KvCache
from worker.model.torch_chunks import Chunk, chunk_of
from worker.scheduling.batch import Batch


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """A step's rows."""

    chunks: tuple[Chunk, ...]

    def attend(self, call: LayerCall, cache: KvCache) -> Tensor:
        """See AttentionPlan."""
        out = call.query.new_empty(*call.query.shape[:2], call.value.shape[-1])
        for chunk in self.chunks:
            chunk.attend(call, cache, out[chunk.first : chunk.stop])
        return out


def torch_plan(batch: Batch, cache: KvCache) -> TorchPlan:
    """Lay out a batch."""
    chunks, first = [], 0
    for row in batch.rows:
        chunks.append(chunk_of(row, first, cache))
        first += row.count
    return TorchPlan(tuple(chunks))
