"""Attention in torch: for the CPU, and the oracle of the kernels.

flat batch   │ decode rows, one token each │ chunk │ chunk │ ...
               grouped by length: gather     one call each, over its
               blocks, one call a group      sequence so far
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from worker.model.attention import LayerCall
from worker.model.kv_cache import KvCache
from worker.scheduling.batch import Batch, Row

# Decode rows are gathered together as long as padding to the longest at most doubles a row.
_GROUP_SPREAD = 2
# Measured: scaled_dot_product_attention is the fastest for so few queries of a key head, and for so many scores of a
# head (tokens x positions) that they do not stay in a cache; between them, two products are up to twice as fast.
_FEW_QUERIES = 32
_MANY_SCORES = 1 << 18


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
class Chunk:
    """Tokens [first, stop) of the flat batch, which are the positions from `start` of one sequence.

    `table` [blocks] covers the positions up to the last one; None where the chunk begins its sequence.
    """

    first: int
    stop: int
    start: int
    table: Tensor | None


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """A step's `decodes` first rows in groups, and its chunks."""

    decodes: int
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    # Additive masks, made by the first layer that needs them.
    masks: dict[tuple[int, int | None, int], Tensor] = field(default_factory=dict)

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
        for index, chunk in enumerate(self.chunks):
            out[chunk.first : chunk.stop] = self._attend_chunk(index, call, cache)
        return out

    def _attend_group(self, index: int, call: LayerCall, cache: KvCache) -> Tensor:
        group = self.groups[index]
        q = call.query[: self.decodes] if group.rows is None else call.query.index_select(0, group.rows)
        rows, heads, dim = q.shape
        keys, values = cache.gather_blocks(call.layer, group.table, rows)
        mask = self.masks.get((index, call.window, 1))
        if mask is None:
            positions = torch.arange(group.length, device=q.device)
            mask = _additive(_visible(positions[None], group.positions[:, None], call.window), q.dtype)[:, None, None]
            self.masks[index, call.window, 1] = mask
        # The query heads that share a key head stand where a sequence's tokens stand otherwise: keys are not repeated.
        kv_heads = keys.shape[2]
        shared = q.reshape(rows, kv_heads, heads // kv_heads, dim)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if call.softcap is not None or call.sinks is not None:
            sinks = None if call.sinks is None else call.sinks.view(kv_heads, -1)
            return _by_definition(shared, keys, values, mask, call, sinks).reshape(rows, heads, -1)
        out = scaled_dot_product_attention(shared, keys, values, attn_mask=mask, scale=call.scaling)
        return out.reshape(rows, heads, -1)

    def _attend_chunk(self, index: int, call: LayerCall, cache: KvCache) -> Tensor:
        chunk = self.chunks[index]
        q, keys, values = (tensor[chunk.first : chunk.stop] for tensor in (call.query, call.key, call.value))
        tokens, heads, dim = q.shape
        end = chunk.start + tokens
        plain = call.softcap is None and call.sinks is None
        if chunk.table is not None:
            keys, values = (blocks[0, :end] for blocks in cache.gather_blocks(call.layer, chunk.table, 1))
        elif plain and (call.window is None or call.window >= end):
            q, keys, values = (tensor.transpose(0, 1)[None] for tensor in (q, keys, values))
            out = scaled_dot_product_attention(q, keys, values, is_causal=True, scale=call.scaling, enable_gqa=True)
            return out[0].transpose(0, 1)
        # The query heads that share a key head stand one below the other, as if they were more tokens of one head.
        kv_heads = keys.shape[1]
        shared = heads // kv_heads
        packed = q.view(tokens, kv_heads, shared, dim).permute(1, 2, 0, 3).reshape(kv_heads, shared * tokens, dim)
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        mask = self._chunk_mask(index, end, call, shared)
        if not plain:
            sinks = None if call.sinks is None else call.sinks.view(kv_heads, -1).repeat_interleave(tokens, 1)
            out = _by_definition(packed[None], keys[None], values[None], mask, call, sinks)[0]
        elif shared * tokens <= _FEW_QUERIES or tokens * end > _MANY_SCORES:
            out = scaled_dot_product_attention(
                packed[None], keys[None], values[None], attn_mask=mask, scale=call.scaling
            )[0]
        else:
            scores = torch.baddbmm(mask.expand(kv_heads, -1, -1), packed, keys.transpose(1, 2), alpha=call.scaling)
            out = torch.bmm(scores.softmax(-1), values)
        return out.view(kv_heads, shared, tokens, -1).permute(2, 0, 1, 3).reshape(tokens, heads, -1)

    def _chunk_mask(self, index: int, end: int, call: LayerCall, shared: int) -> Tensor:
        """[shared * tokens, end]."""
        # Chunks are told from groups in the keys of `masks` by the sign.
        key = (-1 - index, call.window, shared)
        mask = self.masks.get(key)
        if mask is None:
            positions = torch.arange(end, device=call.query.device)
            visible = _visible(positions[None], positions[self.chunks[index].start :, None], call.window)
            mask = self.masks[key] = _additive(visible, call.query.dtype).repeat(shared, 1)
        return mask


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


def _by_definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, call: LayerCall, sinks: Tensor | None) -> Tensor:
    """Attention with a softcap or sinks: q [..., queries, dim]; k, v [..., positions, dim]; sinks [heads, queries]."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, ..., None].expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
    return torch.matmul(weights[..., : k.shape[-2]], v)


def _visible(keys: Tensor, queries: Tensor, window: int | None) -> Tensor:
    """Which key positions [1, k] each query position [q, 1] sees: [q, k]."""
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    return visible


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
