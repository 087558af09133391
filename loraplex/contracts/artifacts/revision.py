"""A revision of an adapter: its digest, and the module of each of its tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from loraplex.contracts.artifacts import ArtifactError, MismatchError, parse_object
from loraplex.contracts.artifacts.checkpoint import TensorInfo
from loraplex.contracts.artifacts.families import HEAD, is_embedding, is_head, is_inner
from loraplex.contracts.artifacts.names import sha256_bytes, sha256_json
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE, SAVED_FIELD, TOKENS_FIELD, PeftConfig

WEIGHTS_FILE = "adapter_model.safetensors"

_FORMAT = 1
# Prefix of all tensors' names in peft's checkpoints.
TENSOR_PREFIX = "base_model.model."
_BASE_LAYER = ".base_layer"
_MAGNITUDE = "magnitude"
_SUFFIXES = {"A": ".lora_A.weight", "B": ".lora_B.weight", _MAGNITUDE: ".lora_magnitude_vector"}
_EMBEDDING_SUFFIXES = {"A": ".lora_embedding_A", "B": ".lora_embedding_B", _MAGNITUDE: ".lora_magnitude_vector"}


# Advice for an adapter of the embeddings or the head that a worker cannot serve: CUDA's kernels leave both as they are.
ENDS_ON_CPU = (
    "workers serve adapters of the embeddings and the head, and trained tokens, on the CPU alone (--device cpu)"
)
_TRAINED_ROWS = ".token_adapter.trainable_tokens_delta"


class TrainedTokens(NamedTuple):
    """Tokens whose rows of the embeddings, or of the output head, an adapter has in place of the base's.

    `tensor` is the name of theirs, [ids, hidden size].
    """

    tensor: str
    ids: tuple[int, ...]


class LoraShape(NamedTuple):
    """The sizes of a module's LoRA pair: A is (rank, in_features), B is (out_features, rank).

    Token embeddings have the vocabulary as in_features. Each of a layer's experts has a pair of these sizes.
    """

    rank: int
    in_features: int
    out_features: int


def revision_digest(config: bytes, weights_sha256: str) -> str:
    """Return the digest of a revision's manifest: format, configuration, digest of the safetensors file.

    The configuration counts as JSON, so the order of its keys does not matter; bytes that are not JSON, which a hash
    model accepts, count as bytes.
    """
    manifest: dict[str, Any] = {"format": _FORMAT, "weights": weights_sha256}
    try:
        parsed = parse_object(config, CONFIG_FILE)
    except ArtifactError:
        return sha256_json(manifest | {"config_bytes": sha256_bytes(config)})
    # The first pattern that matches counts, so the order of patterns is part of the adapter.
    for field in ("rank_pattern", "alpha_pattern"):
        if isinstance(parsed.get(field), dict):
            parsed[field] = list(parsed[field].items())
    return sha256_json(manifest | {"config": parsed})


def lora_tensors(
    header: Mapping[str, TensorInfo],
    *,
    use_dora: bool = False,
    own: Collection[str] = (),
    experts: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, LoraShape]:
    """Return the adapted modules of a checkpoint's header, by their name in the base model.

    With `use_dora` each must have a magnitude vector. The tensors of `base_copies` and of trained tokens are left out,
    and those of the adapter's `own` heads and embeddings. `experts` are the numbers of experts by the name of their
    tensor in the base. Raises ArtifactError that names a tensor of no module, one whose partner is missing, or one of a
    shape that does not fit it.
    """
    parts: dict[str, dict[str, TensorInfo]] = {}
    copies = base_copies(header, own)
    for name, tensor in header.items():
        if name in copies or name in own or _has_trained_rows(name):
            continue
        module, part = _place(name)
        if part is None or (part == _MAGNITUDE and not use_dora):
            if part is None and (of_base := [one for one in header if one.endswith(f"{_BASE_LAYER}.weight")]):
                raise ArtifactError(
                    WEIGHTS_FILE,
                    f"has {of_base[0]}, a weight of the base: it is the whole model's state; save the adapter alone, "
                    "by model.save_pretrained(DIR) or get_peft_model_state_dict(model)",
                )
            raise ArtifactError(WEIGHTS_FILE, f"tensor {name} is not a LoRA weight that is served")
        if len(tensor.shape) != (1 if part == _MAGNITUDE else 2) or 0 in tensor.shape:
            sizes = "one size is" if part == _MAGNITUDE else "two sizes are"
            gathered = "; DeepSpeed ZeRO-3 has not gathered it: save by accelerator.get_state_dict(model)"
            advice = gathered if 0 in tensor.shape else ""
            message = f"tensor {name} has the shape {list(tensor.shape)}; {sizes} needed{advice}"
            raise ArtifactError(WEIGHTS_FILE, message)
        parts.setdefault(module, {})[part] = tensor
    if not parts:
        raise ArtifactError(WEIGHTS_FILE, "has no LoRA tensors")
    return {
        module: _shape(module, tensors, experts.get(module, 1), use_dora=use_dora) for module, tensors in parts.items()
    }


def base_copies(header: Mapping[str, TensorInfo], own: Collection[str] = ()) -> dict[str, str]:
    """Return the tensors that copy the base's embeddings or output head, each with its parameter's name in the base.

    peft saves them beside an adapter of these modules, where the vocabulary was resized, and with
    save_embedding_layers; it loads them in place of the base's. Those that are the adapter's `own` are left out.
    """
    copies = {}
    for name in header:
        module, _, kind = name.removeprefix(TENSOR_PREFIX).rpartition(".")
        own_weight = f"{TENSOR_PREFIX}{module}.weight" in own
        module = module.removesuffix(_BASE_LAYER)
        if name.startswith(TENSOR_PREFIX) and kind in ("weight", "bias") and not is_inner(module) and not own_weight:
            copies[name] = f"{module}.{kind}"
    return copies


def check_copies(
    header: Mapping[str, TensorInfo], modules: Mapping[str, tuple[int, ...]], own: Collection[str] = ()
) -> dict[str, str]:
    """Return what `base_copies` returns; `modules` are those of `trained_tokens`.

    Raises MismatchError for a copy that has not the shape of the base's own.
    """
    copies = base_copies(header, own)
    for name, parameter in copies.items():
        module, _, kind = parameter.rpartition(".")
        weight = _weight_shape(module, modules) if module in modules else ()
        if header[name].shape != (weight if kind == "weight" else weight[:1]) or not weight:
            _check_vocabulary(header[name].shape, weight)
            raise MismatchError(WEIGHTS_FILE, f"tensor {name} has not the shape of the base's own {parameter}")
    return copies


def _weight_shape(module: str, modules: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return [vocabulary, hidden size] of embeddings or of an output head."""
    return modules[module] if is_embedding(module) else modules[module][::-1]


def _check_vocabulary(shape: tuple[int, ...], own: tuple[int, ...]) -> None:
    """Raise MismatchError for embeddings or a head [vocabulary, hidden size] of another vocabulary than the base's."""
    if len(shape) != 2 or shape[1:] != own[1:] or shape[0] == own[0]:
        return
    advice = (
        "leave out resize_token_embeddings, which cut rows that no token has"
        if shape[0] < own[0]
        else "train new tokens in rows that no token of the base has (trainable_token_indices, modules_to_save), or "
        "merge the adapter into its model (merge_and_unload) and register that with `loraplex models push`"
    )
    raise MismatchError(WEIGHTS_FILE, f"was trained with {shape[0]:,} tokens, the base has {own[0]:,}; {advice}")


def trained_tokens(
    header: Mapping[str, TensorInfo], config: PeftConfig, modules: Mapping[str, tuple[int, ...]]
) -> dict[str, TrainedTokens]:
    """Return an adapter's trained tokens by module: token embeddings, or the output head.

    `modules` are (in_features, out_features) of the layers that an adapter may change. Raises ArtifactError where
    tensors and configuration differ, MismatchError where they do not fit the base.
    """
    tokens: dict[str, TrainedTokens] = {}
    for name in filter(_has_trained_rows, header):
        module = name.removeprefix(TENSOR_PREFIX).removesuffix(_TRAINED_ROWS)
        if module not in modules or not (is_embedding(module) or is_head(module)):
            message = f"the base has no embeddings {module} that an adapter may change here; {ENDS_ON_CPU}"
            raise MismatchError(TOKENS_FIELD, message)
        vocabulary, hidden = modules[module] if is_embedding(module) else modules[module][::-1]
        ids = next((ids for end, ids in config.trained_tokens if _is_named(module, end)), ())
        if header[name].shape != (len(ids), hidden):
            shape = list(header[name].shape)
            raise ArtifactError(WEIGHTS_FILE, f"{module} has rows {shape} for {len(ids)} trained tokens of {hidden}")
        if max(ids) >= vocabulary:
            raise MismatchError(TOKENS_FIELD, f"{max(ids)} is not a token of the base, which has {vocabulary}")
        tokens[module] = TrainedTokens(name, ids)
    for end, _ in config.trained_tokens:
        if not any(_is_named(module, end) for module in tokens):
            raise ArtifactError(WEIGHTS_FILE, f"lacks the trained tokens of {end or 'the embeddings'}")
    return tokens


def trained_ends(
    header: Mapping[str, TensorInfo], config: PeftConfig, modules: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Return the tensors that an adapter has in place of the base's embeddings or output head, by module.

    Each has a row for each token, [vocabulary, hidden size]. `modules` and errors are those of `trained_tokens`.
    """
    ends: dict[str, str] = {}
    for saved in config.trained_ends:
        module = next((one for one in modules if not is_inner(one) and _is_named(one, saved)), "")
        if not module:
            raise MismatchError(SAVED_FIELD, f"the base has no {saved} that an adapter may have here; {ENDS_ON_CPU}")
        if (name := f"{TENSOR_PREFIX}{module}.weight") not in header:
            raise ArtifactError(WEIGHTS_FILE, f"lacks the tensor {name}")
        shape = _weight_shape(module, modules)
        if header[name].shape != shape:
            _check_vocabulary(header[name].shape, shape)
            sizes = f"{list(header[name].shape)}, in the base {list(shape)}"
            raise MismatchError(WEIGHTS_FILE, f"tensor {name} has the shape {sizes}")
        if any(f"{TENSOR_PREFIX}{module}{part}" in header for part in (*_suffixes(module).values(), _TRAINED_ROWS)):
            raise MismatchError(SAVED_FIELD, f"{module} has other trained tensors too, which would not count")
        ends[module] = name
    return ends


def _has_trained_rows(name: str) -> bool:
    return name.startswith(TENSOR_PREFIX) and name.endswith(_TRAINED_ROWS)


def _is_named(module: str, end: str) -> bool:
    return f".{module}".endswith(f".{end}") if end else is_embedding(module)


def ranks_of(shapes: Mapping[str, LoraShape], tokens: Mapping[str, TrainedTokens]) -> dict[str, int]:
    """Return the rank of each module: of its pair, and one more for each trained token.

    Tokens of the embeddings count at the head too, which may share its weight with them.
    """
    ranks = {module: shape.rank for module, shape in shapes.items()}
    for module, trained in tokens.items():
        shared = {HEAD} if is_embedding(module) and HEAD not in tokens else set()
        for changed in {module, *shared}:
            ranks[changed] = ranks.get(changed, 0) + len(trained.ids)
    return ranks


def tensor_names(module: str) -> dict[str, str]:
    """Return the names of a module's tensors in a checkpoint: A, B, and magnitude."""
    return {part: f"{TENSOR_PREFIX}{module}{suffix}" for part, suffix in _suffixes(module).items()}


def _suffixes(module: str) -> Mapping[str, str]:
    return _EMBEDDING_SUFFIXES if is_embedding(module) else _SUFFIXES


def _place(name: str) -> tuple[str, str | None]:
    """Return a tensor's module and its part of it; None for a tensor that is not served."""
    for suffixes in (_SUFFIXES, _EMBEDDING_SUFFIXES):
        for part, suffix in suffixes.items():
            module = name.removeprefix(TENSOR_PREFIX).removesuffix(suffix)
            if name == f"{TENSOR_PREFIX}{module}{suffix}" and _suffixes(module) is suffixes:
                return module, part
    return name, None


def _shape(module: str, tensors: Mapping[str, TensorInfo], experts: int, *, use_dora: bool) -> LoraShape:
    for part, name in tensor_names(module).items():
        if part not in tensors and (part != _MAGNITUDE or use_dora):
            raise ArtifactError(WEIGHTS_FILE, f"tensor {name} is missing")
    (rank, in_features), (out_features, rank_of_b) = tensors["A"].shape, tensors["B"].shape
    if rank != rank_of_b:
        raise ArtifactError(WEIGHTS_FILE, f"{module}: lora_A has rank {rank}, lora_B {rank_of_b}")
    if rank % experts:
        raise ArtifactError(WEIGHTS_FILE, f"{module}: lora_A has {rank} rows, which {experts} experts cannot share")
    if use_dora and tensors[_MAGNITUDE].shape != (out_features,):
        length = tensors[_MAGNITUDE].shape[0]
        raise ArtifactError(WEIGHTS_FILE, f"{module}: lora_magnitude_vector has {length} numbers for {out_features}")
    return LoraShape(rank // experts, in_features, out_features)


_V = TypeVar("_V")
# Tensors' names as trainers leave them:
#     _orig_mod.base_model.model.model.layers.0.q_proj.lora_A.weight    of torch.compile, and of other wrappers
#     base_model.model.model.layers.0.q_proj.lora_A.default.weight      with the adapter's name: a module's own state
#     model.layers.0.q_proj.lora_A.weight                               without base_model.model.
#     base_model.model.model.language_model.layers.0.q_proj.lora_A.weight   of a model with images
# Modules that wrap a model: torch.compile's, that of DDP and DeepSpeed, FSDP's, activation checkpointing's, and models
# of images and text.
_WRAPPER = re.compile(
    r"(?:(?<=\.)|^)(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module|language_model|text_model)\."
)
# Dictionaries of a peft layer by the names of adapters. In a file of peft's `.weight` follows at once, or nothing.
_BY_ADAPTER = re.compile(
    r"(?P<kept>\.(?:lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|trainable_tokens_delta)|\.modules_to_save)"
    r"\.(?!(?:weight|bias)$)(?P<adapter>[^.]+)(?=\.|$)"
)
_SAVED = ".modules_to_save"
# The base's module, which peft keeps beside one that was trained in full.
_ORIGINAL = ".original_module."


def as_peft_names(tensors: Mapping[str, _V]) -> tuple[dict[str, _V], tuple[str, ...]]:
    """Return the tensors by the names that peft's save_pretrained gives them, and what was changed in these.

    The latter are parts that were left out, such as `_orig_mod.`, and `base_model.model.` if it was missing. Raises
    ArtifactError for a file of several adapters.
    """
    renamed, owners, changes = dict[str, _V](), dict[str, str](), dict[str, None]()
    for name, value in tensors.items():
        if _ORIGINAL in name:
            continue
        plain = _WRAPPER.sub("", name)
        changes.update(dict.fromkeys(_WRAPPER.findall(name)))
        adapter = ""
        if match := _BY_ADAPTER.search(plain):
            adapter, kept = match["adapter"], match["kept"]
            plain = plain[: match.start()] + kept.removesuffix(_SAVED) + plain[match.end() :]
            plain = plain.removesuffix(".weight") if kept == _SUFFIXES[_MAGNITUDE] else plain
            changes[f"{adapter}."] = None
        if plain in renamed:
            raise ArtifactError(
                WEIGHTS_FILE,
                f"has {plain} of {owners[plain] or 'one adapter'} and of {adapter or 'another'}; save one adapter: "
                "model.save_pretrained(DIR, selected_adapters=[NAME])",
            )
        renamed[plain], owners[plain] = value, adapter
    if renamed and not any(name.startswith("base_model.") for name in renamed):
        changes[TENSOR_PREFIX] = None
        renamed = {TENSOR_PREFIX + name: value for name, value in renamed.items()}
    return renamed, tuple(changes)
