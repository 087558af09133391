"""A path that the gateway serves: reads requests, runs their handlers, and answers errors in the protocol's shape."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from loraplex.gateway.bodies import Body
from loraplex.gateway.cluster import Cluster
from loraplex.gateway.errors import HttpError, full, http_error, renamed
from loraplex.gateway.exchange import BODIES_BYTES, Exchange
from loraplex.gateway.provider import Providers
from loraplex.gateway.request_span import RequestSpan
from loraplex.gateway.sessions import Cookies
from loraplex.gateway.settings import GatewaySettings
from loraplex.gateway.trainers import Trainers
from loraplex.gateway.turns import Turns
from loraplex.runtime.rpc.shares import FairThreads, Shares
from loraplex.runtime.telemetry.metrics import LONG_S, Meters
from loraplex.runtime.telemetry.tracing import Spans
from loraplex.runtime.tenancy.guard import is_loopback
from loraplex_client import AsyncClient, AsyncGenerationStream, Generation, LoraplexError
from loraplex_client.encoding import Embeddings

# Maximum length in characters of a header that an error shows.
_SHOWN = 100
# Maximum number of bytes or values of a work that is done on the event loop, in some milliseconds. Longer work is done
# in threads, which leave the interpreter to the loop every few milliseconds; a caller alone gets half of them.
_SHORT, LONG_THREADS = 4_096, 4
T = TypeVar("T")
Answered = TypeVar("Answered", Generation, Embeddings)
log = logging.getLogger(__name__)

# Beginnings of the paths that the page calls as the person who has signed in.
_OF_PEOPLE = ("/v1/", "/cluster/state", "/cluster/usage")


def own_names(settings: GatewaySettings) -> OwnNames | None:
    """Return the names of a gateway; None where any is served: callers prove who they are, or may be anywhere."""
    names = [name.strip().lower() for name in settings.host_names.split(",") if name.strip()]
    if settings.ca or not (names or is_loopback(settings.host)):
        return None
    return OwnNames(names)


class OwnNames:
    """The names of a gateway without credentials, so that pages of other sites do not reach it.

    A page in a browser of this machine reaches loopback: under a name of its own site that it lets resolve to 127.0.0.1
    (DNS rebinding), and with blind requests, whose answers it cannot read. Host shows the first, Origin both. Localhost
    and all addresses are names too: an address cannot be made to mean another one.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    def check(self, headers: Headers) -> None:
        """Raise HttpError for a request that a page of another site may have made."""
        hosts = headers.getlist("host")
        for host in hosts:
            name = _name(f"//{host}")
            if not (self._is_own(name) or _is_address(name)):
                raise HttpError(
                    403,
                    "host_not_allowed",
                    f"host: {host[:_SHOWN]!r} is not a name of this gateway; if it should be, add it to --host-names",
                    "host",
                )
        for origin in headers.getlist("origin"):
            scheme, _, rest = origin.partition("://")
            # Programs with a browser inside have schemes of their own; `null` is a page that hides its site.
            if scheme in ("http", "https", "null") and rest not in hosts and not self._is_own(_name(origin)):
                site = f"a page of {origin[:_SHOWN]}"
                message = f"origin: {site} may not call this gateway; if it should, start it with --host-names"
                raise HttpError(403, "origin_not_allowed", message, "origin")

    def _is_own(self, name: str) -> bool:
        return name in self._names or is_loopback(name) or name.endswith(".localhost")


def _name(address: str) -> str:
    """Return the name or address of a URL, without its port; empty for none."""
    try:
        return (urlsplit(address).hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class GatewayMetrics(Meters):
    """The metrics of one gateway. `path` is a path that it serves, or `other`."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = self.counter("http_requests", "HTTP requests that ended, by status.", ("path", "status"))
        self.seconds = self.histogram("http_request_seconds", "From a request to its end.", LONG_S, ("path",))
        self.open = self.gauge("http_requests_open", "Requests that run now.", ("path",))
        self.connections = self.gauge("http_connections", "Open connections.")
        self.closed = self.counter("http_connections_closed", "Connections closed for their client's fault.", ("why",))
        self.continued = self.counter("http_answers_continued", "Answers that went on elsewhere after a loss.")


@dataclass(frozen=True)
class Protocol:
    """Shapes of a protocol's errors: as an answer, and as the last events of a stream that has begun.

    `statuses` are HTTP statuses that the protocol has instead of the usual ones.
    """

    error: Callable[[HttpError], object]
    error_events: Callable[[HttpError], bytes]
    statuses: Mapping[int, int] = field(default_factory=dict)

    def status(self, error: HttpError) -> int:
        """Return the HTTP status of an error."""
        return self.statuses.get(error.status, error.status)


@dataclass(frozen=True)
class Gateway:
    """Parts of the process that every endpoint needs. Without `names` it is served by any name."""

    cluster: Cluster
    metrics: GatewayMetrics
    names: OwnNames | None = None
    # Whether callers prove who they are, by a header that no page of another site has.
    checks_credentials: bool = False
    turns: Turns = field(default_factory=Turns)
    # Where people sign in to the page, and their sessions.
    providers: Providers | None = None
    cookies: Cookies | None = None
    long: FairThreads = field(default_factory=lambda: FairThreads(LONG_THREADS, "long-work"))
    spans: Spans = field(default_factory=Spans)
    trainers: Trainers = field(default_factory=Trainers)
    # Of requests that say none.
    logprobs_mode: str = "raw_logprobs"

    def reader(self, headers: Headers) -> str:
        """Return the site whose pages may read the answer to a request; empty for none, `*` for any.

        Raises HttpError for a request that a page of another site may have made.
        """
        if self.names is not None:
            self.names.check(headers)
            return headers.get("origin", "")
        return "*" if self.checks_credentials and "origin" in headers else ""


# The header of a browser's question whether a page of another site may send a request.
PREFLIGHT = "access-control-request-method"


def _preflight(headers: Headers) -> list[tuple[str, str]]:
    """Return the headers of the answer that a page may."""
    return [
        ("access-control-allow-methods", "GET, POST, PUT, DELETE"),
        ("access-control-allow-headers", headers.get("access-control-request-headers", "*")),
        ("access-control-max-age", "600"),
    ]


class HttpCall:
    """A request with its body, on whose behalf `caller` calls the cluster. Path parameters are in `parameters`."""

    def __init__(
        self,
        exchange: Exchange,
        gateway: Gateway,
        body: bytes,
        parameters: Mapping[str, str],
        counted_as: str,
        span: RequestSpan,
    ) -> None:
        self.exchange, self._span = exchange, span
        # The name of the caller whose share the request takes.
        self.counted_as, self._long = counted_as, gateway.long
        self.cluster = gateway.cluster
        self.metrics = gateway.metrics
        self.turns, self.trainers = gateway.turns, gateway.trainers
        self.logprobs_mode = gateway.logprobs_mode
        self.providers, self.cookies = gateway.providers, gateway.cookies
        self.body = body
        self.parameters = parameters
        self.timeout_s = exchange.timeout_s()

    @cached_property
    def caller(self) -> AsyncClient:
        """Return the client of the request's tenant. Raises HttpError, LoraplexError."""
        return self.cluster.caller(self.exchange.headers)

    async def named(self, name: str) -> Mapping[str, Any]:
        """Return the options of what `name` names, as Cluster.named does. Raises HttpError, LoraplexError."""
        options = await self.cluster.named(self.caller, name)
        if adapter := options.get("adapter_id"):
            return {**options, "adapter_id": self.trainers.exact(self.counted_as, adapter)}
        return options

    def sign_in(self) -> tuple[Providers, Cookies]:
        """Return what signs people in. Raises HttpError where the gateway signs nobody in."""
        if self.providers is None or self.cookies is None:
            raise HttpError(404, "sign_in_not_served", "nobody signs in here: start the gateway with --page-url")
        return self.providers, self.cookies

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Return what a work on so many bytes or values returns; long work is done in a thread at the caller's turn."""
        return work() if size <= _SHORT else await self._long.run(self.counted_as, work)

    async def read(self, kind: Body) -> dict[str, Any]:
        """Return the fields of the body. Raises HttpError naming one that is wrong."""
        fields = await self.run(len(self.body), partial(kind.read, self.body))
        self._span.asked(fields)
        return fields

    @property
    def claimed(self) -> str:
        """Return the name of the caller that the request claims to come from, proven or not. Raises HttpError."""
        return self.cluster.claimed(self.exchange.headers)

    async def begin_when_admitted(self, streams: Sequence[AsyncGenerationStream], events: bytes = b"") -> None:
        """Begin a stream of events once all these requests wait for their first tokens, for which that may be long.

        Where one is not admitted, reading it raises its error; until then the answer may have that error's status.
        """
        for stream in streams:
            if not await stream.admitted():
                return
            self.exchange.not_enforced, self.exchange.rate_limits = stream.not_enforced, stream.rate_limits
        await self.begin(events)

    async def begin(self, events: bytes = b"") -> None:
        """Begin a stream of events, with these."""
        await self.exchange.begin_events()
        if events:
            await self.exchange.write(events)

    def finished(self, whole: Answered) -> Answered:
        """Count a finished answer, and take what its headers and its span say of it; returns it."""
        self.exchange.rate_limits = whole.rate_limits
        if isinstance(whole, Generation):
            self.exchange.not_enforced = whole.not_enforced
        self._span.answered(whole)
        if whole.continuations:
            self.metrics.continued.inc()
        return whole


Handler = Callable[[HttpCall], Awaitable[None]]


_READS_BODY: set[Handler] = set()


def reads_body(handler: Handler) -> Handler:
    """Mark a handler that reads its request's body itself, as it comes, by `exchange.pieces`."""
    _READS_BODY.add(handler)
    return handler


_ALWAYS: set[Handler] = set()


def always_served(handler: Handler) -> Handler:
    """Mark a handler that takes no body, and is served whatever share a caller has: its requests may wait for it."""
    _ALWAYS.add(handler)
    return reads_body(handler)


class OpenRequests:
    """The requests of the whole process, in shares of the callers."""

    def __init__(self, limit: int) -> None:
        self._running = Shares(limit)
        # Bytes of the bodies of requests that run.
        self.bytes = Shares(BODIES_BYTES)

    @contextmanager
    def running(self, caller: str, *, is_paused: bool = False) -> Iterator[str]:
        """Count a request while the context is open; yields the name of its share. Raises HttpError.

        Calls that a pause holds have a share of their own: their tenant's other keys need the usual one.
        """
        share = f"paused {caller}" if is_paused else caller
        if not self._running.take(share):
            if is_paused:
                raise full("holds as many calls of paused keys as it may; call /resume")
            raise full("runs as many requests as it may")
        try:
            yield share
        finally:
            self._running.give(share)


class HttpEndpoint:
    """ASGI application of one path; `handlers` by HTTP method. A client that leaves cancels its handler."""

    def __init__(
        self,
        path: str,
        protocol: Protocol,
        handlers: Mapping[str, Handler],
        gateway: Gateway,
        open_requests: OpenRequests,
        operation: str = "",
    ) -> None:
        self.path, self._operation = path, operation
        self._protocol = protocol
        self._handlers = handlers
        self._gateway = gateway
        self._open = open_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; raises nothing."""
        exchange = Exchange(scope, receive, send)
        metrics, began = self._gateway.metrics, time.perf_counter()
        metrics.open.labels(self.path).inc()
        status, failure = 0, None
        span = RequestSpan(self._gateway.spans, exchange, self.path, self._operation)
        try:
            await self._serve(exchange, scope, span)
            status = exchange.status
        except BaseException as error:
            failure = renamed(self._failure(error), exchange.names)
            status = self._protocol.status(failure)
            await self._fail(exchange, failure)
        finally:
            exchange.close()
            span.end(status, failure)
            metrics.open.labels(self.path).dec()
            metrics.requests.labels(self.path, str(status)).inc()
            metrics.seconds.labels(self.path).observe(time.perf_counter() - began)

    async def _serve(self, exchange: Exchange, scope: Scope, span: RequestSpan) -> None:
        exchange.reader = self._gateway.reader(exchange.headers)
        if exchange.reader and exchange.method == "OPTIONS" and PREFLIGHT in exchange.headers:
            await exchange.answer(b"", headers=_preflight(exchange.headers))
            return
        handler = self._handlers.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            allowed = ", ".join(self._handlers)
            raise HttpError(405, "method_not_allowed", f"{exchange.method}: {self.path} takes {allowed}")
        if self._gateway.cookies is not None and self.path.startswith(_OF_PEOPLE):
            exchange.headers = self._gateway.cookies.as_bearer(exchange.headers)
        caller = await self._gateway.cluster.counted_as(exchange.headers)
        sampler = await self._gateway.cluster.identity(exchange.headers) if self._operation in _SAMPLING else None
        is_paused = sampler is not None and self._gateway.trainers.is_paused(sampler)
        with nullcontext(caller) if handler in _ALWAYS else self._open.running(caller, is_paused=is_paused) as share:
            try:
                body = b"" if handler in _READS_BODY else await exchange.read_body(self._open.bytes, share)
                call = HttpCall(exchange, self._gateway, body, scope.get("path_params", {}), caller, span)
                with span.current():
                    work = asyncio.create_task(_run(handler, call, sampler))
                await _unless_left(exchange, work)
            finally:
                self._open.bytes.give(share, exchange.body_bytes)

    def _failure(self, error: BaseException) -> HttpError:
        if isinstance(error, HttpError):
            return error
        if isinstance(error, LoraplexError):
            return http_error(error)
        if isinstance(error, asyncio.CancelledError):
            return HttpError(503, "gateway_stopping", "the gateway stops; send the request again", retry_after_s=1.0)
        log.exception("%s failed", self.path, exc_info=error)
        return HttpError(500, "internal_error", "internal error; the gateway's log says more")

    async def _fail(self, exchange: Exchange, error: HttpError) -> None:
        if exchange.ended:
            return
        if exchange.status:
            await exchange.end(self._protocol.error_events(error))
        else:
            exchange.rate_limits = error.rate_limits or exchange.rate_limits
            await exchange.answer(self._protocol.error(error), self._protocol.status(error), error.headers())


# Operations that wait while their caller has paused.
_SAMPLING = ("chat", "text_completion")


async def _run(handler: Handler, call: HttpCall, sampler: bytes | None) -> None:
    if sampler is None:
        await handler(call)
        return
    began = time.monotonic()
    async with call.trainers.sampling(sampler, call.timeout_s):
        if call.timeout_s is not None:
            call.timeout_s = max(1e-3, call.timeout_s - (time.monotonic() - began))
        await handler(call)


async def _unless_left(exchange: Exchange, working: asyncio.Task[None]) -> None:
    """Wait for a handler. Raises its error, or HttpError where the client left before its end, which cancels it."""
    client_gone = asyncio.create_task(exchange.client_gone())
    try:
        await asyncio.wait({working, client_gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and not exchange.ended:
            raise HttpError(499, "client_left", "the client has left")
        await working
    finally:
        working.cancel()
        client_gone.cancel()
        await asyncio.gather(working, client_gone, return_exceptions=True)
