"""OpenAI's /v1/files and /v1/batches: files of requests, and batches that answer them (docs/guides/batches.md)."""

from __future__ import annotations

import re
import tempfile
from asyncio import to_thread
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Any, Required

from python_multipart.multipart import parse_options_header
from typing_extensions import TypedDict

from loraplex.gateway.adapters_api import FilesForm, read_query
from loraplex.gateway.bodies import Body
from loraplex.gateway.endpoint import HttpCall, Protocol, reads_body
from loraplex.gateway.errors import HttpError, invalid, no_store, renamed
from loraplex.gateway.exchange import encode
from loraplex_client import AsyncBatchClient, Batch, BatchFile

# Maximum characters of the fields of an upload's form that are no file, and maximum number of a page's batches.
_FIELD, _PAGE, _MOST = 1_000, 20, 100
# Bytes of a download that are kept in memory; more wait on the disk until the client has read them.
_IN_MEMORY, _PIECE = 1024 * 1024, 256 * 1024
_WINDOW = re.compile(r"([1-9]\d{0,4})([hms])")
_UNIT_S = {"h": 3600, "m": 60, "s": 1}
# Names in a request of the store's fields.
_NAMES = {
    r"input_file$": "input_file_id",
    r"header\.": "",
    r"data$": "file",
    r"name$": "id",
    r"page_token$": "after",
}


def error_of(error: HttpError) -> Mapping[str, Any]:
    """Return an error's answer in OpenAI's shape, with the names of these paths."""
    error = renamed(error, _NAMES)
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    field = "" if error.status == 404 else error.field
    return {"error": {"message": error.message, "type": kind, "param": field or None, "code": error.code}}


PROTOCOL = Protocol(error_of, lambda error: encode(error_of(error)))


class BatchRequest(TypedDict, total=False):
    """Body of a request to /v1/batches."""

    input_file_id: Required[str]
    endpoint: Required[str]
    completion_window: Required[str]
    metadata: dict[str, str] | None


BATCH = Body(BatchRequest)


class _UploadForm(FilesForm):
    """Reads the form of an upload piece by piece: the field `purpose`, and one `file`."""

    EXAMPLE = "-F purpose=batch -F file=@requests.jsonl"

    def __init__(self, content_type: str) -> None:
        self.filename, self.fields = "", dict[str, str]()
        super().__init__(content_type)

    def _name_file(self) -> None:
        _, options = parse_options_header(self._disposition)
        field = options.get(b"name", b"").decode("utf-8", "replace")
        is_file = b"filename" in options
        if field not in {"file", "purpose"} or is_file != (field == "file"):
            raise invalid(field[:80] or "part", "is not served; send `file`, and `purpose` with the value batch")
        if field in self._seen:
            raise invalid(field, "is there twice")
        self._seen.append(field)
        self._file = "" if is_file else field
        if is_file:
            self.filename = options[b"filename"].decode("utf-8", "replace")
        else:
            self.fields[field] = ""

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if not self._file:
            super()._take_data(data, start, end)
        elif len(self.fields[self._file]) < _FIELD:
            self.fields[self._file] += data[start:end].decode("utf-8", "replace")

    def check(self) -> None:
        """Raise HttpError on a form that has not wholly come, or whose purpose is not served."""
        if not self._ended:
            raise HttpError(400, "invalid_form", "the body is not a whole form: it ends before its last boundary")
        for field in ("file", "purpose"):
            if field not in self._seen:
                raise HttpError(400, "missing_required_parameter", f"{field}: is required", field)
        if self.fields["purpose"] != "batch":
            raise invalid("purpose", f"{self.fields['purpose'][:80]!r} is not served; give batch")


@reads_body
async def create_file(call: HttpCall) -> None:
    """Upload a file of requests. Raises HttpError, LoraplexError."""
    client = _client(call)
    form = _UploadForm(call.exchange.headers.get("content-type", ""))
    body = call.exchange.pieces()

    async def first_pieces() -> list[bytes]:
        """Read until the file has its name."""
        async for data in body:
            if (pieces := form.read(data)) or form.filename:
                return [piece for _, piece in pieces]
        form.check()
        return []

    begun = await first_pieces()

    async def pieces() -> AsyncIterator[bytes]:
        for piece in begun:
            yield piece
        async for data in body:
            for _, piece in form.read(data):
                yield piece
        form.check()

    await call.exchange.answer(_file(await client.upload_file(pieces(), form.filename)))


async def list_files(call: HttpCall) -> None:
    """Answer with the tenant's files, newest first. Raises HttpError, LoraplexError."""
    query = read_query(call, ("purpose", "limit", "order", "after"))
    files = await _client(call).list_files(query.get("purpose", ""))
    if query.get("order") == "asc":
        files.reverse()
    if after := query.get("after"):
        ids = [file.id for file in files]
        if after not in ids:
            raise invalid("after", f"{after[:80]!r} is not one of the files")
        files = files[ids.index(after) + 1 :]
    limit = _limit(query.get("limit"), 10_000)
    await call.exchange.answer(_list([_file(file) for file in files[:limit]], has_more=len(files) > limit))


async def get_file(call: HttpCall) -> None:
    """Answer with a file. Raises HttpError, LoraplexError."""
    await call.exchange.answer(_file(await _client(call).get_file(call.parameters["file"])))


async def delete_file(call: HttpCall) -> None:
    """Delete a file. Raises HttpError, LoraplexError."""
    file = call.parameters["file"]
    await _client(call).delete_file(file)
    await call.exchange.answer({"id": file, "object": "file", "deleted": True})


async def get_content(call: HttpCall) -> None:
    """Answer with a file's bytes, all of which have come from the store before. Raises HttpError, LoraplexError."""
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as kept:
        await _client(call).download_file(call.parameters["file"], kept.write)
        size = kept.tell()
        kept.seek(0)
        await call.exchange.begin_bytes("application/octet-stream", size)
        while piece := await to_thread(_read, kept):
            await call.exchange.write(piece)
        await call.exchange.end()


def _read(file: Any) -> bytes:
    piece: bytes = file.read(_PIECE)
    return piece


async def create_batch(call: HttpCall) -> None:
    """Begin a batch of a file's lines. Raises HttpError, LoraplexError."""
    body = await call.read(BATCH)
    batch = await _client(call).create(
        body["input_file_id"],
        body["endpoint"],
        window_s=_window_s(body["completion_window"]),
        metadata=body.get("metadata"),
    )
    await call.exchange.answer(_batch(batch))


async def list_batches(call: HttpCall) -> None:
    """Answer with a page of the tenant's batches, newest first. Raises HttpError, LoraplexError."""
    query = read_query(call, ("after", "limit"))
    limit = _limit(query.get("limit", str(_PAGE)), _MOST)
    batches, token = await _client(call).page(limit, query.get("after", ""))
    await call.exchange.answer(_list([_batch(batch) for batch in batches], has_more=bool(token)))


async def get_batch(call: HttpCall) -> None:
    """Answer with a batch. Raises HttpError, LoraplexError."""
    await call.exchange.answer(_batch(await _client(call).get(call.parameters["batch"])))


async def cancel_batch(call: HttpCall) -> None:
    """Begin no further lines of a batch. Raises HttpError, LoraplexError."""
    await call.exchange.answer(_batch(await _client(call).cancel(call.parameters["batch"])))


def _client(call: HttpCall) -> AsyncBatchClient:
    if not call.cluster.has_store:
        raise no_store()
    return call.cluster.batches(call.exchange.headers)


def _window_s(text: str) -> float:
    match = _WINDOW.fullmatch(text)
    if match is None:
        raise invalid("completion_window", f"{text[:40]!r} is not a time such as 24h or 30m")
    return int(match[1]) * _UNIT_S[match[2]]


def _limit(text: str | None, most: int) -> int:
    if text is None:
        return most
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= most):
        raise invalid("limit", f"{text[:40]!r} is not a number from 1 to {most}")
    return int(text)


def _list(items: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more}


def _file(file: BatchFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.create_time.timestamp()),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


# The states whose times an answer has.
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def _batch(batch: Batch) -> dict[str, Any]:
    def at(time: datetime | None) -> int | None:
        return None if time is None else int(time.timestamp())

    errors = [
        {"code": one.code, "message": one.message, "line": one.line or None, "param": one.param or None}
        for one in batch.errors
    ]
    seconds = round(batch.window_s)
    unit = next(unit for unit, size in _UNIT_S.items() if seconds % size == 0)
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file,
        "completion_window": f"{seconds // _UNIT_S[unit]}{unit}",
        "status": batch.state,
        "output_file_id": batch.output_file or None,
        "error_file_id": batch.error_file or None,
        "created_at": at(batch.state_times["validating"]),
        "expires_at": at(batch.expire_time),
        **{f"{state}_at": at(batch.state_times.get(state)) for state in _TIMES},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": dict(batch.metadata) or None,
    }
