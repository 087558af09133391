"""What the runner needs of a model's adaptable layers, whatever device they are on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worker.lora.weights import AdapterWeights


class AdapterLayers(Protocol):
    """A model's adaptable layers: worker.lora.layers on the CPU, worker.lora.cuda_layers on CUDA; from one thread."""

    def install(self, weights: AdapterWeights, slot: int) -> None:
        """Put an adapter into a slot, in place of what was there, behind the steps that were launched before."""

    def begin_step(self, rows: Sequence[tuple[int, int]], decodes: int, wanted: Sequence[int] = ()) -> None:
        """Set what the layers do until the next call.

        `rows` are (slot or -1, tokens), the first `decodes` of them with one token, each part sorted by slot; `wanted`
        says of how many of each row's tokens the output head gives logits.
        """

    def begin_decode(self, row_slots: Sequence[int], padded: int) -> None:
        """The same for one token a row, and rows up to `padded` that pad; `row_slots` are sorted.

        On CUDA every call with this `padded` leads to the same launches, so that a graph can hold them.
        """
