"""A revision of an adapter: the digest that names it, and where each of its tensors belongs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from artifacts.digests import sha256_bytes, sha256_json
from artifacts.errors import ArtifactError
from artifacts.json_object import parse_object
from artifacts.peft_config import CONFIG_FILE
from artifacts.safetensors_header import TensorInfo

WEIGHTS_FILE = "adapter_model.safetensors"
__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "LoraShape", "lora_tensors", "revision_digest"]

_FORMAT = 1
_PREFIX = "base_model.model."
_SUFFIXES = {"A": ".lora_A.weight", "B": ".lora_B.weight"}


class LoraShape(NamedTuple):
    """The sizes of one module's pair: A is (rank, in_features), B is (out_features, rank)."""

    rank: int
    in_features: int
    out_features: int


def revision_digest(config: bytes, weights_sha256: str) -> str:
    """The digest of a revision's manifest: format, configuration, digest of the safetensors file.

    The configuration counts as JSON, whatever the order of its keys; where it is none (a hash model takes any bytes),
    as bytes.
    """
    manifest: dict[str, Any] = {"format": _FORMAT, "weights": weights_sha256}
    try:
        parsed = parse_object(config, CONFIG_FILE)
    except ArtifactError:
        return sha256_json(manifest | {"config_bytes": sha256_bytes(config)})
    # Of these the first pattern that matches counts, so their order is part of what the adapter computes.
    for field in ("rank_pattern", "alpha_pattern"):
        if isinstance(parsed.get(field), dict):
            parsed[field] = list(parsed[field].items())
    return sha256_json(manifest | {"config": parsed})


def lora_tensors(header: Mapping[str, TensorInfo]) -> dict[str, LoraShape]:
    """The adapted modules of a checkpoint's header, by their name in the base model. Raises ArtifactError naming the
    tensor that is neither a module's lora_A nor lora_B, or lacks its partner, or has a shape that does not fit it.
    """
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor in header.items():
        part = next((part for part, suffix in _SUFFIXES.items() if name.endswith(suffix)), None)
        if part is None or not name.startswith(_PREFIX):
            raise ArtifactError(WEIGHTS_FILE, f"tensor {name} is not a LoRA weight that is served")
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise ArtifactError(WEIGHTS_FILE, f"tensor {name} has the shape {list(tensor.shape)}; two sizes are needed")
        pairs.setdefault(name[len(_PREFIX) : -len(_SUFFIXES[part])], {})[part] = tensor
    if not pairs:
        raise ArtifactError(WEIGHTS_FILE, "has no LoRA tensors")
    return {module: _shape(module, pair) for module, pair in pairs.items()}


def _shape(module: str, pair: Mapping[str, TensorInfo]) -> LoraShape:
    for part, suffix in _SUFFIXES.items():
        if part not in pair:
            raise ArtifactError(WEIGHTS_FILE, f"tensor {_PREFIX}{module}{suffix} is missing")
    (rank, in_features), (out_features, rank_of_b) = pair["A"].shape, pair["B"].shape
    if rank != rank_of_b:
        raise ArtifactError(WEIGHTS_FILE, f"{module}: lora_A has rank {rank}, lora_B {rank_of_b}")
    return LoraShape(rank, in_features, out_features)
