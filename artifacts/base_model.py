"""A base model's manifest: what store, routers and workers agree on about a model whose weights only workers hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from artifacts.checkpoint import Checkpoint, read_checkpoint, read_small_file
from artifacts.digests import sha256_json
from artifacts.errors import ArtifactError
from artifacts.hash_model import is_hash_spec, parse_hash_model
from artifacts.json_object import parse_object
from artifacts.names import check_base_name

HASH_ARCHITECTURE = "hash"
# Checkpoints whose adaptable layers are exactly the two-dimensional `.weight` tensors below model.layers, stored as
# (out_features, in_features); a test compares them with the real models' linear layers.
LAYOUTS_READ = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_LAYERS = "model.layers."
_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_SMALL_FILES = (
    _CONFIG,
    _GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True, order=True)
class ModuleShape:
    """A linear layer by its name in the model, such as model.layers.0.self_attn.q_proj."""

    name: str
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The manifest. `context_length` counts prompt and answer; `files` are the small ones, by name."""

    name: str
    digest: str
    architecture: str
    context_length: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    modules: tuple[ModuleShape, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)


def read_base_model(path_or_spec: str, name: str = "") -> BaseModel:
    """The manifest of a transformers directory or of a `hash:?...` spec. The name is the directory's, or `hash`, unless
    given. Reads headers and samples, not the weights. Raises ArtifactError.
    """
    if is_hash_spec(path_or_spec):
        model = parse_hash_model(path_or_spec)
        return BaseModel(
            name=check_base_name(name or HASH_ARCHITECTURE),
            digest=model.digest,
            architecture=HASH_ARCHITECTURE,
            context_length=model.context,
            vocab_size=model.vocab,
            end_token_ids=model.end_token_ids,
            modules=(),
        )
    directory = Path(path_or_spec)
    if not directory.is_dir():
        raise ArtifactError("model", f"{path_or_spec} is not a directory")
    return _read_directory(directory, check_base_name(name or directory.resolve().name))


def _read_directory(directory: Path, name: str) -> BaseModel:
    if not (directory / _CONFIG).is_file():
        raise ArtifactError("model", f"{directory} has no {_CONFIG}, so it is not a transformers model")
    files = {small: read_small_file(directory / small) for small in _SMALL_FILES if (directory / small).is_file()}
    config = parse_object(files[_CONFIG], _CONFIG)
    architecture = config.get("model_type")
    if not isinstance(architecture, str) or architecture not in LAYOUTS_READ:
        raise ArtifactError(
            _CONFIG, f"model_type {architecture!r} is not supported, only {', '.join(sorted(LAYOUTS_READ))}"
        )
    if config.get("quantization_config"):
        raise ArtifactError(_CONFIG, "quantization_config: quantized checkpoints are not supported")
    checkpoint = read_checkpoint(directory)
    return BaseModel(
        name=name,
        digest=sha256_json({"config": config, "tensors": checkpoint.fingerprint()}),
        architecture=architecture,
        context_length=_count(config, "max_position_embeddings"),
        vocab_size=_count(config, "vocab_size"),
        end_token_ids=_end_token_ids(config, files),
        modules=_modules(checkpoint),
        files=files,
    )


def _modules(checkpoint: Checkpoint) -> tuple[ModuleShape, ...]:
    found = [
        ModuleShape(name.removesuffix(".weight"), in_features=tensor.shape[1], out_features=tensor.shape[0])
        for name, (_, tensor) in checkpoint.tensors.items()
        if name.startswith(_LAYERS) and name.endswith(".weight") and len(tensor.shape) == 2
    ]
    if not found:
        raise ArtifactError("model", f"has no linear layers below {_LAYERS[:-1]}")
    return tuple(sorted(found))


def _end_token_ids(config: dict[str, Any], files: Mapping[str, bytes]) -> tuple[int, ...]:
    """As transformers' generate reads them: the generation config's where there is one, else the config's."""
    ids = config.get("eos_token_id")
    if _GENERATION in files:
        ids = parse_object(files[_GENERATION], _GENERATION).get("eos_token_id", ids)
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ArtifactError(
            _GENERATION if _GENERATION in files else _CONFIG, "eos_token_id is not a token id or a list"
        )
    return tuple(ids)


def _count(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value < 2**31:
        raise ArtifactError(_CONFIG, f"{key} is {value!r}, not a whole number from 1")
    return value
