"""Adapters over HTTP: a form with an adapter's two files is streamed to the store, which checks them as it comes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import QueryParams

from loraplex.gateway.endpoint import HttpCall, Protocol, reads_body
from loraplex.gateway.errors import HttpError, invalid, no_store, renamed
from loraplex.gateway.exchange import encode
from loraplex_client import Adapter, AsyncStoreClient, LoraplexError, Revision
from loraplex_client.adapter_directory import CONFIG_FILE, FILES_BESIDE, WEIGHTS_FILE

FILES = (CONFIG_FILE, WEIGHTS_FILE)
# Timeout in seconds of asking a router what its workers take.
_ASK_S = 1.0
# Names in a request of the store's fields.
_NAMES = {
    r"header\.adapter": "adapter",
    r"header\.alias": "alias",
    r"header\.base_model": "model",
    r"(name|parent)$": "adapter",
}
# Longest time to live in seconds of a revision: ten years.
_LONGEST_S = 3_650 * 86_400.0
_QUERY = ("model", "alias", "ttl_s")
# OpenAPI's description of an upload's request.
UPLOAD: Mapping[str, Any] = {
    "parameters": [{"name": name, "in": "query", "schema": {"type": "string"}} for name in _QUERY],
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "description": f"Parts whose file names are {FILES[0]} and {FILES[1]}, in any order; also any of "
                    f"{', '.join(FILES_BESIDE)}.",
                    "properties": {"file": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                }
            }
        },
    },
}


def error_of(error: HttpError) -> Mapping[str, Any]:
    """Return an error's answer in OpenAI's shape, with the names of these paths."""
    error = renamed(error, _NAMES)
    missing, found, _ = error.message.partition(" not found: ")
    field = missing if found and missing in {"adapter", "release"} else error.field
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": field or None, "code": error.code}}


PROTOCOL = Protocol(error_of, lambda error: encode(error_of(error)))


class FilesForm:
    """Reads a form of an adapter's files piece by piece; keeps none of their bytes."""

    # The flags of curl that send such a form.
    EXAMPLE = f"-F file=@{FILES[0]} -F file=@{FILES[1]}"

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise HttpError(
                415,
                "unsupported_media_type",
                f"content-type: send multipart/form-data, as curl does with {self.EXAMPLE}",
            )
        self._file = ""
        self._seen: list[str] = []
        self._header, self._value, self._disposition = b"", b"", b""
        self._pieces: list[tuple[str, bytes]] = []
        self._ended = False
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._take_field,
                    "on_header_value": self._take_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._name_file,
                    "on_part_data": self._take_data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _broken(str(error)) from error

    def read(self, data: bytes) -> list[tuple[str, bytes]]:
        """Return the files' bytes in a piece of the body, with the names of the files. Raises HttpError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _broken(str(error)) from error
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> None:
        """Check that all of the form has come. Raises HttpError."""
        if not self._ended:
            raise _broken("it ends before its last boundary")
        for file in FILES:
            if file not in self._seen:
                raise invalid(file, f"is missing; send both files, {self.EXAMPLE}")

    def _begin(self) -> None:
        self._header, self._value, self._disposition = b"", b"", b""

    def _take_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header, self._value = b"", b""

    def _name_file(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"filename", b"").decode("utf-8", "replace")
        if b"filename" not in options:
            field = options.get(b"name", b"").decode("utf-8", "replace")
            raise invalid(field[:80] or "part", f"is not a file; {self.EXAMPLE}; {' and '.join(_QUERY)} in the query")
        if name not in FILES and name not in FILES_BESIDE:
            raise invalid("filename", f"{name[:80]!r} is not {FILES[0]} or {FILES[1]}, nor {', '.join(FILES_BESIDE)}")
        if name in self._seen:
            raise invalid(name, "is there twice")
        self._seen.append(name)
        self._file = name
        self._pieces.append((name, b""))  # an empty file has a piece too

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        self._pieces.append((self._file, data[start:end]))

    def _end(self) -> None:
        self._ended = True


def _broken(why: str) -> HttpError:
    return HttpError(400, "invalid_form", f"the body is not a whole multipart/form-data form: {why[:200]}")


def read_query(call: HttpCall, names: Sequence[str]) -> QueryParams:
    """Return the parameters of a request's query, which may have these. Raises HttpError on another."""
    query = QueryParams(call.exchange.query)
    for name in query:
        if name not in names:
            raise invalid(
                name[:80],
                f"is not a parameter; {', '.join(names)} {'are' if names[1:] else 'is'}",
                "unknown_parameter",
            )
    return query


def read_ttl(value: str | float | None) -> float | None:
    """Return a time to live in seconds; None for none. Raises HttpError."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= _LONGEST_S:
        raise invalid("ttl_s", f"{str(value)[:40]} is not a number of seconds between 1 and {_LONGEST_S:.0f}")
    return seconds


@reads_body
async def put_adapter(call: HttpCall) -> None:
    """Upload an adapter's files as a revision, and move its alias. Raises HttpError, LoraplexError."""
    store, query = _store(call), read_query(call, _QUERY)
    form = FilesForm(call.exchange.headers.get("content-type", ""))

    async def pieces() -> AsyncIterator[tuple[str, bytes]]:
        async for data in call.exchange.pieces():
            for piece in form.read(data):
                yield piece
        form.finish()

    alias, model, ttl_s = query.get("alias", ""), query.get("model", ""), read_ttl(query.get("ttl_s"))
    try:
        async with asyncio.timeout(call.timeout_s):
            pushed = await store.push_pieces(
                pieces(), call.parameters["adapter"], base_model=model, alias=alias, ttl_s=ttl_s
            )
    except LoraplexError:  # of which one is a TimeoutError too
        raise
    except TimeoutError:
        raise HttpError(504, "deadline_exceeded", "the upload did not end within the request's deadline") from None
    moved = {} if alias == "-" else {alias or "live": pushed.revision.digest}
    answer = _described(pushed.adapter, pushed.revision)
    warnings = [*pushed.warnings, *await _rank_warnings(call, pushed.revision)]
    told = {"created": pushed.created, "moved": moved, "warnings": warnings}
    await call.exchange.answer({**answer, **told})


async def _rank_warnings(call: HttpCall, revision: Revision) -> list[str]:
    """Return that the workers do not take a revision's rank, if so; nothing where no router answers soon."""
    with suppress(LoraplexError, TimeoutError):
        async with asyncio.timeout(_ASK_S):
            named = [model for model in await call.caller.models() if model.name == revision.base_model]
            return [warning for model in named if (warning := model.rank_warning(revision.rank))]
    return []


async def get_adapter(call: HttpCall) -> None:
    """Answer with an adapter and the revision that its name means. Raises HttpError, LoraplexError."""
    await call.exchange.answer(_described(*await _store(call).get(call.parameters["adapter"])))


async def delete_adapter(call: HttpCall) -> None:
    """Remove an adapter with all its revisions. Raises HttpError, LoraplexError."""
    name = call.parameters["adapter"]
    await _store(call).delete(name)
    await call.exchange.answer({"name": name, "deleted": True})


async def list_adapters(call: HttpCall) -> None:
    """Answer with the adapters that the tenant may use. Raises HttpError, LoraplexError."""
    await call.exchange.answer({"adapters": [_adapter(one) for one in await _store(call).list()]})


def _store(call: HttpCall) -> AsyncStoreClient:
    if not call.cluster.has_store:
        raise no_store()
    return call.caller.store


def _described(adapter: Adapter, revision: Revision) -> dict[str, Any]:
    return {**_adapter(adapter), "revision": revision.digest, "rank": revision.rank}


def _adapter(adapter: Adapter) -> dict[str, Any]:
    return {"name": adapter.name, "base_model": adapter.base_model, "aliases": dict(adapter.aliases)}
