"""The inputs of decode steps at fixed addresses, padded to a few batch sizes, so that CUDA graphs can hold such a step.

row      0   1   2 │ padding
id       17  5   9 │ 0        its logits are dropped
position 40  7   3 │ 0
slot     ..  ..  ..│ the scratch block's first
blocks   ..  ..  ..│ scratch, scratch, ...
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from worker.engine.attention.kv_cache import KvCache
from worker.engine.attention.paged import AttentionPlan, AttentionStep
from worker.engine.device.transfer import upload
from worker.engine.model.inputs import StepInputs
from worker.engine.scheduling.sequence import Row


class DecodeBuffers:
    """Buffers for up to `rows` rows of up to `max_tokens` positions each; `sizes` are the batch sizes padded to."""

    def __init__(self, rows: int, max_tokens: int, cache: KvCache, device: torch.device) -> None:
        self.sizes = padded_sizes(rows)
        self._cache = cache
        blocks = -(-max_tokens // cache.block_size)
        # Ids, positions, slots. Filled as padding, so that a step can be captured before there is a sequence.
        self._tokens = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._tokens[2] = cache.scratch_block * cache.block_size
        self._tables = torch.full((rows, blocks), cache.scratch_block, dtype=torch.int32, device=device)
        self._wanted = torch.arange(rows, device=device)

    def fill(self, rows: Sequence[Row]) -> int:
        """Lay out decode rows; returns the size they are padded to.

        Ids that are placeholders are left 0. A step may still read the buffers meanwhile: see device/transfer.py.
        """
        cache, size = self._cache, next(size for size in self.sizes if size >= len(rows))
        blocks = [row.start // cache.block_size + 1 for row in rows]
        tokens = np.zeros((3, size), dtype=np.int64)
        tokens[2] = cache.scratch_block * cache.block_size
        # Values of earlier steps beyond these columns are beyond the rows' positions, where attention does not look.
        tables = np.full((size, max(blocks)), cache.scratch_block, dtype=np.int32)
        for index, (row, count) in enumerate(zip(rows, blocks, strict=True)):
            table, offset = row.sequence.block_table, row.start % cache.block_size
            token = 0 if row.last_is_placeholder else row.sequence.ids[row.start]
            tokens[:, index] = token, row.start, table[count - 1] * cache.block_size + offset
            tables[index, :count] = table[:count]
        self._tokens[:, :size].copy_(upload(tokens, self._tokens.device))
        self._tables[:size, : tables.shape[1]].copy_(upload(tables, self._tables.device))
        return size

    @property
    def input_ids(self) -> torch.Tensor:
        """Return the ids [rows] of the step to come."""
        return self._tokens[0]

    def inputs(self, size: int) -> StepInputs:
        """Return the step of that size: views of the buffers, at the same addresses every time."""
        ids, positions, slots = self._tokens[:, :size].unbind()
        step = AttentionStep(self._cache, slots, self._plan(size))
        return StepInputs(ids[None], positions[None], self._wanted[:size], step)

    def _plan(self, size: int) -> AttentionPlan:
        tables, positions = self._tables[:size], self._tokens[1, :size]
        if tables.device.type == "cuda":
            from worker.engine.attention.cuda.plan import DecodeRows, TritonPlan  # Triton is there only with CUDA

            return TritonPlan(DecodeRows(tables, positions), None)
        from worker.engine.attention.cpu.plan import decode_plan  # and numba only where the CPU computes

        return decode_plan(tables.tolist(), positions.tolist(), self._cache)


def padded_sizes(rows: int) -> tuple[int, ...]:
    """Return 1, 2, 4, then multiples of 8, up to `rows`."""
    return (*(size for size in (1, 2, 4, *range(8, rows, 8)) if size < rows), rows)
