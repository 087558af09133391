"""Accepts the gateway's connections: within its limit, which counts those whose TLS handshake lasts, too."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from prometheus_client import Counter

from rpc.server import PortInUse

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


class Listener:
    """Accepts connections at a socket until it is closed; `make` returns the protocol of one.

    `has_room` says, for the number of unfinished handshakes, whether another one may come; others are closed at once.
    """

    def __init__(
        self,
        bound: socket.socket,
        make: Callable[[], asyncio.BaseProtocol],
        has_room: Callable[[int], bool],
        tls: ssl.SSLContext | None,
        closed: Counter,
    ) -> None:
        self._bound, self._make, self._has_room, self._tls, self._closed = bound, make, has_room, tls, closed
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
                connection, _ = await loop.sock_accept(self._bound)
            except OSError as error:
                log.warning("cannot accept a connection: %s", error.strerror)
                await asyncio.sleep(_NO_FILES_S)
                continue
            if self._has_room(len(self._opening)):
                opening = asyncio.create_task(self._open(connection))
                self._opening.add(opening)
                opening.add_done_callback(self._opening.discard)
            else:
                self._closed.labels("limit").inc()
                connection.close()
            await asyncio.sleep(0)  # a flood of connections must not keep the others waiting

    async def _open(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = None if self._tls is None else _HANDSHAKE_S
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.connect_accepted_socket(self._make, connection, ssl=self._tls, ssl_handshake_timeout=timeout_s)
        except OSError:  # ssl.SSLError and TimeoutError too
            self._closed.labels("handshake").inc()
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
