"""The interceptor around every method: calls end with the statuses of their errors."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from rpc.errors import CallError, Internal
from rpc.handlers import wrapped
from rpc.identity.running_calls import let_finish, take_ending
from rpc.status import abort

log = logging.getLogger(__name__)


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """End every call that raised with its status; an error outside the table is logged and becomes INTERNAL.

    Put it before all other interceptors: it asks them for a method's handler once and keeps it.
    """

    def __init__(self) -> None:
        self._guarded: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler, guarded."""
        name = handler_call_details.method
        if name not in self._guarded:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            guard = self._guard_stream if handler.response_streaming else self._guard
            self._guarded[name] = wrapped(handler, lambda inner: guard(inner, name))
        return self._guarded[name]

    def _guard(self, method: Callable[..., Awaitable[Any]], name: str) -> Callable[..., Awaitable[Any]]:
        async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                answer = await method(request, context)
                await let_finish()
                return answer
            except grpc.aio.AbortError:
                raise
            except asyncio.CancelledError:
                if (ending := take_ending()) is None:
                    raise
                failure = ending
            except Exception as error:
                failure = _as_call_error(error, name)
            return await abort(context, failure)

        return guarded

    def _guard_stream(self, method: Any, name: str) -> Callable[..., Awaitable[None]]:
        """Guard a method that yields; its messages are written here.

        gRPC writes what a generator yields outside of it: there the end of a credential would end the call of a client
        that reads nothing without a status.
        """

        async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            answer = None
            writes = _Writes(context)
            try:
                try:
                    answer = method(request, context)
                    async for response in answer:
                        await writes.write(response)
                    await let_finish()
                    return
                except grpc.aio.AbortError:
                    raise
                except asyncio.CancelledError:
                    if (ending := take_ending()) is None:
                        raise
                    failure = ending
                except Exception as error:
                    failure = _as_call_error(error, name)
                finally:
                    if inspect.isasyncgen(answer):
                        await answer.aclose()
                await writes.end_first()
                await abort(context, failure)
            finally:
                writes.close()

        return guarded


class _Writes:
    """The messages of one stream, as gRPC writes them.

    The first write ends before a status is sent, because gRPC notes after it that the call's metadata went with it; it
    refuses a status with these metadata again, and the client would wait for ever.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self._first: asyncio.Future[None] | None = None

    async def write(self, response: Any) -> None:
        """Write a message; a call that is cancelled meanwhile leaves the first one to gRPC."""
        if self._first is None:
            self._first = asyncio.ensure_future(self._context.write(response))
            self._first.add_done_callback(_retrieve)
            await asyncio.shield(self._first)
        else:
            await self._context.write(response)

    async def end_first(self) -> None:
        """Wait until a status may follow."""
        if self._first is not None:
            await asyncio.wait([self._first])

    def close(self) -> None:
        """Give up the first write, which would keep the call."""
        if self._first is not None:
            self._first.cancel()


def _retrieve(write: asyncio.Future[None]) -> None:
    """Take the error of a write that nobody waits for any more: its client has left."""
    if not write.cancelled():
        write.exception()


def _as_call_error(error: Exception, name: str) -> CallError:
    """Return the error that ends the call, without its traceback.

    gRPC keeps what `abort` raises with the call. With the frames of a traceback, which know the call, that would be a
    cycle that holds the request's message until a garbage collection.
    """
    if not isinstance(error, CallError):
        log.exception("%s failed", name, exc_info=error)
        return Internal("internal error; the server's log says more")
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error
