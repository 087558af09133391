"""The HTTP server: uvicorn, which answers whatever is no request and lets clients read why.

Clients that send or read too slowly, or open too many connections, are for the proxy in front: deploy/edge/haproxy.cfg.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from asyncio.events import TimerHandle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httptools
import uvicorn
from prometheus_client import Counter, Gauge
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from loraplex.gateway.errors import HttpError
from loraplex.gateway.exchange import encode
from loraplex.gateway.settings import GatewaySettings
from loraplex.runtime.files import FollowedFiles
from loraplex.runtime.rpc.server import PortInUse, raise_file_limit
from loraplex.runtime.rpc.settings import SettingsError

# Time in seconds in which the rest of a refused request is read and dropped: closing before would reset the
# connection, and the client would not see its answer.
_REST_S = 10.0
# Time in seconds after which a connection without a request is closed.
_IDLE_S = 75


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound. Raises PortInUse."""
    bare = host.strip("[]")
    try:
        family = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
    """A connection whose refusals have the shape of other errors, and come through."""

    # Set by `http_server`, in a subclass.
    on_error: Callable[[HttpError], object]
    gauge: Gauge
    closed: Counter
    # Closes the transport.
    _close: Callable[[], None]

    # Runs while the rest of a request that is answered already is read.
    _rest_timer: TimerHandle | None = None
    _in_headers = _in_request = True
    # Why the headers are refused, while the parser reads them.
    _bad_headers: HttpError | None = None
    # Whether the request was refused, so that nothing more is parsed.
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        self._close = transport.close
        super().connection_made(cast(asyncio.Transport, _Transport(transport, self._end)))
        self.gauge.set(len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        super().connection_lost(exc)
        self.gauge.set(len(self.connections))
        if self._rest_timer is not None:
            self._rest_timer.cancel()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._refused or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

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

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools; headers behind a body in chunks are ignored."""
        if self._in_headers and name.lower() != b"upgrade":  # see _parse
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See httptools. Raises HttpError."""
        if self.parser.get_method() == b"CONNECT":
            self._bad_headers = HttpError(405, "method_not_allowed", "CONNECT: the gateway is not a proxy")
            raise self._bad_headers
        if not self.parser.should_upgrade():  # see _parse
            self._in_headers = False
            super().on_headers_complete()

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

    def _give_up(self, why: str) -> None:
        self.closed.labels(why).inc()
        self.transport.abort()


class HttpServer(uvicorn.Server):
    """A server whose process handles signals itself: `should_exit` stops it in order."""

    def __init__(self, config: Config, tls: OwnCertificate | None) -> None:
        super().__init__(config)
        self._tls = tls
        # Set when it listens, or has failed to.
        self.start_tried = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn.Server."""
        self.config.ssl = None if self._tls is None else self._tls.context
        try:
            await super().startup(sockets)
        finally:
            self.start_tried.set()

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
    raise_file_limit()
    tls = OwnCertificate(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
    return HttpServer(config, tls)
