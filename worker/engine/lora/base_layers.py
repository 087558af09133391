"""What reading an adapter asks of the base model: for DoRA, and for copies of its weights in a checkpoint."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class BaseLayers(Protocol):
    """The base model's own layers by name; asked by loader threads, while steps go on."""

    def squares(self, module: str) -> Tensor:
        """The sum of squares of each output's weights: [out_features] float32."""

    def product(self, module: str, a: Tensor) -> Tensor:
        """What the layer makes of a [rows, in_features], without its bias: [rows, out_features] float32.

        Of token embeddings: the sums of all tokens' rows, weighted by a.
        """

    def bias(self, module: str) -> Tensor | None:
        """[out_features] float32, where the layer has one."""

    def output_scale(self, module: str) -> float:
        """By what token embeddings multiply their rows."""

    def repeats(self, parameter: str, values: Tensor) -> bool:
        """Whether a parameter of the embeddings or the output head has these values, in the model's dtype."""
