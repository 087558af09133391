"""HTTP requests and their answers, over ASGI."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from decimal import Decimal
from urllib.parse import quote

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from loraplex.gateway.errors import HttpError, full, invalid
from loraplex.runtime.rpc.shares import Shares
from loraplex_client import RateLimit

# Maximum bytes of a request's body: a router takes gRPC messages of 4 MiB.
BODY_BYTES = 4 * 1024 * 1024
# Timeout in seconds for a request's body.
BODY_S = 10.0
# Maximum bytes of the bodies of all requests that run; a caller alone gets half of them. A router's own bound of its
# calls' messages is half as large.
BODIES_BYTES = 512 * 1024 * 1024
# Interval in seconds of comments in a stream without events: proxies cut a silent connection after 30 s or 60 s.
COMMENT_S = 10.0
# The client's own deadline in milliseconds.
TIMEOUT_HEADER = "x-request-timeout-ms"

REQUEST_ID_HEADER = "x-request-id"
# The parts of tools' schemas that calls need not keep to; a comma or a sign that is not ASCII is written as %XX.
NOT_ENFORCED_HEADER = "x-loraplex-not-enforced"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# What goes with the site whose pages may read an answer.
_RATE_KINDS, _RATE_PARTS = ("requests", "tokens", "budget", "budget-warning"), ("limit", "remaining", "reset")
_RATE_HEADERS = [f"x-ratelimit-{part}-{kind}" for kind in _RATE_KINDS for part in _RATE_PARTS]
_EXPOSED = ", ".join([REQUEST_ID_HEADER, "retry-after", NOT_ENFORCED_HEADER, *_RATE_HEADERS])
_READERS = [
    (b"access-control-expose-headers", _EXPOSED.encode()),
    (b"vary", b"origin"),
]

encode = msgspec.json.Encoder().encode


def raw(value: object) -> msgspec.Raw:
    """Return a value as JSON: what many of them make is then encoded in no time."""
    return msgspec.Raw(encode(value))


class Exchange:
    """A request and its answer, which is one JSON value or a stream of events. `status` is 0 until it is sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.scheme: str = scope.get("scheme", "http")
        self.query: bytes = scope.get("query_string", b"")
        self.headers = Headers(scope=scope)
        self.status = 0
        self.body_bytes = 0
        # The id of the request at the routers, and the one that the answer has: the client's own, if it gave one.
        self.request_id = secrets.token_hex(12)
        given = self.headers.get(REQUEST_ID_HEADER, "")
        self._answered_id = given if _REQUEST_ID.fullmatch(given) else self.request_id
        # The site whose pages may read the answer; empty: none, `*`: any.
        self.reader = ""
        self._receive = receive
        self._send = send
        self._body_read = asyncio.Event()
        # Whether the whole answer was sent.
        self.ended = False
        # Names that this request gives to the cluster's fields, as expressions; see errors.renamed.
        self.names: Mapping[str, str] = {}
        # Paths of what the answer need not keep to.
        self.not_enforced: Sequence[str] = ()
        # The rest of the caller's limits, by kind: requests, tokens.
        self.rate_limits: Mapping[str, RateLimit] = {}
        # Number of writes of a stream, and the task that sends comments between them.
        self._written = 0
        self._commenting: asyncio.Task[None] | None = None

    async def read_body(self, held: Shares, caller: str) -> bytes:
        """Return the body; `body_bytes` of `held` are the caller's from now on, to be given back.

        Raises HttpError where it is too large, too slow, or the client left, or where its share does not allow it.
        """
        if (encoding := self.headers.get("content-encoding", "identity")).lower() != "identity":
            why = f"content-encoding: {encoding[:40]!r} is not taken; send the body as it is"
            raise HttpError(415, "unsupported_content_encoding", why, "content-encoding")
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > BODY_BYTES:
            raise _too_large()
        parts, more = [], True
        try:
            async with asyncio.timeout(BODY_S):
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise _left()
                    parts.append(message.get("body", b""))
                    if not held.take(caller, len(parts[-1])):
                        raise full("has as many bytes of requests as it may")
                    self.body_bytes += len(parts[-1])
                    more = message.get("more_body", False)
                    if self.body_bytes > BODY_BYTES:
                        raise _too_large()
        except TimeoutError:
            raise HttpError(408, "body_too_slow", f"the body did not come within {BODY_S:g} s") from None
        self._body_read.set()
        return b"".join(parts)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes, of any size; what is not taken yet keeps the client waiting.

        Raises HttpError where the client leaves. How fast the pieces have to come is the reader's to say.
        """
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _left()
            more = message.get("more_body", False)
            yield message.get("body", b"")
        self._body_read.set()

    async def client_gone(self) -> None:
        """Return when the client has left, after the body was read."""
        await self._body_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def timeout_s(self) -> float | None:
        """Return the client's deadline in seconds, if it gave one. Raises HttpError."""
        text = self.headers.get(TIMEOUT_HEADER)
        if text is None:
            return None
        if not (text.isascii() and text.isdecimal() and int(text[:12]) > 0 and len(text) <= 12):
            raise invalid(TIMEOUT_HEADER, f"{text[:40]!r} is not a number of milliseconds above 0")
        return int(text) / 1e3

    async def answer(
        self,
        payload: object,
        status: int = 200,
        headers: Iterable[tuple[str, str]] = (),
        kind: str = "text/plain; charset=utf-8",
    ) -> None:
        """Send a JSON value, or bytes of a content type as they are, as the whole answer."""
        body = payload if isinstance(payload, bytes) else encode(payload)
        if not isinstance(payload, bytes):
            kind = "application/json"
        await self._start(status, [("content-type", kind), ("content-length", str(len(body))), *headers])
        await self._body(body)

    async def begin_bytes(self, kind: str, size: int) -> None:
        """Begin an answer of so many bytes of a content type; `write` and `end` send them."""
        await self._start(200, [("content-type", kind), ("content-length", str(size))])

    async def begin_events(self) -> None:
        """Begin a stream of events. While it waits for one it has comments, so that no proxy takes it for dead."""
        await self._start(200, [("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache")])
        self._commenting = asyncio.create_task(self._comment())

    async def _comment(self) -> None:
        while True:
            written = self._written
            await asyncio.sleep(COMMENT_S)
            if self._written == written:
                await self.write(b": waiting\n\n")

    async def write(self, events: bytes) -> None:
        """Send events; waits while the client reads more slowly than they come."""
        self._written += 1
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes = b"") -> None:
        """Send the last events."""
        await self._body(events)

    async def _start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        self.status = status
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        raw.append((REQUEST_ID_HEADER.encode(), self._answered_id.encode()))
        if self.not_enforced:
            paths = ", ".join(quote(path.removeprefix("chat."), safe="[]$/ ") for path in self.not_enforced)
            raw.append((NOT_ENFORCED_HEADER.encode(), paths.encode()))
        for kind, rate in self.rate_limits.items():
            amounts = (f"{Decimal(str(one)).normalize():f}" for one in (rate.limit, rate.remaining))
            values = (*amounts, _duration(rate.reset_s))
            raw += [
                (f"x-ratelimit-{part}-{kind}".encode(), value.encode())
                for part, value in zip(_RATE_PARTS, values, strict=True)
            ]
        if self.reader:
            raw += [(b"access-control-allow-origin", self.reader.encode("latin-1")), *_READERS]
        if status == 408:  # the rest of the body is not waited for
            raw.append((b"connection", b"close"))
        start: Message = {"type": "http.response.start", "status": status, "headers": raw}
        await self._send(start)

    def close(self) -> None:
        """Send no more comments."""
        if self._commenting is not None:
            self._commenting.cancel()

    async def _body(self, body: bytes) -> None:
        self.ended = True
        self.close()
        body = b"" if self.method == "HEAD" else body
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _duration(seconds: float) -> str:
    """Return a time as OpenAI writes it, such as 6m0s, in whole seconds."""
    minutes, left = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{left}s"


def _left() -> HttpError:
    return HttpError(499, "client_left", "the client has left")


def _too_large() -> HttpError:
    return HttpError(413, "body_too_large", f"the body is larger than {BODY_BYTES} bytes")
