"""The linear layers, token embeddings and output head of a checkpoint, by the names of their weights' tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.checkpoint import Checkpoint
from loraplex.contracts.artifacts.families import (
    FAMILIES,
    HEAD,
    HEAD_WEIGHTS,
    Family,
    config_count,
    is_embedding,
    is_head,
)
from loraplex.contracts.artifacts.quantization import Quantization, StoredWeight, stored_scheme, stored_weights

_POSITIONS = ("embed_positions", "wpe")
ROUTERS = ("gate", "router", "router.layer")
_LAYER_NUMBER = re.compile(r"\.(?:layers|h)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """The weight of a module that adapters can change. Token embeddings have the vocabulary as in_features.

    `tensor` is its name in the checkpoint; `input_first` says that the tensor is stored as (in_features, out_features).
    A quantized weight has `stored`, and `tensor` is the name that the float tensor would have.
    """

    tensor: str
    in_features: int
    out_features: int
    input_first: bool = False
    stored: StoredWeight | None = None

    @property
    def rows(self) -> int:
        """Return the outputs that have scales of their own; of embeddings the tokens."""
        return self.in_features if self.is_embedding else self.out_features

    @property
    def columns(self) -> int:
        """Return the numbers of a row."""
        return self.out_features if self.is_embedding else self.in_features

    @property
    def is_embedding(self) -> bool:
        """Tell whether the weight is the token embeddings'."""
        return is_embedding(self.tensor.removesuffix(".weight"))

    def scheme(self, quantize: Quantization | None) -> Quantization | None:
        """Return the scheme that the weight is loaded in: its own or, where it is chosen, `quantize`."""
        if self.stored is not None:
            return self.stored.scheme.quantization
        is_end = self.is_embedding or self.tensor in HEAD_WEIGHTS
        return quantize if quantize is not None and (quantize.embeddings or not is_end) else None


def model_bytes(
    checkpoint: Checkpoint,
    weights: Mapping[str, LinearWeight],
    quantize: Quantization | None,
    number_bytes: int,
    shape_of: Callable[[str, Sequence[int]], Sequence[int]] = lambda tensor, shape: shape,
) -> tuple[int, int]:
    """Return how many weights a model has, and their bytes where a number that is not quantized has `number_bytes`.

    `shape_of` returns the part of a tensor that is loaded, by its name and shape; `weights` are such parts already.
    """
    parts = {name for weight in weights.values() if weight.stored for name in weight.stored.names}
    sizes = {
        name: math.prod(shape_of(name, info.shape))
        for name, (_, info) in checkpoint.tensors.items()
        if name not in parts
    }
    sizes |= {weight.tensor: weight.rows * weight.columns for weight in weights.values()}
    schemes = {weight.tensor: (weight, weight.scheme(quantize)) for weight in weights.values()}
    total = 0
    for name, numbers in sizes.items():
        weight, scheme = schemes.get(name, (None, None))
        total += scheme.weight_bytes(weight.rows, weight.columns) if weight and scheme else numbers * number_bytes
    return sum(sizes.values()), total


def read_weights(config: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, LinearWeight]:
    """Return the weights of a decoder's checkpoint, quantized ones too. Raises ArtifactError."""
    if config.get("model_type") not in FAMILIES:
        raise ArtifactError("config.json", f"model_type {config.get('model_type')!r} is an encoder's, not a decoder's")
    return linear_weights(config, checkpoint, stored_weights(stored_scheme(config), checkpoint))


def linear_weights(
    config: Mapping[str, Any], checkpoint: Checkpoint, stored: Mapping[str, StoredWeight]
) -> dict[str, LinearWeight]:
    """Return the weights by the names that their modules have once transformers has loaded them.

    `config` is that of a served family. Raises ArtifactError for a quantized weight of another layer.
    """
    family, layers = FAMILIES[config["model_type"]], config_count(config, "num_hidden_layers")
    shapes = {name: info.shape for name, (_, info) in checkpoint.tensors.items()}
    shapes |= {name: (weight.out_features, weight.in_features) for name, weight in stored.items()}
    has_prefix = any(name.startswith(f"{family.prefix}.") for name in shapes)
    linear = {}
    for tensor, shape in shapes.items():
        name = HEAD if tensor in HEAD_WEIGHTS else tensor.removesuffix(".weight")
        if name == tensor or len(shape) != 2 or not _is_linear(name, family, layers):
            if tensor in stored and not is_left_out(name, layers):
                raise ArtifactError(
                    "model", f"{name} is quantized, which is served for linear layers alone, no experts"
                )
            continue
        whole = name if has_prefix or is_head(name) else f"{family.prefix}.{name}"
        input_first = tensor not in stored and (is_embedding(name) or (family.input_first and not is_head(name)))
        # The rows of embeddings are tokens, in both kinds of checkpoint.
        rows_in = input_first or is_embedding(name)
        in_features, out_features = shape if rows_in else shape[::-1]
        linear[whole] = LinearWeight(tensor, in_features, out_features, input_first, stored.get(tensor))
    return linear


def _is_linear(name: str, family: Family, layers: int) -> bool:
    last = name.rpartition(".")[2]
    # Norms of queries and keys may have a weight for each head.
    if last in _POSITIONS or last.endswith("norm") or is_left_out(name, layers):
        return False
    # transformers joins the experts of a layer to tensors with three dimensions, and its routers are no linear layers.
    return not (family.experts and (".experts." in name or name.endswith(tuple(f".{router}" for router in ROUTERS))))


def is_left_out(name: str, layers: int) -> bool:
    """Tell whether a module or tensor predicts several tokens at once: transformers leaves these in the file."""
    number = _LAYER_NUMBER.search(f".{name}.")
    return "mtp" in name or bool(number and int(number[1]) >= layers)
