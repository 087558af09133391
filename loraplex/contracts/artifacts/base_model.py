"""The manifest of a base model: store and routers know the model by it, as only workers hold the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from loraplex.contracts.artifacts import ArtifactError, parse_object
from loraplex.contracts.artifacts.base_modules import LinearWeight, linear_weights
from loraplex.contracts.artifacts.checkpoint import (
    CONFIG_FILE,
    TOWER_FIELD,
    TOWERS,
    Checkpoint,
    read_checkpoint,
    read_config,
    read_small_file,
)
from loraplex.contracts.artifacts.encoders import (
    ENCODERS,
    EncoderFamily,
    check_encoder,
    encoder_weights,
    has_head,
    label_names,
)
from loraplex.contracts.artifacts.experts import ExpertSizes, expert_sizes
from loraplex.contracts.artifacts.families import (
    FAMILIES,
    HEAD,
    check_kv_cache_dtype,
    config_count,
    is_embedding,
    is_head,
    is_inner,
)
from loraplex.contracts.artifacts.generation_config import (
    GENERATION_CONFIG,
    UNSAID,
    GenerationConfig,
    read_generation_config,
)
from loraplex.contracts.artifacts.gguf_files import refuse_gguf
from loraplex.contracts.artifacts.hash_model import is_hash_spec, parse_hash_model
from loraplex.contracts.artifacts.names import check_base_name, sha256_json
from loraplex.contracts.artifacts.quantization import (
    Quantization,
    StoredScheme,
    parse_quantization,
    quantized_digest,
    stored_scheme,
    stored_weights,
)

_MODULES = "modules.json"
_POOLING = "1_Pooling/config.json"
_MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
# Modules of a sentence-transformers pipeline that are served. The last two are no steps here: a request asks for them.
_STAGES = ("Transformer", "Pooling", "Normalize", "LogitScore")
HASH_ARCHITECTURE = "hash"
HASH_LABELS = ("LABEL_0", "LABEL_1")
TASKS = ("generate", "embed", "classify")
# The template for chats with tools, in its folder beside the model's own.
_TEMPLATES, _TOOL_TEMPLATE = "additional_chat_templates", "tool_use.jinja"
# The ids of a reranker's answers, in a file of the pipeline's module.
LOGIT_SCORE = "logit_score.json"
_SMALL_FILES = (
    CONFIG_FILE,
    GENERATION_CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def read_pooling(directory: Path) -> str:
    """Return "cls", "mean" or "last"; empty where the files do not say. Raises ArtifactError for another one."""
    if (directory / _MODULES).is_file():
        # The file is a list, which parse_object does not take alone.
        stages = parse_object(b'{"stages": ' + read_small_file(directory / _MODULES) + b"}", _MODULES)["stages"]
        kinds = [str(stage.get("type", "")).rpartition(".")[2] for stage in stages if isinstance(stage, dict)]
        if unknown := [kind for kind in kinds if kind not in _STAGES]:
            raise ArtifactError(_MODULES, f"{unknown[0]} is not served behind a model, only {', '.join(_STAGES)}")
    if not (directory / _POOLING).is_file():
        return ""
    config = parse_object(read_small_file(directory / _POOLING), _POOLING)
    chosen = [field for field, value in config.items() if field.startswith("pooling_mode_") and value]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise ArtifactError(
            _POOLING, f"{', '.join(chosen) or 'no pooling'} is not served, only one of {', '.join(_MODES)}"
        )
    return _MODES[chosen[0]]


def _max_seq_length(directory: Path) -> int | None:
    """Return the maximum tokens of a text in a sentence-transformers pipeline, special ones too; None: not said."""
    for path in sorted(directory.glob("sentence_*_config.json")):  # bert, roberta, ...: by the first model of its kind
        config = parse_object(read_small_file(path), path.name)
        if config.get("max_seq_length") is not None:
            return config_count(config, "max_seq_length", path.name)
    return None


@dataclass(frozen=True, slots=True, order=True)
class ModuleShape:
    """The name and sizes of a module that adapters can change, such as model.layers.0.self_attn.q_proj.

    Token embeddings have the vocabulary as in_features. The output head is listed even if it shares their weight. So
    are the two tensors of a layer's experts, such as model.layers.0.mlp.experts.down_proj, with their number.
    """

    name: str
    in_features: int
    out_features: int
    experts: int = 0


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A base model's manifest. `context_length` counts prompt and answer; `files` has the small files by name.

    `labels` are those of its own classifier. `pooling` makes one vector of its hidden states where a request does not
    say how.

    A quantized model has its own digest, the scheme's name, and the digest of the model that it was made of, where that
    is known. So has one with a quantized KV cache, which changes answers as well; `kv_cache_dtype` is empty where keys
    and values are in the dtype that the model computes in.
    """

    name: str
    digest: str
    architecture: str
    context_length: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    modules: tuple[ModuleShape, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    tasks: tuple[str, ...] = ("generate",)
    labels: tuple[str, ...] = ()
    pooling: str = ""
    quantization: str = ""
    original_digest: str = ""
    kv_cache_dtype: str = ""
    # The class of a checkpoint that has the model beside towers for images or sound.
    tower_of: str = ""
    # Read from one of `files`, which are compared in its place: a version that did not read it has the same model.
    generation_config: GenerationConfig = field(default=UNSAID, compare=False)

    def serves(self, task: str) -> bool:
        """Tell whether the model alone does a task: "generate", "embed" or "classify"."""
        return task in self.tasks

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return (in_features, out_features) of its modules by name, of experts ExpertSizes."""
        shapes = {name: tuple(sizes) for name, *sizes in map(astuple, self.modules)}
        return {name: ExpertSizes(*sizes) if sizes[2] else sizes[:2] for name, sizes in shapes.items()}

    @property
    def adapted_digest(self) -> str:
        """Return the digest that adapters are bound to: of a quantized copy that of its original."""
        return self.original_digest or self.digest


def read_base_model(path_or_spec: str, name: str = "", quantize: str = "", kv_cache_dtype: str = "") -> BaseModel:
    """Read the manifest of a transformers directory or of a `hash:?...` spec.

    The name defaults to the directory's, or to `hash`. `quantize` names the scheme in which workers load the weights,
    `kv_cache_dtype` that of their KV cache. Of the weights only headers and samples are read. Raises ArtifactError.
    """
    check_kv_cache_dtype(kv_cache_dtype)
    if is_hash_spec(path_or_spec):
        if quantize:
            raise ArtifactError("--quantize", f"{quantize}: a hash model has no weights")
        if kv_cache_dtype:
            raise ArtifactError("--kv-cache-dtype", f"{kv_cache_dtype}: a hash model has no keys and values")
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
    refuse_gguf("model", path_or_spec)
    if not directory.is_dir():
        raise ArtifactError("model", f"{path_or_spec} is not a directory")
    name = check_base_name(name or directory.resolve().name)
    return _read_directory(directory, name, parse_quantization(quantize), kv_cache_dtype)


def is_encoder(directory: str) -> bool:
    """Tell whether a directory's config.json names an encoder's family."""
    try:
        return read_config(Path(directory)).get("model_type") in tuple(ENCODERS)
    except ArtifactError:
        return False


def _read_directory(directory: Path, name: str, quantize: Quantization | None, kv_cache_dtype: str) -> BaseModel:
    if not (directory / CONFIG_FILE).is_file():
        raise ArtifactError("model", f"{directory} has no {CONFIG_FILE}, so it is not a transformers model")
    paths = {small: directory / small for small in _SMALL_FILES} | {
        _TOOL_TEMPLATE: directory / _TEMPLATES / _TOOL_TEMPLATE,
        LOGIT_SCORE: directory / "1_LogitScore" / CONFIG_FILE,
    }
    files = {small: read_small_file(path) for small, path in paths.items() if path.is_file()}
    whole, config = parse_object(files[CONFIG_FILE], CONFIG_FILE), read_config(directory)
    if tower := str(config.get(TOWER_FIELD, "")):
        files |= import_module(TOWERS).text_files(directory, config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES | ENCODERS:
        supported = ", ".join(sorted(FAMILIES | ENCODERS))
        raise ArtifactError(CONFIG_FILE, f"model_type {model_type!r} is not supported, only {supported}")
    scheme = _check_scheme(stored_scheme(config), quantize, model_type)
    if kv_cache_dtype and model_type in ENCODERS:
        raise ArtifactError("--kv-cache-dtype", f"{kv_cache_dtype}: {model_type} is an encoder, which has no KV cache")
    checkpoint, pooling = read_checkpoint(directory), read_pooling(directory)
    fingerprint = {"config": whole, "tensors": checkpoint.fingerprint()} | ({"pooling": pooling} if pooling else {})
    own_digest = sha256_json(fingerprint)
    digest, original = own_digest, scheme.original if scheme else ""
    if (scheme is None and quantize is not None) or kv_cache_dtype:
        chosen = quantize if scheme is None else None
        digest, original = quantized_digest(own_digest, chosen, kv_cache_dtype), original or own_digest
    manifest = BaseModel(
        name=name,
        digest=digest,
        architecture=model_type,
        context_length=config_count(config, "max_position_embeddings"),
        vocab_size=config_count(config, "vocab_size"),
        end_token_ids=(),
        modules=(),
        files=files,
        pooling=pooling,
        quantization=str(scheme or quantize or ""),
        original_digest=original,
        kv_cache_dtype=kv_cache_dtype,
        tower_of=tower,
    )
    if model_type in ENCODERS:
        encoder = _read_encoder(manifest, config, checkpoint, ENCODERS[model_type])
        longest = _max_seq_length(directory) or encoder.context_length
        return replace(encoder, context_length=min(encoder.context_length, longest))
    return _read_decoder(manifest, config, checkpoint, scheme, quantize)


def _check_scheme(scheme: StoredScheme | None, quantize: Quantization | None, model_type: str) -> StoredScheme | None:
    """Return a checkpoint's own scheme. Raises ArtifactError for one that is not served, or not the one wanted."""
    if scheme is not None and model_type in ENCODERS:
        raise ArtifactError(CONFIG_FILE, "quantization_config: encoders are read unquantized; use the original model")
    if (
        quantize is not None
        and model_type in ENCODERS
        and (quantize.bits != 8 or quantize.floating or quantize.dynamic)
    ):
        raise ArtifactError("--quantize", f"{quantize}: encoders are quantized to int8 or int8-zero-point alone")
    if scheme is not None and quantize is not None and str(scheme) != str(quantize):
        raise ArtifactError("--quantize", f"{quantize}: the model is quantized already, in {scheme}")
    return scheme


def _read_encoder(
    manifest: BaseModel, config: dict[str, Any], checkpoint: Checkpoint, family: EncoderFamily
) -> BaseModel:
    """Add to a manifest what an encoder has."""
    check_encoder(family, config)
    weights = encoder_weights(checkpoint, family)
    if not any(name.startswith(f"{family.prefix}.") and not is_embedding(name) for name in weights):
        raise ArtifactError("model", "has no linear layers that adapters could change")
    classifies = has_head(weights, family.model_type)
    return replace(
        manifest,
        context_length=manifest.context_length - family.reserved_positions(config),
        modules=tuple(
            sorted(ModuleShape(name, weight.in_features, weight.out_features) for name, weight in weights.items())
        ),
        tasks=("embed", "classify") if classifies else ("embed",),
        labels=label_names(config, weights[family.head.output].out_features) if classifies else (),
        # The default of sentence-transformers for models that do not say.
        pooling=manifest.pooling or "mean",
    )


def _read_decoder(
    manifest: BaseModel,
    config: dict[str, Any],
    checkpoint: Checkpoint,
    scheme: StoredScheme | None,
    quantize: Quantization | None,
) -> BaseModel:
    """Add to a manifest what a decoder has."""
    saved_from = str((config.get("architectures") or [""])[0])
    if saved_from.endswith("ForSequenceClassification"):
        raise ArtifactError(
            CONFIG_FILE,
            f"{saved_from} is not served; push the classifier as an adapter of SEQ_CLS on the ...ForCausalLM",
        )
    return replace(
        manifest,
        end_token_ids=_end_token_ids(config, manifest.files),
        modules=_modules(
            linear_weights(config, checkpoint, stored_weights(scheme, checkpoint)),
            quantize,
            [ModuleShape(name, *sizes) for name, sizes in expert_sizes(config, checkpoint).items()],
        ),
        tasks=("generate", "embed"),
        pooling=manifest.pooling or "last",
        generation_config=read_generation_config(manifest.files),
    )


def _modules(
    weights: Mapping[str, LinearWeight], quantize: Quantization | None, experts: Sequence[ModuleShape]
) -> tuple[ModuleShape, ...]:
    """Return the modules that adapters can change, under the names that they have once transformers has loaded them."""
    modules = [ModuleShape(name, weight.in_features, weight.out_features) for name, weight in weights.items()]
    if not any(is_inner(module.name) for module in modules):
        raise ArtifactError("model", "has no linear layers that adapters could change")
    if quantize is not None and quantize.bits == 4:
        for module in modules:
            if is_inner(module.name) and module.in_features % 2:
                raise ArtifactError("--quantize", f"{quantize}: {module.name} has an odd number of columns; use int8")
    if not any(is_head(module.name) for module in modules):  # the head shares the embeddings' weight
        embeddings = [module for module in modules if is_embedding(module.name)]
        modules += [ModuleShape(HEAD, module.out_features, module.in_features) for module in embeddings]
    return tuple(sorted([*modules, *experts]))


def _end_token_ids(config: dict[str, Any], files: Mapping[str, bytes]) -> tuple[int, ...]:
    """Return the end tokens of the generation config if there is one, else of the config, as transformers does."""
    ids = config.get("eos_token_id")
    if GENERATION_CONFIG in files:
        ids = parse_object(files[GENERATION_CONFIG], GENERATION_CONFIG).get("eos_token_id", ids)
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ArtifactError(
            GENERATION_CONFIG if GENERATION_CONFIG in files else CONFIG_FILE, "eos_token_id is not a token id or a list"
        )
    return tuple(ids)
