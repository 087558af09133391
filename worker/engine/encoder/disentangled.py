"""DeBERTa-v2's attention (arXiv 2006.03654) over texts without padding, each with its own adapter.

    score(i, j) = (q_i . k_j  +  q_i . pk[i - j]  +  k_j . pq[j - i]) / sqrt(3 d)

pk and pq are projections of the embeddings of relative positions, which all layers share. They are constants of the
model and of an adapter: the model's are computed once, and an adapter adds its own part. The sums are those of
transformers' DisentangledSelfAttention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from worker.engine.attention.paged import AttentionContext
from worker.engine.encoder.attention import Text, TextAttention
from worker.engine.lora.fused_linears import FusedPart, FusedProduct
from worker.engine.lora.weights import LoraPair

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
