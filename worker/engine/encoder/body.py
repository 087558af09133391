"""The forward pass of each family's encoder, without its head, over texts that lie one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from worker.engine.attention.paged import AttentionContext
from worker.engine.encoder.attention import Text, TextAttention
from worker.engine.encoder.disentangled import DisentangledAttention, RelativePositions
from worker.engine.encoder.loader import LoadedEncoder
from worker.engine.lora.weights import AdapterWeights


class EncoderBody:
    """An encoder's embeddings and layers. `on_layer` is called after each layer."""

    def __init__(self, loaded: LoadedEncoder, slots: int, on_layer: Callable[[], None]) -> None:
        """Prepare the model's attention; before its weights are packed."""
        self._body = loaded.body
        self._prefix = loaded.family.prefix
        self._padding: int = loaded.module.config.pad_token_id or 0
        self._types: int = getattr(loaded.module.config, "type_vocab_size", 0)
        self._context = AttentionContext()
        self._own_attention: list[DisentangledAttention] = []
        if self._prefix == "deberta":
            self._replace_attention(slots)
        else:
            self._context.attach(self._body)
        layers = self._body.layers if self._prefix == "model" else self._body.encoder.layer
        for layer in layers:
            layer.register_forward_hook(lambda *_: on_layer())

    def install(self, weights: AdapterWeights, slot: int) -> None:
        """Replace a slot's adapter where it changes constants of the attention."""
        for attention in self._own_attention:
            attention.install(weights.pairs, slot)

    def hidden_states(self, ids: Sequence[Sequence[int]], pairs: Sequence[int], slots: Sequence[int]) -> Tensor:
        """Return the last layer's hidden states of all texts' tokens: [tokens, width].

        `pairs` says how many tokens at each text's end are of a pair's second text; `slots` its adapter's slot or -1.
        """
        lengths = [len(text) for text in ids]
        ends = accumulate(lengths)
        texts = tuple(Text(end - length, end, slot) for end, length, slot in zip(ends, lengths, slots, strict=True))
        flat = torch.tensor([token for text in ids for token in text])
        positions = torch.cat([self._positions(text) for text in flat.split_with_sizes(lengths)])
        types = torch.zeros_like(flat)
        if self._types > 1:
            for text, pair in zip(texts, pairs, strict=True):
                types[text.stop - pair : text.stop] = 1
        with self._context.during(TextAttention(texts)):
            hidden: Tensor = self._compute(flat[None], positions[None], types[None], texts)[0]
        return hidden

    def _positions(self, ids: Tensor) -> Tensor:
        if self._prefix != "roberta":
            return torch.arange(len(ids))
        # Padding inside a text has the padding's position, and is not counted (create_position_ids_from_input_ids).
        real = (ids != self._padding).long()
        return real.cumsum(0) * real + self._padding

    def _compute(self, ids: Tensor, positions: Tensor, types: Tensor, texts: Sequence[Text]) -> Tensor:
        body = self._body
        hidden: Tensor
        if self._prefix == "model":
            hidden = body(input_ids=ids, position_ids=positions).last_hidden_state
            return hidden
        hidden = body.embeddings(input_ids=ids, position_ids=positions, token_type_ids=types)
        if self._prefix != "deberta":
            hidden = body.encoder(hidden, attention_mask=None).last_hidden_state
            return hidden
        for index, layer in enumerate(body.encoder.layer):
            output = layer(hidden, None)[0]
            if index == 0 and body.encoder.conv is not None:
                output = _convolved(body.encoder.conv, hidden, output, texts)
            hidden = output
        return hidden

    def _replace_attention(self, slots: int) -> None:
        encoder = self._body.encoder
        positions = RelativePositions(encoder) if encoder.relative_attention else None
        for index, layer in enumerate(encoder.layer):
            name = f"{self._prefix}.encoder.layer.{index}.attention.self"
            attention = DisentangledAttention(layer.attention.self, positions, slots, name, self._context)
            layer.attention.self = attention
            self._own_attention.append(attention)


def _convolved(conv: Any, hidden: Tensor, output: Tensor, texts: Sequence[Text]) -> Tensor:
    """Add the convolution of each text's first hidden states, which does not reach beyond the text."""
    parts = []
    for text in texts:
        own = slice(text.start, text.stop)
        parts.append(conv(hidden[:, own], output[:, own], hidden.new_ones(1, text.length)))
    return torch.cat(parts, dim=1)
