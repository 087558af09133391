"""The keys and values of all sequences, in blocks of block_size positions.

keys, values [layers, blocks + 1, block_size, kv_heads, dim]      slot = block * block_size + position % block_size
                          └── the last block is scratch: it pads block tables of uneven length, and takes the keys
                              and values of rows that pad a batch; no query attends to it
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.engine.device.cpu.workspace import Workspace

# Share of the memory that is free after the weights are loaded. The rest is for activations, and on the CPU for the
# other programs of the machine.
_CPU_SHARE = 0.25
_CUDA_SHARE = 0.9
# Maximum number of tokens per row on the CPU, unless one context is longer: more blocks than rows can fill are useless.
_CPU_TOKENS_PER_ROW = 4096


class KvCache:
    """Keys and values by layer, as slots to write to and as blocks to gather.

    A key has `head_dim` elements per head, a value `value_dim`, by default the same.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        value_dim: int | None = None,
    ) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.scratch_block = blocks
        # Not zeroed: on the CPU the system then allocates a block's pages on its first write. Unwritten slots are never
        # read.
        self._keys, self._values = (
            torch.empty(layers, blocks + 1, block_size, kv_heads, dim, dtype=dtype, device=device)
            for dim in (head_dim, value_dim or head_dim)
        )
        pools = list(zip(self._keys, self._values, strict=True))
        # For each layer keys and values [slots, kv_heads, dim]; `by_block` is the same memory as [blocks + 1, ...].
        self.slots = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in pools]
        self.by_block = [(keys.flatten(1), values.flatten(1)) for keys, values in pools]
        # Buffers of gather_blocks, shared by all layers: new memory for each would cost page faults and cache misses.
        self._gathered = tuple(pool.new_empty(0, pool[0, 0].numel()) for pool in (self._keys, self._values))
        # Scratch memory of the CPU's attention kernel.
        self.workspace = Workspace()

    def gather_blocks(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Gather a sequence's keys and values by its block table [n]: each [n * block_size, heads, dim].

        The results are valid until the next call.
        """
        if len(table) > len(self._gathered[0]):
            self._gathered = tuple(store.new_empty(len(table), store.shape[1]) for store in self._gathered)
        keys, values = (
            torch.index_select(pool, 0, table, out=store[: len(table)])
            for pool, store in zip(self.by_block[layer], self._gathered, strict=True)
        )
        return keys.view(-1, *self._keys.shape[-2:]), values.view(-1, *self._values.shape[-2:])


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
