"""The gRPC channels of a client, one for each address, made at their first use and shared by all of its callers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from loraplex_client.credentials import Tls

# Keepalive notices within 5 s that a router is cut off, and its streams go on at another. Servers must accept the
# pings, or they answer GOAWAY too_many_pings: Loraplex's accept one each half second (rpc/server.py, which is not part
# of the client).
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 3_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    # This timeout ends the connection; keepalive's own timeout was seen not to.
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    ("grpc.max_send_message_length", 4 * 1024 * 1024),
]


# A name of several hosts is resolved to all of them. Without a retryPolicy gRPC repeats only calls that no server has
# seen: `retries` alone decides about the others.
SERVICE_CONFIG: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
# Short reconnect pauses, so that a server that comes back is found soon; the minimum is the timeout of a connection.
_CLIENT_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Each client has connections of its own, or those of one program would all be one, and reach one router of several
    # behind an address.
    ("grpc.use_local_subchannel_pool", 1),
]


class Channels:
    """The open channels with their stubs. `closings` counts how often they were closed."""

    def __init__(self, transport: Any, make_stub: Callable[[Any], Any], tls: Tls | None) -> None:
        self._transport = transport
        self._make_stub = make_stub
        self._tls = tls
        self._channels: dict[str, Any] = {}
        self._stubs: dict[str, Any] = {}
        # Channels of before a change of the certificate files, with streams that go on.
        self._former: list[Any] = []
        self._tls_version: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self.closings = 0

    def stub(self, address: str) -> Any:
        """Return the stub of an address, on a channel that is opened if there is none."""
        with self._lock:
            self._look_at_files()
            if address not in self._stubs:
                self._channels[address] = self._open(address, [*CHANNEL_OPTIONS, *_CLIENT_OPTIONS])
                self._stubs[address] = self._make_stub(self._channels[address])
            return self._stubs[address]

    def forget(self) -> list[Any]:
        """Return the channels for closing and forget them; the next call opens new ones."""
        with self._lock:
            channels = [*self._channels.values(), *self._former]
            self._channels, self._stubs, self._former = {}, {}, []
            self.closings += 1
        return channels

    def _look_at_files(self) -> None:
        """Begin with new channels where the certificate files have changed."""
        version = () if self._tls is None else self._tls.version()
        if version != self._tls_version:
            self._tls_version = version
            self._former += self._channels.values()
            self._channels, self._stubs = {}, {}

    def _open(self, address: str, options: list[tuple[str, Any]]) -> Any:
        if self._tls is None:
            return self._transport.insecure_channel(address, options=options)
        return self._transport.secure_channel(address, self._tls.channel_credentials(), options=options)
