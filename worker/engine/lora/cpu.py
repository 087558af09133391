"""The model's adaptable layers on the CPU: layers that are one product share one CpuGroup.

    x ──▶ q, k and v's weights, one product ──▶ y [rows, q | k | v] ──▶ CpuGroup adds to y ──▶ views of y

    rows of a step, sorted by slot    │ slot 3 │ slot 3, a prompt │ slot 5 │ slot 7 │ none │
    at most _KERNEL_ROWS of a slot      kernel                      kernel   kernel
    more                                         x A^T B in torch

Nothing is copied into a slot: a slot is a line of a table with the addresses of the adapter's tensors in host memory.
Rows without an adapter keep the base model's bits. A step costs time for the adapters of its own rows, not for all that
are in slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear

from worker.engine.device import dtype_name
from worker.engine.kernels.lora import COUNTERS, PAIR_FIELDS, SEGMENT_FIELDS, compile_lora
from worker.engine.kernels.threads import Workspace
from worker.engine.lora.base_layers import FusedPart, FusedProduct, fused_groups, place_parts
from worker.engine.lora.weights import AdapterWeights, LoraPair
from worker.engine.quantized.weight import QuantizedEmbedding


class CpuEmbedding(nn.Module):
    """Token embeddings plus, for each token, its row of the adapter's A^T times B; CUDA does not serve them yet."""

    def __init__(self, base: nn.Embedding | QuantizedEmbedding, slots: int, step: CpuStep) -> None:
        super().__init__()
        self.base = base
        self.pairs: list[LoraPair | None] = [None] * slots
        self._step = step

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids [...] and add each row's adapter: [..., features]."""
        y: Tensor = self.base(ids)
        out, flat = y.view(-1, y.shape[-1]), ids.reshape(-1)
        for slot, first, stop in self._step.segments:
            pair = self.pairs[slot]
            if pair is not None:
                pair.add_to(out[first:stop], pair.a.index_select(1, flat[first:stop]).t())
        return y


# Maximum number of consecutive rows of one adapter for the kernel; torch's matrix products are faster on more.
_KERNEL_ROWS = 96
# Minimum number of tasks per thread that a step is cut into: with two, no thread waits long for the last one.
_TASKS_PER_THREAD = 2


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
        self._kernel.run(
            *(x.data_ptr(), self.in_features * size, self.in_features, y.data_ptr(), self.width * size),
            *(*self._addresses, layers, step.addresses[0], len(step.short), step.parts, step.addresses[1]),
            *(shrunk, layers * self._max_rank * 4, self._max_rank, size),
        )


def _table_line(pair: LoraPair | None) -> tuple[int, ...]:
    """Return the kernel's PAIR_FIELDS integers for a pair, all 0 for none."""
    if pair is None:
        return (0,) * PAIR_FIELDS
    change = pair.rescale
    gain, shift = (0, 0) if change is None else (change.gain.data_ptr(), change.shift.data_ptr())
    return pair.a.data_ptr(), pair.b.data_ptr(), len(pair.a), gain, shift


class CpuLayers:
    """Implements worker.engine.lora.weights.AdapterLayers. An adapter's tensors are referenced, not copied."""

    def __init__(
        self,
        model: nn.Module,
        linears: Mapping[str, tuple[int, int]],
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        ends: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        """Replace the model's layers, and compile the kernel.

        `linears` are (in_features, out_features) by name of the layers between embeddings and output head; `ends` are
        those of the embeddings and the head, where adapters may change them.
        """
        self._step = CpuStep()
        # The head computes only the rows whose logits are needed, so it has row numbers of its own.
        self._head_step = CpuStep()
        self._embeddings: dict[str, CpuEmbedding] = {}
        self._groups: list[tuple[Sequence[str], CpuGroup]] = []

        def add_group(names: Sequence[str], shapes: Mapping[str, tuple[int, int]], step: CpuStep) -> None:
            widths = [shapes[name][1] for name in names]
            layers = [model.get_submodule(name) for name in names]
            base: Callable[[Tensor], Tensor] = layers[0]
            if isinstance(layers[0], FusedPart):
                parts = [layer.index for layer in layers if isinstance(layer, FusedPart)]
                assert parts == list(range(len(layers[0].product.widths))), "all parts of the product, in their order"
                base = layers[0].product.base
            group = CpuGroup(base, shapes[names[0]][0], widths, slots, max_rank, dtype, step)
            place_parts(model, names, group)
            self._groups.append((names, group))

        for names in fused_groups(model, linears):
            add_group(names, linears, self._step)
        self._has_ends = bool(ends)
        for name in ends:
            base = model.get_submodule(name)
            if isinstance(base, nn.Embedding | QuantizedEmbedding):
                self._embeddings[name] = CpuEmbedding(base, slots, self._step)
                model.set_submodule(name, self._embeddings[name])
            else:
                add_group([name], ends, self._head_step)

    def install(self, weights: AdapterWeights, slot: int) -> None:
        """See AdapterLayers."""
        for names, group in self._groups:
            group.set_slot(slot, [weights.pairs.get(name) for name in names])
        for name, embedding in self._embeddings.items():
            embedding.pairs[slot] = weights.pairs.get(name)

    def begin_step(self, rows: Sequence[tuple[int, int]], logit_counts: Sequence[int] = ()) -> None:
        """See AdapterLayers."""
        self._step.set_rows(rows)
        if self._has_ends:
            self._head_step.set_rows([(slot, count) for (slot, _), count in zip(rows, logit_counts, strict=True)])

    def begin_decode(self, row_slots: Sequence[int], padded: int) -> None:
        """See AdapterLayers."""
        self.begin_step([(slot, 1) for slot in (*row_slots, *[-1] * (padded - len(row_slots)))], [1] * padded)
