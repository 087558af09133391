"""The methods of the adapter store's clients, and the files that they upload and download."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from google.protobuf.duration_pb2 import Duration
from loraplex.adapters.v1 import adapters_pb2, adapters_pb2_grpc

from loraplex_client.adapter_directory import CONFIG_FILE, WEIGHTS_FILE, read_config
from loraplex_client.calls import AsyncUploadRequests, Call, Script, UploadRequests, pages
from loraplex_client.connection import method
from loraplex_client.endpoint import ServiceCalls
from loraplex_client.errors import DataLossError
from loraplex_client.resources import (
    Adapter,
    BaseModel,
    Calibration,
    Exported,
    FitnessCertificate,
    Pushed,
    Revision,
    calibration_message,
    certificate_message,
    model_message,
    resource_of,
)

CHUNK_BYTES = 512 * 1024
PAGE_SIZE = 1000

# A callback that gets the bytes sent so far and the bytes in all.
Progress: TypeAlias = Callable[[int, int], None]
# A piece of a file of an adapter, with the file's name.
Piece: TypeAlias = tuple[str, bytes]


class StoreCalls(ServiceCalls):
    """Adapters and base models at the adapter store's `address`, as `tenant`. Short names are the tenant's own.

    Every method raises LoraplexError. `timeout_s` is the deadline of each call; none by default. `api_key` is a key or
    a token, or a function that returns the current one; `tls` has the certificate files. Without them the variables
    LORAPLEX_API_KEY or LORAPLEX_API_KEY_FILE, LORAPLEX_CA, LORAPLEX_CERT and LORAPLEX_KEY are read. With a credential
    the tenant is the credential's, and `tenant` may stay empty; without one an empty `tenant` is `default`.
    """

    _stub = adapters_pb2_grpc.AdapterServiceStub

    @method
    def push(
        self,
        directory: str | Path,
        name: str,
        *,
        base_model: str = "",
        alias: str = "",
        ttl_s: float | None = None,
        progress: Progress | None = None,
    ) -> Script[Pushed]:
        """Upload the peft adapter in `directory` as a revision of `name`, and move `alias` (`live`) to it.

        With `ttl_s` the revision is deleted after so many seconds, unless an alias or a release has it.

        A `chat_template.jinja` in the directory becomes the adapter's own chat template; the prompts or chats in a
        `certificate_prompts.jsonl`, with their answers, become those that its certificates are made with.
        `base_model` may be empty if the store has only one. Alias `-` moves no alias. `progress` is called with the
        bytes sent and the bytes in all. Raises InvalidRequestError if `directory` has no adapter, or a line of the
        prompts is none.
        """
        header = _header(name, base_model, alias, ttl_s)
        config, weights = read_config(Path(directory)), Path(directory) / WEIGHTS_FILE
        response = yield Call("UploadRevision", UploadRequests(_upload_requests(header, config, weights, progress)))
        return _pushed(response)

    @method
    def push_pieces(
        self,
        pieces: Iterable[Piece] | AsyncIterable[Piece],
        name: str,
        *,
        base_model: str = "",
        alias: str = "",
        ttl_s: float | None = None,
    ) -> Script[Pushed]:
        """Upload a revision of `name` as `push` does, from pieces of its two files: pairs of file name and bytes.

        The pieces of a file follow each other; an asynchronous client also takes pieces that are awaited. What raises
        while they are made ends the upload, and nothing of it is kept.
        """
        header = _header(name, base_model, alias, ttl_s)
        if isinstance(pieces, AsyncIterable):
            requests: Any = AsyncUploadRequests(_async_piece_requests(header, pieces))
        else:
            requests = UploadRequests(_piece_requests(header, pieces))
        response = yield Call("UploadRevision", requests)
        return _pushed(response)

    @method
    def import_revision(
        self,
        source: str,
        name: str,
        *,
        base_model: str = "",
        alias: str = "",
        ttl_s: float | None = None,
        keep_alias: bool = False,
        progress: Progress | None = None,
    ) -> Script[Pushed]:
        """Let the store fetch an adapter as a revision of `name`, and move `alias` (`live`) to it, as `push` does.

        `source` is hf://ORG/REPO[@REVISION][/FOLDER], s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, az://CONTAINER/FOLDER,
        oci://REGISTRY/REPO:TAG or file:///FOLDER of the store's machine. The store has the credentials, and its
        operator says which sources the tenant may use. `ttl_s`: as in `push`; `keep_alias`: as in `push_adapter`.
        `progress` is called with the bytes that the store has and the bytes in all. An import that was interrupted goes
        on with the same call within ten minutes.
        """
        request = adapters_pb2.ImportRevisionRequest(
            adapter=name,
            base_model=base_model,
            alias=alias,
            source=source,
            ttl=_duration(ttl_s),
            keep_alias=keep_alias,
        )
        events = _Events(progress)
        yield Call("ImportRevision", request, take=events.take)
        return _pushed(events.last("imported"))

    @method
    def export_revision(self, name: str, destination: str, *, progress: Progress | None = None) -> Script[Exported]:
        """Let the store push the revision that `name` means to a registry, as oci://REGISTRY/REPO:TAG."""
        events = _Events(progress)
        request = adapters_pb2.ExportRevisionRequest(name=name, destination=destination)
        yield Call("ExportRevision", request, take=events.take)
        return resource_of(Exported, events.last("exported"))

    @method
    def push_adapter(
        self,
        config: Mapping[str, Any],
        weights: bytes | memoryview,
        name: str,
        *,
        base_model: str = "",
        alias: str = "-",
        ttl_s: float | None = None,
        keep_alias: bool = False,
    ) -> Script[Pushed]:
        """Upload a revision of `name` from memory: peft's configuration, and what `safetensors.save` returns.

        By default no alias moves to it: requests name it by its digest, as `NAME@` and `pushed.revision.digest`, while
        others that were pushed before are served beside it. For training runs, which give a `ttl_s`. With `keep_alias`
        an alias that means another revision refuses the upload.
        """
        header, content = _header(name, base_model, alias, ttl_s, keep_alias=keep_alias), memoryview(weights)
        pieces = ((WEIGHTS_FILE, bytes(content[at : at + CHUNK_BYTES])) for at in range(0, len(content), CHUNK_BYTES))
        requests = _piece_requests(header, chain([(CONFIG_FILE, json.dumps(dict(config)).encode())], pieces))
        response = yield Call("UploadRevision", UploadRequests(requests))
        return _pushed(response)

    @method
    def list(self, tenant: str = "", *, usable: bool = False) -> Script[tuple[Adapter, ...]]:
        """Return the adapters that the caller may use: its own and the shared ones, or those of one `tenant`.

        With `usable` only those that its plans allow in requests (allowed_adapters).
        """
        parent = f"tenants/{tenant}" if tenant else ""
        request = adapters_pb2.ListAdaptersRequest(parent=parent, page_size=PAGE_SIZE, usable=usable)
        messages = yield from pages("ListAdapters", request, lambda page: page.adapters)
        return tuple(resource_of(Adapter, message) for message in messages)

    @method
    def get(self, name: str) -> Script[tuple[Adapter, Revision]]:
        """Return an adapter, and the revision that `name` (with `@alias` or `@sha256:...`) currently means."""
        return (yield from _get(name))

    @method
    def delete(self, name: str, *, purge: bool = False) -> Script[None]:
        """Remove an adapter with all its revisions; with `purge` their files at once, even if answers run."""
        yield Call("DeleteAdapter", adapters_pb2.DeleteAdapterRequest(name=self.full_name(name), purge=purge))

    @method
    def revisions(self, name: str) -> Script[tuple[Revision, ...]]:
        """Return an adapter's revisions, newest first."""
        request = adapters_pb2.ListRevisionsRequest(parent=self.full_name(name), page_size=PAGE_SIZE)
        messages = yield from pages("ListRevisions", request, lambda page: page.revisions)
        return tuple(resource_of(Revision, message) for message in messages)

    @method
    def set_alias(self, name: str, alias: str, digest: str) -> Script[Adapter]:
        """Move `alias` to the revision of that digest, atomically; an empty digest removes it."""
        request = adapters_pb2.SetAliasRequest(adapter=self.full_name(name), alias=alias, digest=digest)
        response = yield Call("SetAlias", request)
        return resource_of(Adapter, response.adapter)

    @method
    def certify(self, revision: str, certificate: FitnessCertificate) -> Script[FitnessCertificate]:
        """Keep the certificate of a revision, by its full name; returns it with the store's verdict."""
        request = adapters_pb2.CertifyRevisionRequest(name=revision, certificate=certificate_message(certificate))
        response = yield Call("CertifyRevision", request)
        return resource_of(FitnessCertificate, response.certificate)

    @method
    def calibrate(self, revision: str, calibration: Calibration) -> Script[Calibration]:
        """Keep the calibration of a revision, by its full name, in the place of an earlier one."""
        request = adapters_pb2.CertifyRevisionRequest(name=revision, calibration=calibration_message(calibration))
        response = yield Call("CertifyRevision", request)
        return resource_of(Calibration, response.calibration)

    @method
    def download(self, name: str, directory: str | Path) -> Script[Revision]:
        """Write the two files of the revision that `name` means into `directory`, which is made if needed."""
        if "/revisions/" not in name:
            _, revision = yield from _get(name)
            name = revision.name
        Path(directory).mkdir(parents=True, exist_ok=True)
        files = _Incoming(Path(directory))
        try:
            yield Call("DownloadRevision", adapters_pb2.DownloadRevisionRequest(name=name), take=files.take)
            return files.keep()
        finally:
            files.discard()

    @method
    def config(self, revision: str) -> Script[dict[str, Any]]:
        """Return the configuration of a revision, by its full name."""
        parts: list[bytes] = []
        request = adapters_pb2.DownloadRevisionRequest(name=revision, config_only=True)
        yield Call("DownloadRevision", request, take=lambda response: parts.append(response.chunk.data))
        fields = json.loads(b"".join(parts))
        return fields if isinstance(fields, dict) else {}

    @method
    def register_model(
        self, model: BaseModel, files: Mapping[str, bytes], *, replace: bool = False, stage: bool = False
    ) -> Script[BaseModel]:
        """Register a base model with its small files.

        For a name with another digest `stage` keeps it beside the live revision, for `promote_model`, and `replace`
        makes it live at once.
        """
        header = adapters_pb2.RegisterBaseModelRequest(model=model_message(model), replace=replace, stage=stage)
        # The number of files goes first, so that the store notices a stream that is cut short.
        for name, content in sorted(files.items()):
            sha256 = f"sha256:{hashlib.sha256(content).hexdigest()}"
            header.model.files.add(name=name, size=len(content), sha256=sha256)
        response = yield Call("RegisterBaseModel", UploadRequests(_register_requests(header, files)))
        return resource_of(BaseModel, response.model)

    @method
    def models(self, *, all_revisions: bool = False) -> Script[tuple[BaseModel, ...]]:
        """Return the registered base models: the live revision of each, or also the staged and the former ones."""
        request = adapters_pb2.ListBaseModelsRequest(page_size=PAGE_SIZE, all_revisions=all_revisions)
        messages = yield from pages("ListBaseModels", request, lambda page: page.models)
        return tuple(resource_of(BaseModel, message) for message in messages)

    @method
    def promote_model(self, name: str, digest: str) -> Script[BaseModel]:
        """Make a staged or former revision of a base model live: calls get it from now on.

        It does not look whether a worker serves it, as `loraplex models promote` does.
        """
        request = adapters_pb2.PromoteBaseModelRequest(name=name, digest=digest)
        response = yield Call("PromoteBaseModel", request)
        return resource_of(BaseModel, response.model)

    def full_name(self, name: str) -> str:
        """Return the full name of an adapter; a short name means the tenant's own, whom the store may know alone."""
        return name if name.startswith("tenants/") or not self.tenant else f"tenants/{self.tenant}/adapters/{name}"


def _get(name: str) -> Script[tuple[Adapter, Revision]]:
    response = yield Call("GetAdapter", adapters_pb2.GetAdapterRequest(name=name))
    return resource_of(Adapter, response.adapter), resource_of(Revision, response.revision)


def _header(
    name: str, base_model: str, alias: str, ttl_s: float | None, *, keep_alias: bool = False
) -> adapters_pb2.UploadHeader:
    return adapters_pb2.UploadHeader(
        adapter=name, base_model=base_model, alias=alias, ttl=_duration(ttl_s), keep_alias=keep_alias
    )


def _duration(seconds: float | None) -> Duration | None:
    if seconds is None:
        return None
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _upload_requests(
    header: adapters_pb2.UploadHeader, config: bytes, weights: Path, progress: Progress | None
) -> Iterator[adapters_pb2.UploadRevisionRequest]:
    sent, total = 0, len(config) + weights.stat().st_size
    yield adapters_pb2.UploadRevisionRequest(header=header)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with io.BytesIO(config) if name == CONFIG_FILE else weights.open("rb") as file:
            while data := file.read(CHUNK_BYTES):
                chunk = adapters_pb2.FileChunk(name=name, data=data)
                yield adapters_pb2.UploadRevisionRequest(chunk=chunk)
                sent += len(data)
                if progress is not None:
                    progress(sent, total)


def _piece_requests(
    header: adapters_pb2.UploadHeader, pieces: Iterable[Piece]
) -> Iterator[adapters_pb2.UploadRevisionRequest]:
    yield adapters_pb2.UploadRevisionRequest(header=header)
    for piece in pieces:
        for chunk in _chunks(*piece):
            yield adapters_pb2.UploadRevisionRequest(chunk=chunk)


async def _async_piece_requests(
    header: adapters_pb2.UploadHeader, pieces: AsyncIterable[Piece]
) -> AsyncIterator[adapters_pb2.UploadRevisionRequest]:
    yield adapters_pb2.UploadRevisionRequest(header=header)
    async for piece in pieces:
        for chunk in _chunks(*piece):
            yield adapters_pb2.UploadRevisionRequest(chunk=chunk)


def _chunks(name: str, data: bytes) -> Iterator[adapters_pb2.FileChunk]:
    for start in range(0, max(len(data), 1), CHUNK_BYTES):  # An empty file needs a chunk too.
        yield adapters_pb2.FileChunk(name=name, data=data[start : start + CHUNK_BYTES])


def _pushed(response: adapters_pb2.UploadRevisionResponse | adapters_pb2.ImportedRevision) -> Pushed:
    adapter, revision = resource_of(Adapter, response.adapter), resource_of(Revision, response.revision)
    return Pushed(adapter, revision, response.created, tuple(response.warnings))


class _Events:
    """The messages of an import or an export: the progress is told, and the last one kept."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._message: Any = None

    def take(self, message: Any) -> None:
        """Tell the progress."""
        self._message = message
        if message.WhichOneof("event") == "progress" and self._progress is not None:
            self._progress(message.progress.done_bytes, message.progress.total_bytes)

    def last(self, event: str) -> Any:
        """Return the event that ends a transfer. Raises DataLossError where the stream ended before it."""
        if self._message is None or self._message.WhichOneof("event") != event:
            raise DataLossError("the store ended the call without its result", kind="revision", name="")
        return getattr(self._message, event)


def _register_requests(
    header: adapters_pb2.RegisterBaseModelRequest, files: Mapping[str, bytes]
) -> Iterator[adapters_pb2.RegisterBaseModelRequest]:
    yield header
    for name, content in sorted(files.items()):
        for chunk in _chunks(name, content):
            yield adapters_pb2.RegisterBaseModelRequest(chunk=chunk)


class _Incoming:
    """Files being downloaded, under temporary names until all of them are complete."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parts: dict[str, Path] = {}
        self._revision: Revision | None = None

    def take(self, response: adapters_pb2.DownloadRevisionResponse) -> None:
        """Keep a message's description, or append its chunk to its file."""
        if response.WhichOneof("part") == "revision":
            self._revision = resource_of(Revision, response.revision)
            return
        name = response.chunk.name
        if name not in (CONFIG_FILE, WEIGHTS_FILE):  # A path could lead out of the directory.
            raise DataLossError(f"the store sent a file of an unexpected name: {name!r}", kind="file", name=name)
        mode = "ab" if name in self._parts else "wb"
        part = self._parts.setdefault(name, self._directory / f"{name}.part")
        with part.open(mode) as file:
            file.write(response.chunk.data)

    def keep(self) -> Revision:
        """Rename the files to their final names."""
        if self._revision is None or len(self._parts) != 2:
            raise DataLossError("the store sent less than a revision: its description and two files")
        for name, part in self._parts.items():
            part.replace(self._directory / name)
        return self._revision

    def discard(self) -> None:
        """Remove the files that were not kept."""
        for part in self._parts.values():
            part.unlink(missing_ok=True)
