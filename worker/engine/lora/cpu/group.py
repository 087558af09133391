"""Layers with the same input and an adapter for every row, on the CPU: their base's product, and what is added to it.

    rows of a step, sorted by slot    │ slot 3 │ slot 3, a prompt │ slot 5 │ slot 7 │ none │
    few in a row with one adapter       kernel                      kernel   kernel
    many                                         x A^T B in torch

Nothing is copied into a slot: it is a line in a table that says where the adapter lies in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from struct import Struct

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from worker.engine.device.cpu import threads
from worker.engine.device.cpu.workspace import Workspace
from worker.engine.lora.cpu.kernel import COUNTERS, PAIR_FIELDS, SEGMENT_FIELDS, compile_lora
from worker.engine.lora.embedding import add_pair
from worker.engine.lora.weights import LoraPair

# With more rows of one adapter products of matrices are faster.
_FEW_ROWS = 96
# Of so many tasks none keeps a thread waiting for long.
_TASKS_PER_THREAD = 2
_GIVEN = Struct("=16q")


@dataclass(slots=True)
class CpuStep:
    """What the layers that see the same rows need to know of a step.

    It has so many `tokens`. `segments` are (slot, first row, last row + 1) of the rows with adapters, `short` [n, 3]
    and `long` those with few and with many rows; a short one's work in a layer is cut into `parts`. `addresses` are
    those of `short` and of the kernel's counters.
    """

    tokens: int = 0
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    short: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, SEGMENT_FIELDS), np.int64))
    long: list[tuple[int, int, int]] = field(default_factory=list)
    parts: int = 1
    counters: NDArray[np.int64] = field(default_factory=lambda: np.zeros(COUNTERS, np.int64))
    addresses: tuple[int, int] = (0, 0)
    # For whichever group is computed.
    workspace: Workspace = field(default_factory=Workspace)

    def set_rows(self, rows: Sequence[tuple[int, int]]) -> None:
        """Set the rows of the next step: (slot or -1, tokens), those with one token and the others sorted by slot."""
        self.segments = []
        first = 0
        # A decode's numbers are not to depend on whether a prompt of its adapter stands beside it.
        for (slot, _), group in groupby(rows, key=lambda row: (row[0], row[1] > 1)):
            stop = first + sum(tokens for _, tokens in group)
            if slot >= 0 and stop > first:
                self.segments.append((slot, first, stop))
            first = stop
        self.tokens = first
        short = [one for one in self.segments if one[2] - one[1] <= _FEW_ROWS]
        self.long = [one for one in self.segments if one[2] - one[1] > _FEW_ROWS]
        self.short = np.array(short, np.int64).reshape(-1, SEGMENT_FIELDS)
        self.addresses = self.short.ctypes.data, self.counters.ctypes.data
        self.parts = max(1, -(-_TASKS_PER_THREAD * torch.get_num_threads() // max(1, len(short))))


class CpuGroup:
    """Layers with the same input, of which `base` makes all outputs side by side; and their adapters."""

    def __init__(
        self,
        base: Callable[[Tensor], Tensor],
        in_features: int,
        widths: Sequence[int],
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        step: CpuStep,
    ) -> None:
        """`widths` are the layers' out_features; what `base` gives is contiguous. Compiles the kernel."""
        self.base = base
        self.in_features = in_features
        self.width = sum(widths)
        self._step = step
        self._max_rank = max_rank
        ends = np.cumsum([0, *widths])
        self._parts = list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))
        self._dtype = dtype
        self._kernel = compile_lora(str(dtype).removeprefix("torch."))
        self._columns = np.array([[first, stop - first] for first, stop in self._parts], np.int64)
        # What the table tells of, by slot and layer; it keeps that from being freed.
        self._pairs: list[list[LoraPair | None]] = [[None] * len(widths) for _ in range(slots)]
        self._table = np.zeros((slots, len(widths), PAIR_FIELDS), np.int64)
        self._addresses = self._table.ctypes.data, self._columns.ctypes.data
        self._used: set[int] = set()

    def set_slot(self, slot: int, pairs: Sequence[LoraPair | None]) -> None:
        """Put a pair for each layer in a slot, in place of what was there; None: the adapter does not change it."""
        assert all(pair is None or len(pair.a) <= self._max_rank for pair in pairs), "ranks that there is room for"
        self._table[slot] = [_line(pair) for pair in pairs]
        self._pairs[slot] = list(pairs)
        (self._used.add if any(pairs) else self._used.discard)(slot)

    def __call__(self, x: Tensor) -> Tensor:
        """The base's output plus each row's adapter's: [..., in_features] to [..., sum of the widths]."""
        y = self.base(x)
        step = self._step
        if not (self._used and step.segments):
            return y
        x = x.contiguous()
        if len(step.short):
            self._add_short(x, y)
        rows, out = x.view(-1, self.in_features), y.view(-1, self.width)
        for slot, first, stop in step.long:
            for (begin, end), pair in zip(self._parts, self._pairs[slot], strict=True):
                if pair is not None:
                    add_pair(out[first:stop, begin:end], linear(rows[first:stop], pair.a), pair)
        return y

    def _add_short(self, x: Tensor, y: Tensor) -> None:
        step, layers, size = self._step, len(self._parts), self._dtype.itemsize
        # What the kernel takes for granted: it would write beyond them.
        assert (x.numel(), y.numel()) == (step.tokens * self.in_features, step.tokens * self.width), "the step's rows"
        assert x.dtype == y.dtype == self._dtype, "numbers of the kernel's kind"
        shrunk = step.workspace.address(step.tokens * layers * self._max_rank)
        step.counters[:] = 0
        given = _GIVEN.pack(
            *(x.data_ptr(), self.in_features * size, self.in_features, y.data_ptr(), self.width * size),
            *(*self._addresses, layers, step.addresses[0], len(step.short), step.parts, step.addresses[1]),
            *(shrunk, layers * self._max_rank * 4, self._max_rank, size),
        )
        threads.run_on_all_threads(self._kernel.address, given)


def _line(pair: LoraPair | None) -> tuple[int, ...]:
    if pair is None:
        return (0,) * PAIR_FIELDS
    change = pair.rescale
    gain, shift = (0, 0) if change is None else (change.gain.data_ptr(), change.shift.data_ptr())
    return pair.a.data_ptr(), pair.b.data_ptr(), len(pair.a), gain, shift
