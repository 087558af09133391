"""Connections to public addresses alone, whatever a name or a redirect says.

The HTTP client of hubs and registries makes them, and a proxy for the library that reads object stores.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpcore2
import httpx2

from loraplex.adapter_store.records import SourceFile
from loraplex.runtime.rpc.errors import CallError, PermissionDenied
from loraplex.runtime.rpc.timed_http import OpenSockets
from loraplex.transfers.sources import (
    PIECE_BYTES,
    Interrupted,
    broken,
    changed,
    down,
    not_found,
    refused,
)

# The library logs every URL, which may be signed for whoever has it.
logging.getLogger("httpx2").setLevel(logging.WARNING)
# Time in seconds for a connection, and for the next bytes of an answer.
CONNECT_S, SILENT_S = 10.0, 30.0
# Maximum number of redirects, and bytes of an answer that is read whole: a list of files, or a manifest.
_REDIRECTS, _ANSWER_BYTES = 5, 8 << 20
# Maximum bytes of the head of a request to CheckedProxy, and interval in seconds of its looks at whether it was closed.
_HEAD_BYTES, _LOOK_S = 64 << 10, 0.05

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# IPv6 addresses of hosts on the internet; leaves out site-local addresses, ::/96 and local NAT64.
_UNICAST = ipaddress.ip_network("2000::/3")
# Special networks that Python takes for public: metadata services of Azure and Oracle, documentation.
_SPECIAL = [ipaddress.ip_network(each) for each in ("168.63.129.16/32", "192.0.0.0/24", "3fff::/20")]


def public_addresses(host: str, port: int, *, allow_private: bool) -> list[str]:
    """Resolve a host. Raises PermissionDenied where one address is of a private network, Unavailable without any."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise down(f"the source's host {host} has no address: {error}") from error
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for address in addresses:
        if not allow_private and not _is_public(address):
            message = (
                f"the source's host {host} has the address {address}, of a private network: an operator allows such"
            )
            raise PermissionDenied(f"{message} with allow_private in the file of --sources", "SOURCE_ADDRESS_REFUSED")
    return addresses


def _is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        # Addresses of IPv4 within IPv6: mapped ones, those that a NAT64 translates, 6to4, and Teredo.
        if parsed.ipv4_mapped is not None or parsed in _NAT64:
            return _is_public(str(ipaddress.IPv4Address(int(parsed) & 0xFFFF_FFFF)))
        inner = (parsed.sixtofour, *(parsed.teredo or ()))
        if parsed not in _UNICAST or not all(_is_public(str(each)) for each in inner if each is not None):
            return False
    return parsed.is_global and not parsed.is_multicast and not any(parsed in network for network in _SPECIAL)


class _Backend(httpcore2.SyncBackend):
    """Connects to the addresses that were checked, so that a name cannot get another one in between."""

    def __init__(self, sockets: OpenSockets, allow_private: bool) -> None:
        super().__init__()
        self._sockets, self._allow_private = sockets, allow_private

    def connect_tcp(self, host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        error: Exception | None = None
        for address in public_addresses(host, port, allow_private=self._allow_private):
            try:
                stream = super().connect_tcp(address, port, *args, **kwargs)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as failed:
                error = failed
            else:
                self._sockets.add(stream.get_extra_info("socket"))
                return stream
        raise error or httpcore2.ConnectError(f"{host} has no address")


class _Transport(httpx2.HTTPTransport):
    def __init__(self, sockets: OpenSockets, allow_private: bool) -> None:
        context = ssl.create_default_context()
        super().__init__(verify=context, trust_env=False)
        self._pool.close()
        self._pool = httpcore2.ConnectionPool(ssl_context=context, network_backend=_Backend(sockets, allow_private))


class CheckedProxy:
    """A proxy on loopback for a library that resolves names and follows redirects by itself.

    Without `allow_private` it connects to public addresses alone. `refusal` is the error of an address that it has
    refused.
    """

    def __init__(self, sockets: OpenSockets, *, allow_private: bool) -> None:
        self.refusal: PermissionDenied | None = None
        self._sockets, self._allow_private = sockets, allow_private
        serve = self._serve

        class Connection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with suppress(OSError, ValueError):  # a client that left, or an address that is none
                    serve(self.request)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connection)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(_LOOK_S,), daemon=True).start()

    def close(self) -> None:
        """Take no more connections. Those that are open end when the library closes them."""
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, client: socket.socket) -> None:
        """Serve a connection: a tunnel (CONNECT), or requests in clear, all of which are for one server."""
        self._sockets.add(client)
        client.settimeout(CONNECT_S)
        head = b""
        while b"\r\n\r\n" not in head:
            piece = client.recv(PIECE_BYTES)
            head += piece
            if not piece or len(head) > _HEAD_BYTES:
                return
        method, target, _ = head.decode("latin-1").split(" ", 2)
        url = urlsplit(f"//{target}" if method == "CONNECT" else target)
        try:
            server = self._connect(url.hostname or "", url.port or 80)
        except (CallError, OSError) as error:
            if isinstance(error, PermissionDenied):
                self.refusal = error
            status = "403 Forbidden" if isinstance(error, PermissionDenied) else "502 Bad Gateway"
            client.sendall(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
            return
        with server:
            if method == "CONNECT":
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            else:
                server.sendall(head)
            client.settimeout(None)
            answers = threading.Thread(target=_copy, args=(server, client), daemon=True)
            answers.start()
            _copy(client, server)
            answers.join()

    def _connect(self, host: str, port: int) -> socket.socket:
        for address in (addresses := public_addresses(host, port, allow_private=self._allow_private)):
            try:
                server = socket.create_connection((address, port), CONNECT_S)
            except OSError:
                if address == addresses[-1]:
                    raise
            else:
                server.settimeout(None)
                return server
        raise OSError(f"{host} has no address")


def _copy(source: socket.socket, sink: socket.socket) -> None:
    """Send on what comes until one of the connections ends, and then end the other."""
    with suppress(OSError):
        while piece := source.recv(PIECE_BYTES):
            sink.sendall(piece)
    for one in (source, sink):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


class SourceClient:
    """Makes requests for one import or export. No proxy is asked, since it would resolve names itself."""

    def __init__(self, uri: str, sockets: OpenSockets, *, allow_private: bool) -> None:
        self._uri = uri
        self._client = httpx2.Client(
            transport=_Transport(sockets, allow_private),
            trust_env=False,
            timeout=httpx2.Timeout(SILENT_S, connect=CONNECT_S),
            max_redirects=_REDIRECTS,
            headers={"user-agent": "loraplex", "accept-encoding": "identity"},
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    @contextmanager
    def stream(self, method: str, url: str, **options: Any) -> Iterator[httpx2.Response]:
        """Send a request, follow redirects, and yield the answer, whatever its status.

        Raises Interrupted where the connection fails or breaks, and PermissionDenied for a private address.
        """
        options.setdefault("follow_redirects", method in {"GET", "HEAD"})
        try:
            with self._client.stream(method, url, **options) as response:
                if urlsplit(url).scheme == "https" and response.url.scheme != "https":
                    raise broken(f"{self._uri} redirects to an address without TLS")
                yield response
        except httpx2.TooManyRedirects as error:
            raise broken(f"{self._uri} redirects more than {_REDIRECTS} times") from error
        except (httpx2.TransportError, httpx2.StreamError) as error:
            raise Interrupted(f"{type(error).__name__}: {error}") from error
        except httpx2.InvalidURL as error:
            raise broken(f"{self._uri} redirects to {error}") from error

    def answer(self, method: str, url: str, **options: Any) -> tuple[httpx2.Response, bytes]:
        """Send a request and read its whole answer. Raises as `stream` does, and InvalidField for a large one."""
        with self.stream(method, url, **options) as response:
            body = bytearray()
            for piece in response.iter_bytes(PIECE_BYTES):
                body += piece
                if len(body) > _ANSWER_BYTES:
                    raise broken(f"{self._uri}: an answer of more than {_ANSWER_BYTES} bytes")
            return response, bytes(body)

    def pieces(self, url: str, file: SourceFile, start: int, headers: Iterable[tuple[str, str]]) -> Iterator[bytes]:
        """Yield the bytes of a file from `start` on. Raises Aborted where it has another length or tag by now."""
        sent = [*headers, *([("range", f"bytes={start}-")] if start else [])]
        with self.stream("GET", url, headers=sent) as response:
            check_status(self._uri, response)
            if start and response.status_code != 206:
                raise broken(f"{self._uri} does not send parts of {file.path}, so that a broken import cannot go on")
            length = response.headers.get("content-length", "")
            if length.isdigit() and int(length) != file.size - start:
                raise changed(file, f"it has {int(length) + start} bytes, the list says {file.size}")
            yield from response.iter_raw()  # as it comes: what a broken answer has brought is kept


def check_status(uri: str, response: httpx2.Response) -> None:
    """Raise the error of an answer that is not a success."""
    status = response.status_code
    if status in {401, 403}:
        raise refused(uri, status)
    if status in {404, 410}:
        raise not_found(uri)
    if status == 429 or status >= 500:
        raise Interrupted(f"it answers {status}")
    if not 200 <= status < 300:
        raise broken(f"{uri} answers {status}")
