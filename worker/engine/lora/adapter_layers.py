"""What the runner needs of a model's adaptable layers, whatever device they are on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worker.engine.lora.weights import AdapterWeights


class AdapterLayers(Protocol):
    """A model's adaptable layers: cpu_layers.py on the CPU, cuda_layers.py on CUDA; from one thread."""

    def install(self, weights: AdapterWeights, slot: int) -> None:
        """Put an adapter into a slot, in place of what was there, behind the steps that were launched before."""

    def begin_step(self, rows: Sequence[tuple[int, int]], wanted: Sequence[int] = ()) -> None:
        """Set what the layers do until the next call.

        `rows` are (slot or -1, tokens), those with one token and those with more each sorted by slot; `wanted` says of
        how many of each row's tokens the output head gives logits.
        """

    def begin_decode(self, row_slots: Sequence[int], padded: int) -> None:
        """The same for one token a row, and rows up to `padded` that pad; `row_slots` are sorted.

        On CUDA every call with this `padded` leads to the same launches, so that a graph can hold them.
        """
