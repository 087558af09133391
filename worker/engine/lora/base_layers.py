"""The interface to the base model's weights that reading an adapter needs: for DoRA, and to check copied weights."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class BaseLayers(Protocol):
    """The base model's layers by name. Called by loader threads while steps run."""

    @property
    def hidden_size(self) -> int:
        """Return the width of the last layer's hidden states."""

    def squares(self, module: str) -> Tensor:
        """Return the sum of squares of each output's weights: [out_features] float32."""

    def product(self, module: str, a: Tensor) -> Tensor:
        """Multiply a [rows, in_features] with the layer's weight, without its bias: [rows, out_features] float32.

        For token embeddings in_features is the vocabulary: each row of a weights the tokens' embeddings.
        """

    def bias(self, module: str) -> Tensor | None:
        """Return the layer's bias [out_features] float32; None where it has none."""

    def output_scale(self, module: str) -> float:
        """Return the factor that the model multiplies token embeddings by (1 in most families)."""

    def repeats(self, parameter: str, values: Tensor) -> bool:
        """Tell whether a parameter of the embeddings or the output head equals these values in the model's dtype."""
