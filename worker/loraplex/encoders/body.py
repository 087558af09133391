"""The forward pass of each family's encoder, without its head, over texts side by side, without padding.

    tokens    │ text 0 │ text 1     │ text 2 │    a text's tokens attend to all of its tokens, or to a window of them

DeBERTa-v2 has attention of its own (arXiv 2006.03654):

    score(i, j) = (q_i . k_j  +  q_i . pk[i - j]  +  k_j . pq[j - i]) / sqrt(3 d)

pk and pq are projections of the embeddings of relative positions, which all layers share. They are constants of the
model and of an adapter: the model's are computed once, and an adapter adds its own part. The sums are those of
transformers' DisentangledSelfAttention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from loraplex.encoders.loader import LoadedEncoder
from loraplex.worker.engine.attention.paged import AttentionContext, LayerCall
from loraplex.worker.engine.lora.base_layers import FusedPart, FusedProduct
from loraplex.worker.engine.lora.weights import AdapterWeights, LoraPair

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
    """Implements loraplex.worker.engine.attention.paged.StepAttention for a step's texts."""

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


# Tokens by which the index of relative positions grows.
_INDEX_STEP = 128


class RelativePositions:
    """The embeddings of relative positions, [2 * span, width], and their index for each pair of a text's tokens."""

    def __init__(self, encoder: Any) -> None:
        attention = encoder.layer[0].attention.self
        self.span: int = attention.pos_ebd_size
        self.embeddings: Tensor = encoder.get_rel_embedding()[: 2 * self.span]
        self._buckets: int = attention.position_buckets
        self._most: int = attention.max_relative_positions
        self._index = torch.empty(0, 0, dtype=torch.int64)

    def index(self, length: int) -> tuple[Tensor, slice]:
        """Return [length, length] and the embeddings that it indexes: at (i, j) the row of those for i - j."""
        if len(self._index) < length:
            # In steps, so that it is not made for each length anew.
            positions = torch.empty(1, -(-length // _INDEX_STEP) * _INDEX_STEP, 1)
            relative: Any = build_relative_position(positions, positions, self._buckets, self._most)
            index: Tensor = relative[0] + self.span
            self._index = index.clamp_(0, 2 * self.span - 1)
        index = self._index[:length, :length]
        first, last = int(index[0, -1]), int(index[-1, 0])
        return index - first, slice(first, last + 1)


class _Projection:
    """A linear layer's output for the relative positions, by adapter: [heads, 2 * span, dim]."""

    def __init__(self, layer: nn.Module, positions: RelativePositions, heads: int, slots: int) -> None:
        self._positions = positions
        self._heads = heads
        self._own: Tensor = layer(positions.embeddings)
        self.pairs: list[LoraPair | None] = [None] * slots

    def of_slot(self, slot: int) -> Tensor:
        """Return the projection with the adapter in a slot; -1: without."""
        pair, y = self.pairs[slot] if slot >= 0 else None, self._own
        if pair is not None:
            y = y.clone()
            pair.add_to(y, linear(self._positions.embeddings, pair.a))
        return y.view(len(y), self._heads, -1).transpose(0, 1)


class DisentangledAttention(nn.Module):
    """Takes the place of transformers' DisentangledSelfAttention, whose layers it keeps under their names."""

    def __init__(
        self, own: Any, positions: RelativePositions | None, slots: int, name: str, context: AttentionContext
    ) -> None:
        """Project the relative positions by `own`, whose name in the model is `name`."""
        super().__init__()
        for child, layer in own.named_children():
            self.add_module(child, layer)
        self._heads: int = own.num_attention_heads
        self._width: int = own.all_head_size
        self._context = context
        kinds = [kind for kind in ("c2p", "p2c") if kind in own.pos_att_type]
        self._scale: float = (own.attention_head_size * (1 + len(kinds))) ** 0.5
        self._positions = positions
        # By kind; the names are those of the layers that adapters may change.
        self._projections: dict[str, _Projection] = {}
        self._names: dict[str, str] = {}
        for kind in kinds if positions is not None else ():
            part = "key" if kind == "c2p" else "query"
            layer = f"{part}_proj" if own.share_att_key else f"pos_{part}_proj"
            self._projections[kind] = _Projection(getattr(own, layer), positions, self._heads, slots)  # type: ignore[arg-type]
            self._names[kind] = f"{name}.{layer}"
            if not own.share_att_key:
                # Computed here alone: nothing packs or adapts it as a layer of a step's tokens.
                self.add_module(layer, FusedPart(FusedProduct(getattr(own, layer), [self._width]), 0))

    def install(self, pairs: Mapping[str, LoraPair], slot: int) -> None:
        """Replace a slot's adapter."""
        for kind, projection in self._projections.items():
            projection.pairs[slot] = pairs.get(self._names[kind])

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Attend from hidden_states [1, tokens, width]; returns the same shape."""
        q, k, v = (
            self.get_submodule(f"{part}_proj")(hidden_states)[0].unflatten(-1, (self._heads, -1)).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        step = self._context.step
        assert isinstance(step, TextAttention), "attention is called within a step"
        out = torch.empty_like(v.transpose(0, 1))
        projected: dict[int, dict[str, Tensor]] = {}
        for text in step.texts:
            if text.slot not in projected:
                projected[text.slot] = {kind: one.of_slot(text.slot) for kind, one in self._projections.items()}
            own = slice(text.start, text.stop)
            scores = self._scores(q[:, own], k[:, own], text, projected[text.slot])
            out[own] = torch.matmul(scores.softmax(-1), v[:, own]).transpose(0, 1)
        return out.flatten(1)[None], None

    def _scores(self, q: Tensor, k: Tensor, text: Text, projected: Mapping[str, Tensor]) -> Tensor:
        """Return [heads, tokens, tokens] of one text's q and k [heads, tokens, dim]."""
        scores: Tensor = torch.matmul(q, k.transpose(-1, -2))
        if self._positions is not None:
            index, near = self._positions.index(text.length)
            index = index.expand_as(scores)
            if "c2p" in projected:
                scores += torch.matmul(q, projected["c2p"][:, near].transpose(-1, -2)).gather(-1, index)
            if "p2c" in projected:
                # By key and query; j - i has the row that i - j has in the transposed index.
                by_key = torch.matmul(k, projected["p2c"][:, near].transpose(-1, -2))
                scores += by_key.gather(-1, index.transpose(-1, -2)).transpose(-1, -2)
        return scores / self._scale


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
