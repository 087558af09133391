"""Converts between protobuf messages and records, and errors of artifacts to errors of calls."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager

from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.timestamp_pb2 import Timestamp
from loraplex.adapters.v1 import adapters_pb2 as pb

from adapter_store.certificates import FitnessPolicy
from adapter_store.records import Adapter, Base, FitnessCertificate, NewRevision, Revision
from artifacts.base_model import TASKS, BaseModel, ModuleShape
from artifacts.certificate import Figures
from artifacts.digests import is_digest
from artifacts.errors import ArtifactError, MismatchError
from artifacts.names import check_base_name
from rpc.errors import InvalidField, Mismatch

# Maximum life of a key or a grant in seconds: ten years.
_LONGEST_S = 10 * 365 * 86_400
_MAX_MANIFEST_BYTES = 2 * 1024 * 1024
# Maximum characters of a quantization's text.
_MAX_QUANTIZATION = 1024
# Patterns of a manifest's texts, and what they name.
_WORDS = {
    "quantization": (r"[a-z0-9+-]{0,64}", "scheme such as int8"),
    "kv_cache_dtype": (r"[a-z0-9]{0,64}", "dtype such as int8"),
    "architecture": (r"[a-z0-9_-]{1,64}", "model_type such as llama"),
}
_KEY_ID = re.compile(r"[a-z0-9]{16}")
_MODULE_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


@contextmanager
def refusals(field: str = "") -> Iterator[None]:
    """Translate bad artifacts to InvalidField of `field` (if empty, of the artifact's own file or field), and those
    that do not go with the base model become Mismatch.
    """
    try:
        yield
    except MismatchError as error:
        raise Mismatch(error.subject, error.message) from error
    except ArtifactError as error:
        raise InvalidField(field or error.subject, error.message) from error


def check_key_id(field: str, key_id: str) -> None:
    """Check that a text may be the id of an API key. Raises InvalidField."""
    if not _KEY_ID.fullmatch(key_id):
        raise InvalidField(field, f"{key_id!r} is not the id of an API key: 16 of a-z and 0-9")


def seconds_of(field: str, duration: Duration, *, least: float) -> float:
    """Return a duration in seconds. Raises InvalidField below `least` and above ten years."""
    seconds = duration.seconds + duration.nanos / 1e9
    if not least <= seconds <= _LONGEST_S:
        raise InvalidField(field, f"{seconds:g} s; {least:g} to {_LONGEST_S} s")
    return seconds


def adapter_to_pb(adapter: Adapter) -> pb.Adapter:
    """Return an adapter's message."""
    return pb.Adapter(
        name=str(adapter.name),
        base_model=adapter.base_model,
        aliases=adapter.aliases,
        create_time=timestamp(adapter.create_ns),
        update_time=timestamp(adapter.update_ns),
        etag=adapter.etag,
    )


def revision_to_pb(revision: Revision | NewRevision, policy: FitnessPolicy) -> pb.Revision:
    """Return a revision's message; without create_time if the revision is not kept."""
    certificates = revision.certificates if isinstance(revision, Revision) else ()
    return pb.Revision(
        name=str(revision.name),
        digest=revision.name.digest,
        base_model=revision.base_model,
        base_digest=revision.base_digest,
        rank=revision.rank,
        weight_bytes=revision.weights.size,
        create_time=timestamp(revision.create_ns) if isinstance(revision, Revision) else None,
        certificates=[certificate_to_pb(certificate, policy) for certificate in certificates],
    )


def certificate_to_pb(certificate: FitnessCertificate, policy: FitnessPolicy) -> pb.FitnessCertificate:
    """Return a certificate's message, with what the policy makes of its figures."""
    breach = policy.limits.breach(certificate.figures)
    beyond = pb.VERDICT_REFUSED if policy.refuses else pb.VERDICT_WARNED
    return pb.FitnessCertificate(
        quantization=certificate.quantization,
        base_digest=certificate.base_digest,
        **dataclasses.asdict(certificate.figures),
        create_time=timestamp(certificate.create_ns),
        verdict=beyond if breach else pb.VERDICT_FIT,
        breach=breach,
    )


def figures_from_pb(certificate: pb.FitnessCertificate) -> Figures:
    """Check and return the figures of a certificate. Raises InvalidField."""
    if not 0 < len(certificate.quantization) <= _MAX_QUANTIZATION:
        raise InvalidField("certificate.quantization", f"is not a text of 1 to {_MAX_QUANTIZATION} characters")
    names = [field.name for field in dataclasses.fields(Figures)]
    try:
        return Figures(**{name: getattr(certificate, name) for name in names})
    except ValueError as error:
        raise InvalidField("certificate", str(error)) from error


def base_to_pb(base: Base) -> pb.BaseModel:
    """Return a base model's message."""
    manifest = base.manifest
    return pb.BaseModel(
        name=manifest.name,
        digest=manifest.digest,
        architecture=manifest.architecture,
        context_length=manifest.context_length,
        vocab_size=manifest.vocab_size,
        end_token_ids=manifest.end_token_ids,
        modules=[
            pb.Module(name=module.name, in_features=module.in_features, out_features=module.out_features)
            for module in manifest.modules
        ],
        files=[pb.FileInfo(name=name, size=blob.size, sha256=blob.digest) for name, blob in base.files.items()],
        create_time=timestamp(base.create_ns),
        tasks=manifest.tasks,
        labels=manifest.labels,
        pooling=manifest.pooling,
        quantization=manifest.quantization,
        original_digest=manifest.original_digest,
        kv_cache_dtype=manifest.kv_cache_dtype,
    )


def base_from_pb(model: pb.BaseModel) -> BaseModel:
    """Check and return the manifest that a client registers, without its files. Raises InvalidField."""
    if model.ByteSize() > _MAX_MANIFEST_BYTES:
        raise InvalidField("model", f"is larger than {_MAX_MANIFEST_BYTES} bytes")
    with refusals("model.name"):
        check_base_name(model.name)
    if not is_digest(model.digest):
        raise InvalidField("model.digest", f"{model.digest!r} is not sha256: and 64 lower-case hexadecimal digits")
    if model.original_digest and not is_digest(model.original_digest):
        raise InvalidField("model.original_digest", f"{model.original_digest!r} is not a digest")
    for field, (pattern, what) in _WORDS.items():
        if not re.fullmatch(pattern, value := getattr(model, field)):
            raise InvalidField(f"model.{field}", f"{value!r} is not a {what}")
    for field in ("context_length", "vocab_size"):
        if getattr(model, field) < 1:
            raise InvalidField(f"model.{field}", "is missing")
    for index, token in enumerate(model.end_token_ids):
        if token >= model.vocab_size:
            raise InvalidField(f"model.end_token_ids[{index}]", f"{token} is not in a vocabulary of {model.vocab_size}")
    if unknown := set(model.tasks) - set(TASKS):
        raise InvalidField("model.tasks", f"{', '.join(sorted(unknown))}: not one of {', '.join(TASKS)}")
    if model.pooling not in ("", "cls", "mean", "last"):
        raise InvalidField("model.pooling", f"{model.pooling!r} is not cls, mean or last")
    return BaseModel(
        name=model.name,
        digest=model.digest,
        architecture=model.architecture,
        context_length=model.context_length,
        vocab_size=model.vocab_size,
        end_token_ids=tuple(model.end_token_ids),
        modules=_modules(model),
        tasks=tuple(model.tasks),
        labels=tuple(model.labels),
        pooling=model.pooling,
        quantization=model.quantization,
        original_digest=model.original_digest,
        kv_cache_dtype=model.kv_cache_dtype,
    )


def masked(model: pb.BaseModel, mask: FieldMask) -> pb.BaseModel:
    """Keep only the fields that the mask names; an empty mask keeps all. Raises InvalidField on an unknown field."""
    if not mask.paths:
        return model
    if not mask.IsValidForDescriptor(pb.BaseModel.DESCRIPTOR):
        raise InvalidField("read_mask", f"{', '.join(mask.paths)}: not all of these are fields of BaseModel")
    chosen = pb.BaseModel()
    mask.MergeMessage(model, chosen)
    return chosen


def _modules(model: pb.BaseModel) -> tuple[ModuleShape, ...]:
    seen: set[str] = set()
    for index, module in enumerate(model.modules):
        field = f"model.modules[{index}]"
        if not _MODULE_NAME.fullmatch(module.name) or module.name in seen:
            raise InvalidField(f"{field}.name", f"{module.name!r} is not a module's name, or is there twice")
        if not (module.in_features and module.out_features):
            raise InvalidField(field, f"{module.name} has no in_features or out_features")
        seen.add(module.name)
    return tuple(ModuleShape(module.name, module.in_features, module.out_features) for module in model.modules)


def timestamp(nanoseconds: int | None) -> Timestamp | None:
    """Return a time's message; None for None."""
    if nanoseconds is None:
        return None
    stamp = Timestamp()
    stamp.FromNanoseconds(nanoseconds)
    return stamp
