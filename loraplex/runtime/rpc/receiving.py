"""Reads the messages of calls that have one, behind the guard and in turns, in the place of gRPC.

gRPC receives a message before anybody has looked at the credential, however long the rest of it takes, and a proxy does
not know how long that is: a thousand calls that send all but the last byte of 4 MiB would take gigabytes. On the wire a
call with one message is the same as a stream of one, so that the methods are served as streams, and read here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from loraplex.runtime.rpc.errors import DeadlinePassed, InvalidField
from loraplex.runtime.rpc.interceptors import Context, Handler, Interceptor
from loraplex.runtime.rpc.principal import known_caller
from loraplex.runtime.rpc.shares import FairTurns

# Maximum bytes of the messages that are being received: their size is not known before.
RECEIVING_BYTES = 64 * 1024 * 1024
# Timeout in seconds for the rest of a call's message: a client that sends half of it keeps a place.
RECEIVE_S = 10.0


def reading(handler: Handler, read: Callable[[Context], Awaitable[tuple[Any, Callable[[], None]]]]) -> Handler:
    """Register a unary method as streaming; `read` returns its request, with a function to call at the end.

    gRPC hands the bytes over without a deserializer.
    """
    method: Any = handler.unary_unary or handler.unary_stream

    async def one(_: Any, context: Context) -> Any:
        request, ended = await read(context)
        try:
            return await method(request, context)
        finally:
            ended()

    async def many(_: Any, context: Context) -> AsyncIterator[Any]:
        request, ended = await read(context)
        try:
            answer = method(request, context)
            del request  # it may be large, and a stream long
            async with aclosing(answer) as responses:
                async for response in responses:
                    yield response
        finally:
            ended()

    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(many, None, handler.response_serializer)
    return grpc.stream_unary_rpc_method_handler(one, None, handler.response_serializer)


class OneMessage(Interceptor):
    """Receives the one message of a call, in turns of the callers: each at most `message_bytes`, in `limit_s`.

    Put it behind the guard; methods that are streams already pass it. Callers without a credential are one caller.
    """

    def __init__(self, message_bytes: int, limit_s: float = RECEIVE_S) -> None:
        self._message_bytes = message_bytes
        self._turns = FairTurns(max(RECEIVING_BYTES, 2 * message_bytes))
        self._limit_s = limit_s

    def wrap(self, handler: Handler, method: str) -> Handler:
        """Register a unary method as streaming, and read the first message."""
        decode = handler.request_deserializer
        if handler.request_streaming or decode is None:
            return handler

        async def read(context: Context) -> tuple[Any, Callable[[], None]]:
            principal = known_caller()
            who = "" if principal is None else principal.tenant or principal.name
            return decode(await self.read(who, context)), lambda: None

        return reading(handler, read)

    async def read(self, who: str, context: Context) -> bytes:
        """Return the bytes of a call's message. Raises InvalidField or DeadlinePassed."""
        try:
            async with self._turns.turn(who, self._message_bytes), asyncio.timeout(self._limit_s):
                data = await context.read()
        except TimeoutError:
            message = f"the call's message did not come within {self._limit_s:g} s"
            raise DeadlinePassed(message, reason="MESSAGE_LATE") from None
        except grpc.aio.BaseError:  # the server has stopped while the call waited
            raise asyncio.CancelledError from None
        if data is grpc.aio.EOF:
            raise InvalidField("request", "the call has no message")
        assert isinstance(data, bytes), "the handler has no deserializer"
        return data
