"""The interface between the runner and a model's adaptable layers, the same on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worker.engine.lora.weights import AdapterWeights


class AdapterLayers(Protocol):
    """A model's adaptable layers: cpu/layers.py on the CPU, cuda/layers.py on CUDA. Called by one thread."""

    def install(self, weights: AdapterWeights, slot: int) -> None:
        """Replace a slot's adapter; steps that are already launched still use the old one."""

    def begin_step(self, rows: Sequence[tuple[int, int]], wanted: Sequence[int] = ()) -> None:
        """Set the rows that the layers compute until the next call.

        `rows` are (slot or -1, tokens): first those with one token, then those with more, each sorted by slot. `wanted`
        is the number of each row's tokens that the output head computes logits for.
        """

    def begin_decode(self, row_slots: Sequence[int], padded: int) -> None:
        """Set rows of one token each, with padding rows up to `padded`; `row_slots` are sorted.

        On CUDA all calls with the same `padded` lead to the same launches, so that a CUDA graph can hold them.
        """
