"""The whole layers of a model that is split among ranks, read from its files when an adapter asks for them.

DoRA needs the norm of each output's whole weight, and no rank has all columns of every layer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from loraplex.contracts.artifacts.base_modules import LinearWeight, read_weights
from loraplex.contracts.artifacts.checkpoint import read_checkpoint, read_config
from loraplex.contracts.artifacts.families import is_head
from loraplex.worker.engine.lora.base_layers import LoadedBase, ModelLayers, numbers_of, squares_of
from loraplex.worker.engine.quantized.stored import open_slices
from loraplex.worker.engine.quantized.weight import QuantizedWeight


class WholeLayers(ModelLayers):
    """See ModelLayers. One layer at a time is in memory."""

    def __init__(self, loaded: LoadedBase) -> None:
        """Read the biases."""
        self.loaded = loaded
        embeddings = loaded.module.get_input_embeddings()
        self.vocabulary, self._embeddings = embeddings.num_embeddings, embeddings.weight
        self._squares: dict[str, Tensor] = {}
        self._checkpoint = read_checkpoint(loaded.directory)
        self._weights = read_weights(read_config(loaded.directory), self._checkpoint)
        names = {name: f"{weight.tensor.removesuffix('.weight')}.bias" for name, weight in self._weights.items()}
        with open_slices(self._checkpoint, mapped=False) as slices:
            self._biases = {name: slices[bias][...].float() for name, bias in names.items() if bias in slices}

    def squares(self, module: str) -> Tensor:
        """See ModelLayers."""
        weight = self._file_weight(module)
        if weight is None:
            return super().squares(module)
        if module not in self._squares:
            self._squares[module] = squares_of(self._whole(module, weight))
        return self._squares[module]

    @torch.inference_mode()
    def product(self, module: str, a: Tensor) -> Tensor:
        """See ModelLayers."""
        weight = self._file_weight(module)
        if weight is None:
            return super().product(module, a)
        dtype = self.loaded.dtype
        return linear(a.to(dtype), numbers_of(self._whole(module, weight), dtype)).float()

    def _file_weight(self, module: str) -> LinearWeight | None:
        """Return the weight of a layer; None for token embeddings, which every rank has whole."""
        if is_head(module) and module not in self._weights:
            return next(weight for weight in self._weights.values() if weight.is_embedding)
        weight = self._weights[module]
        return None if weight.is_embedding else weight

    def _whole(self, module: str, weight: LinearWeight) -> Tensor | QuantizedWeight:
        quantized = self.loaded.quantized
        if weight.is_embedding:  # of a tied head
            embeddings: Tensor | QuantizedWeight = self._embeddings
            return embeddings.to(torch.device("cpu"))
        if quantized is not None and module in quantized.weights:
            return quantized.read(module)
        with open_slices(self._checkpoint, mapped=False) as slices:
            tensor: Tensor = slices[weight.tensor][...]
        return (tensor.t() if weight.input_first else tensor).to(self.loaded.dtype)
