"""The transports: channels to a service, sync or grpc.aio. Each address gets its channel at its first use."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc
from loraplex.inference.v1 import inference_pb2

from loraplex_client.addresses import Rotation, read_addresses
from loraplex_client.calls import Call, Script
from loraplex_client.credentials import Credentials, credentials_of
from loraplex_client.errors import CancelledError, InvalidRequestError, LoraplexError, UnavailableError, error_of
from loraplex_client.recovery import RESUME_ATTEMPTS, Attempt, Recovery
from loraplex_client.retries import RetryBudget, Tries
from loraplex_client.stream import AsyncGenerationStream, GenerationStream
from loraplex_client.tracing import trace_metadata

R = TypeVar("R")

TENANT_KEY = "x-loraplex-tenant"
# The tenant of a client that has neither a credential nor a tenant.
DEFAULT_TENANT = "default"

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
]


class _Endpoint:
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
        if not (tenant.isascii() and tenant.isprintable()):
            raise InvalidRequestError(f"tenant: {tenant!r} is not a name", field="tenant")
        self._rotation = Rotation(read_addresses(address))
        self._credentials = credentials_of(None, None) if credentials is None else credentials
        self._credentials.check(self._rotation.addresses)
        self.tenant = tenant or ("" if self._credentials.given else DEFAULT_TENANT)
        self._metadata = ((TENANT_KEY, self.tenant),) if self.tenant else ()
        self._budget = RetryBudget()
        self._make_stub = stub
        self._timeout_s = timeout_s
        self._resume_attempts = resume_attempts
        self._channels: dict[str, Any] = {}
        self._stubs: dict[str, Any] = {}
        # Channels of before a change of the certificate files, with streams that go on.
        self._former: list[Any] = []
        self._tls_version: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self.closings = 0

    # The module that makes channels: grpc or grpc.aio.
    _transport: Any

    def start(self, attempt: Attempt) -> Any:
        """Begin an RPC."""
        method = getattr(self._stub(attempt.address), attempt.call.method)
        metadata = (*self._metadata, *self._credentials.metadata(), *trace_metadata())
        return method(attempt.call.request, timeout=attempt.timeout_s, metadata=metadata)

    def _stub(self, address: str) -> Any:
        with self._lock:
            self._look_at_files()
            if address not in self._stubs:
                self._channels[address] = self._channel(address, [*CHANNEL_OPTIONS, *_CLIENT_OPTIONS])
                self._stubs[address] = self._make_stub(self._channels[address])
            return self._stubs[address]

    def _look_at_files(self) -> None:
        """Begin with new channels where the certificate files have changed."""
        version = () if self._credentials.tls is None else self._credentials.tls.version()
        if version != self._tls_version:
            self._tls_version = version
            self._former += self._channels.values()
            self._channels, self._stubs = {}, {}

    def _channel(self, address: str, options: list[tuple[str, Any]]) -> Any:
        """Open a channel."""
        tls = self._credentials.tls
        if tls is None:
            return self._transport.insecure_channel(address, options=options)
        return self._transport.secure_channel(address, tls.channel_credentials(), options=options)

    def _recovery(self, request: inference_pb2.GenerateRequest, timeout_s: float | None) -> Recovery:
        return Recovery(request, self._tries(timeout_s), self._resume_attempts)

    def _tries(self, timeout_s: float | None = None) -> Tries:
        return Tries(self._rotation, self._budget, self._timeout_s if timeout_s is None else timeout_s)

    def _attempt(self, call: Call, tries: Tries) -> Attempt:
        address, timeout_s = tries.begin()
        return Attempt(address, call, timeout_s)

    def _failed(self, attempt: Attempt, tries: Tries, error: grpc.RpcError) -> float:
        """Return the seconds until the next try of a call that is not resumed. Raises the error that ends it."""
        failure = error_of(error, attempt.address)
        try:
            if not isinstance(failure, UnavailableError):
                raise failure
            if not attempt.call.may_repeat:
                tries.failed()
                raise failure
            return tries.retry(failure)
        except LoraplexError:
            raise failure from error

    def _check_open(self, closings: int) -> None:
        """Raise CancelledError where the client was closed while a call waited for its next try."""
        if self.closings != closings:
            raise CancelledError("the client was closed")

    def _forget(self) -> list[Any]:
        """Return the channels for closing and forget them; the next call opens new ones."""
        with self._lock:
            channels = [*self._channels.values(), *self._former]
            self._channels, self._stubs, self._former = {}, {}, []
            self.closings += 1
        return channels


class Connection(_Endpoint):
    """Runs calls and blocks until their answers. Threads may share it."""

    _transport = grpc

    def run(self, script: Script[R], timeout_s: float | None = None) -> R:
        """Run every call that the script yields; return the script's result. Raises LoraplexError.

        The script gets the error of a call first.
        """
        try:
            call = next(script)
            while True:
                try:
                    answer = self._call(call, timeout_s)
                except LoraplexError as error:
                    call = script.throw(error)
                else:
                    call = script.send(answer)
        except StopIteration as end:
            value: R = end.value
            return value
        finally:
            script.close()

    def stream(self, request: inference_pb2.GenerateRequest, timeout_s: float | None) -> GenerationStream:
        """Start a generation."""
        return GenerationStream(self, self._recovery(request, timeout_s))

    def close(self) -> None:
        """Cancel running calls and close the channels; the next call opens new ones."""
        for channel in self._forget():
            channel.close()

    def _call(self, call: Call, timeout_s: float | None) -> Any:
        tries, closings = self._tries(timeout_s), self.closings
        while True:
            attempt = self._attempt(call, tries)
            try:
                return self._ask(attempt)
            except grpc.RpcError as error:
                if call.failure is not None:
                    raise call.failure from error
                pause_s = self._failed(attempt, tries, error)
            time.sleep(pause_s)
            self._check_open(closings)

    def _ask(self, attempt: Attempt) -> Any:
        call, answer = attempt.call, self.start(attempt)
        if call.take is None:
            return answer
        try:
            for message in answer:
                call.take(message)
        finally:
            answer.cancel()
        return None


class AsyncConnection(_Endpoint):
    """Runs calls on the running event loop."""

    _transport = grpc.aio

    async def run(self, script: Script[R], timeout_s: float | None = None) -> R:
        """Run every call that the script yields; return the script's result. Raises LoraplexError.

        The script gets the error of a call first.
        """
        try:
            call = next(script)
            while True:
                try:
                    answer = await self._call(call, timeout_s)
                except LoraplexError as error:
                    call = script.throw(error)
                else:
                    call = script.send(answer)
        except StopIteration as end:
            value: R = end.value
            return value
        finally:
            script.close()

    def stream(self, request: inference_pb2.GenerateRequest, timeout_s: float | None) -> AsyncGenerationStream:
        """Start a generation."""
        return AsyncGenerationStream(self, self._recovery(request, timeout_s))

    async def close(self) -> None:
        """Cancel running calls and close the channels; the next call opens new ones."""
        for channel in self._forget():
            await channel.close()

    async def _call(self, call: Call, timeout_s: float | None) -> Any:
        tries, closings = self._tries(timeout_s), self.closings
        while True:
            attempt = self._attempt(call, tries)
            try:
                return await self._ask(attempt)
            except (grpc.RpcError, asyncio.CancelledError) as error:
                # grpc.aio reports a request iterator that raised as a cancelled call.
                if call.failure is not None:
                    raise call.failure from error
                if not isinstance(error, grpc.RpcError):
                    raise
                pause_s = self._failed(attempt, tries, error)
            await asyncio.sleep(pause_s)
            self._check_open(closings)

    async def _ask(self, attempt: Attempt) -> Any:
        call, answer = attempt.call, self.start(attempt)
        if call.take is None:
            return await answer
        try:
            async for message in answer:
                call.take(message)
        finally:
            answer.cancel()
        return None
