"""Attention of a chunk: some tokens of one sequence, over all of it so far.

transformers' and torch's own way, scaled_dot_product_attention with a mask, takes about twice as long for more than a
few scores in bfloat16: keys are the right factor of its product, and mkldnn lays a right factor out anew every time.
Here keys are the left one, a block of queries after the other, so that no block's scores leave the caches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from worker.engine.attention.eager import additive_mask, eager_attention, visibility
from worker.engine.attention.kv_cache import KvCache
from worker.engine.attention.paged import LayerCall
from worker.engine.scheduling.batch import Row

# Tokens of a block. Measured: 32 to 128 are alike, fewer and more are slower.
_BLOCK_TOKENS = 64
# So few scores of a key head are sooner done in one call.
_FEW_SCORES = 6_000
# torch's softmax over rows works on 16 columns at a time; on fewer one by one.
_FEW_COLUMNS = 24


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [first, stop) of the flat batch, which are the positions from `start` of one sequence.

    `table` [blocks] covers the positions up to the last one; None where the chunk begins its sequence.
    """

    first: int
    stop: int
    start: int
    table: Tensor | None
    # Additive masks, made by the first layer that needs them.
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)

    def attend(self, call: LayerCall, cache: KvCache, out: Tensor) -> None:
        """Write what the chunk's tokens attend to into out [tokens, heads, dim of the values]."""
        q, keys, values = (tensor[self.first : self.stop] for tensor in (call.query, call.key, call.value))
        tokens, heads, dim = q.shape
        end = self.start + tokens
        if self.table is not None:
            keys, values = (blocks[:end] for blocks in cache.gather_blocks(call.layer, self.table))
        # The query heads that share a key head stand one below the other, as if they were more tokens of one head.
        kv_heads = keys.shape[1]
        shared = heads // kv_heads
        grouped = q.view(tokens, kv_heads, shared, dim).permute(1, 2, 0, 3)
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        plain = call.softcap is None and call.sinks is None
        if plain and shared * tokens * end > _FEW_SCORES:
            self._attend_blocks(call, grouped * call.scaling, keys, values, out.view(tokens, kv_heads, shared, -1))
            return
        packed, mask = grouped.flatten(1, 2), self._mask(0, tokens, 0, call).t().repeat(shared, 1)
        if plain:
            attended = scaled_dot_product_attention(
                packed[None], keys[None], values[None], attn_mask=mask, scale=call.scaling
            )
        else:
            sinks = None if call.sinks is None else call.sinks.view(kv_heads, -1).repeat_interleave(tokens, 1)
            attended = eager_attention(packed[None], keys[None], values[None], mask, call, sinks)
        ungrouped = attended.view(kv_heads, shared, tokens, -1).permute(2, 0, 1, 3)
        out.view(ungrouped.shape).copy_(ungrouped)

    def _attend_blocks(self, call: LayerCall, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """With scaled q [kv_heads, shared, tokens, dim]; keys and values [kv_heads, end, dim]."""
        kv_heads, shared, tokens, dim = q.shape
        for first in range(0, tokens, _BLOCK_TOKENS):
            stop = min(first + _BLOCK_TOKENS, tokens)
            begin, end = self.start + first, self.start + stop
            low = 0 if call.window is None else max(0, begin - call.window + 1)
            block = q[:, :, first:stop].reshape(kv_heads, -1, dim)
            scores = torch.bmm(keys[:, low:end], block.transpose(1, 2))
            # Without a window all of the block's tokens see all that came before it.
            mask = self._mask(first, stop, begin if call.window is None else low, call)
            scores[:, -len(mask) :] += mask.repeat(1, shared)
            if scores.shape[2] < _FEW_COLUMNS:
                weights = scores.transpose(1, 2).contiguous().softmax(-1)
            else:
                weights = scores.softmax(1).transpose(1, 2)
            attended = torch.bmm(weights, values[:, low:end])
            out[first:stop] = attended.view(kv_heads, shared, stop - first, -1).permute(2, 0, 1, 3)

    def _mask(self, first: int, stop: int, low: int, call: LayerCall) -> Tensor:
        """Of the chunk's tokens [first, stop) over the positions from `low` to the last one's: [positions, tokens]."""
        mask = self.masks.get((first, low, call.window))
        if mask is None:
            device, end = call.query.device, self.start + stop
            keys = torch.arange(low, end, device=device)[:, None]
            queries = torch.arange(self.start + first, end, device=device)[None]
            seen = visibility(keys, queries, call.window)
            mask = self.masks[first, low, call.window] = additive_mask(seen, call.query.dtype)
        return mask


def chunk_from_row(row: Row, first: int, cache: KvCache) -> Chunk:
    """A row as a chunk that begins at token `first` of the flat batch."""
    past = None
    if row.start:
        blocks = -(-(row.start + row.count) // cache.block_size)
        past = torch.tensor(row.sequence.block_table[:blocks])
    return Chunk(first, first + row.count, row.start, past)
