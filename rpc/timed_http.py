"""HTTP connections of which a whole call ends in time: timeouts of their own are for each step, and bytes may drip."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class _Plain(http.client.HTTPConnection):
    """A connection that notes its socket, before the TLS handshake if there is one."""

    opened: list[socket.socket]

    def connect(self) -> None:
        """See http.client."""
        super().connect()
        self.opened.append(self.sock.dup())


class _Tls(http.client.HTTPSConnection, _Plain):
    """A connection over TLS, whose `connect` calls that of _Plain."""


class TimedConnections:
    """Makes the connections of one call, with the arguments of http.client's classes."""

    def __init__(self) -> None:
        self.opened: list[socket.socket] = []

    def plain(self, *arguments: Any, **options: Any) -> http.client.HTTPConnection:
        """Return a connection without TLS."""
        return self._noted(_Plain(*arguments, **options))

    def tls(self, *arguments: Any, **options: Any) -> http.client.HTTPConnection:
        """Return a connection over TLS."""
        return self._noted(_Tls(*arguments, **options))

    def _noted(self, connection: _Plain) -> _Plain:
        connection.opened = self.opened
        return connection

    def cut(self) -> None:
        """End the connections, whatever they are doing."""
        for one in self.opened:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextmanager
def timed_connections(limit_s: float) -> Iterator[TimedConnections]:
    """Yield what makes connections that are cut after a time; then who reads from one gets an error or its end."""
    connections = TimedConnections()
    timer = threading.Timer(limit_s, connections.cut)
    timer.daemon = True
    timer.start()
    try:
        yield connections
    finally:
        timer.cancel()
        for one in connections.opened:
            one.close()
