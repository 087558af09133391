"""The model's adaptable layers on the CPU; layers that are one product share one CpuGroup.

    x ──▶ q, k and v's weights, one product ──▶ y [rows, q | k | v] ──▶ CpuGroup adds to y ──▶ views of y

Rows without an adapter keep the base model's bits. A step costs time for the adapters of its own rows, not for all that
are in slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from worker.engine.lora.cpu.group import CpuGroup, CpuStep
from worker.engine.lora.embedding import CpuEmbedding
from worker.engine.lora.fused_linears import FusedPart, fused_groups, replace_linears
from worker.engine.lora.weights import AdapterWeights
from worker.engine.quantized.embedding import QuantizedEmbedding


class CpuLayers:
    """Implements worker.engine.lora.adapter_layers.AdapterLayers. An adapter's tensors are referenced, not copied."""

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
            replace_linears(model, names, group)
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

    def begin_step(self, rows: Sequence[tuple[int, int]], wanted: Sequence[int] = ()) -> None:
        """See AdapterLayers."""
        self._step.set_rows(rows)
        if self._has_ends:
            self._head_step.set_rows([(slot, count) for (slot, _), count in zip(rows, wanted, strict=True)])

    def begin_decode(self, row_slots: Sequence[int], padded: int) -> None:
        """See AdapterLayers."""
        self.begin_step([(slot, 1) for slot in (*row_slots, *[-1] * (padded - len(row_slots)))], [1] * padded)
