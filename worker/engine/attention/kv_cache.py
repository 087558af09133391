"""The keys and values of all sequences, in blocks of block_size positions.

keys, values [layers, blocks + 1, block_size, kv_heads, dim]      slot = block * block_size + position % block_size
                          └── the last block is scratch: it fills up block tables of uneven length, and takes the
                              keys and values of rows that pad a batch; nobody sees what is in it
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.engine.device.cpu.workspace import Workspace

# Of what is free after the weights are loaded: the rest is for activations, and on the CPU for everything else there.
_CPU_SHARE = 0.25
_CUDA_SHARE = 0.9
# On the CPU no more than this for each row, unless a context is longer: blocks that nobody fills are no use.
_CPU_TOKENS_PER_ROW = 4096


class KvCache:
    """Keys and values by layer, as slots to write to and as blocks to gather.

    Keys have `head_dim` numbers a head, values as many unless `value_dim` says otherwise.
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
        # Not zeroed: on the CPU memory is then taken when a block is first written. What nobody wrote is not read.
        self._keys, self._values = (
            torch.empty(layers, blocks + 1, block_size, kv_heads, dim, dtype=dtype, device=device)
            for dim in (head_dim, value_dim or head_dim)
        )
        pools = list(zip(self._keys, self._values, strict=True))
        # For each layer keys and values [slots, kv_heads, dim], and the same memory as [blocks + 1, ...].
        self.slots = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in pools]
        self.by_block = [(keys.flatten(1), values.flatten(1)) for keys, values in pools]
        # Where blocks are gathered, layer after layer: new memory for each would be cold, and page faults.
        self._gathered = tuple(pool.new_empty(0, pool[0, 0].numel()) for pool in (self._keys, self._values))
        # For a kernel on the CPU.
        self.workspace = Workspace()

    def gather_blocks(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence's blocks, table [n]: each [n * block_size, heads, dim].

        They are good until the next call.
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
    """How many blocks to make when nobody says: a share of what is free, at most what `rows` sequences can fill.

    On the CPU that is a quarter of the available memory, and at most 4,096 tokens for each row (or one whole context,
    if that is more); on CUDA nine tenths of the free memory.
    """
    share = _CUDA_SHARE if device.type == "cuda" else _CPU_SHARE
    fitting = int(available_bytes * share) // (token_bytes * block_size)
    row_tokens = context if device.type == "cuda" else min(context, _CPU_TOKENS_PER_ROW)
    wanted = max(rows * row_tokens, context)
    return min(fitting, -(-wanted // block_size))
