"""The adapters of modules that share their input, in slots at fixed addresses; and which rows of a step use which.

a [slots, modules, max_rank, in_features]     b [slots, max_rank * width of each module]     ranks [slots, modules]
rescales, two of [slots, width of each module]: DoRA's gains and shifts, of pairs whose rank is negative in `ranks`

A pair is contiguous in both, so that an adapter is installed with few launches, and read 16 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine.lora.dora import Rescale
from worker.engine.lora.weights import LoraPair

MAX_MODULES = 3
# A tile's rows: a product on tensor cores has at least 16; for long runs of one adapter the higher reads it less often.
LOW_TILE, HIGH_TILE = 16, 64
# Features that one program of the shrink sums up. They depend on the module alone, so that a row's result does not
# depend on the batch. The expand adds the partial sums, at most so many.
_SPLIT = 1024
_MOST_SPLITS = 16
# Ranks that a program takes: as few as a tile can have, while there are at most so many tiles of them.
_LEAST_RANKS, _MOST_RANKS, _RANK_TILES = 16, 64, 8


class SlotGroup:
    """Slots of modules with one input; their outputs stand side by side in the order of `widths`."""

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
        # Not cleared: nothing behind a pair's own rank is read.
        self.a = torch.empty(slots, len(widths), max_rank, in_features, dtype=dtype, device=device)
        self.b = torch.empty(slots, max_rank * sum(widths), dtype=dtype, device=device)
        self.rescales = Rescale(*torch.empty(2, slots, sum(widths), dtype=dtype, device=device))
        self.ranks = torch.zeros(slots, len(widths), dtype=torch.int32, device=device)

    @property
    def splits(self) -> int:
        """Into how many partial sums a row's shrink is cut."""
        return -(-self.in_features // self.split_features)

    @property
    def split_features(self) -> int:
        """Features of a partial sum."""
        return _SPLIT * max(1, -(-self.in_features // (_SPLIT * _MOST_SPLITS)))

    @property
    def rank_tile(self) -> int:
        """How many ranks a program of the shrink takes. Programs beyond an adapter's rank do nothing, and take time."""
        ranks = _LEAST_RANKS
        while ranks < _MOST_RANKS and ranks * _RANK_TILES < self.max_rank:
            ranks *= 2
        return ranks

    @property
    def rank_space(self) -> int:
        """Ranks that a row's partial sums have room for: max_rank, up to whole tiles."""
        return -(-self.max_rank // self.rank_tile) * self.rank_tile

    def place(self, slot: int, module: int, rank: int) -> LoraPair:
        """Where a module's pair of such a rank belongs: contiguous views."""
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

    A line is (slot, first row, rows); slot -1 is a tile without rows. Rows in no tile are left alone.
    """

    table: Tensor
    height: int

    def __len__(self) -> int:
        return len(self.table)


def tile_lines(rows: Sequence[tuple[int, int]], height: int) -> list[tuple[int, int, int]]:
    """Cut rows, which are (slot or -1, tokens) one after the other, into the lines of a Tiles.

    Neighbours with the same slot share tiles.
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
