"""The HTTP server: uvicorn with limits for clients that send too much, too slowly, or do not read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from asyncio.events import TimerHandle
from collections import Counter as Counts
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httptools
import uvicorn
from prometheus_client import Counter, Gauge
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from clients.gateway.errors import HttpError
from clients.gateway.exchange import BODY_BYTES, STREAMS_BODY, encode, host_of
from clients.gateway.settings import GatewaySettings
from files import FollowedFiles
from rpc.server import PortInUse, raise_file_limit
from rpc.settings import SettingsError

log = logging.getLogger(__name__)

# Maximum number of connections that wait to be accepted.
_WAITING = 2_048
# Timeout in seconds for the TLS handshake of a connection.
_HANDSHAKE_S = 10.0
# Time in seconds after which the next connection is accepted where the process has no file left for one.
_NO_FILES_S = 0.1
# Timeout in ms after which Linux gives up data that a client does not take from a connection that we have closed.
_UNSENT_MS = 60_000
# Maximum bytes that a connection keeps in the kernel before they are sent, beside uvicorn's own 64 KiB.
_UNSENT_BYTES = 128 * 1024
# Maximum bytes of a request's line and headers.
_HEADER_BYTES = 64 * 1024
# Maximum bytes of a whole request as it is sent: its body may be in small chunks.
_REQUEST_BYTES = 4 * BODY_BYTES
# Time in seconds in which the rest of a refused request is read and dropped: closing before would reset the
# connection, and the client would not see its answer.
_REST_S = 10.0
# Timeout in seconds for the headers of a request, the first one's from the connection on.
_HEADERS_S = 10.0
# Time in seconds after which a connection without a request is closed.
_IDLE_S = 75
# Number of files that are left to other uses than connections.
_OTHER_FILES = 256


class Place:
    """The place of one connection of a host; `close` ends the connection."""

    def __init__(self, places: Places, host: str) -> None:
        self.host = host
        self.close: Callable[[], object] = lambda: None
        self._places = places

    def rest(self) -> None:
        """Note that no request runs, so that the connection may be closed for another one."""
        self._places.resting.setdefault(self.host, {})[self] = None

    def work(self) -> None:
        """Note that a request runs."""
        resting = self._places.resting
        resting.get(self.host, {}).pop(self, None)
        if not resting.get(self.host):
            resting.pop(self.host, None)

    def leave(self) -> None:
        """Give the place back; a second time changes nothing."""
        self.work()
        self._places.leave(self)


class Places:
    """The connections that may be open: `limit` of all hosts, and half as many of one host.

    Where a new one finds no room, a connection without a request is closed for it, the one that has rested longest: of
    the host that has most, or of the new one's own host where no other has more or where it has its half.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: set[Place] = set()
        self._of_host: Counts[str] = Counts()
        # Connections without a request, by host; those that have rested longest come first.
        self.resting: dict[str, dict[Place, None]] = {}

    def enter(self, host: str) -> Place | None:
        """Return a place for a connection of a host, which rests; None if there is none."""
        if not self._make_room(host):
            return None
        place = Place(self, host)
        self._taken.add(place)
        self._of_host[host] += 1
        place.rest()
        return place

    def leave(self, place: Place) -> None:
        """See Place."""
        if place in self._taken:
            self._taken.remove(place)
            self._of_host[place.host] -= 1
            if not self._of_host[place.host]:
                del self._of_host[place.host]

    def _make_room(self, host: str) -> bool:
        count = self._of_host[host]
        if count >= (self._limit + 1) // 2:
            loser = host
        elif len(self._taken) >= self._limit:
            most = max(self.resting, key=self._of_host.__getitem__, default=host)
            loser = most if self._of_host[most] > count else host
        else:
            return True
        place = next(iter(self.resting.get(loser, ())), None)
        if place is None:
            return False
        place.leave()
        place.close()
        return True


class Listener:
    """Accepts connections at a socket until it is closed; `make` returns the protocol of one in its place."""

    def __init__(
        self,
        bound: socket.socket,
        make: Callable[[Place], asyncio.BaseProtocol],
        places: Places,
        tls: ssl.SSLContext | None,
        closed: Counter,
    ) -> None:
        self._bound, self._make, self._places, self._tls, self._closed = bound, make, places, tls, closed
        self._opening: set[asyncio.Task[None]] = set()
        bound.setblocking(False)
        bound.listen(_WAITING)
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Accept no more; connections without a finished handshake end."""
        for task in (self._accepting, *self._opening):
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until all of it has ended."""
        await asyncio.gather(self._accepting, *self._opening, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._bound)
            except OSError as error:
                log.warning("cannot accept a connection: %s", error.strerror)
                await asyncio.sleep(_NO_FILES_S)
                continue
            place = self._places.enter(host_of(address[0]))
            if place is None:
                self._closed.labels("limit").inc()
                connection.close()
            else:
                opening = asyncio.create_task(self._open(connection, place))
                self._opening.add(opening)
                opening.add_done_callback(self._opening.discard)
                place.close = opening.cancel
            await asyncio.sleep(0)  # a flood of connections must not keep the others waiting

    async def _open(self, connection: socket.socket, place: Place) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = None if self._tls is None else _HANDSHAKE_S
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.connect_accepted_socket(
                lambda: self._make(place), connection, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except (OSError, asyncio.CancelledError) as error:  # ssl.SSLError and TimeoutError too
            self._closed.labels("handshake" if isinstance(error, OSError) else "limit").inc()
            place.leave()
            connection.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound. Raises PortInUse."""
    bare = host.strip("[]")
    try:
        family = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            for name, value in (("TCP_USER_TIMEOUT", _UNSENT_MS), ("TCP_NOTSENT_LOWAT", _UNSENT_BYTES)):
                if hasattr(socket, name):  # connections inherit it
                    bound.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            bound.bind((bare, port))
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise PortInUse(f"--port: cannot listen on {host}:{port}: {error.strerror or error}") from error
    return bound


class OwnCertificate(FollowedFiles[ssl.SSLContext]):
    """A certificate and its key. `context` is what connections begin with; each gets the files as they are then.

    Raises SettingsError where the files cannot be used.
    """

    def __init__(self, cert: str, key: str) -> None:
        def read() -> ssl.SSLContext:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(cert, key, password="")  # an encrypted key must not ask at a terminal
            return context

        super().__init__(f"--tls-cert {cert}, --tls-key {key}", [Path(cert), Path(key)], read, SettingsError)
        self.context = self.content
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Give a connection the newest certificate; called in its handshake, whether it names a host or not."""
        self.look()
        connection.context = self.content


class _Transport:
    """A connection's transport, whose `close` is the connection's `end`. Drops what is written once it was cut."""

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        self._transport, self.close = transport, end

    def write(self, data: bytes) -> None:
        """See asyncio.Transport: uvloop's raises RuntimeError until the connection is told that it is lost."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class HttpConnection(HttpToolsProtocol):
    """A connection within the limits."""

    # Set by `http_server`, in a subclass.
    stall_s: float
    on_error: Callable[[HttpError], object]
    gauge: Gauge
    closed: Counter
    # Set by `HttpServer`.
    place: Place
    # Closes the transport.
    _close: Callable[[], None]

    _headers_timer: TimerHandle | None = None
    _stall_timer: TimerHandle | None = None
    # Runs while the rest of a request that is answered already is read.
    _rest_timer: TimerHandle | None = None
    _in_headers = _in_request = True
    _request_bytes = _header_bytes = 0
    # Whether the body is read as it comes, by a handler that bounds it.
    _streams_body = False
    # Why the headers are refused, while the parser reads them.
    _bad_headers: HttpError | None = None
    # Whether the request was refused, so that nothing more is parsed.
    _refused = False
    _has_host = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        self._close = transport.close
        super().connection_made(cast(asyncio.Transport, _Transport(transport, self._end)))
        self.place.close = self._make_room
        self.gauge.set(len(self.connections))
        self._headers_timer = self.loop.call_later(_HEADERS_S, self._give_up, "headers_slow")

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        super().connection_lost(exc)
        self.place.leave()
        self.gauge.set(len(self.connections))
        for timer in (self._headers_timer, self._stall_timer, self._rest_timer):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._refused or self.transport.is_closing():
            return
        self._request_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._refused or self.transport.is_closing():
            return
        if self._in_headers and self._request_bytes > _HEADER_BYTES:
            self._refuse(_headers_too_large())
        elif self._request_bytes > _REQUEST_BYTES and self._rest_timer is None and not self._streams_body:
            self._give_up("request_size")

    def _parse(self, data: bytes) -> None:
        """Parse requests; one that offers an upgrade is read as if it did not (RFC 9110, section 7.8).

        The parser stops behind such a head, without its body: a new one gets the head again, without the offer.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                method, version = self.parser.get_method(), self.parser.get_http_version().encode()
                headers = b"".join(b"%s: %s\r\n" % header for header in self.headers)
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                self.parser.feed_data(b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version, headers))

    def on_message_begin(self) -> None:
        """See httptools."""
        super().on_message_begin()
        self._in_headers = self._in_request = True
        self._request_bytes = self._header_bytes = 0
        self._has_host = self._streams_body = False
        self.scope["extensions"] = {STREAMS_BODY: {"begin": self._stream_body}}
        if self._headers_timer is None:
            self._headers_timer = self.loop.call_later(_HEADERS_S, self._give_up, "headers_slow")

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools; headers behind a body in chunks are ignored. Raises HttpError, which the parser ends with."""
        if not self._in_headers:
            return
        self._count_head(len(name) + len(value))
        if name.lower() == b"host":
            if self._has_host:  # a proxy may have looked at the other one
                self._bad_headers = HttpError(400, "invalid_http", "the request has two Host headers")
                raise self._bad_headers
            self._has_host = True
        if name.lower() != b"upgrade":  # see _parse
            super().on_header(name, value)

    def on_url(self, url: bytes) -> None:
        """See httptools. Raises HttpError."""
        self._count_head(len(url))
        super().on_url(url)

    def _count_head(self, size: int) -> None:
        """Count bytes of a request's line and headers. Raises HttpError beyond the limit."""
        self._header_bytes += size
        if self._header_bytes > _HEADER_BYTES:
            self._bad_headers = _headers_too_large()
            raise self._bad_headers

    def on_headers_complete(self) -> None:
        """See httptools. Raises HttpError."""
        if self.parser.get_method() == b"CONNECT":
            self._bad_headers = HttpError(405, "method_not_allowed", "CONNECT: the gateway is not a proxy")
            raise self._bad_headers
        if self.parser.should_upgrade():  # see _parse
            return
        self._in_headers = False
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None
        super().on_headers_complete()
        self.place.work()

    def on_message_complete(self) -> None:
        """See httptools."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._in_request = False
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def on_response_complete(self) -> None:
        """See HttpToolsProtocol."""
        super().on_response_complete()
        if self._in_request and self.cycle.response_complete and not (self._refused or self.transport.is_closing()):
            self._rest_timer = self.loop.call_later(_REST_S, self._give_up, "request_size")
        if self.cycle.response_complete:  # else the next request came behind this one
            self.place.rest()

    def pause_writing(self) -> None:
        """See asyncio.Protocol: the client reads more slowly than its answer comes."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.stall_s, self._give_up, "unread")

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def timeout_keep_alive_handler(self) -> None:
        """See HttpToolsProtocol: an answer that is unread would keep a connection that is closed in order."""
        if self.transport.get_write_buffer_size():
            self._give_up("unread")
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """See HttpToolsProtocol; the answer has the shape of other errors."""
        self._refuse(self._bad_headers or HttpError(400, "invalid_http", msg))

    def _refuse(self, error: HttpError) -> None:
        """Answer a request that is not one, and close the connection when the client has."""
        self._refused = True
        self.closed.labels(error.code).inc()
        body = encode(self.on_error(error))
        head = (
            f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self._drop_rest(error.code)

    def _end(self) -> None:
        """Close the connection; where a body still comes, only once the client has closed it or has had time to."""
        if self._in_request and self.cycle is not None and self.cycle.response_complete and not self._refused:
            self._drop_rest("request_size")
        else:
            self._close()

    def _drop_rest(self, why: str) -> None:
        self._refused = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._rest_timer = self.loop.call_later(_REST_S, self._give_up, why)

    def _stream_body(self) -> None:
        self._streams_body = True

    def _make_room(self) -> None:
        self._give_up("limit")

    def _give_up(self, why: str) -> None:
        self.closed.labels(why).inc()
        self.transport.abort()


def _headers_too_large() -> HttpError:
    return HttpError(431, "headers_too_large", f"the headers have more than {_HEADER_BYTES} bytes")


class HttpServer(uvicorn.Server):
    """A server whose process handles signals itself: `should_exit` stops it in order.

    At most `connections_limit` are open, those in their TLS handshake included; `closed` counts others.
    """

    def __init__(self, config: Config, connections_limit: int, tls: OwnCertificate | None, closed: Counter) -> None:
        super().__init__(config)
        self._places, self._tls, self._closed = Places(connections_limit), tls, closed
        # Set when it listens, or has failed to.
        self.start_tried = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn.Server, which would accept connections without a limit until their handshake has ended."""
        try:
            await super().startup([])
            context = None if self._tls is None else self._tls.context
            listeners = [Listener(one, self._connection, self._places, context, self._closed) for one in sockets or ()]
            self.servers = cast(Any, listeners)  # uvicorn closes them
        finally:
            self.start_tried.set()

    def _connection(self, place: Place) -> asyncio.BaseProtocol:
        make = cast(Any, self.config.http_protocol_class)
        connection = make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        connection.place = place
        return cast(asyncio.BaseProtocol, connection)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def http_server(
    app: ASGIApp, settings: GatewaySettings, on_error: Callable[[HttpError], object], gauge: Gauge, closed: Counter
) -> HttpServer:
    """Return the server of an application; `on_error` shapes the errors of requests that cannot be read.

    Raises SettingsError where its certificate cannot be used.
    """
    values: dict[str, Any] = {
        "stall_s": settings.client_stall_s,
        "on_error": staticmethod(on_error),
        "gauge": gauge,
        "closed": closed,
    }
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # what clients do is counted, not logged
    config = Config(
        cast(Any, app),
        http=type("LimitedConnection", (HttpConnection,), values),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
    )
    limit = min(settings.connections_limit, raise_file_limit() - _OTHER_FILES)
    tls = OwnCertificate(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
    return HttpServer(config, limit, tls, closed)
