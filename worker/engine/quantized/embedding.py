"""Token embeddings over a quantized weight."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.engine.quantized.weight import QuantizedModule, QuantizedWeight


class QuantizedEmbedding(QuantizedModule):
    """Token embeddings [num_embeddings, embedding_dim]: looks up ids [...] to [..., embedding_dim].

    Some models multiply by `embed_scale`, which is then an attribute as on their own layer.
    """

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype, embed_scale: float | None = None) -> None:
        super().__init__(weight)
        self.num_embeddings = weight.out_features
        self.embedding_dim = weight.in_features
        self.dtype = dtype
        if embed_scale is not None:
            self.embed_scale = embed_scale

    def forward(self, ids: Tensor) -> Tensor:
        """Dequantize the rows of ids [...]: [..., embedding_dim]."""
        y = self.weight.rows(ids.reshape(-1)).dequantize(self.dtype)
        if hasattr(self, "embed_scale"):
            y *= torch.tensor(self.embed_scale, dtype=self.dtype)
        return y.view(*ids.shape, self.embedding_dim)
