"""The manifest of a base model: store and routers know the model by it, as only workers hold the weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from artifacts.checkpoint import Checkpoint, read_checkpoint, read_small_file
from artifacts.digests import sha256_json
from artifacts.encoders import ENCODERS, EncoderFamily, adaptable_name, check_encoder, has_head, label_names
from artifacts.errors import ArtifactError
from artifacts.families import FAMILIES, HEAD, HEAD_WEIGHTS, Family, is_embedding, is_head, is_inner
from artifacts.hash_model import is_hash_spec, parse_hash_model
from artifacts.json_object import parse_object
from artifacts.kv_shape import config_count
from artifacts.names import check_base_name
from artifacts.pooling import read_pooling

HASH_ARCHITECTURE = "hash"
HASH_LABELS = ("LABEL_0", "LABEL_1")
TASKS = ("generate", "embed", "classify")
_POSITIONS = ("embed_positions", "wpe")
_ROUTERS = ("gate", "router", "router.layer")
_LAYER_NUMBER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
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
    """The name and sizes of a module that adapters can change, such as model.layers.0.self_attn.q_proj.

    Token embeddings have the vocabulary as in_features. The output head is listed even if it shares their weight.
    """

    name: str
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A base model's manifest. `context_length` counts prompt and answer; `files` has the small files by name.

    `labels` are those of its own classifier. `pooling` makes one vector of its hidden states where a request does not
    say how. Manifests of older versions have no `tasks`: these models generate.
    """

    name: str
    digest: str
    architecture: str
    context_length: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    modules: tuple[ModuleShape, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    pooling: str = ""

    def serves(self, task: str) -> bool:
        """Tell whether the model alone does a task: "generate", "embed" or "classify"."""
        return task in (self.tasks or ("generate",))


def read_base_model(path_or_spec: str, name: str = "") -> BaseModel:
    """Read the manifest of a transformers directory or of a `hash:?...` spec.

    The name defaults to the directory's, or to `hash`. Of the weights only headers and samples are read. Raises
    ArtifactError.
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
            tasks=TASKS,
            labels=HASH_LABELS,
            pooling="last",
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
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES | ENCODERS:
        supported = ", ".join(sorted(FAMILIES | ENCODERS))
        raise ArtifactError(_CONFIG, f"model_type {model_type!r} is not supported, only {supported}")
    if config.get("quantization_config"):
        raise ArtifactError(_CONFIG, "quantization_config: quantized checkpoints are not supported")
    checkpoint, pooling = read_checkpoint(directory), read_pooling(directory)
    fingerprint = {"config": config, "tensors": checkpoint.fingerprint()}
    manifest = BaseModel(
        name=name,
        digest=sha256_json(fingerprint | ({"pooling": pooling} if pooling else {})),
        architecture=model_type,
        context_length=config_count(config, "max_position_embeddings"),
        vocab_size=config_count(config, "vocab_size"),
        end_token_ids=(),
        modules=(),
        files=files,
        pooling=pooling,
    )
    if model_type in ENCODERS:
        return _read_encoder(manifest, config, checkpoint, ENCODERS[model_type])
    return replace(
        manifest,
        end_token_ids=_end_token_ids(config, files),
        modules=_modules(checkpoint, FAMILIES[model_type], config_count(config, "num_hidden_layers")),
        tasks=("generate", "embed"),
        pooling=pooling or "last",
    )


def _read_encoder(
    manifest: BaseModel, config: dict[str, Any], checkpoint: Checkpoint, family: EncoderFamily
) -> BaseModel:
    """Add to a manifest what an encoder has."""
    check_encoder(family, config)
    prefixed = any(name.startswith(f"{family.prefix}.") for name in checkpoint.tensors)
    found: dict[str, ModuleShape] = {}
    for tensor_name, (_, tensor) in checkpoint.tensors.items():
        name = adaptable_name(tensor_name, family, prefixed=prefixed) if len(tensor.shape) == 2 else None
        if name is not None:
            found[name] = ModuleShape(name, *(tensor.shape if is_embedding(name) else tensor.shape[::-1]))
    if not any(name.startswith(f"{family.prefix}.") and not is_embedding(name) for name in found):
        raise ArtifactError("model", "has no linear layers that adapters could change")
    classifies = has_head(found, family.model_type)
    return replace(
        manifest,
        context_length=manifest.context_length - family.reserved_positions(config),
        modules=tuple(sorted(found.values())),
        tasks=("embed", "classify") if classifies else ("embed",),
        labels=label_names(config, found[family.head.output].out_features) if classifies else (),
        # As sentence-transformers does with a model that does not say.
        pooling=manifest.pooling or "mean",
    )


def _modules(checkpoint: Checkpoint, family: Family, layers: int) -> tuple[ModuleShape, ...]:
    """Return the modules that adapters can change, under the names that they have once transformers has loaded them."""
    found = []
    has_prefix = any(name.startswith(f"{family.prefix}.") for name in checkpoint.tensors)
    for tensor_name, (_, tensor) in checkpoint.tensors.items():
        name = HEAD if tensor_name in HEAD_WEIGHTS else tensor_name.removesuffix(".weight")
        if name == tensor_name or len(tensor.shape) != 2 or not _is_linear(name, family, layers):
            continue
        as_stored = is_embedding(name) or (family.input_first and not is_head(name))
        shape = tensor.shape if as_stored else tensor.shape[::-1]
        found.append(ModuleShape(name if has_prefix or is_head(name) else f"{family.prefix}.{name}", *shape))
    if not any(is_inner(module.name) for module in found):
        raise ArtifactError("model", "has no linear layers that adapters could change")
    if not any(is_head(module.name) for module in found):  # the head shares the embeddings' weight
        embeddings = [module for module in found if is_embedding(module.name)]
        found += [ModuleShape(HEAD, module.out_features, module.in_features) for module in embeddings]
    return tuple(sorted(found))


def _is_linear(name: str, family: Family, layers: int) -> bool:
    last = name.rpartition(".")[2]
    # Norms of queries and keys may have a weight for each head.
    if last in _POSITIONS or last.endswith("norm"):
        return False
    # Layers for predicting several tokens at once, which transformers leaves in the file.
    number = _LAYER_NUMBER.search(f".{name}.")
    if "mtp" in name or (number and int(number[1]) >= layers):
        return False
    # transformers joins the experts of a layer to tensors with three dimensions, and its routers are no linear layers.
    return not (family.experts and (".experts." in name or name.endswith(tuple(f".{router}" for router in _ROUTERS))))


def _end_token_ids(config: dict[str, Any], files: Mapping[str, bytes]) -> tuple[int, ...]:
    """Return the end tokens of the generation config if there is one, else of the config, as transformers does."""
    ids = config.get("eos_token_id")
    if _GENERATION in files:
        ids = parse_object(files[_GENERATION], _GENERATION).get("eos_token_id", ids)
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ArtifactError(
            _GENERATION if _GENERATION in files else _CONFIG, "eos_token_id is not a token id or a list"
        )
    return tuple(ids)
