"""Accepts the gateway's connections: within its limit, which counts those whose TLS handshake lasts, too."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections import Counter as Counts
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


def host_of(address: str) -> str:
    """Return an IPv4 address itself, and the /64 network of an IPv6 address: one host has all addresses of it."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if ip.version == 4:
        return address
    return str(ip.ipv4_mapped or ipaddress.ip_network((int(ip) >> 64 << 64, 64)))


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
