"""Batches: files of requests that the cluster answers when it has time for them, and files of their answers."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from loraplex.batches.v1 import batches_pb2, batches_pb2_grpc

from loraplex_client.calls import AsyncUploadRequests, Call, Script, UploadRequests, pages
from loraplex_client.connection import AsyncioClient, BlockingClient, method
from loraplex_client.endpoint import ServiceCalls

# Bytes of a message of an upload.
_CHUNK_BYTES = 512 * 1024
# Number of files or batches of a page.
_PAGE = 1000


@dataclass(frozen=True)
class BatchFile:
    """A file: its `purpose` is `batch` for requests, `batch_output` for answers and errors."""

    id: str
    filename: str
    purpose: str
    bytes: int
    sha256: str
    create_time: datetime


@dataclass(frozen=True)
class BatchError:
    """An error of a line, numbered from 1, and its field; line 0 stands for the whole batch."""

    code: str
    message: str
    line: int = 0
    param: str = ""


@dataclass(frozen=True)
class Batch:
    """A batch. `state` is validating, failed, in_progress, finalizing, completed, expired, cancelling or cancelled.

    `state_times` has when it came into each state. The files are ids, empty where there is none (yet). `models` are the
    names that requests run with, by those of the lines: an adapter's has its revision.
    """

    id: str
    endpoint: str
    input_file: str
    window_s: float
    metadata: Mapping[str, str]
    state: str
    state_times: Mapping[str, datetime]
    expire_time: datetime
    errors: tuple[BatchError, ...]
    total: int
    completed: int
    failed: int
    output_file: str
    error_file: str
    models: Mapping[str, str]

    @property
    def has_ended(self) -> bool:
        """Return whether it is completed, failed, expired or cancelled."""
        return self.state in {"completed", "failed", "expired", "cancelled"}


def file_of(message: batches_pb2.File) -> BatchFile:
    """Return a file of its message."""
    created = _time(message.create_time)
    name = _last(message.name)
    return BatchFile(name, message.filename, message.purpose, message.bytes, message.sha256, created)


def batch_of(message: batches_pb2.Batch) -> Batch:
    """Return a batch of its message."""
    state = batches_pb2.BatchState.Name(message.state).removeprefix("BATCH_STATE_").lower()
    return Batch(
        id=_last(message.name),
        endpoint=message.endpoint,
        input_file=_last(message.input_file),
        window_s=message.completion_window.seconds + message.completion_window.nanos / 1e9,
        metadata=dict(message.metadata),
        state=state,
        state_times={name: _time(at) for name, at in message.state_times.items()},
        expire_time=_time(message.expire_time),
        errors=tuple(BatchError(one.code, one.message, one.line, one.param) for one in message.errors),
        total=message.total_count,
        completed=message.completed_count,
        failed=message.failed_count,
        output_file=_last(message.output_file),
        error_file=_last(message.error_file),
        models=dict(message.models),
    )


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _time(stamp: Timestamp) -> datetime:
    return stamp.ToDatetime(UTC)


class BatchCalls(ServiceCalls):
    """Files and batches at the adapter store's `address`, as `tenant`; arguments are as StoreClient's.

    Every method raises LoraplexError. A file's line is a request as OpenAI's batches have it:

        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "support", ...}}
    """

    _stub = batches_pb2_grpc.BatchServiceStub

    @method
    def upload_file(
        self, data: str | Path | bytes | Iterable[bytes] | AsyncIterable[bytes], filename: str = ""
    ) -> Script[BatchFile]:
        """Upload a file of requests: of a path, or bytes, or pieces of bytes, which an asynchronous client awaits."""
        if isinstance(data, (str, Path)):
            filename, data = filename or Path(data).name, _pieces(Path(data))
        header = batches_pb2.FileHeader(filename=filename or "requests.jsonl", purpose="batch")
        if isinstance(data, AsyncIterable):
            requests: Any = AsyncUploadRequests(_async_requests(header, data))
        else:
            requests = UploadRequests(_requests(header, [data] if isinstance(data, bytes) else data))
        response = yield Call("UploadFile", requests)
        return file_of(response.file)

    @method
    def get_file(self, file: str) -> Script[BatchFile]:
        """Return a file."""
        response = yield Call("GetFile", batches_pb2.GetFileRequest(name=file))
        return file_of(response.file)

    @method
    def list_files(self, purpose: str = "") -> Script[list[BatchFile]]:
        """Return the tenant's files, of a purpose or all, newest first."""
        request = batches_pb2.ListFilesRequest(page_size=_PAGE, purpose=purpose)
        return (yield from pages("ListFiles", request, lambda page: map(file_of, page.files)))

    @method
    def delete_file(self, file: str) -> Script[None]:
        """Delete a file, unless a batch that runs reads it."""
        yield Call("DeleteFile", batches_pb2.DeleteFileRequest(name=file))

    @method
    def download_file(self, file: str, take: Callable[[bytes], object]) -> Script[None]:
        """Call `take` with each piece of a file's bytes."""

        def take_message(message: batches_pb2.DownloadFileResponse) -> None:
            take(message.data)

        yield Call("DownloadFile", batches_pb2.DownloadFileRequest(name=file), take=take_message)

    @method
    def create(
        self,
        input_file: str,
        endpoint: str = "/v1/chat/completions",
        *,
        window_s: float = 86_400.0,
        metadata: Mapping[str, str] | None = None,
    ) -> Script[Batch]:
        """Begin a batch of a file's lines, which are all requests to `endpoint`; after `window_s` none begins."""
        request = batches_pb2.CreateBatchRequest(
            input_file=input_file,
            endpoint=endpoint,
            completion_window=Duration(seconds=int(window_s), nanos=int(window_s % 1 * 1e9)),
            metadata=metadata or {},
        )
        response = yield Call("CreateBatch", request)
        return batch_of(response.batch)

    @method
    def get(self, batch: str) -> Script[Batch]:
        """Return a batch."""
        response = yield Call("GetBatch", batches_pb2.GetBatchRequest(name=batch))
        return batch_of(response.batch)

    @method
    def page(self, size: int, token: str = "") -> Script[tuple[list[Batch], str]]:
        """Return a page of the tenant's batches, newest first, and the token of the next page, empty after the last.

        A token is the id of the batch before it.
        """
        request = batches_pb2.ListBatchesRequest(page_size=size, page_token=token)
        response = yield Call("ListBatches", request)
        return [batch_of(one) for one in response.batches], response.next_page_token

    @method
    def list(self) -> Script[list[Batch]]:
        """Return the tenant's batches, newest first."""
        request = batches_pb2.ListBatchesRequest(page_size=_PAGE)
        return (yield from pages("ListBatches", request, lambda page: map(batch_of, page.batches)))

    @method
    def cancel(self, batch: str) -> Script[Batch]:
        """Begin no further lines of a batch; those that have begun end."""
        response = yield Call("CancelBatch", batches_pb2.CancelBatchRequest(name=batch))
        return batch_of(response.batch)


class BatchClient(BlockingClient, BatchCalls):
    __doc__ = BatchCalls.__doc__


class AsyncBatchClient(AsyncioClient, BatchCalls):
    """BatchClient on the running event loop."""


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            yield piece


def _chunks(piece: bytes) -> Iterator[batches_pb2.UploadFileRequest]:
    for at in range(0, len(piece), _CHUNK_BYTES):
        yield batches_pb2.UploadFileRequest(data=piece[at : at + _CHUNK_BYTES])


def _requests(header: batches_pb2.FileHeader, pieces: Iterable[bytes]) -> Iterator[batches_pb2.UploadFileRequest]:
    yield batches_pb2.UploadFileRequest(header=header)
    for piece in pieces:
        yield from _chunks(piece)


async def _async_requests(
    header: batches_pb2.FileHeader, pieces: AsyncIterable[bytes]
) -> AsyncIterator[batches_pb2.UploadFileRequest]:
    yield batches_pb2.UploadFileRequest(header=header)
    async for piece in pieces:
        for request in _chunks(piece):
            yield request
