"""A group of layers with the same input on the CPU: the base product of all, and each row's adapter added to it.

    rows of a step, sorted by slot    │ slot 3 │ slot 3, a prompt │ slot 5 │ slot 7 │ none │
    at most _KERNEL_ROWS of a slot      kernel                      kernel   kernel
    more                                         x A^T B in torch

Nothing is copied into a slot: a slot is a line of a table with the addresses of the adapter's tensors in host memory.
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
from worker.engine.device.dtypes import dtype_name
from worker.engine.lora.cpu.kernel import COUNTERS, PAIR_FIELDS, SEGMENT_FIELDS, compile_lora
from worker.engine.lora.fused_linears import FusedProduct
from worker.engine.lora.weights import LoraPair

# Maximum number of consecutive rows of one adapter for the kernel; torch's matrix products are faster on more.
_KERNEL_ROWS = 96
# Minimum number of tasks per thread that a step is cut into: with two, no thread waits long for the last one.
_TASKS_PER_THREAD = 2
# Layout of the kernel's 16 parameters: 64-bit integers, see kernel.py.
_PARAMETERS = Struct("=16q")


@dataclass(slots=True)
class CpuStep:
    """The rows of a step, shared by all groups that see the same rows.

    `tokens` is their number. `segments` are (slot, first row, last row + 1) of consecutive rows with one adapter:
    `short` [n, SEGMENT_FIELDS] for the kernel, `long` for torch. The kernel cuts a short segment's work in one layer
    into `parts`. `addresses` are those of the arrays `short` and `counters`.
    """

    tokens: int = 0
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    short: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, SEGMENT_FIELDS), np.int64))
    long: list[tuple[int, int, int]] = field(default_factory=list)
    parts: int = 1
    counters: NDArray[np.int64] = field(default_factory=lambda: np.zeros(COUNTERS, np.int64))
    addresses: tuple[int, int] = (0, 0)
    # Scratch memory for the group that is being computed.
    workspace: Workspace = field(default_factory=Workspace)

    def set_rows(self, rows: Sequence[tuple[int, int]]) -> None:
        """Set the next step's rows: (slot or -1, tokens), first those with one token, then the rest, each by slot."""
        self.segments = []
        first = 0
        # Decodes and prompts of one slot are separate segments: a decode's bits must not depend on a prompt beside it.
        for (slot, _), group in groupby(rows, key=lambda row: (row[0], row[1] > 1)):
            stop = first + sum(tokens for _, tokens in group)
            if slot >= 0 and stop > first:
                self.segments.append((slot, first, stop))
            first = stop
        self.tokens = first
        short = [segment for segment in self.segments if segment[2] - segment[1] <= _KERNEL_ROWS]
        self.long = [segment for segment in self.segments if segment[2] - segment[1] > _KERNEL_ROWS]
        self.short = np.array(short, np.int64).reshape(-1, SEGMENT_FIELDS)
        self.addresses = self.short.ctypes.data, self.counters.ctypes.data
        self.parts = max(1, -(-_TASKS_PER_THREAD * torch.get_num_threads() // max(1, len(short))))


class CpuGroup(FusedProduct):
    """Layers with the same input: the base model's product of all of them, and the adapters in their slots."""

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
        """Compile the kernel. `widths` are the layers' out_features; the output of `base` must be contiguous."""
        super().__init__(base, widths)
        self.in_features = in_features
        self.width = sum(widths)
        self._step = step
        self._max_rank = max_rank
        ends = np.cumsum([0, *widths])
        self._columns = list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))
        self._dtype = dtype
        self._kernel = compile_lora(dtype_name(dtype))
        self._kernel_columns = np.array([[first, stop - first] for first, stop in self._columns], np.int64)
        # The pairs whose addresses are in the table, by slot and layer: references keep them from being freed.
        self._pairs: list[list[LoraPair | None]] = [[None] * len(widths) for _ in range(slots)]
        self._table = np.zeros((slots, len(widths), PAIR_FIELDS), np.int64)
        self._addresses = self._table.ctypes.data, self._kernel_columns.ctypes.data
        self._used: set[int] = set()

    @property
    def adapts(self) -> bool:
        """Tell whether a row of the step has an adapter, and an adapter in a slot is on these layers."""
        return bool(self._used and self._step.segments)

    @property
    def counters(self) -> NDArray[np.int64]:
        """Return the counters of the kernel's calls, shared by all groups of a step."""
        return self._step.counters

    def set_slot(self, slot: int, pairs: Sequence[LoraPair | None]) -> None:
        """Replace the pairs of a slot, one for each layer; None where the adapter does not change the layer."""
        assert all(pair is None or len(pair.a) <= self._max_rank for pair in pairs), "no rank is above max_rank"
        self._table[slot] = [_table_line(pair) for pair in pairs]
        self._pairs[slot] = list(pairs)
        (self._used.add if any(pairs) else self._used.discard)(slot)

    def compute(self, x: Tensor) -> Tensor:
        """Compute the base product and add each row's adapter: [..., in_features] to [..., sum of the widths]."""
        y = self.base(x)
        if self.adapts:
            self.add_adapters(x.contiguous(), y)
        return y

    def add_adapters(self, x: Tensor, y: Tensor) -> None:
        """Add each row's adapter to the base product y [..., sum of the widths] of x [..., in_features], in place."""
        step = self._step
        if len(step.short):
            self._run_kernel(x, y)
        rows, out = x.view(-1, self.in_features), y.view(-1, self.width)
        for slot, first, stop in step.long:
            for (begin, end), pair in zip(self._columns, self._pairs[slot], strict=True):
                if pair is not None:
                    pair.add_to(out[first:stop, begin:end], linear(rows[first:stop], pair.a))

    def _run_kernel(self, x: Tensor, y: Tensor) -> None:
        """Add the short segments' adapters to y [..., width] of x [..., in_features], in place."""
        step, layers, size = self._step, len(self._columns), self._dtype.itemsize
        # The kernel checks nothing: with other sizes or dtypes it would write outside these tensors.
        assert (x.numel(), y.numel()) == (step.tokens * self.in_features, step.tokens * self.width), "the step's rows"
        assert x.dtype == y.dtype == self._dtype, "the dtype that the kernel is compiled for"
        shrunk = step.workspace.address(step.tokens * layers * self._max_rank)
        step.counters[:] = 0
        parameters = _PARAMETERS.pack(
            *(x.data_ptr(), self.in_features * size, self.in_features, y.data_ptr(), self.width * size),
            *(*self._addresses, layers, step.addresses[0], len(step.short), step.parts, step.addresses[1]),
            *(shrunk, layers * self._max_rank * 4, self._max_rank, size),
        )
        threads.run_on_all_threads(self._kernel.address, parameters)


def _table_line(pair: LoraPair | None) -> tuple[int, ...]:
    """Return the kernel's PAIR_FIELDS integers for a pair, all 0 for none."""
    if pair is None:
        return (0,) * PAIR_FIELDS
    change = pair.rescale
    gain, shift = (0, 0) if change is None else (change.gain.data_ptr(), change.shift.data_ptr())
    return pair.a.data_ptr(), pair.b.data_ptr(), len(pair.a), gain, shift
