"""An interceptor that answers bytes which are no message, such as invalid UTF-8 in a string, with INVALID_ARGUMENT.

gRPC itself answers UNKNOWN, logs a traceback, and does so before anybody has looked at the caller's credential. Here
such bytes become an UnreadableMessage, which is refused where a method's own message would reach it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rpc.errors import InvalidField
from rpc.handlers import wrapped

Context = grpc.aio.ServicerContext[Any, Any]


class UnreadableMessage:
    """Bytes of a client that are no message of the method's type."""


class ReadableMessages(grpc.aio.ServerInterceptor):
    """Refuses messages that cannot be read. Put it behind all other interceptors: they see the call first."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the method's handler and what reads its messages."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        wrap = _of_many if handler.request_streaming else _of_one
        return wrapped(handler, wrap, _reader(handler.request_deserializer))


def _reader(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except (DecodeError, ValueError):  # the Python implementation raises UnicodeDecodeError, a ValueError
            return UnreadableMessage()

    return read


def _of_one(method: Callable[..., Any]) -> Callable[..., Any]:
    def checked(request: Any, context: Context) -> Any:
        return method(_readable(request), context)

    return checked


def _of_many(method: Callable[..., Any]) -> Callable[..., Any]:
    def checked(requests: AsyncIterator[Any], context: Context) -> Any:
        return method(_Stream(requests), context)

    return checked


class _Stream:
    """A client's messages; no generator, so that a stream that is left has nothing to close."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = requests
        self._next: Callable[[], Awaitable[Any]] | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._next is None:  # not before: a call may be refused before it reads
            self._next = aiter(self._requests).__anext__
        return _readable(await self._next())


def _readable(request: Any) -> Any:
    if isinstance(request, UnreadableMessage):
        message = "the bytes are not this method's message; strings of a message are UTF-8"
        raise InvalidField("request", message, reason="MESSAGE_UNREADABLE")
    return request
