"""The HTTP client of hubs and registries: it connects to public addresses alone, whatever a name or a redirect says."""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpcore2
import httpx2

from adapter_store.sources import PIECE_BYTES, Interrupted, SourceFile, broken, changed, down, not_found, refused
from rpc.errors import PermissionDenied

# The library logs every URL, which may be signed for whoever has it.
logging.getLogger("httpx2").setLevel(logging.WARNING)
# Time in seconds for a connection, and for the next bytes of an answer.
CONNECT_S, SILENT_S = 10.0, 30.0
# Maximum number of redirects, and bytes of an answer that is read whole: a list of files, or a manifest.
_REDIRECTS, _ANSWER_BYTES = 5, 8 << 20


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


def check_endpoint(url: str, *, allow_private: bool) -> None:
    """Check the addresses of an endpoint that another library connects to. Raises as `public_addresses` does."""
    parts = urlsplit(url)
    public_addresses(parts.hostname or "", parts.port or 443, allow_private=allow_private)


def _is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        # Addresses of IPv4 within IPv6: mapped ones, 6to4, Teredo, and those that a NAT64 translates.
        nat64 = ipaddress.ip_network("64:ff9b::/96")
        inner = [parsed.ipv4_mapped, parsed.sixtofour, *(parsed.teredo or ())]
        inner += [ipaddress.IPv4Address(int(parsed) & 0xFFFF_FFFF)] if parsed in nat64 else []
        if not all(each.is_global for each in inner if each is not None):
            return False
        if parsed.ipv4_mapped is not None or parsed in nat64:
            return True
    return parsed.is_global and not parsed.is_multicast


class _Backend(httpcore2.SyncBackend):
    """Connects to the addresses that were checked, so that a name cannot get another one in between."""

    def __init__(self, allow_private: bool) -> None:
        super().__init__()
        self._allow_private = allow_private

    def connect_tcp(self, host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        error: Exception | None = None
        for address in public_addresses(host, port, allow_private=self._allow_private):
            try:
                return super().connect_tcp(address, port, *args, **kwargs)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as failed:
                error = failed
        raise error or httpcore2.ConnectError(f"{host} has no address")


class _Transport(httpx2.HTTPTransport):
    def __init__(self, allow_private: bool) -> None:
        context = ssl.create_default_context()
        super().__init__(verify=context, trust_env=False)
        self._pool.close()
        self._pool = httpcore2.ConnectionPool(ssl_context=context, network_backend=_Backend(allow_private))


class SourceClient:
    """Makes requests for one import or export. No proxy is asked, since it would resolve names itself."""

    def __init__(self, uri: str, *, allow_private: bool) -> None:
        self._uri = uri
        self._client = httpx2.Client(
            transport=_Transport(allow_private),
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
