"""The transports: one channel to one service of one address, made when it is first used, sync or grpc.aio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
from loraplex.inference.v1 import inference_pb2

from loraplex_client.calls import Call, Script
from loraplex_client.errors import InvalidRequestError, error_of
from loraplex_client.stream import AsyncGenerationStream, GenerationStream

R = TypeVar("R")

TENANT_KEY = "x-loraplex-tenant"

# Client and server must agree on keepalive, or the server answers GOAWAY too_many_pings. The servers have the same
# numbers in their rpc/server.py, which a client alone does not ship.
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    ("grpc.max_send_message_length", 4 * 1024 * 1024),
]


class _Endpoint:
    """Who is called, as whom, and for how long at most."""

    def __init__(self, address: str, stub: Callable[[Any], Any], tenant: str, timeout_s: float | None) -> None:
        if not (tenant.isascii() and tenant.isprintable()):
            raise InvalidRequestError(f"tenant: {tenant!r} is not a name", field="tenant")
        self.address = address
        self._make_stub = stub
        self._metadata = ((TENANT_KEY, tenant),)
        self._timeout_s = timeout_s
        self._channel: Any = None
        self._stub: Any = None

    def _start(self, call: Call, timeout_s: float | None = None) -> Any:
        """Begin the RPC on the stub; a given `timeout_s` wins over the connection's."""
        timeout = self._timeout_s if timeout_s is None else timeout_s
        return getattr(self._stub, call.method)(call.request, timeout=timeout, metadata=self._metadata)


class Connection(_Endpoint):
    """Runs calls and blocks. May be shared by threads."""

    def __init__(
        self, address: str, stub: Callable[[Any], Any], *, tenant: str, timeout_s: float | None = None
    ) -> None:
        super().__init__(address, stub, tenant, timeout_s)
        self._lock = threading.Lock()

    def run(self, script: Script[R]) -> R:
        """Answer every call of the script; what it returns. Raises LoraplexError."""
        answer = None
        try:
            while True:
                answer = self._call(script.send(answer))
        except StopIteration as end:
            value: R = end.value
            return value
        finally:
            script.close()

    def stream(self, request: inference_pb2.GenerateRequest, timeout_s: float | None) -> GenerationStream:
        """Start a generation."""
        self._open()
        return GenerationStream(self._start(Call("Generate", request), timeout_s), self.address)

    def close(self) -> None:
        """Cancel what runs and close the channel; the next call opens another."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
            self._channel = None

    def _open(self) -> None:
        with self._lock:
            if self._channel is None:
                self._channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
                self._stub = self._make_stub(self._channel)

    def _call(self, call: Call) -> Any:
        self._open()
        try:
            answer = self._start(call)
            if call.take is None:
                return answer
            try:
                for message in answer:
                    call.take(message)
            finally:
                answer.cancel()
        except grpc.RpcError as error:
            raise call.failure or error_of(error, self.address) from error
        return None


class AsyncConnection(_Endpoint):
    """Runs calls on the running event loop."""

    def __init__(
        self, address: str, stub: Callable[[Any], Any], *, tenant: str, timeout_s: float | None = None
    ) -> None:
        super().__init__(address, stub, tenant, timeout_s)

    async def run(self, script: Script[R]) -> R:
        """Answer every call of the script; what it returns. Raises LoraplexError."""
        answer = None
        try:
            while True:
                answer = await self._call(script.send(answer))
        except StopIteration as end:
            value: R = end.value
            return value
        finally:
            script.close()

    def stream(self, request: inference_pb2.GenerateRequest, timeout_s: float | None) -> AsyncGenerationStream:
        """Start a generation."""
        self._open()
        return AsyncGenerationStream(self._start(Call("Generate", request), timeout_s), self.address)

    async def close(self) -> None:
        """Cancel what runs and close the channel; the next call opens another."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _open(self) -> None:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
            self._stub = self._make_stub(self._channel)

    async def _call(self, call: Call) -> Any:
        self._open()
        try:
            answer = self._start(call)
            if call.take is None:
                return await answer
            try:
                async for message in answer:
                    call.take(message)
            finally:
                answer.cancel()
        except (grpc.RpcError, asyncio.CancelledError) as error:
            # grpc.aio reports a request iterator that raised as a cancelled call
            if call.failure is not None:
                raise call.failure from error
            if isinstance(error, grpc.RpcError):
                raise error_of(error, self.address) from error
            raise
        return None
