"""The endpoint of both transports: a service's addresses, a client's credentials, the calls' metadata, and channels."""

from __future__ import annotations

import ipaddress
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeAlias

import grpc

from loraplex_client.calls import Call
from loraplex_client.errors import (
    ClientClosedError,
    InvalidRequestError,
    LoraplexError,
    UnavailableError,
    error_of,
    is_broken,
)
from loraplex_client.generation import Attempt
from loraplex_client.retries import RESUME_ATTEMPTS, AddressRotation, RetryBudget, Tries, read_addresses

# A key or token itself, or a function that returns the current one before each call.
ApiKey: TypeAlias = str | Callable[[], str]

# The variables that a client without credentials of its own reads.
KEY_VARIABLE, KEY_FILE_VARIABLE = "LORAPLEX_API_KEY", "LORAPLEX_API_KEY_FILE"
CA_VARIABLE, CERT_VARIABLE, CERT_KEY_VARIABLE = "LORAPLEX_CA", "LORAPLEX_CERT", "LORAPLEX_KEY"
# The value of `ca` that stands for the certificate authorities of the system.
SYSTEM_CA = "system"


@dataclass(frozen=True)
class Tls:
    """PEM files for TLS. They are read again when they change.

    `ca` signs the servers' certificates, `system` for the authorities of the system. `cert` and `key` are the client's
    own certificate, where it is the credential.
    """

    ca: str | Path = SYSTEM_CA
    cert: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidRequestError("tls: give cert and key together, or neither", field="tls")

    def files(self) -> list[Path]:
        """Return the files."""
        paths = [None if self.ca == SYSTEM_CA else self.ca, self.cert, self.key]
        return [Path(path) for path in paths if path is not None]

    def version(self) -> tuple[int, ...]:
        """Return numbers that change with the files; a file that is missing for a moment counts as 0."""
        return tuple(path.stat().st_mtime_ns if path.is_file() else 0 for path in self.files())

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises InvalidRequestError."""
        try:
            ca = None if self.ca == SYSTEM_CA else Path(self.ca).read_bytes()
            key = None if self.key is None else Path(self.key).read_bytes()
            cert = None if self.cert is None else Path(self.cert).read_bytes()
        except OSError as error:
            raise InvalidRequestError(f"tls: {error.filename}: {error.strerror}", field="tls") from error
        return grpc.ssl_channel_credentials(ca, key, cert)


@dataclass(frozen=True)
class Credentials:
    """A client's credentials; with neither a key nor TLS, the servers take the tenant's name as it is."""

    api_key: ApiKey = ""
    tls: Tls | None = None

    @property
    def name_the_caller(self) -> bool:
        """Return whether the tenant of the calls is the credential's."""
        return bool(self.api_key) or (self.tls is not None and self.tls.cert is not None)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call. Raises InvalidRequestError."""
        key = self.api_key() if callable(self.api_key) else self.api_key
        if not (key.isascii() and key.isprintable()):
            raise InvalidRequestError("api_key: has characters that no key or token has", field="api_key")
        return (("authorization", f"Bearer {key}"),) if key else ()

    def check(self, addresses: Sequence[str]) -> None:
        """Raise InvalidRequestError where the key would cross a network in clear."""
        for address in addresses:
            if self.api_key and self.tls is None and not _is_loopback(address):
                raise InvalidRequestError(
                    f"api_key: would go to {address} in clear; give tls=Tls(ca=...), or set {CA_VARIABLE}",
                    field="api_key",
                )


def credentials_of(api_key: ApiKey | None, tls: Tls | None, environ: Mapping[str, str] = os.environ) -> Credentials:
    """Return the credentials given, or else those of the environment. Raises InvalidRequestError."""
    if api_key is None:
        file = environ.get(KEY_FILE_VARIABLE)
        api_key = environ.get(KEY_VARIABLE, "") if not file else lambda: _read_key(file)
    if tls is None and (environ.get(CA_VARIABLE) or environ.get(CERT_VARIABLE)):
        cert, key = environ.get(CERT_VARIABLE) or None, environ.get(CERT_KEY_VARIABLE) or None
        tls = Tls(environ.get(CA_VARIABLE) or SYSTEM_CA, cert, key)
    return Credentials(api_key, tls)


def _read_key(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"api_key: {file} can't be read: {error}", field="api_key") from error


def _is_loopback(address: str) -> bool:
    target = address.rpartition("/")[2]
    if address.startswith("unix:") or target.startswith("unix:"):
        return True
    host = target.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
# Metadata of a call of a batch's runner: the id of the API key that made the batch, or `-`.
BATCH_KEY = "x-loraplex-batch-key"
# Metadata of a call that asks to hear of its admission before its first token, and of the answer that says so.
ADMITTED_KEY = "x-loraplex-admitted"
# Metadata of the same answer: the parts of tools' schemas that calls need not keep to, as JSON.
NOT_ENFORCED_KEY = "x-loraplex-not-enforced"
_ASKS_FOR_ADMISSION = ((ADMITTED_KEY, "1"),)
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
    """The open channels with their stubs, until they are closed."""

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
        self.closed = False

    def stub(self, address: str) -> Any:
        """Return the stub of an address, on a channel that is opened if there is none. Raises ClientClosedError."""
        with self._lock:
            if self.closed:
                raise ClientClosedError
            self._look_at_files()
            if address not in self._stubs:
                self._channels[address] = self._open(address, [*CHANNEL_OPTIONS, *_CLIENT_OPTIONS])
                self._stubs[address] = self._make_stub(self._channels[address])
            return self._stubs[address]

    def forget(self) -> list[Any]:
        """Return the channels for closing, and open no more."""
        with self._lock:
            channels = [*self._channels.values(), *self._former]
            self._channels, self._stubs, self._former = {}, {}, []
            self.closed = True
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

    def _call_as(self, tenant: str, credentials: Credentials, batch_key: str | None = None) -> None:
        """Set the tenant and the credentials of the calls. Raises InvalidRequestError."""
        if not (tenant.isascii() and tenant.isprintable()):
            raise InvalidRequestError(f"tenant: {tenant!r} is not a name", field="tenant")
        credentials.check(self._rotation.addresses)
        self._credentials = credentials
        self.tenant = tenant or ("" if credentials.name_the_caller else DEFAULT_TENANT)
        named = {TENANT_KEY: self.tenant, BATCH_KEY: "" if batch_key is None else batch_key or "-"}
        self._metadata = tuple((key, value) for key, value in named.items() if value)

    def for_caller(self, tenant: str, api_key: ApiKey, batch_key: str | None = None) -> Self:
        """Return this endpoint for calls of another tenant or key, with the same channels and budget of retries."""
        other = copy(self)
        other._call_as(tenant, replace(self._credentials, api_key=api_key), batch_key)
        return other

    @property
    def closed(self) -> bool:
        """Return whether the channels were closed; streams that ran then are not resumed."""
        return self._channels.closed

    def start(self, attempt: Attempt, form: str = "__call__") -> Any:
        """Begin an RPC, by a method of grpc's callable."""
        method = getattr(getattr(self._channels.stub(attempt.address), attempt.call.method), form)
        asks = _ASKS_FOR_ADMISSION if attempt.call.method in ("Generate", "Resume") else ()
        metadata = (*self._metadata, *self._credentials.metadata(), *trace_metadata(), *asks)
        return method(attempt.call.request, timeout=attempt.timeout_s, metadata=metadata)

    def _tries(self, timeout_s: float | None = None) -> Tries:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if timeout_s is not None and (isinstance(timeout_s, (bool, str)) or not -math.inf < timeout_s < math.inf):
            raise InvalidRequestError(f"timeout_s: give a number of seconds, not {timeout_s!r}", field="timeout_s")
        return Tries(self._rotation, self._budget, timeout_s, self._resume_attempts)

    def _attempt(self, call: Call, tries: Tries) -> Attempt:
        address, timeout_s = tries.begin()
        return Attempt(address, call, timeout_s)

    def _failed(self, attempt: Attempt, tries: Tries, error: grpc.RpcError) -> float:
        """Return the seconds until the next try of a call that is not resumed. Raises the error that ends it."""
        if self.closed:
            raise ClientClosedError from error
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


class ServiceCalls:
    """Calls of the adapter store's service `_stub` at `address`, as `tenant`; `_connect` makes the transport."""

    _connect: Any
    _stub: Any

    def __init__(
        self,
        address: str | Sequence[str],
        tenant: str = "",
        *,
        timeout_s: float | None = None,
        api_key: ApiKey | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.address = ",".join(read_addresses(address))
        self._connection = self._connect(
            address,
            self._stub,
            tenant=tenant,
            timeout_s=timeout_s,
            credentials=credentials_of(api_key, tls),
        )
        self.tenant: str = self._connection.tenant

    def for_caller(self, tenant: str = "", api_key: ApiKey = "") -> Self:
        """Return a client for calls of another tenant or key, with the channels of this one, which closes them."""
        other = copy(self)
        other._connection = self._connection.for_caller(tenant, api_key)
        other.tenant = other._connection.tenant
        return other
