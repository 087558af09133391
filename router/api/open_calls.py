"""Bounds the calls of clients that a router has open, before it reads their messages, and what the messages may take.

    accepted ─▶ room for a call? ─▶ a turn to be read ─▶ room for its bytes? ─▶ decoded ─▶ the method, to the call's end
                 └▶ ROUTER_FULL     └▶ MESSAGE_LATE      └▶ ROUTER_FULL         └▶ TOO_MANY_FIELDS

Each bound is shared by the tenants (rpc.shares): one that sends a burst is refused at once and takes no room from
others. Streams that run are never touched.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import Default

from router.api.message_fields import FIELDS, field_in_excess
from rpc.errors import CallError, Exhausted, InvalidField
from rpc.identity.permissions import SGLANG_SERVICE
from rpc.identity.principal import caller, calling_tenant
from rpc.receiving import RECEIVE_S, Receiving
from rpc.server import MESSAGE_BYTES
from rpc.shares import FairTurns, Shares

# The service and the further methods whose calls are bounded: operators and health checks must get through when a
# router is full.
_SERVICE = "/loraplex.inference.v1.InferenceService"
_METHODS = frozenset(f"/{SGLANG_SERVICE}/{method}" for method in ("Generate", "Embed", "GetTokenizer"))
# Lists of a tenant's jobs, which go through those of all tenants. Without credentials, nobody need name a tenant.
_LISTS = frozenset(f"/loraplex.cluster.v1.ClusterService/{method}" for method in ("ListJobs", "ListDeadJobs"))
# Maximum bytes of a message that is decoded beside others: one of 4 MiB may take 20 ms.
LARGE_BYTES = 1 << 18
# Mean time in seconds after which a refused client is to call again; each gets its own, so that they come spread out.
RETRY_S = 1.0

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class _Method:
    """A bounded method: its name, its requests' type, what decodes their bytes, and whether it needs a tenant."""

    name: str
    message: Descriptor
    decode: Callable[[bytes], Any]
    of_tenant: bool

    def read(self, data: bytes) -> Any:
        """Return the request in a message's bytes. Raises InvalidField."""
        if field := field_in_excess(data, self.message):
            text = f"the message has more than {FIELDS} fields; a list of numbers that is packed counts as one"
            raise InvalidField(field.removeprefix("spec."), text, reason="TOO_MANY_FIELDS")
        return self.decode(data)


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
        self._receiving = Receiving(MESSAGE_BYTES, receive_s)
        self._turns = FairTurns(1)
        self._refused = refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap a method whose calls are bounded. Its handler reads the message itself, so that a refusal comes first.

        On the wire a call with one message is the same as a stream of one. gRPC hands the bytes over without a
        deserializer.
        """
        handler = await continuation(handler_call_details)
        decode = None if handler is None else handler.request_deserializer
        if handler is None or decode is None:
            return handler
        service, _, name = handler_call_details.method.rpartition("/")
        if service != _SERVICE and handler_call_details.method not in _METHODS | _LISTS:
            return handler
        described = Default().FindMethodByName(f"{service[1:]}.{name}")
        read = _Method(name, described.input_type, decode, of_tenant=handler_call_details.method not in _LISTS)
        if handler.unary_stream:
            streamed = self._stream(handler.unary_stream, read)
            return grpc.stream_stream_rpc_method_handler(streamed, None, handler.response_serializer)
        single = self._single(handler.unary_unary, read)
        return grpc.stream_unary_rpc_method_handler(single, None, handler.response_serializer)

    def _stream(self, method: Any, read: _Method) -> Callable[[Any, Context], AsyncIterator[Any]]:
        async def bounded(_: Any, context: Context) -> AsyncIterator[Any]:
            tenant, size, request = await self._enter(read, context)
            try:
                answer = method(request, context)
                del request  # it may be large, and a stream long
                async with aclosing(answer) as responses:
                    async for response in responses:
                        yield response
            finally:
                self._leave(tenant, size)

        return bounded

    def _single(self, method: Any, read: _Method) -> Callable[[Any, Context], Awaitable[Any]]:
        async def bounded(_: Any, context: Context) -> Any:
            tenant, size, request = await self._enter(read, context)
            try:
                return await method(request, context)
            finally:
                self._leave(tenant, size)

        return bounded

    async def _enter(self, method: _Method, context: Context) -> tuple[str, int, Any]:
        """Count a call until `_leave`; return its tenant, and its message with its size. Raises a CallError."""
        tenant, size = "", 0
        try:
            tenant = calling_tenant() if method.of_tenant else caller().tenant
            self._take(self._calls, tenant, 1, "calls")
            try:
                data = await self._receiving.read(tenant, context)
                self._take(self._bytes, tenant, len(data), "bytes of calls' messages")
                size = len(data)
                request = await self._decode(method, tenant, data)
            except BaseException:
                self._leave(tenant, size)
                raise
        except CallError as error:
            self._refused(method.name, tenant, error)
            raise
        return tenant, size, request

    async def _decode(self, method: _Method, tenant: str, data: bytes) -> Any:
        """Return the request in a message's bytes; of large ones the loop reads one in a pass. Raises InvalidField."""
        if len(data) <= LARGE_BYTES:
            return method.read(data)
        await self._turns.take(tenant)
        try:
            request = method.read(data)
            await asyncio.sleep(0)
            return request
        finally:
            self._turns.give(tenant)

    def _leave(self, tenant: str, size: int) -> None:
        self._calls.give(tenant)
        self._bytes.give(tenant, size)

    def _take(self, shares: Shares, tenant: str, amount: int, what: str) -> None:
        if not shares.take(tenant, amount):
            raise Exhausted(
                f"tenants/{tenant}/calls",
                f"{tenant} has its share of the {shares.limit} {what} that this router holds open",
                retry_after_s=random.uniform(0.5, 1.5) * RETRY_S,
                reason="ROUTER_FULL",
            )
