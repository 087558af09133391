"""Receives what clients upload: an adapter's two files, which child processes check, or a base model's small files."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.adapter_store.bases import BaseModels
from loraplex.adapter_store.catalog import Catalog
from loraplex.adapter_store.convert import base_from_pb, own_adapter, refusals, seconds_of
from loraplex.adapter_store.open_calls import OpenUploads
from loraplex.adapter_store.plans import StoreQuotas
from loraplex.adapter_store.records import Base, Blob, NewBase, NewRevision, Provenance, Revision
from loraplex.adapter_store.storage import PIECE_BYTES, CorruptBlob, DataDirectory, Upload
from loraplex.adapter_store.validate import CONFIG_BYTES, Validated, validate_adapter
from loraplex.contracts.artifacts import ArtifactError, MismatchError
from loraplex.contracts.artifacts.added_tokens import (
    ADDED_FIELD,
    TOKEN_FIELDS,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    BaseTokens,
)
from loraplex.contracts.artifacts.base_model import HASH_ARCHITECTURE, BaseModel
from loraplex.contracts.artifacts.names import ANY_MODEL, LIVE, AdapterName, RevisionName, check_alias
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE, revision_digest
from loraplex.runtime.rpc.children.pool import ChildDiedError, ChildPool
from loraplex.runtime.rpc.errors import CallError, DataLoss, DeadlinePassed, InvalidField
from loraplex.runtime.rpc.principal import caller, only_trains
from loraplex_client import InvalidRequestError
from loraplex_client.adapter_directory import FILES_BESIDE, read_config, template_file, why_no_adapter

# Maximum bytes of a base model's small files, and maximum number of the files of an upload.
_BASE_FILES_BYTES = 64 * 1024 * 1024
_FILES = 64
# Maximum bytes of the files beside an adapter's two, of which only the beginning of tokenizer.json is read.
BESIDE_BYTES = dict.fromkeys(FILES_BESIDE, 2 * 1024 * 1024) | {TOKENIZER_FILE: 64 * 1024 * 1024}
# The alias of an upload that moves none.
_NO_ALIAS = "-"
# Timeouts in seconds before an upload is refused: for receiving what its client still sends, and for the next message.
_HEAR_OUT_S = 2.0
_SILENT_S = 0.5
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")

# Maximum number of bases whose tokens are kept in memory.
_TOKENIZERS = 4

P = TypeVar("P")
UploadHeader = pb.UploadHeader | pb.ImportRevisionRequest
UploadPart = pb.UploadRevisionRequest | pb.ValidateAdapterRequest
# Returns the maximum size in bytes of a file by its name. Raises InvalidField on a name that is refused.
LimitOf = Callable[[str], int]
# Timeout in seconds for a child's answer, which reads gigabytes of weights from the disk.
_CHECK_S = 600.0


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an upload: it becomes a revision of `name` for the base model; `alias` None moves no alias."""

    name: AdapterName
    alias: str | None
    etag: str
    base: Base
    ttl_s: float | None
    keep_alias: bool


class Receiver:
    """Turns upload streams into checked files that wait to be kept."""

    def __init__(
        self,
        data: DataDirectory,
        catalog: Catalog,
        bases: BaseModels,
        max_adapter_bytes: int,
        quotas: StoreQuotas,
    ) -> None:
        self._data = data
        self._catalog = catalog
        self._bases = bases
        self._limits = {CONFIG_FILE: CONFIG_BYTES, WEIGHTS_FILE: max_adapter_bytes}
        self._limits |= BESIDE_BYTES
        # By the base's files that they are read from, the last used of _TOKENIZERS.
        self._tokenizers: dict[tuple[Blob, ...], BaseTokens] = {}
        self._open_uploads = OpenUploads()
        self._quotas = quotas
        self._validator = _Validator()

    def close(self) -> None:
        """End the processes that check uploads."""
        self._validator.close()

    @asynccontextmanager
    async def revision(
        self, parts: AsyncIterable[UploadPart], tenant: str
    ) -> AsyncIterator[tuple[NewRevision, Upload]]:
        """Receive and validate a revision; its files are removed afterwards unless kept. Raises errors of the call."""
        async with _heard_out(aiter(parts)) as received, AsyncExitStack() as counted:
            counted.enter_context(self._quotas.uploading(tenant, caller().key_id))
            coming = await counted.enter_async_context(self._open_uploads.one(received, tenant))
            first = await anext(coming, None)
            if first is None or first.WhichOneof("part") != "header":
                raise InvalidField("header", "comes first, then the chunks")
            header = await self.header(first.header, tenant, "header.")
            limit = sum(self._limits.values())
            async with _received(self._data, coming, "header", self._adapter_limit, limit) as upload:
                for file in (CONFIG_FILE, WEIGHTS_FILE):
                    if file not in upload.sizes:
                        raise InvalidField("chunk", f"{file} is missing")
                yield await self.check(header, upload, tenant), upload

    @asynccontextmanager
    async def base_model(
        self, parts: AsyncIterable[pb.RegisterBaseModelRequest], registrar: str
    ) -> AsyncIterator[tuple[NewBase, Upload]]:
        """Receive and check a manifest; its files are removed afterwards unless kept. Raises errors of the call."""
        async with _heard_out(aiter(parts)) as received, self._open_uploads.one(received, registrar) as coming:
            first = await anext(coming, None)
            if first is None or first.WhichOneof("part") != "model":
                raise InvalidField("model", "comes first, then the chunks")
            manifest = base_from_pb(first.model)
            async with _received(self._data, coming, "model", _base_file_limit, _BASE_FILES_BYTES) as upload:
                blobs = await asyncio.to_thread(upload.finish)
                _check_announced(first.model, blobs)
                yield NewBase(manifest, blobs, first.replace, first.stage), upload

    async def header(self, header: UploadHeader, tenant: str, at: str = "") -> Header:
        """Check what an upload is to become, before its bytes come. Raises errors that name fields below `at`."""
        name = own_adapter(f"{at}adapter", header.adapter, tenant)
        if name.adapter in ANY_MODEL or await asyncio.to_thread(self._bases.has, name.adapter):
            why = f"{name.adapter} means the base model over HTTP, where the adapter could not be named; choose another"
            raise InvalidField(f"{at}adapter", why)
        with refusals(f"{at}alias"):
            alias = None if header.alias == _NO_ALIAS else check_alias(header.alias or LIVE)
        model = header.base_model or self._quotas.plans.default_model(name.tenant, caller().key_id)
        base = await asyncio.to_thread(self._bases.get_or_only, model, f"{at}base_model")
        await asyncio.to_thread(self._catalog.check_upload, name, base.manifest.name, header.etag, caller().key_id)
        ttl_s = seconds_of(f"{at}ttl", header.ttl, least=1.0) if header.HasField("ttl") else None
        if ttl_s is None and only_trains():
            raise InvalidField(f"{at}ttl", "is required of the role trainer, whose revisions expire")
        return Header(name, alias, header.etag, base, ttl_s, header.keep_alias)

    def _adapter_limit(self, file: str) -> int:
        if file not in self._limits:
            raise InvalidField("chunk.name", f"{file!r} is not a file of an adapter: {', '.join(self._limits)}")
        return self._limits[file]

    async def check(
        self, header: Header, upload: Upload, tenant: str, provenance: Provenance | None = None
    ) -> NewRevision:
        """Make the files of a complete upload the two of an adapter and validate them. Raises errors of the call."""
        base = header.base.manifest
        told = await asyncio.to_thread(self._join, upload, header.base)
        blobs = await asyncio.to_thread(upload.finish)
        valid, digest = await self._validator.check(upload, blobs[WEIGHTS_FILE].digest, base, tenant)
        if valid.config is not None:
            blobs[CONFIG_FILE] = await asyncio.to_thread(upload.rewrite, CONFIG_FILE, valid.config)
        name = RevisionName(header.name.tenant, header.name.adapter, digest)
        files = (blobs[CONFIG_FILE], blobs[WEIGHTS_FILE])
        revision = Revision(name, base.name, base.adapted_digest, valid.rank, *files, provenance=provenance)
        warnings = (*told, *_warnings(valid, base.name))
        rest = warnings, header.ttl_s, header.keep_alias
        return NewRevision(revision, header.alias, header.etag, caller().key_id, *rest)

    def _join(self, upload: Upload, base: Base) -> list[str]:
        """Add the files beside the configuration to its fields; return warnings for the adapter's owner. Blocks.

        The same as `adapters push`, but for added and end tokens, of which those stay that are not the base's.
        """
        upload.finish()
        if why := why_no_adapter(upload.path):
            raise InvalidField("adapter", why)
        sent = (upload.path / CONFIG_FILE).read_bytes()
        try:
            config = read_config(upload.path)
        except (InvalidRequestError, ValueError, RecursionError) as error:
            message = (
                str(error).replace(f"{upload.path}/", "") if isinstance(error, InvalidRequestError) else "is no text"
            )
            raise InvalidField("adapter", f"a file beside {CONFIG_FILE} cannot be read: {message}") from error
        name = template_file(upload.path)
        told = [f"{name} was taken: chats with the adapter use its template"] if name else []
        config = self._with_own_tokens(config, base, told)
        if len(config) > CONFIG_BYTES:
            raise InvalidField("adapter", f"{CONFIG_FILE} has more than {CONFIG_BYTES} bytes with the files beside it")
        if config != sent:
            upload.rewrite(CONFIG_FILE, config)
        return told

    def _with_own_tokens(self, config: bytes, base: Base, told: list[str]) -> bytes:
        """Return a configuration with those of its added and end tokens that are not the base's; `told` gets lines."""
        try:
            fields = json.loads(config)
        except (ValueError, RecursionError):
            return config
        if not isinstance(fields, dict) or fields.keys().isdisjoint(TOKEN_FIELDS):
            return config
        if TOKENIZER_FILE not in base.files and fields.pop(ADDED_FIELD, None):
            told.append(f"added tokens were left out: the base has no {TOKENIZER_FILE}")
        with refusals():
            new, ends = self._tokens_of(base).keep_own(fields, base.manifest.end_token_ids)
        if new:
            first = ", ".join(repr(token.content) for token in new[:3])
            others = f" and {len(new) - 3} others" if len(new) > 3 else ""
            told.append(f"the tokenizer of its requests also has the added tokens {first}{others}")
        if ends:
            told.append(f"its answers also end with {', '.join(map(repr, ends))}")
        return json.dumps(fields).encode()

    def _tokens_of(self, base: Base) -> BaseTokens:
        names = [name for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE) if name in base.files]
        files = tuple(base.files[name] for name in names)
        if files not in self._tokenizers:
            _, readers = self._bases.open(BaseModels.position(base))
            try:
                tokens = BaseTokens({name: b"".join(iter(readers[name].read, b"")) for name in names})
            except CorruptBlob as error:
                raise DataLoss("base model", base.manifest.name, str(error)) from error
            finally:
                for reader in readers.values():
                    reader.close()
            while len(self._tokenizers) >= _TOKENIZERS:
                self._tokenizers.pop(next(iter(self._tokenizers)), None)
            self._tokenizers[files] = tokens
        return self._tokenizers[files]


def _warnings(valid: Validated, base: str) -> tuple[str, ...]:
    """Return what the owner of an adapter should know, such as that it names another base model, whose shapes fit."""
    trained_on = valid.trained_on.rstrip("/").rpartition("/")[2]
    if not trained_on or trained_on.lower() == base.rpartition("/")[2].lower():
        return valid.warnings
    other = f"base_model_name_or_path is {valid.trained_on[:200]!r}: its shapes fit {base}, which serves it"
    return (*valid.warnings, other)


@asynccontextmanager
async def _heard_out(coming: AsyncIterator[P]) -> AsyncIterator[AsyncIterator[P]]:
    """Delay a refusal while the client still sends, for a limited time.

    grpc.aio's client takes a refusal that overtakes its own messages for an internal error.
    """
    try:
        yield coming
    except DeadlinePassed:  # the client sends nothing
        raise
    except CallError:
        with suppress(TimeoutError, StopAsyncIteration, CallError):
            async with asyncio.timeout(_HEAR_OUT_S):
                while True:
                    async with asyncio.timeout(_SILENT_S):
                        await anext(coming)
        raise


def _check_announced(model: pb.BaseModel, received: Mapping[str, Blob]) -> None:
    """Check that all announced files arrived: the stream of a vanished client may end without an error."""
    announced = {file.name: Blob(file.sha256, file.size) for file in model.files}
    if announced and announced != received:
        wrong = min(name for name in {*announced, *received} if announced.get(name) != received.get(name))
        raise InvalidField("model.files", f"{wrong} did not arrive as it is described here; send it again")


def _base_file_limit(file: str) -> int:
    if not _FILE_NAME.fullmatch(file):
        raise InvalidField("chunk.name", f"{file!r} is not a plain file name")
    return _BASE_FILES_BYTES


class _Validator:
    """Checks uploads in child processes, in turns of the tenants: hostile files end or hold up a child alone.

    The first adapter of a base model other than the hash model starts a child.
    """

    def __init__(self) -> None:
        self._children = ChildPool("loraplex.adapter_store.validate", "VALIDATOR_BUSY", wall_s=_CHECK_S)

    async def check(self, upload: Upload, weights_digest: str, base: BaseModel, tenant: str) -> tuple[Validated, str]:
        """Return what is accepted, and the digest of the revision that it is.

        Raises InvalidField for what is broken, Mismatch for what does not go with the base, or Unavailable.
        """
        if base.architecture == HASH_ARCHITECTURE:
            return await asyncio.to_thread(_check_any_bytes, upload, weights_digest, base)
        request = {
            "directory": str(upload.path.absolute()),
            "base": dataclasses.replace(base, files={}),
            "weights": weights_digest,
            "bytes": upload.sizes[WEIGHTS_FILE],
        }
        try:
            answer = await self._children.ask(tenant, request)
        except ChildDiedError as error:
            message = f"the check of {CONFIG_FILE} and the header of {WEIGHTS_FILE} {error}"
            raise InvalidField("adapter", message, reason="ADAPTER_TOO_COSTLY") from None
        with refusals():
            if "error" in answer:
                kind = MismatchError if answer.get("mismatch") else ArtifactError
                raise kind(answer["subject"], answer["error"])
        config = answer["config"]
        kept = None if config is None else config.encode()
        valid = Validated(answer["rank"], kept, answer["trained_on"], tuple(answer["warnings"]))
        return valid, answer["digest"]

    def close(self) -> None:
        """End the children."""
        self._children.close()


def _check_any_bytes(upload: Upload, weights_digest: str, base: BaseModel) -> tuple[Validated, str]:
    config = (upload.path / CONFIG_FILE).read_bytes()
    return validate_adapter(upload.path, base), revision_digest(config, weights_digest)


@asynccontextmanager
async def _received(
    data: DataDirectory, parts: AsyncIterator[Any], first: str, limit_of: LimitOf, total_bytes: int
) -> AsyncIterator[Upload]:
    """Receive the chunks behind the part `first`; files that are not kept by the end are deleted, however it ends.

    Raises InvalidField as soon as a limit is passed.
    """
    upload = data.new_upload()
    try:
        async for part in parts:
            if part.WhichOneof("part") != "chunk":
                raise InvalidField(first, "comes once, first; chunks follow")
            _check_chunk(upload, part.chunk, limit_of(part.chunk.name), total_bytes)
            await asyncio.to_thread(upload.append, part.chunk.name, part.chunk.data)
        yield upload
    finally:
        # A client that vanished first ends its stream, then cancels: the cancel may come while this waits for a thread.
        await asyncio.shield(asyncio.to_thread(upload.discard))


def _check_chunk(upload: Upload, chunk: pb.FileChunk, limit: int, total_bytes: int) -> None:
    name, size, sizes = chunk.name, len(chunk.data), upload.sizes
    if size > PIECE_BYTES:
        raise InvalidField("chunk.data", f"has {size} bytes; a chunk has at most {PIECE_BYTES}")
    if name in sizes and name != upload.current:
        raise InvalidField("chunk.name", f"{name} goes on after another file; send one file after the other")
    if name not in sizes and len(sizes) >= _FILES:
        raise InvalidField("chunk.name", f"these are more than {_FILES} files")
    if sizes.get(name, 0) + size > limit:
        raise InvalidField(name, f"is larger than the {limit} bytes accepted")
    if sum(sizes.values()) + size > total_bytes:
        raise InvalidField("chunk", f"all files together are larger than the {total_bytes} bytes accepted")
