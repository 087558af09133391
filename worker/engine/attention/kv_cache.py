"""The keys and values of all sequences, in blocks of block_size positions.

keys, values [layers, blocks + 1, block_size, kv_heads, dim]      slot = block * block_size + position % block_size
scales       [layers, blocks + 1, block_size, kv_heads]           of int8 alone: a number is code * scale
                          └── the last block is scratch: it pads block tables of uneven length, and takes the keys
                              and values of rows that pad a batch; no query attends to it

In int8 each token's head has a scale of its own, the largest magnitude over 127. It depends on nothing but these
numbers: the same keys and values get the same codes in every batch, chunk and attempt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from artifacts.families import KvShape
from worker.engine.device.cpu.workspace import Workspace

# Share of the memory that is free after the weights are loaded. The rest is for activations, and on the CPU for the
# other programs of the machine.
_CPU_SHARE = 0.25
_CUDA_SHARE = 0.9
# Maximum number of tokens per row on the CPU, unless one context is longer: more blocks than rows can fill are useless.
_CPU_TOKENS_PER_ROW = 4096


class KvCache:
    """Keys and values by layer, as slots to write to and as blocks to gather.

    The model computes in `dtype`; `int8` says that keys and values are kept as codes.
    """

    def __init__(
        self, shape: KvShape, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, *, int8: bool
    ) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.scratch_block = blocks
        # Not zeroed: on the CPU the system then allocates a block's pages on its first write. Unwritten slots are never
        # read.
        sizes = shape.layers, blocks + 1, block_size, shape.kv_heads
        kept = torch.int8 if int8 else dtype
        pools = [torch.empty(*sizes, dim, dtype=kept, device=device) for dim in (shape.key_dim, shape.value_dim)]
        # For each layer keys and values [slots, kv_heads, dim].
        self.slots = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in zip(*pools, strict=True)]
        # Of int8 for each layer the scales of keys and values [slots, kv_heads]; else empty.
        scales = [torch.empty(sizes, device=device) for _ in range(2 if int8 else 0)]
        self.scales = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in zip(*scales, strict=True)]
        # Buffers of gather_blocks, shared by all layers: new memory for each would cost page faults and cache misses.
        self._gathered = [torch.empty(0, *pool.shape[2:], dtype=dtype, device=device) for pool in pools]
        # Scratch memory of the CPU's attention kernel.
        self.workspace = Workspace()

    def gather_blocks(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Gather a sequence's keys and values by its block table [n]: each [n * block_size, heads, dim].

        The results are valid until the next call.
        """
        if len(table) > len(self._gathered[0]):
            self._gathered = [store.new_empty(len(table), *store.shape[1:]) for store in self._gathered]
        outs = [store[: len(table)] for store in self._gathered]
        for index, out in enumerate(outs):
            blocks = self._by_block(self.slots[layer][index])
            if self.scales:
                scales = self._by_block(self.scales[layer][index])
                torch.mul(blocks.index_select(0, table), scales.index_select(0, table)[..., None], out=out)
            else:
                torch.index_select(blocks, 0, table, out=out)
        keys, values = (out.flatten(0, 1) for out in outs)
        return keys, values

    def _by_block(self, slots: Tensor) -> Tensor:
        """Return slots [slots, ...] as [blocks + 1, block_size, ...]."""
        return slots.view(-1, self.block_size, *slots.shape[1:])


def fitting_blocks(
    available_bytes: int, token_bytes: int, block_size: int, rows: int, context: int, device: torch.device
) -> int:
    """Return the default number of blocks: a share of the free memory, at most what `rows` sequences can fill.

    On the CPU the share is a quarter, and the maximum 4,096 tokens for each row (or one whole context, if that is
    more); on CUDA the share is nine tenths.
    """
    share = _CUDA_SHARE if device.type == "cuda" else _CPU_SHARE
    fitting = int(available_bytes * share) // (token_bytes * block_size)
    row_tokens = context if device.type == "cuda" else min(context, _CPU_TOKENS_PER_ROW)
    wanted = max(rows * row_tokens, context)
    return min(fitting, -(-wanted // block_size))
