"""HTTP calls that end in time: the timeouts of http.client are for each step, and bytes may drip."""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult


class _Plain(http.client.HTTPConnection):
    """A connection that keeps a copy of its socket, made before the TLS handshake if there is one."""

    opened: socket.socket | None = None

    def connect(self) -> None:
        """See http.client."""
        super().connect()
        self.opened = self.sock.dup()

    def cut(self) -> None:
        """End the connection, whatever it is doing."""
        if self.opened is not None:
            with suppress(OSError):
                self.opened.shutdown(socket.SHUT_RDWR)


class _Tls(http.client.HTTPSConnection, _Plain):
    """A connection over TLS, whose `connect` calls that of _Plain."""


def timed_call(limit_s: float, method: str, url: SplitResult, *request: Any, most_bytes: int = 0) -> tuple[int, bytes]:
    """Return the status and the first bytes of the answer; redirects are not followed. Blocks.

    `request`: the arguments of http.client's `request` behind the URL. Raises OSError or HTTPException.
    """
    kind, usual_port = (_Tls, 443) if url.scheme == "https" else (_Plain, 80)
    # Without a port http.client takes the last part of an IPv6 address for one.
    connection = kind(url.hostname or "", url.port or usual_port, timeout=limit_s)
    timer = threading.Timer(limit_s, connection.cut)
    timer.daemon = True
    timer.start()
    try:
        connection.request(method, (url.path or "/") + (f"?{url.query}" if url.query else ""), *request)
        answer = connection.getresponse()
        return answer.status, answer.read(most_bytes) if most_bytes else b""
    finally:
        timer.cancel()
        connection.close()
        if connection.opened is not None:
            connection.opened.close()
