"""Token embeddings with an adapter per row, in torch operators. On the CPU only: CUDA does not serve them yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from worker.engine.lora.weights import LoraPair
from worker.engine.quantized.embedding import QuantizedEmbedding

if TYPE_CHECKING:
    from worker.engine.lora.cpu.group import CpuStep  # numba is installed only where the engine computes on the CPU


class CpuEmbedding(nn.Module):
    """Token embeddings plus, for each token, its row of the adapter's A^T times B."""

    def __init__(self, base: nn.Embedding | QuantizedEmbedding, slots: int, step: CpuStep) -> None:
        super().__init__()
        self.base = base
        self.pairs: list[LoraPair | None] = [None] * slots
        self._step = step

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids [...] and add each row's adapter: [..., features]."""
        y: Tensor = self.base(ids)
        out, flat = y.view(-1, y.shape[-1]), ids.reshape(-1)
        for slot, first, stop in self._step.segments:
            pair = self.pairs[slot]
            if pair is not None:
                pair.add_to(out[first:stop], pair.a.index_select(1, flat[first:stop]).t())
        return y
