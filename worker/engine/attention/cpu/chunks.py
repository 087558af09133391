"""Attention of a long chunk on the CPU: many tokens of one sequence over all its positions so far, as matrix products.

torch's scaled_dot_product_attention with a mask takes about twice as long for more than a few scores in bfloat16: keys
are the right factor of its product, and mkldnn reorders a right factor in each call. Here keys are the left factor,
and queries are processed in blocks, whose scores stay in the CPU's caches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from worker.engine.attention.eager import additive_mask, eager_attention, visibility
from worker.engine.attention.kv_cache import KvCache
from worker.engine.attention.paged import LayerCall
from worker.engine.scheduling.sequence import Row

# Tokens of a block of queries. Measured: 32 to 128 take the same time, fewer and more are slower.
_BLOCK_TOKENS = 64
# Maximum number of scores of a key head for which one call of scaled_dot_product_attention is faster.
_ONE_CALL_SCORES = 6_000
# Minimum number of columns for a softmax over rows, which torch vectorizes by 16 columns; fewer are transposed first.
_SOFTMAX_COLUMNS = 24


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [first, stop) of the flat batch: the positions from `start` on of one sequence.

    `table` [blocks] covers all positions up to the chunk's last; None where the chunk's own keys and values are all
    that it needs: it begins its sequence, and the cache would give them back as they are.
    """

    first: int
    stop: int
    start: int
    table: Tensor | None
    # Additive masks by (first token, first position, window), made by the first layer that needs them.
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)

    def attend(self, call: LayerCall, cache: KvCache, out: Tensor) -> None:
        """Compute the chunk's attention into out [tokens, heads, dim of the values]."""
        q, keys, values = (tensor[self.first : self.stop] for tensor in (call.query, call.key, call.value))
        tokens, heads, dim = q.shape
        end = self.start + tokens
        if self.table is not None:
            keys, values = (blocks[:end] for blocks in cache.gather_blocks(call.layer, self.table))
        # Query heads that share a key head are concatenated along tokens, as if they were more tokens of one head.
        kv_heads = keys.shape[1]
        shared = heads // kv_heads
        grouped = q.view(tokens, kv_heads, shared, dim).permute(1, 2, 0, 3)
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        plain = call.softcap is None and call.sinks is None
        if plain and shared * tokens * end > _ONE_CALL_SCORES:
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
        """Attend block by block: scaled q [kv_heads, shared, tokens, dim]; keys and values [kv_heads, end, dim]."""
        kv_heads, shared, tokens, dim = q.shape
        for first in range(0, tokens, _BLOCK_TOKENS):
            stop = min(first + _BLOCK_TOKENS, tokens)
            begin, end = self.start + first, self.start + stop
            low = 0 if call.window is None else max(0, begin - call.window + 1)
            block = q[:, :, first:stop].reshape(kv_heads, -1, dim)
            scores = torch.bmm(keys[:, low:end], block.transpose(1, 2))
            # Without a window all tokens of the block attend to all positions before it: only the rest needs a mask.
            mask = self._mask(first, stop, begin if call.window is None else low, call)
            scores[:, -len(mask) :] += mask.repeat(1, shared)
            if scores.shape[2] < _SOFTMAX_COLUMNS:
                weights = scores.transpose(1, 2).contiguous().softmax(-1)
            else:
                weights = scores.softmax(1).transpose(1, 2)
            attended = torch.bmm(weights, values[:, low:end])
            out[first:stop] = attended.view(kv_heads, shared, stop - first, -1).permute(2, 0, 1, 3)

    def _mask(self, first: int, stop: int, low: int, call: LayerCall) -> Tensor:
        """Return the additive mask [positions, tokens] of tokens [first, stop) over positions from `low` on."""
        mask = self.masks.get((first, low, call.window))
        if mask is None:
            device, end = call.query.device, self.start + stop
            keys = torch.arange(low, end, device=device)[:, None]
            queries = torch.arange(self.start + first, end, device=device)[None]
            seen = visibility(keys, queries, call.window)
            mask = self.masks[first, low, call.window] = additive_mask(seen, call.query.dtype)
        return mask


def chunk_from_row(row: Row, first: int, cache: KvCache) -> Chunk:
    """Return a row as a chunk that begins at token `first` of the flat batch."""
    past = None
    if row.start or cache.scales:
        blocks = -(-(row.start + row.count) // cache.block_size)
        past = torch.tensor(row.sequence.block_table[:blocks])
    return Chunk(first, first + row.count, row.start, past)
