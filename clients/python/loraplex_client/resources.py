"""Resources of the adapter store: adapters, their immutable revisions, and base models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from loraplex.adapters.v1 import adapters_pb2

_VERDICTS: Mapping[int, str] = {
    adapters_pb2.VERDICT_FIT: "fit",
    adapters_pb2.VERDICT_WARNED: "warned",
    adapters_pb2.VERDICT_REFUSED: "refused",
}


@dataclass(frozen=True)
class Adapter:
    """An adapter: `name` is tenants/{tenant}/adapters/{adapter}; `aliases` gives the revision digest of each alias."""

    name: str
    base_model: str
    aliases: Mapping[str, str]
    create_time: datetime
    update_time: datetime
    etag: str


@dataclass(frozen=True)
class FitnessCertificate:
    """The figures of a revision on a base with a `quantization`, against the original base of `base_digest`.

    Measured over `tokens` tokens of the greedy answers to `prompts` prompts on the original: `agreement` is the share
    of equal best tokens, the divergences are in nats. `same_answers` of the whole answers are equal (None: not
    counted); of `expected_answers` prompts the right answer is known, which `right_original` and `right_quantized`
    gave. The store fills in `verdict` (`fit`, `warned` or `refused`: what happens to requests on such a base),
    `breach`, which of its limits the figures break, and `create_time`.
    """

    quantization: str
    base_digest: str
    prompts: int
    drawn: bool
    tokens: int
    agreement: float
    mean_kl: float
    max_kl: float
    verdict: str = ""
    breach: str = ""
    create_time: datetime | None = None
    same_answers: int | None = None
    expected_answers: int = 0
    right_original: int = 0
    right_quantized: int = 0


@dataclass(frozen=True)
class Calibration:
    """The temperature of a revision's decisions on a base with a `quantization`, fitted on `questions` of known answer.

    `ece` is the expected calibration error (15 bins), `nll` the mean negative log likelihood of the right labels in
    nats: with the model's own probabilities, and at `temperature`. `base_digest` is the original base's.
    """

    quantization: str
    base_digest: str
    temperature: float
    questions: int
    ece_before: float
    ece_after: float
    nll_before: float
    nll_after: float
    create_time: datetime | None = None


@dataclass(frozen=True)
class SourceFile:
    """A file of a source, as it was when it was fetched. `etag` and `version` are empty where the source has none."""

    path: str
    size: int
    etag: str
    version: str


@dataclass(frozen=True)
class Provenance:
    """The origin of an imported revision: the URI that was asked for, and one of these bytes alone (`pin`).

    For sources without such URIs `pin` is the same one, and `files` say which bytes they were.
    """

    uri: str
    pin: str
    files: tuple[SourceFile, ...]
    fetch_time: datetime | None = None


@dataclass(frozen=True)
class Revision:
    """A revision: `name` is tenants/{tenant}/adapters/{adapter}/revisions/{digest}; `rank` is its largest rank."""

    name: str
    digest: str
    base_model: str
    base_digest: str
    rank: int
    weight_bytes: int
    create_time: datetime
    certificates: tuple[FitnessCertificate, ...] = ()
    # Where the revision was imported from; None: it was uploaded.
    provenance: Provenance | None = None
    # When it ends by itself; None: never.
    expire_time: datetime | None = None
    calibrations: tuple[Calibration, ...] = ()


@dataclass(frozen=True)
class Pushed:
    """The result of an upload or an import; `created` is False if the store had the same bytes already.

    `warnings` say what was left out of an import, and what else its owner should know.
    """

    adapter: Adapter
    revision: Revision
    created: bool
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exported:
    """The result of an export: the revision, and the URI of its artifact, oci://REGISTRY/REPO@sha256:DIGEST."""

    revision: Revision
    pin: str


@dataclass(frozen=True)
class Module:
    """A linear layer that an adapter may change, by its name in the model; or the tensor of a layer's `experts`."""

    name: str
    in_features: int
    out_features: int
    experts: int = 0


@dataclass(frozen=True)
class ModelFile:
    """A small file of a base model in the store."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class GenerationConfig:
    """The sampling that a base model's generation_config.json proposes, by its own names; None where it has no value.

    Routers fill in with it what a request leaves unset: those that shape sampling only where `do_sample` is true.
    """

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class BaseModel:
    """The properties of a base model that all parts share. The store fills in `files`, `create_time` and `state`.

    `digest` covers configuration, tensor headers and sizes, and sampled bytes of every tensor; `architecture` is
    transformers' model_type; `context_length` counts tokens of prompt and answer together.
    """

    name: str
    digest: str
    architecture: str
    context_length: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    modules: tuple[Module, ...]
    files: tuple[ModelFile, ...] = ()
    create_time: datetime | None = None
    # What the model does without an adapter: generate, embed, classify.
    tasks: tuple[str, ...] = ("generate",)
    # The names of its own classifier's labels, in the order of the logits.
    labels: tuple[str, ...] = ()
    # How hidden states become one vector where a request does not say: cls, mean or last.
    pooling: str = ""
    # The scheme of the weights, such as int8, and the digest of the model whose adapters are valid for this one.
    quantization: str = ""
    original_digest: str = ""
    # The dtype of the KV cache, int8; empty: that in which the model computes.
    kv_cache_dtype: str = ""
    # The class of a checkpoint that has the model beside towers for images or sound, which are not served.
    tower_of: str = ""
    generation_config: GenerationConfig = GenerationConfig()
    # The store's: live, which calls get; staged, registered beside it and not live yet; former, live before.
    state: str = ""


T = TypeVar("T")


def resource_of(cls: type[T], message: Message) -> T:
    """Return the resource of a class in a message, whose fields have the same names."""
    fields: Any = dataclasses.fields(cls)  # type: ignore[arg-type]  # all of these classes are dataclasses
    values = {field.name: _field_of(message, field.name) for field in fields}
    if cls is FitnessCertificate:
        values["verdict"] = _VERDICTS.get(values["verdict"], "")
    return cls(**values)


def _field_of(message: Message, name: str) -> Any:
    """Return a field's value; None for a number that is unset and not 0, and for an unset time or provenance."""
    field = message.DESCRIPTOR.fields_by_name[name]
    unset = field.has_presence and not message.HasField(name)
    if unset and (field.message_type is None or field.message_type is Timestamp.DESCRIPTOR or name == "provenance"):
        return None
    return _value_of(getattr(message, name))


def _value_of(value: Any) -> Any:
    match value:
        case Timestamp():
            return value.ToDatetime(tzinfo=UTC)
        case Message():
            return resource_of(_CLASSES[value.DESCRIPTOR.name], value)
        case Mapping():
            return dict(value)
        case str():
            return value
        case Sequence():
            return tuple(map(_value_of, value))
    return value


# The classes of messages that are in others.
_CLASSES: Mapping[str, type] = {
    "Calibration": Calibration,
    "FitnessCertificate": FitnessCertificate,
    "Module": Module,
    "FileInfo": ModelFile,
    "Provenance": Provenance,
    "Revision": Revision,
    "SourceFile": SourceFile,
    "GenerationConfig": GenerationConfig,
}


def certificate_message(certificate: FitnessCertificate) -> adapters_pb2.FitnessCertificate:
    """Return the message of a certificate, without what the store fills in."""
    return adapters_pb2.FitnessCertificate(**_without(certificate, "verdict", "breach", "create_time"))


def calibration_message(calibration: Calibration) -> adapters_pb2.Calibration:
    """Return the message of a calibration, without what the store fills in."""
    return adapters_pb2.Calibration(**_without(calibration, "create_time"))


def model_message(model: BaseModel) -> adapters_pb2.BaseModel:
    """Return the message that registers a base model."""
    return adapters_pb2.BaseModel(**_without(model, "files", "create_time", "state"))


def _without(resource: Any, *names: str) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(resource).items() if name not in names}
