"""Reads and writes the fields of the store's messages: names, times, records, and the tokens of pages.

Errors of artifacts become errors of calls. Lists have pages (https://google.aip.dev/158).
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.adapter_store.records import (
    Adapter,
    Base,
    Candidate,
    FitnessPolicy,
    FoundRevision,
    Provenance,
    Revision,
    Statement,
)
from loraplex.contracts.artifacts import ArtifactError, MismatchError
from loraplex.contracts.artifacts.base_model import TASKS, BaseModel, ModuleShape
from loraplex.contracts.artifacts.fitness import CalibrationFigures, Figures
from loraplex.contracts.artifacts.generation_config import GenerationConfig
from loraplex.contracts.artifacts.names import (
    SHARED,
    AdapterName,
    check_base_name,
    check_tenant,
    is_digest,
    parse_adapter_name,
)
from loraplex.contracts.options import OutOfRangeError
from loraplex.runtime.rpc.errors import InvalidField, Mismatch, NotFound

DEFAULT_SIZE = 100
MAX_SIZE = 1000
# A page ends early rather than outgrow a gRPC message (4 MiB).
_MAX_BYTES = 3 * 1024 * 1024

M = TypeVar("M", bound=Message)
R = TypeVar("R")
# Maximum life of a key or a grant in seconds: ten years.
_LONGEST_S = 10 * 365 * 86_400
_MAX_MANIFEST_BYTES = 2 * 1024 * 1024
# Maximum characters of a quantization's text.
_MAX_QUANTIZATION = 1024
# Patterns of a manifest's texts, and what they name.
_WORDS = {
    "quantization": (r"[a-z0-9+.-]{0,64}", "scheme such as int8"),
    "kv_cache_dtype": (r"[a-z0-9]{0,64}", "dtype such as int8"),
    "tower_of": (r"\w{0,64}", "class such as Gemma3ForConditionalGeneration"),
    "architecture": (r"[a-z0-9_-]{1,64}", "model_type such as llama"),
}
# Fields that a manifest and its message have alike, and those of its modules.
_BASE_FIELDS = tuple(
    field.name for field in dataclasses.fields(BaseModel) if field.name not in {"modules", "files", "generation_config"}
)
_MODULE_FIELDS = tuple(field.name for field in dataclasses.fields(ModuleShape))
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


def check_digest(field: str, digest: str) -> None:
    """Check that a text may be a revision's digest. Raises InvalidField."""
    if not is_digest(digest):
        raise InvalidField(field, f"{digest!r} is not sha256: and 64 lower-case hexadecimal digits")


def seconds_of(field: str, duration: Duration, *, least: float) -> float:
    """Return a duration in seconds. Raises InvalidField below `least` and above ten years."""
    seconds = duration.seconds + duration.nanos / 1e9
    if not least <= seconds <= _LONGEST_S:
        raise InvalidField(field, f"{seconds:g} s; {least:g} to {_LONGEST_S} s")
    return seconds


def own_adapter(field: str, text: str, tenant: str) -> AdapterName:
    """Return the name of an adapter that the tenant is about to change. Raises InvalidField, and as check_owner."""
    with refusals(field):
        name = parse_adapter_name(text, tenant)
    check_owner(name, tenant)
    return name


def check_owner(name: AdapterName, tenant: str) -> None:
    """Check that the tenant may change the adapter.

    Raises Mismatch on a shared adapter, which the tenant may use, and NotFound on another tenant's, also if it exists.
    """
    if name.tenant == tenant:
        return
    if name.tenant == SHARED:
        raise Mismatch("tenant", f"{name} is shared: only tenant {SHARED} may change it", reason="NOT_OWNER")
    raise NotFound("adapter", str(name))


def listed_tenants(parent: str, tenant: str) -> list[str]:
    """Return the tenants whose adapters a list with this parent shows. Raises InvalidField, NotFound."""
    if not parent:
        return sorted({tenant, SHARED})
    listed = parent.removeprefix("tenants/")
    if listed == parent:
        raise InvalidField("parent", f"{parent!r} is not a name like tenants/TENANT")
    with refusals("parent"):
        check_tenant(listed)
    if listed not in {tenant, SHARED}:
        raise NotFound("tenant", parent)
    return [listed]


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


def revision_to_pb(revision: Revision, policy: FitnessPolicy) -> pb.Revision:
    """Return a revision's message; without create_time if the revision is not kept."""
    return pb.Revision(
        name=str(revision.name),
        digest=revision.name.digest,
        base_model=revision.base_model,
        base_digest=revision.base_digest,
        rank=revision.rank,
        weight_bytes=revision.weights.size,
        create_time=timestamp(revision.create_ns),
        expire_time=timestamp(revision.expire_ns),
        certificates=[_certificate_to_pb(certificate, policy) for certificate in revision.certificates],
        calibrations=map(_calibration_to_pb, revision.calibrations),
        provenance=None if revision.provenance is None else _provenance_to_pb(revision.provenance),
    )


def _provenance_to_pb(provenance: Provenance) -> pb.Provenance:
    files = [
        pb.SourceFile(path=file.path, size=file.size, etag=file.etag, version=file.version) for file in provenance.files
    ]
    fetched = timestamp(provenance.fetch_ns or None)
    return pb.Provenance(uri=provenance.uri, pin=provenance.pin, files=files, fetch_time=fetched)


def candidate_to_pb(candidate: Candidate, policy: FitnessPolicy) -> pb.Candidate:
    """Return the message of a revision that is rolled out."""
    return pb.Candidate(
        revision=revision_to_pb(candidate.revision, policy),
        release=candidate.release,
        step=candidate.step,
        permille=candidate.permille,
        shadow_permille=candidate.shadow_permille,
        refusal_phrases=candidate.refusal_phrases,
    )


def found_to_pb(found: FoundRevision) -> pb.FoundRevision:
    """Return the message of a revision that was looked for by its digest."""
    return pb.FoundRevision(
        digest=found.name.digest,
        adapter=str(found.name.adapter_name),
        aliases=found.aliases,
        delete_time=timestamp(found.delete_ns),
    )


def _certificate_to_pb(certificate: Statement[Figures], policy: FitnessPolicy) -> pb.FitnessCertificate:
    """Return a certificate's message, with what the policy makes of its figures."""
    breach = policy.limits.breach(certificate.figures)
    verdict = pb.VERDICT_FIT
    if breach is not None:
        verdict = pb.VERDICT_REFUSED if policy.refuses and breach.certain else pb.VERDICT_WARNED
    return pb.FitnessCertificate(
        **_statement_fields(certificate), verdict=verdict, breach="" if breach is None else breach.text
    )


def _calibration_to_pb(calibration: Statement[CalibrationFigures]) -> pb.Calibration:
    return pb.Calibration(**_statement_fields(calibration))


def _statement_fields(statement: Statement[Any]) -> dict[str, Any]:
    return {
        "quantization": statement.quantization,
        "base_digest": statement.base_digest,
        **dataclasses.asdict(statement.figures),
        "create_time": timestamp(statement.create_ns),
    }


def certified_to_pb(statement: Statement[Any], policy: FitnessPolicy) -> pb.CertifyRevisionResponse:
    """Return the message of a statement that was kept."""
    if isinstance(statement.figures, CalibrationFigures):
        return pb.CertifyRevisionResponse(calibration=_calibration_to_pb(statement))
    return pb.CertifyRevisionResponse(certificate=_certificate_to_pb(statement, policy))


def statement_from_pb(request: pb.CertifyRevisionRequest) -> Statement[Any]:
    """Check and return a request's certificate or calibration, which is made now. Raises InvalidField."""
    calibrates = request.HasField("calibration")
    sent, kind = (request.calibration, CalibrationFigures) if calibrates else (request.certificate, Figures)
    field, least = ("calibration", 0) if calibrates else ("certificate", 1)
    if not least <= len(sent.quantization) <= _MAX_QUANTIZATION:
        raise InvalidField(f"{field}.quantization", f"is not a text of {least} to {_MAX_QUANTIZATION} characters")
    figures = {one.name: getattr(sent, one.name) for one in dataclasses.fields(kind)}
    if not calibrates and not request.certificate.HasField("same_answers"):
        figures["same_answers"] = None
    try:
        return Statement(sent.quantization, sent.base_digest, kind(**figures), time.time_ns())
    except ValueError as error:
        raise InvalidField(field, str(error)) from error


def base_to_pb(base: Base) -> pb.BaseModel:
    """Return a base model's message."""
    manifest = base.manifest
    return pb.BaseModel(
        **{name: getattr(manifest, name) for name in _BASE_FIELDS},
        modules=[pb.Module(**{name: getattr(module, name) for name in _MODULE_FIELDS}) for module in manifest.modules],
        files=[pb.FileInfo(name=name, size=blob.size, sha256=blob.digest) for name, blob in base.files.items()],
        generation_config=pb.GenerationConfig(**given) if (given := manifest.generation_config.given) else None,
        create_time=timestamp(base.create_ns),
        state=base.state,
    )


def base_from_pb(model: pb.BaseModel) -> BaseModel:
    """Check and return the manifest that a client registers, without its files. Raises InvalidField."""
    if model.ByteSize() > _MAX_MANIFEST_BYTES:
        raise InvalidField("model", f"is larger than {_MAX_MANIFEST_BYTES} bytes")
    with refusals("model.name"):
        check_base_name(model.name)
    check_digest("model.digest", model.digest)
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
    if not model.tasks or not set(model.tasks) <= set(TASKS):
        raise InvalidField("model.tasks", f"{list(model.tasks)}: give one or more of {', '.join(TASKS)}")
    if model.pooling not in ("", "cls", "mean", "last"):
        raise InvalidField("model.pooling", f"{model.pooling!r} is not cls, mean or last")
    plain = {name: getattr(model, name) for name in _BASE_FIELDS}
    tuples = {name: tuple(plain[name]) for name in ("end_token_ids", "tasks", "labels")}
    return BaseModel(modules=_modules(model), generation_config=_generation_config(model), **plain | tuples)


def _generation_config(model: pb.BaseModel) -> GenerationConfig:
    config = GenerationConfig.of({field.name: value for field, value in model.generation_config.ListFields()})
    try:
        config.check()
    except OutOfRangeError as error:
        raise InvalidField(f"model.generation_config.{error.field}", error.message) from error
    return config


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
    return tuple(ModuleShape(*(getattr(module, name) for name in _MODULE_FIELDS)) for module in model.modules)


def timestamp(nanoseconds: int | None) -> Timestamp | None:
    """Return a time's message; None for None."""
    if nanoseconds is None:
        return None
    stamp = Timestamp()
    stamp.FromNanoseconds(nanoseconds)
    return stamp


def page_size(asked: int) -> int:
    """Return how many items a page may have. Raises InvalidField."""
    if asked < 0:
        raise InvalidField("page_size", f"{asked} is negative")
    return min(asked or DEFAULT_SIZE, MAX_SIZE)


def encode_token(key: Sequence[str | int]) -> str:
    """Return the token of the page that begins after the item of this key."""
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode()


def decode_token(token: str, first: Sequence[Any]) -> list[Any]:
    """Return the key that a token was made from; `first` for an empty token. Raises InvalidField on a foreign token."""
    if not token:
        return list(first)
    try:
        key = json.loads(base64.b64decode(token, altchars=b"-_", validate=True))
    except (ValueError, RecursionError):
        key = None
    kinds = [type(value) for value in first]
    if not isinstance(key, list) or [type(value) for value in key] != kinds or not all(_fits(value) for value in key):
        raise InvalidField("page_token", "is not one that this list gave")
    return key


def fill_page(
    records: Iterable[R], convert: Callable[[R], M], key: Callable[[R], Sequence[str | int]], size: int
) -> tuple[list[M], str]:
    """Return the messages of a page, in order, at least one if there are any; and the next page's token, or nothing.

    No more records are read than that needs.
    """
    page: list[M] = []
    used, last = 0, None
    for record in records:
        message = convert(record)
        used += message.ByteSize()
        if last is not None and (len(page) == size or used > _MAX_BYTES):
            return page, encode_token(last)
        page.append(message)
        last = key(record)
    return page, ""


async def list_page(
    request: Any, fetch: Callable[[str, int], Sequence[R]], convert: Callable[[R], M], key: Callable[[R], str]
) -> tuple[list[M], str]:
    """Return the page that a request asks for, of records in the order of one text; and the next page's token.

    `fetch` blocks; it returns records from the first after a key, at most so many. Raises InvalidField.
    """
    size, after = page_size(request.page_size), decode_token(request.page_token, first=("",))[0]
    records = await asyncio.to_thread(fetch, after, size + 1)
    return fill_page(records, convert, lambda record: (key(record),), size)


def _fits(value: Any) -> bool:
    """Return whether the database can store the number."""
    return abs(value) < 2**63 if isinstance(value, int) else value.isprintable()
