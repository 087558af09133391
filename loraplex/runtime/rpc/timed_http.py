"""HTTP calls that end in time: the timeouts of http.client are for each step, and bytes may drip."""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult


class OpenSockets:
    """The sockets of some work, which `cut` ends in whatever step a thread waits for them."""

    def __init__(self) -> None:
        self._copies: list[socket.socket] = []
        self._lock = threading.Lock()
        self.is_cut = False

    def add(self, opened: socket.socket) -> None:
        """Keep a copy of a socket, since TLS takes over the socket itself; one that comes after `cut` ends at once."""
        with self._lock:
            self._copies.append(opened.dup())
            if self.is_cut:
                _shut(self._copies[-1])

    def cut(self) -> None:
        """End the connections, and those that are added later. Any thread may call it."""
        with self._lock:
            self.is_cut = True
            for copy in self._copies:
                _shut(copy)

    def close(self) -> None:
        """Close the copies."""
        with self._lock:
            while self._copies:
                self._copies.pop().close()


def _shut(opened: socket.socket) -> None:
    with suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)


class _Plain(http.client.HTTPConnection):
    """A connection whose socket is added to `sockets`, before the TLS handshake if there is one."""

    sockets: OpenSockets

    def connect(self) -> None:
        """See http.client."""
        super().connect()
        self.sockets.add(self.sock)


class _Tls(http.client.HTTPSConnection, _Plain):
    """A connection over TLS, whose `connect` calls that of _Plain."""


def timed_call(limit_s: float, method: str, url: SplitResult, *request: Any, most_bytes: int = 0) -> tuple[int, bytes]:
    """Return the status and the first bytes of the answer; redirects are not followed. Blocks.

    `request`: the arguments of http.client's `request` behind the URL. Raises OSError or HTTPException.
    """
    kind, usual_port = (_Tls, 443) if url.scheme == "https" else (_Plain, 80)
    # Without a port http.client takes the last part of an IPv6 address for one.
    connection = kind(url.hostname or "", url.port or usual_port, timeout=limit_s)
    connection.sockets = OpenSockets()
    timer = threading.Timer(limit_s, connection.sockets.cut)
    timer.daemon = True
    timer.start()
    try:
        connection.request(method, (url.path or "/") + (f"?{url.query}" if url.query else ""), *request)
        answer = connection.getresponse()
        return answer.status, answer.read(most_bytes) if most_bytes else b""
    finally:
        timer.cancel()
        connection.close()
        connection.sockets.close()
        if connection.sockets.is_cut:  # the end of a cut connection may look like that of the answer
            raise TimeoutError(f"no whole answer within {limit_s:g} s")
