"""The model's adaptable layers on the CPU: layers that are one product share one CpuGroup.

    x ──▶ q, k and v's weights, one product ──▶ y [rows, q | k | v] ──▶ CpuGroup adds to y ──▶ views of y

    rows of a step, sorted by slot    │ slot 3 │ slot 3, a prompt │ slot 5 │ slot 7 │ none │

Nothing is copied into a slot: a slot is a line of a table with the addresses of the adapter's tensors in host memory.
Rows without an adapter keep the base model's bits. A step costs time for the adapters of its own rows, not for all that
are in slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear

from loraplex.contracts.artifacts.experts import ExpertSizes
from loraplex.kernels.lora import (
    COUNTERS,
    PAIR_FIELDS,
    SEGMENT_FIELDS,
    SEGMENT_ROWS,
    compile_lora,
    scratch_floats,
)
from loraplex.kernels.lora_products import RANK_STEP, fastest_products
from loraplex.kernels.threads import Workspace
from loraplex.kernels.weight_vectors import FLOATS
from loraplex.worker.engine.device import dtype_name
from loraplex.worker.engine.lora.base_layers import FusedPart, FusedProduct, fused_groups, place_parts
from loraplex.worker.engine.lora.weights import AdapterWeights, LoraPair
from loraplex.worker.engine.quantized.layers import QuantizedEmbedding

# Minimum number of tasks per thread that a step is cut into: with two, no thread waits long for the last one.
_TASKS_PER_THREAD = 2


@dataclass(slots=True)
class CpuStep:
    """The rows of a step, shared by all groups that see the same rows.

    `rows` are (slot or -1, tokens), `tokens` their number. `segments` are (slot, first row, last row + 1) of
    consecutive rows with one adapter, and `table` [n, SEGMENT_FIELDS] the same for the kernel, which cuts a segment's
    work in one layer into `parts`. `addresses` are those of the arrays `table` and `counters`.
    """

    tokens: int = 0
    rows: Sequence[tuple[int, int]] = ()
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    table: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, SEGMENT_FIELDS), np.int64))
    parts: int = 1
    counters: NDArray[np.int64] = field(default_factory=lambda: np.zeros(COUNTERS, np.int64))
    addresses: tuple[int, int] = (0, 0)
    # Scratch memory for the group that is being computed.
    workspace: Workspace = field(default_factory=Workspace)

    def set_rows(self, rows: Sequence[tuple[int, int]]) -> None:
        """Set the next step's rows: (slot or -1, tokens), those of a slot beside each other."""
        if rows == self.rows:
            return
        self.segments, self.rows = [], rows
        first = 0
        for slot, group in groupby(rows, key=itemgetter(0)):
            stop = first + sum(tokens for _, tokens in group)
            if slot >= 0:
                begins = range(first, stop, SEGMENT_ROWS)
                self.segments += [(slot, begin, min(stop, begin + SEGMENT_ROWS)) for begin in begins]
            first = stop
        self.tokens = first
        self.table = np.array(self.segments, np.int64).reshape(-1, SEGMENT_FIELDS)
        self.addresses = self.table.ctypes.data, self.counters.ctypes.data
        self.parts = max(1, -(-_TASKS_PER_THREAD * torch.get_num_threads() // max(1, len(self.segments))))


class CpuGroup(FusedProduct):
    """Layers with the same input: the base model's product of all of them, and the adapters in their slots.

    Of a layer's `experts` each has slots of its own, slot * experts + expert.
    """

    def __init__(
        self,
        base: Callable[[Tensor], Tensor],
        in_features: int,
        widths: Sequence[int],
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        step: CpuStep,
        experts: int = 1,
    ) -> None:
        """Compile the kernel. `widths` are the layers' out_features; the output of `base` must be contiguous."""
        super().__init__(base, widths)
        self.in_features = in_features
        self.width = sum(widths)
        self._step = step
        self._max_rank = -(-max_rank // RANK_STEP) * RANK_STEP
        self._dtype = dtype
        products = fastest_products(dtype_name(dtype), (in_features, *widths))
        self.kernel = compile_lora(dtype_name(dtype), products)
        self._shrunk_size = 4 if products == FLOATS else 2
        self._scratch_floats = scratch_floats(max_rank, products)
        # The first column of each layer in y, and its number of columns.
        self._columns = np.stack([np.cumsum([0, *widths[:-1]]), widths], 1).astype(np.int64)
        # The pairs whose addresses are in the table, by slot and layer: references keep them from being freed.
        self._pairs: list[list[LoraPair | None]] = [[None] * len(widths) for _ in range(slots)]
        # The weights [width, in_features] that adapters have in place of the base's, by slot.
        self._own: dict[int, Tensor] = {}
        self._table = np.zeros((slots, experts, len(widths), PAIR_FIELDS), np.int64)
        self._addresses = self._table.ctypes.data, self._columns.ctypes.data
        self._used: set[int] = set()

    @property
    def adapts(self) -> bool:
        """Tell whether a row of the step has an adapter, and an adapter in a slot is on these layers."""
        return self.used and self.rows_adapt

    @property
    def rows_adapt(self) -> bool:
        """Tell whether a row of the step has an adapter."""
        return bool(self._step.segments)

    @property
    def used(self) -> bool:
        """Tell whether an adapter in a slot is on these layers."""
        return bool(self._used)

    @property
    def is_base(self) -> bool:
        """Tell whether no adapter in a slot is on these layers, or has a weight in their place."""
        return not self._used and not self._own

    @property
    def counters(self) -> NDArray[np.int64]:
        """Return the counters of the kernel's calls, shared by all groups of a step."""
        return self._step.counters

    def set_slot(self, slot: int, pairs: Sequence[LoraPair | None], own: Tensor | None = None) -> None:
        """Replace the pairs of a slot, one for each layer; None where the adapter does not change the layer.

        `own` is the weight that it has in place of the base's.
        """
        assert all(pair is None or pair.rank <= self._max_rank for pair in pairs), "no rank is above max_rank"
        for layer, pair in enumerate(pairs):
            _fill_lines(self._table[slot, :, layer], pair)
        self._pairs[slot] = list(pairs)
        (self._used.add if any(pairs) else self._used.discard)(slot)
        self._own.pop(slot, None)
        if own is not None:
            self._own[slot] = own

    def multiply(self, x: Tensor) -> Tensor:
        """Compute the base product and add each row's adapter: [..., in_features] to [..., sum of the widths]."""
        y = self.base(x)
        if self.adapts:
            self.add_adapters(x.contiguous(), y)
        if self._own:
            rows, inputs = y.view(-1, self.width), x.reshape(-1, self.in_features)
            for slot, first, stop in self._step.segments:
                if (own := self._own.get(slot)) is not None:
                    # A product for each row: its bits do not depend on the rows beside it. Panels would do that too,
                    # and hold a second copy of the weight.
                    for row in range(first, stop):
                        rows[row] = linear(inputs[row], own)
        return y

    def add_adapters(self, x: Tensor, y: Tensor) -> None:
        """Add each row's adapter to the base product y [..., sum of the widths] of x [..., in_features], in place."""
        step, layers, size = self._step, len(self._columns), self._dtype.itemsize
        # The kernel checks nothing: with other sizes or dtypes it would write outside these tensors.
        assert (x.numel(), y.numel()) == (step.tokens * self.in_features, step.tokens * self.width), "the step's rows"
        assert x.dtype == y.dtype == self._dtype, "the dtype that the kernel is compiled for"
        floats = self._scratch_floats
        scratch = step.workspace.address(floats * torch.get_num_threads() + step.tokens * layers * self._max_rank)
        shrunk = scratch + 4 * floats * torch.get_num_threads()
        step.counters[:] = 0
        self.kernel.run(
            *(x.data_ptr(), self.in_features * size, self.in_features, y.data_ptr(), self.width * size),
            *(*self._addresses, layers, step.addresses[0], len(step.segments), step.parts, step.addresses[1]),
            *(shrunk, layers * self._max_rank * 4, self._max_rank, size, self._shrunk_size, scratch, 4 * floats),
        )


def _fill_lines(lines: NDArray[np.int64], pair: LoraPair | None) -> None:
    """Write the kernel's integers for the pair of each expert, or of the layer, [experts, PAIR_FIELDS]; 0 for none."""
    if pair is None:
        lines[:] = 0
        return
    change = pair.rescale
    gain, shift = (0, 0) if change is None else (change.gain.data_ptr(), change.shift.data_ptr())
    lines[:] = pair.a.data_ptr(), pair.b.data_ptr(), pair.rank, gain, shift
    for field_of, tensor in enumerate((pair.a, pair.b)):
        lines[:, field_of] += np.arange(len(lines)) * (tensor.nbytes // len(lines))


class CpuExperts:
    """The adapters on a layer's experts, as the experts ask for them; `products` are 0, up, and 1, down.

    The rows of its groups are pairs of a token and an expert, sorted by expert and slot.
    """

    def __init__(
        self, sizes: Sequence[ExpertSizes], slots: int, max_rank: int, dtype: torch.dtype, step: CpuStep, pairs: CpuStep
    ) -> None:
        """Compile the kernel. `sizes` are those of the experts' tensors, up and down; `pairs` gets a layer's pairs."""
        self._step = step
        self._pairs = pairs
        self._experts = sizes[0].experts

        def own_product(x: Tensor) -> Tensor:
            raise AssertionError("the experts compute their products")

        self.groups = [
            CpuGroup(own_product, one.in_features, [one.out_features], slots, max_rank, dtype, pairs, one.experts)
            for one in sizes
        ]

    @property
    def adapts(self) -> bool:
        """Tell whether a row of the step has an adapter, and an adapter in a slot is on these experts."""
        return bool(self._step.segments) and any(group.used for group in self.groups)

    def sort(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pairs of a token and an expert in the order in which they are computed.

        experts [tokens, experts of a token]; returned are the expert of each pair, and its place among the pairs as
        they come, both [pairs]. `add` takes rows in this order.
        """
        slots, counts = zip(*self._step.rows, strict=True)
        # One more than each pair's slot, so that none, -1, is counted as well.
        of_pairs = np.repeat(np.repeat(np.array(slots) + 1, counts), experts.shape[1])
        several = max(slots) + 2
        keys, order = (experts.reshape(-1) * several + torch.from_numpy(of_pairs)).sort(stable=True)
        runs, lengths = keys.unique_consecutive(return_counts=True)
        places = torch.where(runs % several > 0, (runs % several - 1) * self._experts + runs // several, -1)
        self._pairs.set_rows(list(zip(places.tolist(), lengths.tolist(), strict=True)))
        return keys // several, order

    def add(self, product: int, x: Tensor, y: Tensor) -> None:
        """Add each pair's adapter to y [pairs, out_features], the experts' own product of x [pairs, in_features]."""
        self.groups[product].add_adapters(x.contiguous(), y)


class CpuEmbedding(nn.Module):
    """Token embeddings plus, for each token, its row of the adapter's A^T times B, or the adapter's own rows.

    CUDA does not serve them yet.
    """

    def __init__(
        self, base: nn.Embedding | QuantizedEmbedding, slots: int, max_rank: int, dtype: torch.dtype, step: CpuStep
    ) -> None:
        super().__init__()
        self.base = base
        self._pairs: list[LoraPair | None] = [None] * slots
        self._own: list[Tensor | None] = [None] * slots
        self._scale = torch.tensor(float(getattr(base, "embed_scale", 1.0)), dtype=dtype)
        self._step = step
        # Adds B: a token's row of A^T, with zeros behind it, is multiplied by the identity first.
        self._group = CpuGroup(base, max_rank, [base.embedding_dim], slots, max_rank, dtype, step)

    def set_slot(self, slot: int, pair: LoraPair | None, own: Tensor | None) -> None:
        """Replace the pair of a slot, or the adapter's own embeddings [vocabulary, features]; None: it has none."""
        self._pairs[slot], self._own[slot] = pair, own
        if pair is not None:
            identity = torch.eye(pair.rank, self._group.in_features, dtype=pair.a.dtype)
            pair = LoraPair(identity, pair.b, pair.rescale)
        self._group.set_slot(slot, [pair])

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids [...] and add each row's adapter: [..., features]."""
        y: Tensor = self.base(ids)
        if self._group.adapts:
            flat = ids.reshape(-1)
            shrunk = y.new_zeros(len(flat), self._group.in_features)
            for slot, first, stop in self._step.segments:
                if (pair := self._pairs[slot]) is not None:
                    shrunk[first:stop, : pair.rank] = pair.a.index_select(1, flat[first:stop]).t()
            self._group.add_adapters(shrunk, y)
        for slot, first, stop in self._step.segments:
            if (own := self._own[slot]) is not None:
                chosen = ids.reshape(-1)[first:stop]
                y.view(-1, y.shape[-1])[first:stop] = own.index_select(0, chosen) * self._scale
        return y


class CpuLayers:
    """Implements AdapterLayers of weights. An adapter's tensors are referenced, not copied."""

    def __init__(
        self,
        model: nn.Module,
        linears: Mapping[str, tuple[int, int]],
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        ends: Mapping[str, tuple[int, int]] = MappingProxyType({}),
        experts: Mapping[str, ExpertSizes] = MappingProxyType({}),
    ) -> None:
        """Replace the model's layers, and compile the kernel.

        `linears` are (in_features, out_features) by name of the layers between embeddings and output head; `ends` are
        those of the embeddings and the head, where adapters may change them; `experts` the tensors of experts.
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
                self._embeddings[name] = CpuEmbedding(base, slots, max_rank, dtype, self._step)
                model.set_submodule(name, self._embeddings[name])
            else:
                add_group([name], ends, self._head_step)
        # The pairs of the layer that is being computed.
        pairs = CpuStep()
        for parent in dict.fromkeys(name.rpartition(".")[0] for name in experts):
            names = [name for name in experts if name.rpartition(".")[0] == parent]
            adapters = CpuExperts([experts[name] for name in names], slots, max_rank, dtype, self._step, pairs)
            self._groups += [([name], group) for name, group in zip(names, adapters.groups, strict=True)]
            layer_experts: Any = model.get_submodule(parent).forward
            layer_experts.adapters = adapters

    def install(self, weights: AdapterWeights, slot: int) -> None:
        """See AdapterLayers."""
        for names, group in self._groups:
            group.set_slot(slot, [weights.pairs.get(name) for name in names], weights.own.get(names[0]))
        for name, embedding in self._embeddings.items():
            embedding.set_slot(slot, weights.pairs.get(name), weights.own.get(name))

    def begin_step(self, rows: Sequence[tuple[int, int]], logit_counts: Sequence[int] = ()) -> None:
        """See AdapterLayers."""
        self._step.set_rows(rows)
        if self._has_ends:
            self._head_step.set_rows([(slot, count) for (slot, _), count in zip(rows, logit_counts, strict=True)])

    def begin_decode(self, row_slots: Sequence[int], padded: int) -> None:
        """See AdapterLayers."""
        self.begin_step([(slot, 1) for slot in (*row_slots, *[-1] * (padded - len(row_slots)))], [1] * padded)
