"""Attention in torch: for the CPU, and the oracle of the kernels.

flat batch   │ decode rows, one token each │ chunk │ chunk │ ...
               grouped by length: gather     each over its sequence so
               blocks, one call a group      far: see torch_chunks.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from worker.model.attention import LayerCall
from worker.model.attention_definition import additive, by_definition, visible
from worker.model.kv_cache import KvCache
from worker.model.torch_chunks import Chunk
from worker.scheduling.batch import Batch, Row

# Decode rows are gathered together as long as padding to the longest at most doubles a row.
_GROUP_SPREAD = 2


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of similar length. `rows` [n] are their indices in the flat batch; None: all, in order.

    `table` [n * blocks] holds their block tables side by side, filled up with the scratch block; `positions` [n] the
    position of each row's token, the last one it sees; `length` is blocks * block_size.
    """

    rows: Tensor | None
    table: Tensor
    positions: Tensor
    length: int


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """A step's `decodes` first rows in groups, and its chunks."""

    decodes: int
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    # Additive masks of the groups, made by the first layer that needs them.
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def attend(self, call: LayerCall, cache: KvCache) -> Tensor:
        """See AttentionPlan."""
        q = call.query
        out = q.new_empty(*q.shape[:2], call.value.shape[-1])
        for index, group in enumerate(self.groups):
            attended = self._attend_group(index, call, cache)
            if group.rows is None:
                out[: self.decodes] = attended
            else:
                out.index_copy_(0, group.rows, attended)
        for chunk in self.chunks:
            chunk.attend(call, cache, out[chunk.first : chunk.stop])
        return out

    def _attend_group(self, index: int, call: LayerCall, cache: KvCache) -> Tensor:
        group = self.groups[index]
        q = call.query[: self.decodes] if group.rows is None else call.query.index_select(0, group.rows)
        rows, heads, dim = q.shape
        keys, values = cache.gather_blocks(call.layer, group.table, rows)
        mask = self.masks.get((index, call.window))
        if mask is None:
            positions = torch.arange(group.length, device=q.device)
            mask = additive(visible(positions[None], group.positions[:, None], call.window), q.dtype)[:, None, None]
            self.masks[index, call.window] = mask
        # The query heads that share a key head stand where a sequence's tokens stand otherwise: keys are not repeated.
        kv_heads = keys.shape[2]
        shared = q.reshape(rows, kv_heads, heads // kv_heads, dim)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if call.softcap is not None or call.sinks is not None:
            sinks = None if call.sinks is None else call.sinks.view(kv_heads, -1)
            return by_definition(shared, keys, values, mask, call, sinks).reshape(rows, heads, -1)
        out = scaled_dot_product_attention(shared, keys, values, attn_mask=mask, scale=call.scaling)
        return out.reshape(rows, heads, -1)


def torch_plan(batch: Batch, cache: KvCache, device: torch.device) -> TorchPlan:
    """Lay out a batch."""
    chunks, first = [], batch.decodes
    for row in batch.rows[batch.decodes :]:
        past = None
        if row.start:
            blocks = -(-(row.start + row.count) // cache.block_size)
            past = torch.tensor(row.sequence.block_table[:blocks], device=device)
        chunks.append(Chunk(first, first + row.count, row.start, past))
        first += row.count
    return TorchPlan(batch.decodes, _decode_groups(batch.rows[: batch.decodes], cache, device), tuple(chunks))


def _decode_groups(rows: Sequence[Row], cache: KvCache, device: torch.device) -> tuple[DecodeGroup, ...]:
    blocks = [row.start // cache.block_size + 1 for row in rows]
    groups = []
    order = sorted(range(len(rows)), key=blocks.__getitem__)
    while order:
        longest = blocks[order[-1]]
        members = [index for index in order if blocks[index] * _GROUP_SPREAD >= longest]
        order = order[: len(order) - len(members)]
        members.sort()
        table = np.full((len(members), longest), cache.scratch_block)
        for line, index in zip(table, members, strict=True):
            line[: blocks[index]] = rows[index].sequence.block_table[: blocks[index]]
        groups.append(
            DecodeGroup(
                None if len(members) == len(rows) else torch.tensor(members, device=device),
                torch.from_numpy(table.reshape(-1)).to(device),
                torch.tensor([rows[index].start for index in members], device=device),
                longest * cache.block_size,
            )
        )
    return tuple(groups)
