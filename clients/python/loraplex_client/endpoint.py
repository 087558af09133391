"""The endpoint of both transports: a service's addresses, the metadata of calls, and the channels to them."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Self

import grpc
from loraplex.inference.v1 import inference_pb2

from loraplex_client.calls import Call
from loraplex_client.credentials import ApiKey, Credentials, Tls, credentials_of
from loraplex_client.errors import (
    CancelledError,
    InvalidRequestError,
    LoraplexError,
    UnavailableError,
    error_of,
    is_broken,
)
from loraplex_client.recovery import Attempt, Recovery
from loraplex_client.retries import RESUME_ATTEMPTS, AddressRotation, RetryBudget, Tries, read_addresses

Metadata = tuple[tuple[str, str], ...]
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
TENANT_KEY = "x-loraplex-tenant"
# The tenant of a client that has neither a credential nor a tenant.
DEFAULT_TENANT = "default"


def trace_metadata() -> Metadata:
    """Return W3C's traceparent and the program's other propagated values; nothing without a current span."""
    # A program that has not imported opentelemetry has no current span.
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())


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


class Endpoint:
    """A service's addresses, the tenant with its credentials, and the timeout of each call.

    Without `credentials` those of the environment are used. With a credential, an empty tenant is the credential's;
    without one it is `default`.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        stub: Callable[[Any], Any],
        *,
        tenant: str = "",
        timeout_s: float | None = None,
        resume_attempts: int = RESUME_ATTEMPTS,
        credentials: Credentials | None = None,
    ) -> None:
        self._rotation = AddressRotation(read_addresses(address))
        self._budget = RetryBudget()
        self._timeout_s = timeout_s
        self._resume_attempts = resume_attempts
        credentials = credentials_of(None, None) if credentials is None else credentials
        self._call_as(tenant, credentials)
        self._channels = Channels(self._transport, stub, credentials.tls)

    # The module that makes channels: grpc or grpc.aio.
    _transport: Any

    def _call_as(self, tenant: str, credentials: Credentials) -> None:
        """Set the tenant and the credentials of the calls. Raises InvalidRequestError."""
        if not (tenant.isascii() and tenant.isprintable()):
            raise InvalidRequestError(f"tenant: {tenant!r} is not a name", field="tenant")
        credentials.check(self._rotation.addresses)
        self._credentials = credentials
        self.tenant = tenant or ("" if credentials.name_the_caller else DEFAULT_TENANT)
        self._metadata = ((TENANT_KEY, self.tenant),) if self.tenant else ()

    def for_caller(self, tenant: str, api_key: ApiKey) -> Self:
        """Return this endpoint for calls of another tenant or key, with the same channels and budget of retries."""
        other = copy(self)
        other._call_as(tenant, replace(self._credentials, api_key=api_key))
        return other

    @property
    def closings(self) -> int:
        """Return how often the channels were closed; streams that ran then are not resumed."""
        return self._channels.closings

    def start(self, attempt: Attempt) -> Any:
        """Begin an RPC."""
        method = getattr(self._channels.stub(attempt.address), attempt.call.method)
        metadata = (*self._metadata, *self._credentials.metadata(), *trace_metadata())
        return method(attempt.call.request, timeout=attempt.timeout_s, metadata=metadata)

    def _recovery(self, request: inference_pb2.GenerateRequest, timeout_s: float | None) -> Recovery:
        return Recovery(request, self._tries(timeout_s))

    def _tries(self, timeout_s: float | None = None) -> Tries:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return Tries(self._rotation, self._budget, timeout_s, self._resume_attempts)

    def _attempt(self, call: Call, tries: Tries) -> Attempt:
        address, timeout_s = tries.begin()
        return Attempt(address, call, timeout_s)

    def _failed(self, attempt: Attempt, tries: Tries, error: grpc.RpcError) -> float:
        """Return the seconds until the next try of a call that is not resumed. Raises the error that ends it."""
        failure = error_of(error, attempt.address)
        try:
            if not (isinstance(failure, UnavailableError) or is_broken(failure) or tries.waits(failure)):
                raise failure
            if not attempt.call.may_repeat:
                self._rotation.failed(attempt.address)
                raise failure
            return tries.failed(failure)
        except LoraplexError:
            raise failure from error

    def _check_open(self, closings: int) -> None:
        """Raise CancelledError where the client was closed while a call waited for its next try."""
        if self.closings != closings:
            raise CancelledError("the client was closed")
