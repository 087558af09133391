"""Adapter slots at fixed addresses for a group of modules with the same input, and the tiles of a step's rows.

a [slots, modules, max_rank, in_features]     b [slots, max_rank * width of each module]     ranks [slots, modules]
rescales: gain and shift, [slots, sum of the widths] each, of DoRA pairs, whose rank is negative in `ranks`

A pair's A and B are contiguous, so that installing an adapter takes few launches, and reads are 16 bytes wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine.lora.dora import Rescale
from worker.engine.lora.weights import LoraPair

# Maximum number of modules in a group, which the expand kernel has arguments for: q, k and v.
MAX_MODULES = 3
# Rows of a tile: 16 is the least for a product on tensor cores; with 64, long runs of one adapter read it less often.
LOW_TILE, HIGH_TILE = 16, 64
# Features that one program of the shrink sums up, and the maximum number of partial sums that the expand adds. Both
# depend on the module alone, so that a row's bits do not depend on the batch.
_SPLIT = 1024
_MOST_SPLITS = 16
# Ranks that a program of the shrink computes: the smallest tile with which max_rank takes at most _RANK_TILES tiles.
_LEAST_RANKS, _MOST_RANKS, _RANK_TILES = 16, 64, 8


class SlotGroup:
    """The slots of modules with the same input; their outputs are side by side in the order of `widths`."""

    def __init__(
        self,
        in_features: int,
        widths: Sequence[int],
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if not 1 <= len(widths) <= MAX_MODULES:
            raise ValueError(f"a group has 1 to {MAX_MODULES} modules, not {len(widths)}")
        self.in_features = in_features
        self.widths = tuple(widths)
        self.max_rank = max_rank
        # Not zeroed: nothing beyond a pair's own rank is read.
        self.a = torch.empty(slots, len(widths), max_rank, in_features, dtype=dtype, device=device)
        self.b = torch.empty(slots, max_rank * sum(widths), dtype=dtype, device=device)
        self.rescales = Rescale(*torch.empty(2, slots, sum(widths), dtype=dtype, device=device))
        self.ranks = torch.zeros(slots, len(widths), dtype=torch.int32, device=device)

    @property
    def splits(self) -> int:
        """Return the number of partial sums of a row's shrink."""
        return -(-self.in_features // self.split_features)

    @property
    def split_features(self) -> int:
        """Return the number of features of a partial sum."""
        return _SPLIT * max(1, -(-self.in_features // (_SPLIT * _MOST_SPLITS)))

    @property
    def rank_tile(self) -> int:
        """Return the ranks of a shrink program; programs beyond an adapter's rank do nothing, but cost a launch."""
        ranks = _LEAST_RANKS
        while ranks < _MOST_RANKS and ranks * _RANK_TILES < self.max_rank:
            ranks *= 2
        return ranks

    @property
    def rank_space(self) -> int:
        """Return the ranks allocated for a row's partial sums: max_rank rounded up to whole tiles."""
        return -(-self.max_rank // self.rank_tile) * self.rank_tile

    def place(self, slot: int, module: int, rank: int) -> LoraPair:
        """Return contiguous views of the slot where a module's pair of this rank is stored."""
        column, width = sum(self.widths[:module]), self.widths[module]
        first, columns = self.max_rank * column, slice(column, column + width)
        return LoraPair(
            self.a[slot, module, :rank],
            self.b[slot, first : first + rank * width].view(rank, width),
            Rescale(self.rescales.gain[slot, columns], self.rescales.shift[slot, columns]),
        )


@dataclass(frozen=True, slots=True)
class Tiles:
    """A step's rows cut into tiles of at most `height` rows of one slot: `table` [tiles, 3] int32.

    A line is (slot, first row, rows); slot -1 is a tile without rows. The kernels do not change rows in no tile.
    """

    table: Tensor
    height: int

    def __len__(self) -> int:
        return len(self.table)


def tile_lines(rows: Sequence[tuple[int, int]], height: int) -> list[tuple[int, int, int]]:
    """Cut consecutive rows, given as (slot or -1, tokens), into the lines of a Tiles.

    Consecutive entries with the same slot share tiles.
    """
    lines: list[tuple[int, int, int]] = []
    first = 0
    for slot, tokens in rows:
        if slot >= 0:
            at, stop = first, first + tokens
            if lines and lines[-1][0] == slot and sum(lines[-1][1:]) == first:
                _, at, _ = lines.pop()
            lines += [(slot, begin, min(height, stop - begin)) for begin in range(at, stop, height)]
        first += tokens
    return lines
