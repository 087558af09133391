"""Layouts of steps: all that a runner needs of a batch, as arrays of the host, so that they can go to other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraplex.worker.engine.attention.paged import RowBlocks, row_blocks
from loraplex.worker.engine.scheduling.batch import Batch, Row

# Ids that the last launch has sampled: their tokens in this step, and their rows in that one.
Placeholders = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """A step of any rows. `tokens` [3, tokens] are ids, positions and KV slots; ids that are placeholders are 0.

    `logit_places` are the tokens whose logits are needed: row after row, its prompt_positions and, where it samples,
    its last token; `logit_counts` are their numbers by row. `adapters` are (slot or -1, tokens) of each row. The first
    `decodes` rows have one token each.
    """

    tokens: NDArray[np.int64]
    logit_places: list[int]
    rows: list[RowBlocks]
    decodes: int
    adapters: list[tuple[int, int]]
    logit_counts: list[int]
    placeholders: Placeholders


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """A step of one token a row, padded to a batch size. `tokens` [3, size] are as a StepLayout's, `tables` [size,
    blocks] the rows' blocks; `slots` are the rows' adapter slots.
    """

    tokens: NDArray[np.int64]
    tables: NDArray[np.int64]
    slots: list[int]
    placeholders: Placeholders


Layout = StepLayout | DecodeLayout


def step_layout(batch: Batch, block_size: int, sampled: Sequence[Row] = ()) -> StepLayout:
    """Lay out a batch; `sampled` are the rows of the last launch that sampled."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_places: list[int] = []
    for row in batch.rows:
        table, end = row.sequence.block_table, row.start + row.count
        ids += row.known_ids
        if row.last_is_placeholder:
            ids.append(0)
        logit_places += [len(positions) + position - row.start for position in row.prompt_positions]
        positions += range(row.start, end)
        slots += [
            table[position // block_size] * block_size + position % block_size for position in range(row.start, end)
        ]
        if row.samples:
            logit_places.append(len(ids) - 1)
    return StepLayout(
        np.array([ids, positions, slots], np.int64),
        logit_places,
        row_blocks(batch.rows, block_size),
        batch.decodes,
        [(row.adapter_slot, row.count) for row in batch.rows],
        [len(row.prompt_positions) + row.samples for row in batch.rows],
        placeholders(batch.rows, sampled),
    )


def decode_layout(
    rows: Sequence[Row], sizes: Sequence[int], block_size: int, scratch_block: int, sampled: Sequence[Row] = ()
) -> DecodeLayout:
    """Lay out decode rows, padded to one of `sizes`; see step_layout."""
    size = next(size for size in sizes if size >= len(rows))
    blocks = [row.start // block_size + 1 for row in rows]
    tokens = np.zeros((3, size), dtype=np.int64)
    tokens[2] = scratch_block * block_size
    tables = np.full((size, max(blocks)), scratch_block, dtype=np.int64)
    for index, (row, count) in enumerate(zip(rows, blocks, strict=True)):
        table, offset = row.sequence.block_table, row.start % block_size
        token = 0 if row.last_is_placeholder else row.known_ids[0]
        tokens[:, index] = token, row.start, table[count - 1] * block_size + offset
        tables[index, :count] = table[:count]
    return DecodeLayout(tokens, tables, [row.adapter_slot for row in rows], placeholders(rows, sampled))


def placeholders(rows: Sequence[Row], sampled: Sequence[Row]) -> Placeholders:
    """Return where the tokens of rows are placeholders, and the rows of the last launch that sampled their ids."""
    index_of = {row.sequence: index for index, row in enumerate(sampled)}
    to, of = list[int](), list[int]()
    end = 0
    for row in rows:
        end += row.count
        if row.last_is_placeholder and index_of:
            to.append(end - 1)
            of.append(index_of[row.sequence])
    return to, of
