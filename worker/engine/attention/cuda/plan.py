"""Attention on CUDA: the kernel launches of a step's decode rows and chunks. Imported only where there is Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from worker.engine.attention.cuda.kernels.codes import write_call
from worker.engine.attention.cuda.kernels.decode import decode_calls
from worker.engine.attention.cuda.kernels.prefill import prefill_call, prefill_tiles
from worker.engine.attention.kv_cache import KvCache
from worker.engine.attention.paged import LayerCall
from worker.engine.device.kernel_call import KernelCall
from worker.engine.device.transfer import upload
from worker.engine.scheduling.sequence import Batch, Row


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The decode rows, first in the flat batch: block tables [rows, blocks] int32 and positions [rows] int64.

    Entries of a table beyond the row's position are never read.
    """

    tables: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Chunks: block tables [chunks, blocks] int32; spans of (first token in the flat batch, its position, count)."""

    tables: Tensor
    spans: tuple[tuple[int, int, int], ...]
    # The spans cut into tiles, by the number of query heads per key head; made by the first layer that needs them.
    tiles: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Implements AttentionPlan for a step's decode rows and chunks."""

    decodes: DecodeRows | None
    chunks: ChunkRows | None

    def attend(self, call: LayerCall, cache: KvCache) -> Tensor:
        """See AttentionPlan."""
        out = call.query.new_empty(*call.query.shape[:2], call.value.shape[-1])
        for kernel in self.kernels(call, cache, out):
            kernel.launch()
        return out

    def quantize(self, call: LayerCall, slots: Tensor, cache: KvCache) -> None:
        """See AttentionPlan."""
        write_call(call, slots, cache).launch()

    def kernels(self, call: LayerCall, cache: KvCache, out: Tensor) -> Sequence[KernelCall]:
        """Return the launches that compute `out` [tokens, heads, dim of the values], in order."""
        if call.query.stride(-1) != 1:
            call = replace(call, query=call.query.contiguous())
        kernels: list[KernelCall] = []
        if self.decodes is not None:
            kernels += decode_calls(call, cache, self.decodes.tables, self.decodes.positions, out)
        if self.chunks is not None:
            tiles = self._tiles(self.chunks, call.query.shape[1] // call.key.shape[1], call.query.device)
            kernels.append(prefill_call(call, cache, self.chunks.tables, tiles, out))
        return kernels

    @staticmethod
    def _tiles(chunks: ChunkRows, group: int, device: torch.device) -> Tensor:
        if group not in chunks.tiles:
            chunks.tiles[group] = upload(prefill_tiles(chunks.spans, group), device, torch.int32)
        return chunks.tiles[group]


def triton_plan(batch: Batch, cache: KvCache, device: torch.device) -> TritonPlan:
    """Lay out the attention of a batch."""
    rows, longer = batch.rows[: batch.decodes], batch.rows[batch.decodes :]
    decodes = chunks = None
    if rows:
        positions = upload([row.start for row in rows], device)
        decodes = DecodeRows(_tables(rows, cache, device), positions)
    if longer:
        spans, first = [], len(rows)
        for row in longer:
            spans.append((first, row.start, row.count))
            first += row.count
        chunks = ChunkRows(_tables(longer, cache, device), tuple(spans))
    return TritonPlan(decodes, chunks)


def _tables(rows: Sequence[Row], cache: KvCache, device: torch.device) -> Tensor:
    blocks = [-(-(row.start + row.count) // cache.block_size) for row in rows]
    tables = np.full((len(rows), max(blocks)), cache.scratch_block, dtype=np.int32)
    for line, row, count in zip(tables, rows, blocks, strict=True):
        line[:count] = row.sequence.block_table[:count]
    return upload(tables, device)
