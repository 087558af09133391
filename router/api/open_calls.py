"""Bounds the calls of clients that a router has open, before it reads their messages, and what the messages may take.

    accepted ──▶ room for a call? ──▶ a turn to be read ──▶ room for its bytes? ──▶ the method, to the call's end
                  └─▶ ROUTER_FULL      └─▶ MESSAGE_LATE      └─▶ ROUTER_FULL

Each bound is shared by the tenants (router.shares): one that sends a burst is refused at once and takes no room from
others. Streams that run are never touched.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from router.shares import FairTurns, Shares
from rpc.auth import tenant_of
from rpc.errors import CallError, DeadlinePassed, Exhausted
from rpc.server import MESSAGE_BYTES

# The service whose calls are bounded: operators and health checks must get through when a router is full.
_SERVICE = "/loraplex.inference.v1.InferenceService"
# Maximum bytes of the messages that are being received: their size is not known before.
RECEIVING_BYTES = 16 * MESSAGE_BYTES
# Timeout in seconds for the rest of a call's message: a client that sends half of it keeps a place.
RECEIVE_S = 10.0
# Mean time in seconds after which a refused client is to call again; each gets its own, so that they come spread out.
RETRY_S = 1.0

Context = grpc.aio.ServicerContext[Any, Any]


class OpenCalls(grpc.aio.ServerInterceptor):
    """The open calls of one router: at most `calls`, whose messages have at most `message_bytes` together.

    `refused` is told of each refusal: the method, the tenant if it is known, the error.
    """

    def __init__(
        self,
        calls: int,
        message_bytes: int,
        refused: Callable[[str, str, CallError], None],
        *,
        receive_s: float = RECEIVE_S,
    ) -> None:
        self._calls = Shares(calls)
        self._bytes = Shares(message_bytes)
        self._receiving = FairTurns(RECEIVING_BYTES)
        self._refused = refused
        self._receive_s = receive_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap a method of the inference service. Its handler reads the message itself, so that a refusal comes first.

        On the wire a call with one message is the same as a stream of one.
        """
        handler = await continuation(handler_call_details)
        service, _, name = handler_call_details.method.rpartition("/")
        if handler is None or service != _SERVICE:
            return handler
        serializers = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_stream:
            return grpc.stream_stream_rpc_method_handler(self._stream(handler.unary_stream, name), *serializers)
        return grpc.stream_unary_rpc_method_handler(self._single(handler.unary_unary, name), *serializers)

    def _stream(self, method: Any, name: str) -> Callable[[Any, Context], Awaitable[None]]:
        async def bounded(_: Any, context: Context) -> None:
            async with self._entered(name, context) as request, aclosing(method(request, context)) as responses:
                async for response in responses:
                    await context.write(response)

        return bounded

    def _single(self, method: Any, name: str) -> Callable[[Any, Context], Awaitable[Any]]:
        async def bounded(_: Any, context: Context) -> Any:
            async with self._entered(name, context) as request:
                return await method(request, context)

        return bounded

    @asynccontextmanager
    async def _entered(self, name: str, context: Context) -> AsyncIterator[Any]:
        """Count a call while the context is open, which yields its message. Raises Exhausted or Unauthenticated."""
        tenant, taken = "", 0
        try:
            tenant = tenant_of(context)
            self._take(self._calls, tenant, 1, "calls")
        except CallError as error:
            self._refused(name, tenant, error)
            raise
        try:
            try:
                request = await self._receive(tenant, context)
                size = request.ByteSize()
                self._take(self._bytes, tenant, size, "bytes of calls' messages")
                taken = size
            except CallError as error:
                self._refused(name, tenant, error)
                raise
            yield request
        finally:
            self._calls.give(tenant)
            if taken:
                self._bytes.give(tenant, taken)

    def _take(self, shares: Shares, tenant: str, amount: int, what: str) -> None:
        if not shares.take(tenant, amount):
            raise Exhausted(
                f"tenants/{tenant}/calls",
                f"{tenant} has its share of the {shares.limit} {what} that this router holds open",
                retry_after_s=random.uniform(0.5, 1.5) * RETRY_S,
                reason="ROUTER_FULL",
            )

    async def _receive(self, tenant: str, context: Context) -> Any:
        await self._receiving.take(tenant, MESSAGE_BYTES)
        try:
            async with asyncio.timeout(self._receive_s):
                return await context.read()
        except TimeoutError:
            message = f"the call's message did not come within {self._receive_s:g} s"
            raise DeadlinePassed(message, reason="MESSAGE_LATE") from None
        finally:
            self._receiving.give(tenant, MESSAGE_BYTES)
