"""Attention of texts in both directions, each within itself. They lie one after the other, without padding.

tokens    │ text 0 │ text 1     │ text 2 │        a text's tokens attend to all of its tokens, or to a window of them
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from worker.engine.attention.paged import LayerCall

# Number of queries that a windowed attention computes at once: its cost grows with the text's length, not its square.
_QUERIES = 256


@dataclass(frozen=True, slots=True)
class Text:
    """A text's place among the tokens of a step, and the slot of its adapter (-1: none)."""

    start: int
    stop: int
    slot: int

    @property
    def length(self) -> int:
        """Return the number of its tokens."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class TextAttention:
    """Implements worker.engine.attention.paged.StepAttention for a step's texts."""

    texts: tuple[Text, ...]

    def attend(self, call: LayerCall) -> Tensor:
        """Return the attention of every token; a query attends to positions less than `window` away, on both sides."""
        out = torch.empty_like(call.query)
        for text in self.texts:
            own = slice(text.start, text.stop)
            q, k, v = (part[own].transpose(0, 1)[None] for part in (call.query, call.key, call.value))
            for queries, keys, seen in _pieces(text.length, call.window):
                attended = scaled_dot_product_attention(
                    q[:, :, queries], k[:, :, keys], v[:, :, keys], attn_mask=seen, scale=call.scaling
                )
                out[own][queries] = attended[0].transpose(0, 1)
        return out


def _pieces(length: int, window: int | None) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield queries, the keys that some of them attend to, and which (queries, keys) do: None for all."""
    if window is None or length <= window:
        yield slice(0, length), slice(0, length), None
        return
    for first in range(0, length, _QUERIES):
        queries = slice(first, min(first + _QUERIES, length))
        keys = slice(max(0, queries.start - window + 1), min(length, queries.stop + window - 1))
        distance = torch.arange(queries.start, queries.stop)[:, None] - torch.arange(keys.start, keys.stop)
        yield queries, keys, distance.abs() < window
