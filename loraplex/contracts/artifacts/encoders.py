"""The encoder families that are served, and the classification heads of all families.

Names of modules are those of transformers' ...ForSequenceClassification, whichever class a checkpoint was saved from:
one base serves adapters that were trained on either class (see `with_prefix`). peft saves the parameters of a head in
full beside LoRA (modules_to_save).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from loraplex.contracts.artifacts import ArtifactError, MismatchError
from loraplex.contracts.artifacts.base_modules import LinearWeight
from loraplex.contracts.artifacts.checkpoint import Checkpoint, TensorInfo
from loraplex.contracts.artifacts.families import FAMILIES, HEAD, is_embedding, is_head
from loraplex.contracts.artifacts.peft_config import LABELS_FIELD, SAVED_FIELD, PeftConfig
from loraplex.contracts.artifacts.revision import TENSOR_PREFIX, WEIGHTS_FILE, as_peft_names

_V = TypeVar("_V")
# Others ("dynamic", "longrope") rescale by the longest position of the whole batch: one request would change another.
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


@dataclass(frozen=True, slots=True)
class Head:
    """The modules of a classification head, in the order of their use; `norm` and `dense` may be empty.

    logits = output(norm(act(dense(pooled))))
    """

    output: str
    dense: str = ""
    norm: str = ""

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the names of the modules that it has."""
        return tuple(name for name in (self.dense, self.norm, self.output) if name)

    @property
    def linears(self) -> tuple[str, ...]:
        """Return the names of its linear layers."""
        return tuple(name for name in (self.dense, self.output) if name)


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """A `model_type` of transformers. `architectures` are the classes that a checkpoint may have been saved from.

    `prefix` begins the names of the encoder's own modules; checkpoints saved from the encoder alone lack it.
    """

    model_type: str
    title: str
    architectures: tuple[str, ...]
    prefix: str
    head: Head
    # A module that no vector depends on; what adapters have of it is left out.
    unused: str = ""

    def reserved_positions(self, config: Mapping[str, Any]) -> int:
        """Return how many of max_position_embeddings no token of a text has."""
        padding = config.get("pad_token_id", 1)
        # RoBERTa's first token has the position after the padding's.
        return padding + 1 if self.prefix == "roberta" and isinstance(padding, int) else 0


def _architectures(stem: str, *more: str) -> tuple[str, ...]:
    return tuple(f"{stem}{kind}" for kind in ("Model", "ForMaskedLM", "ForSequenceClassification", *more))


_BERT_HEAD = Head("classifier", "bert.pooler.dense")
_ROBERTA_HEAD = Head("classifier.out_proj", "classifier.dense")
_UNUSED = "roberta.pooler.dense"
_FAMILIES = (
    EncoderFamily("bert", "BERT", _architectures("Bert", "ForPreTraining"), "bert", _BERT_HEAD),
    EncoderFamily("roberta", "RoBERTa", _architectures("Roberta"), "roberta", _ROBERTA_HEAD, _UNUSED),
    EncoderFamily("xlm-roberta", "XLM-RoBERTa", _architectures("XLMRoberta"), "roberta", _ROBERTA_HEAD, _UNUSED),
    EncoderFamily(
        "deberta-v2", "DeBERTa v2, v3", _architectures("DebertaV2"), "deberta", Head("classifier", "pooler.dense")
    ),
    EncoderFamily(
        "modernbert", "ModernBERT", _architectures("ModernBert"), "model", Head("classifier", "head.dense", "head.norm")
    ),
)
ENCODERS = {family.model_type: family for family in _FAMILIES}
# transformers' decoders for sequence classification have a linear layer over the last token.
_DECODER_HEAD = Head("score")


def head_of(architecture: str) -> Head:
    """Return the classification head that a base model of this architecture, or an adapter of it, may have."""
    return ENCODERS[architecture].head if architecture in ENCODERS else _DECODER_HEAD


def with_prefix(tensors: Mapping[str, _V], architecture: str) -> dict[str, _V]:
    """Rename an adapter's tensors that was trained on the model without its head (transformers' AutoModel)."""
    family = ENCODERS.get(architecture) or FAMILIES.get(architecture)
    if family is None:
        return dict(tensors)
    prefix = f"{TENSOR_PREFIX}{family.prefix}."
    if any(name.startswith(prefix) for name in tensors):
        return dict(tensors)
    heads = tuple(f"{TENSOR_PREFIX}{module}." for module in (*head_of(architecture).modules, HEAD))

    def renamed(name: str) -> str:
        if name.startswith(heads) or not name.startswith(TENSOR_PREFIX):
            return name
        return prefix + name.removeprefix(TENSOR_PREFIX)

    return {renamed(name): value for name, value in tensors.items()}


def without_unused(tensors: Mapping[str, _V], architecture: str) -> dict[str, _V]:
    """Drop an adapter's tensors that do not change any output. Names must be those of with_prefix."""
    unused = ENCODERS[architecture].unused if architecture in ENCODERS else ""
    if not unused:
        return dict(tensors)
    return {name: value for name, value in tensors.items() if not name.startswith(f"{TENSOR_PREFIX}{unused}.")}


def check_encoder(family: EncoderFamily, config: Mapping[str, Any]) -> None:
    """Check the content of a config.json. Raises ArtifactError naming the field that is not served."""
    names = config.get("architectures") or [family.architectures[0]]
    if names[0] not in family.architectures:
        raise ArtifactError("config.json", f"{names[0]} is not supported, only {', '.join(family.architectures)}")
    for field in ("is_decoder", "add_cross_attention"):
        if config.get(field):
            raise ArtifactError("config.json", f"{field}: an encoder that decodes is not supported")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ArtifactError(
            "config.json", f"position_embedding_type: {config['position_embedding_type']!r} is not served"
        )
    check_rope_types(config)


def check_rope_types(config: Mapping[str, Any]) -> None:
    """Raise ArtifactError where a config.json names a rope type that is not served."""
    # rope_scaling is the older name; either may hold one set of parameters or one for each kind of layer.
    for field in ("rope_parameters", "rope_scaling"):
        parameters = config.get(field) or {}
        for rope in [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]:
            if (kind := str(rope.get("rope_type", rope.get("type", "default")))) not in _ROPE_TYPES:
                served = ", ".join(sorted(_ROPE_TYPES))
                raise ArtifactError("config.json", f"{field}: rope type {kind!r} is not supported, only {served}")


def encoder_weights(checkpoint: Checkpoint, family: EncoderFamily) -> dict[str, LinearWeight]:
    """Return the weights of a checkpoint that adapters can change, by the names of their modules."""
    prefixed = any(name.startswith(f"{family.prefix}.") for name in checkpoint.tensors)
    weights = {}
    for tensor, (_, info) in checkpoint.tensors.items():
        name = _adaptable_name(tensor, family, prefixed=prefixed) if len(info.shape) == 2 else None
        if name is not None:
            # The rows of embeddings are tokens.
            in_features, out_features = info.shape if is_embedding(name) else info.shape[::-1]
            weights[name] = LinearWeight(tensor, in_features, out_features, input_first=is_embedding(name))
    return weights


def inner_weights(checkpoint: Checkpoint, family: EncoderFamily) -> dict[str, LinearWeight]:
    """Return the weights that may be quantized: not the head's, which are few and whose rounding changes the answer."""
    weights = encoder_weights(checkpoint, family)
    return {name: weight for name, weight in weights.items() if name not in family.head.linears}


def _adaptable_name(tensor: str, family: EncoderFamily, *, prefixed: bool) -> str | None:
    """Return the module's name of a weight with two dimensions, or None where no adapter can change it.

    `prefixed`: the checkpoint's names have the family's prefix.
    """
    name = tensor.removesuffix(".weight")
    if name == tensor:
        return None
    if not prefixed and name not in family.head.linears:
        name = f"{family.prefix}.{name}"
    inner = name.removeprefix(f"{family.prefix}.")
    if name in family.head.linears:
        return name
    if name == inner:
        return None
    linear = inner.startswith(("encoder.layer.", "layers.")) or inner == "embeddings.embed_proj"
    return name if linear or is_embedding(name) else None


def label_names(config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Return the names of a classifier's labels, by config.json; LABEL_0 and so on where that has none."""
    labels = config.get("id2label")
    if isinstance(labels, Mapping) and set(labels) == {str(index) for index in range(count)}:
        return tuple(str(labels[str(index)]) for index in range(count))
    return tuple(f"LABEL_{index}" for index in range(count))


def has_head(modules: Iterable[str], architecture: str) -> bool:
    """Tell whether a base model with these modules classifies without an adapter."""
    return set(head_of(architecture).linears) <= set(modules)


def canonical_header(
    header: Mapping[str, TensorInfo], config: PeftConfig, architecture: str
) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """Return the tensors by the names that they have in the base's ...ForSequenceClassification or ...ForCausalLM.

    Those that nothing depends on are left out. The second are the changes of as_peft_names. Raises ArtifactError.
    """
    if config.trained_ends and architecture in ENCODERS:
        raise MismatchError(SAVED_FIELD, "embeddings of encoders that were trained in full are not served")
    named, changes = as_peft_names(header)
    renamed = with_prefix(named, architecture)
    if renamed.keys() != header.keys():
        config.check_anchors()
    return without_unused(renamed, architecture), changes


def head_tensors(header: Mapping[str, TensorInfo], architecture: str) -> dict[str, str]:
    """Return the names of the tensors of an adapter's own head, by parameter, such as classifier.weight.

    Names must be those of canonical_header.
    """
    parameters = [f"{module}.{kind}" for module in head_of(architecture).modules for kind in ("weight", "bias")]
    return {name: TENSOR_PREFIX + name for name in parameters if TENSOR_PREFIX + name in header}


def check_head(
    header: Mapping[str, TensorInfo], config: PeftConfig, architecture: str, modules: Collection[str], width: int
) -> None:
    """Check an adapter's own head, where it has one, against the names of the base's modules and its hidden width.

    Raises ArtifactError for a broken head, MismatchError for one that lacks what the base does not have.
    """
    head, saved = head_of(architecture), head_tensors(header, architecture)
    if not saved:
        if config.labels:
            raise ArtifactError(LABELS_FIELD, "names the labels of a head that the adapter does not have")
        return
    expected = {f"{head.dense}.weight": (width, width), f"{head.dense}.bias": (width,)}
    expected |= {f"{head.norm}.{kind}": (width,) for kind in ("weight", "bias")}
    labels = header[saved[f"{head.output}.weight"]].shape[0] if f"{head.output}.weight" in saved else 0
    expected |= {f"{head.output}.weight": (labels, width), f"{head.output}.bias": (labels,)}
    for parameter, name in saved.items():
        if header[name].shape != expected[parameter] or 0 in expected[parameter]:
            raise MismatchError(
                WEIGHTS_FILE, f"{name} has the shape {list(header[name].shape)}, not {list(expected[parameter])}"
            )
    _check_complete(head, saved, modules)
    if labels and config.labels and len(config.labels) != labels:
        raise ArtifactError(LABELS_FIELD, f"names {len(config.labels)} labels; the head has {labels}")


def _check_complete(head: Head, saved: Collection[str], modules: Collection[str]) -> None:
    for module in head.linears:
        if f"{module}.weight" not in saved and module not in modules:
            parts = ", ".join(repr(name.removeprefix("bert.").partition(".")[0]) for name in head.linears)
            raise MismatchError(
                SAVED_FIELD,
                f"{module} is neither in the adapter nor in the base; train with modules_to_save=[{parts}]",
            )
    if head.norm and head.dense not in modules and f"{head.norm}.weight" not in saved:
        raise MismatchError(SAVED_FIELD, f"{head.norm} is neither in the adapter nor in the base")


def hidden_size(modules: Mapping[str, tuple[int, ...]]) -> int:
    """Return the width of the hidden states that a head gets; `modules` are (in_features, out_features) by name."""
    for name, sizes in modules.items():
        if is_head(name):
            return sizes[0]
    projections = [sizes[1] for name, sizes in modules.items() if name.endswith(".embed_proj")]
    return (projections or [sizes[1] for name, sizes in modules.items() if is_embedding(name)] or [0])[0]
