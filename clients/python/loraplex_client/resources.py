"""Resources of the adapter store: adapters, their immutable revisions, and base models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

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
    of equal best tokens, the divergences are in nats. The store fills in `verdict` (`fit`, `warned` or `refused`: what
    happens to requests on such a base), `breach`, which of its limits the figures break, and `create_time`.
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


@dataclass(frozen=True)
class Pushed:
    """The result of an upload; `created` is False if the store had the same bytes already."""

    adapter: Adapter
    revision: Revision
    created: bool


@dataclass(frozen=True)
class Module:
    """A linear layer that an adapter may change, by its name in the model."""

    name: str
    in_features: int
    out_features: int


@dataclass(frozen=True)
class ModelFile:
    """A small file of a base model in the store."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class BaseModel:
    """The properties of a base model that all parts share. The store fills in `files` and `create_time`.

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


def adapter_of(message: adapters_pb2.Adapter) -> Adapter:
    """Return the adapter in a message."""
    return Adapter(
        name=message.name,
        base_model=message.base_model,
        aliases=dict(message.aliases),
        create_time=_time_of(message.create_time),
        update_time=_time_of(message.update_time),
        etag=message.etag,
    )


def revision_of(message: adapters_pb2.Revision) -> Revision:
    """Return the revision in a message."""
    return Revision(
        name=message.name,
        digest=message.digest,
        base_model=message.base_model,
        base_digest=message.base_digest,
        rank=message.rank,
        weight_bytes=message.weight_bytes,
        create_time=_time_of(message.create_time),
        certificates=tuple(map(certificate_of, message.certificates)),
    )


def certificate_of(message: adapters_pb2.FitnessCertificate) -> FitnessCertificate:
    """Return the certificate in a message."""
    return FitnessCertificate(
        quantization=message.quantization,
        base_digest=message.base_digest,
        prompts=message.prompts,
        drawn=message.drawn,
        tokens=message.tokens,
        agreement=message.agreement,
        mean_kl=message.mean_kl,
        max_kl=message.max_kl,
        verdict=_VERDICTS.get(message.verdict, ""),
        breach=message.breach,
        create_time=_time_of(message.create_time),
    )


def certificate_message(certificate: FitnessCertificate) -> adapters_pb2.FitnessCertificate:
    """Return the message of a certificate, without what the store fills in."""
    return adapters_pb2.FitnessCertificate(
        quantization=certificate.quantization,
        base_digest=certificate.base_digest,
        prompts=certificate.prompts,
        drawn=certificate.drawn,
        tokens=certificate.tokens,
        agreement=certificate.agreement,
        mean_kl=certificate.mean_kl,
        max_kl=certificate.max_kl,
    )


def model_of(message: adapters_pb2.BaseModel) -> BaseModel:
    """Return the base model in a message."""
    return BaseModel(
        name=message.name,
        digest=message.digest,
        architecture=message.architecture,
        context_length=message.context_length,
        vocab_size=message.vocab_size,
        end_token_ids=tuple(message.end_token_ids),
        modules=tuple(Module(module.name, module.in_features, module.out_features) for module in message.modules),
        files=tuple(ModelFile(file.name, file.size, file.sha256) for file in message.files),
        create_time=_time_of(message.create_time),
        tasks=tuple(message.tasks),
        labels=tuple(message.labels),
        pooling=message.pooling,
        quantization=message.quantization,
        original_digest=message.original_digest,
        kv_cache_dtype=message.kv_cache_dtype,
    )


def model_message(model: BaseModel) -> adapters_pb2.BaseModel:
    """Return the message that registers a base model."""
    return adapters_pb2.BaseModel(
        name=model.name,
        digest=model.digest,
        architecture=model.architecture,
        context_length=model.context_length,
        vocab_size=model.vocab_size,
        end_token_ids=model.end_token_ids,
        modules=[
            adapters_pb2.Module(name=module.name, in_features=module.in_features, out_features=module.out_features)
            for module in model.modules
        ],
        tasks=model.tasks,
        labels=model.labels,
        pooling=model.pooling,
        quantization=model.quantization,
        original_digest=model.original_digest,
        kv_cache_dtype=model.kv_cache_dtype,
    )


def _time_of(message: Timestamp) -> datetime:
    return message.ToDatetime(tzinfo=UTC)
