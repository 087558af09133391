"""The files and batches of a store: loraplex.batches.v1.BatchService over gRPC, for tenants and for runners."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import msgspec
from google.protobuf.duration_pb2 import Duration
from loraplex.batches.v1 import batches_pb2 as pb
from loraplex.batches.v1 import batches_pb2_grpc

from loraplex.adapter_store.convert import fill_page, page_size, timestamp
from loraplex.adapter_store.database import Database
from loraplex.adapter_store.open_calls import OpenUploads
from loraplex.adapter_store.storage import PIECE_BYTES, CorruptBlob, DataDirectory
from loraplex.batch_store.batches import LINES, Batches, BatchState, LineError, LineResult, Report, StoredBatch
from loraplex.batch_store.files import FILE_BYTES, INPUT, BatchFile, BatchFiles
from loraplex.runtime.rpc.errors import CallError, DataLoss, InvalidField, NotFound
from loraplex.runtime.rpc.interceptors import Context
from loraplex.runtime.rpc.principal import caller, calling_tenant
from loraplex.runtime.rpc.tasks import every

log = logging.getLogger(__name__)

# Paths of lines.
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
# Shortest and longest completion window in seconds, and the one by default.
_WINDOW_S, _LONGEST_S = 60.0, 86_400.0
# Maximum number of entries of metadata, and characters of keys, values, file names and reasons of faults.
_ENTRIES, _KEY, _VALUE, _NAME, _FAULT = 16, 64, 512, 255, 1000
# Interval in seconds between looks for batches whose window has ended.
EXPIRY_S = 1.0
# Bytes of a piece of a download.
_PIECE_BYTES = 64 * 1024


class BatchService(batches_pb2_grpc.BatchServiceServicer):
    """Serves loraplex.batches.v1.BatchService."""

    def __init__(self, database: Database, data: DataDirectory) -> None:
        self._files, self._batches = BatchFiles(database, data), Batches(database, data)
        self._uploads = OpenUploads()

    def register(self, server: Any) -> None:
        """Let a server serve it."""
        batches_pb2_grpc.add_BatchServiceServicer_to_server(self, server)

    async def follow(self) -> None:
        """End batches whose window ends before their files are checked; never returns."""
        await every(EXPIRY_S, self._expire, passing=(CallError,))

    async def _expire(self) -> None:
        for batch in await asyncio.to_thread(self._batches.expire):
            log.info("%s is expired", batch)

    async def UploadFile(
        self, request_iterator: AsyncIterable[pb.UploadFileRequest], context: Context
    ) -> pb.UploadFileResponse:
        """Receive a file, whole or not at all."""
        tenant = calling_tenant()
        async with self._uploads.one(aiter(request_iterator), tenant) as coming:
            first = await anext(coming, None)
            if first is None or first.WhichOneof("part") != "header":
                raise InvalidField("header", "comes first, then the data")
            name, purpose = first.header.filename, first.header.purpose
            if purpose != INPUT:
                raise InvalidField("header.purpose", f"{purpose[:80]!r} is not served; give {INPUT!r}")
            if not 1 <= len(name) <= _NAME or not name.isprintable():
                raise InvalidField("header.filename", f"is not a text of 1 to {_NAME} printable characters")
            upload = self._files.new_upload()
            try:
                upload.append("file", b"")
                async for part in coming:
                    if part.WhichOneof("part") != "data" or len(part.data) > PIECE_BYTES:
                        raise InvalidField("data", f"comes behind the header, at most {PIECE_BYTES} bytes a message")
                    if upload.sizes["file"] + len(part.data) > FILE_BYTES:
                        raise InvalidField("data", f"the file is larger than the {FILE_BYTES} bytes accepted")
                    await asyncio.to_thread(upload.append, "file", part.data)
                if not upload.sizes["file"]:
                    raise InvalidField("data", "the file is empty: give a line for each request")
                kept = await asyncio.to_thread(self._files.keep, tenant, name, upload)
            finally:
                await asyncio.shield(asyncio.to_thread(upload.discard))
        return pb.UploadFileResponse(file=_file_to_pb(kept))

    async def GetFile(self, request: pb.GetFileRequest, context: Context) -> pb.GetFileResponse:
        """Return a file."""
        tenant, file = _own("files", request.name)
        return pb.GetFileResponse(file=_file_to_pb(await asyncio.to_thread(self._files.get, tenant, file)))

    async def ListFiles(self, request: pb.ListFilesRequest, context: Context) -> pb.ListFilesResponse:
        """Return a page of the tenant's files, newest first."""
        size, after, tenant = (
            page_size(request.page_size),
            _printable("page_token", request.page_token),
            calling_tenant(),
        )
        files = await asyncio.to_thread(self._files.page, tenant, request.purpose, after, size + 1)
        page, has_more = fill_page(files, _file_to_pb, lambda file: (file.file,), size)
        return pb.ListFilesResponse(files=page, next_page_token=files[len(page) - 1].file if has_more else "")

    async def DeleteFile(self, request: pb.DeleteFileRequest, context: Context) -> pb.DeleteFileResponse:
        """Delete a file."""
        await asyncio.to_thread(self._files.delete, *_own("files", request.name))
        return pb.DeleteFileResponse()

    async def DownloadFile(
        self, request: pb.DownloadFileRequest, context: Context
    ) -> AsyncIterator[pb.DownloadFileResponse]:
        """Send a file's bytes; the last of them only where all have the file's digest."""
        tenant, file = _own("files", request.name)
        try:
            reader = await asyncio.to_thread(self._files.open, tenant, file)
            try:
                while reader.remaining:
                    yield pb.DownloadFileResponse(data=await asyncio.to_thread(reader.read, _PIECE_BYTES))
            finally:
                await asyncio.to_thread(reader.close)
        except CorruptBlob as error:
            raise DataLoss("file", file, str(error)) from error

    async def CreateBatch(self, request: pb.CreateBatchRequest, context: Context) -> pb.CreateBatchResponse:
        """Begin a batch of a file's lines, at the first runner that has room."""
        tenant, file = _own("files", request.input_file, "input_file")
        if request.endpoint not in ENDPOINTS:
            raise InvalidField("endpoint", f"{request.endpoint[:80]!r} is not one of {', '.join(ENDPOINTS)}")
        window_s = _LONGEST_S
        if request.HasField("completion_window"):
            window_s = request.completion_window.seconds + request.completion_window.nanos / 1e9
        if not _WINDOW_S <= window_s <= _LONGEST_S:
            raise InvalidField("completion_window", f"{window_s:g} s; {_WINDOW_S:g} to {_LONGEST_S:g} s")
        if len(request.metadata) > _ENTRIES:
            raise InvalidField("metadata", f"{len(request.metadata)} entries; at most {_ENTRIES}")
        for key, value in request.metadata.items():
            if not 1 <= len(key) <= _KEY or len(value) > _VALUE or "\0" in key + value:
                limits = f"a key has 1 to {_KEY} characters, a value at most {_VALUE}"
                raise InvalidField(f"metadata.{key[:_KEY]}", f"{limits}, and no NUL")
        made = await asyncio.to_thread(
            self._batches.create, tenant, caller().key_id, file, request.endpoint, window_s, request.metadata
        )
        log.info("%s: %s of %s begins", caller().name, made.batch, tenant)
        return pb.CreateBatchResponse(batch=_batch_to_pb(made))

    async def GetBatch(self, request: pb.GetBatchRequest, context: Context) -> pb.GetBatchResponse:
        """Return a batch."""
        batch = await asyncio.to_thread(self._batches.get, *_own("batches", request.name))
        return pb.GetBatchResponse(batch=_batch_to_pb(batch))

    async def ListBatches(self, request: pb.ListBatchesRequest, context: Context) -> pb.ListBatchesResponse:
        """Return a page of the tenant's batches, newest first."""
        size, after = page_size(request.page_size), _printable("page_token", request.page_token)
        batches = self._batches.page(calling_tenant(), after, size + 1)
        page, has_more = await asyncio.to_thread(fill_page, batches, _batch_to_pb, lambda batch: (batch.batch,), size)
        token = page[-1].name.rpartition("/")[2] if has_more else ""
        return pb.ListBatchesResponse(batches=page, next_page_token=token)

    async def CancelBatch(self, request: pb.CancelBatchRequest, context: Context) -> pb.CancelBatchResponse:
        """Begin no further lines of a batch."""
        batch = await asyncio.to_thread(self._batches.cancel, *_own("batches", request.name))
        return pb.CancelBatchResponse(batch=_batch_to_pb(batch))

    async def LeaseBatch(self, request: pb.LeaseBatchRequest, context: Context) -> pb.LeaseBatchResponse:
        """Give a runner an open batch that no other has."""
        leased = await asyncio.to_thread(self._batches.lease, request.except_tenants)
        if leased is None:
            return pb.LeaseBatchResponse()
        batch, ended = leased
        log.info("%s has %s, lease %d", caller().name, batch.batch, batch.lease)
        return pb.LeaseBatchResponse(
            batch=_batch_to_pb(batch),
            lease=batch.lease,
            key_id=batch.key_id,
            begun_count=batch.record.begun,
            ended_lines=ended,
            failure=batch.failure,
        )

    async def ReportBatch(self, request: pb.ReportBatchRequest, context: Context) -> pb.ReportBatchResponse:
        """Keep what a runner has done."""
        name = request.name.rpartition("/")[2]
        if not 0 <= request.total_count <= LINES:
            raise InvalidField("total_count", f"{request.total_count} lines; at most {LINES}")
        report = Report(
            total=request.total_count,
            models=dict(request.models) if request.total_count else None,
            errors=[LineError(one.code, one.message, one.line, one.param) for one in request.errors],
            begun=request.begun_count,
            results=[LineResult(one.line, one.failed, one.result) for one in request.results],
            finished=request.finished,
            expired=request.expired,
            released=request.released,
            waits=request.waits,
            fault=request.fault[:_FAULT],
        )
        batch = await asyncio.to_thread(self._batches.report, name, request.lease, report)
        if request.fault:
            log.warning("%s: its run at %s failed by %s", name, caller().name, request.fault)
        if request.finished or request.errors:
            log.info("%s is %s", name, batch.record.state.value)
        return pb.ReportBatchResponse(batch=_batch_to_pb(batch))


def _own(kind: str, text: str, field: str = "name") -> tuple[str, str]:
    """Return the tenant and the last part of a name like tenants/acme/files/file-1. Raises InvalidField, NotFound."""
    tenant, (parent, _, last) = calling_tenant(), text.rpartition("/")
    if not _printable(field, last):
        raise InvalidField(field, f"is empty; give a name like tenants/TENANT/{kind}/ID")
    if parent not in ("", f"tenants/{tenant}/{kind}"):
        raise NotFound("file" if kind == "files" else "batch", text)
    return tenant, last


def _printable(field: str, text: str) -> str:
    """Return a text that may be a file's or a batch's id. Raises InvalidField."""
    if len(text) > _NAME or not (text.isascii() and text.isprintable()):
        raise InvalidField(field, f"{text[:80]!r} is not one that this store gave")
    return text


def _file_to_pb(file: BatchFile) -> pb.File:
    return pb.File(
        name=f"tenants/{file.tenant}/files/{file.file}",
        filename=file.filename,
        purpose=file.purpose,
        bytes=file.blob.size,
        sha256=file.blob.digest.rpartition(":")[2],
        create_time=timestamp(file.create_ns),
    )


def _batch_to_pb(batch: StoredBatch) -> pb.Batch:
    record = batch.record

    def file(name: str) -> str:
        return name and f"tenants/{batch.tenant}/files/{name}"

    return pb.Batch(
        name=f"tenants/{batch.tenant}/batches/{batch.batch}",
        endpoint=record.endpoint,
        input_file=file(batch.input_file),
        completion_window=Duration(seconds=int(record.window_s)),
        metadata=record.metadata,
        state=_STATES[record.state],
        create_time=timestamp(record.times[BatchState.VALIDATING]),
        expire_time=timestamp(record.expire_ns),
        state_times={state: at for state, ns in record.times.items() if (at := timestamp(ns)) is not None},
        errors=[pb.BatchError(**msgspec.structs.asdict(one)) for one in record.errors],
        total_count=record.total,
        completed_count=record.completed,
        failed_count=record.failed,
        output_file=file(record.output_file),
        error_file=file(record.error_file),
        models=record.models,
    )


_STATES = {state: pb.BatchState.Value(f"BATCH_STATE_{state.name}") for state in BatchState}
