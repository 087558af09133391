"""The interceptors of every server: statuses of errors, messages that cannot be read, counts and bounds of calls."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import grpc
from google.protobuf.message import DecodeError
from prometheus_client import Counter, Histogram

from loraplex.runtime.rpc.errors import CallError, Internal, InvalidField
from loraplex.runtime.rpc.status import CODES, abort
from loraplex.runtime.rpc.tasks import retrieve_error

log = logging.getLogger(__name__)

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

Method = Callable[..., Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# The task that serves a call, from its acceptance until gRPC has sent the status.
Call = asyncio.Task[Any]

# Makers of handlers, by whether requests and whether responses are streams.
_MAKERS: dict[tuple[bool, bool], Callable[..., Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def current_call() -> Call:
    """Return the call that the current task serves."""
    call = asyncio.current_task()
    assert call is not None
    return call


def wrapped(
    handler: Handler, wrap: Callable[[Method], Method], request_deserializer: Callable[[bytes], Any] | None = None
) -> Handler:
    """Return a handler of the same kind with a wrapped method, and perhaps another reader of its requests."""
    method: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    make = _MAKERS[handler.request_streaming, handler.response_streaming]
    return make(wrap(method), request_deserializer or handler.request_deserializer, handler.response_serializer)


def within(handler: Handler, enter: Callable[[Any, Context], AbstractContextManager[Any]]) -> Handler:
    """Return a handler whose calls run in what `enter` returns for a request.

    What that context yields is called with each message of the answer, unless it is None.
    """

    def one(method: Method) -> Method:
        async def entered(request: Any, context: Context) -> Any:
            with enter(request, context) as answered:
                answer = await method(request, context)
                if answered is not None:
                    answered(answer)
                return answer

        return entered

    def many(method: Method) -> Method:
        async def entered(request: Any, context: Context) -> AsyncIterator[Any]:
            with enter(request, context) as answered:
                async for answer in method(request, context):
                    if answered is not None:
                        answered(answer)
                    yield answer

        return entered

    return wrapped(handler, many if handler.response_streaming else one)


class Interceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of a server's methods."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the method's handler, wrapped."""
        handler = await continuation(handler_call_details)
        return None if handler is None else self.wrap(handler, handler_call_details.method)

    def wrap(self, handler: Handler, method: str) -> Handler:
        """Return the handler of the method of that full name, wrapped or as it is."""
        raise NotImplementedError


class CallGuard(Interceptor):
    """Admits callers to the methods of a server; tenancy.guard has the one of every server with services."""

    def check_declared(self, methods: Iterable[str]) -> None:
        """Raise an error where it does not know who may call one of a server's methods."""
        raise NotImplementedError


# Reasons for which tasks of calls were cancelled; rpc.interceptors makes them their status. None: the call has
# its answer.
_ENDINGS: WeakKeyDictionary[asyncio.Task[Any], CallError | None] = WeakKeyDictionary()


def end_call(task: asyncio.Task[Any], error: CallError) -> None:
    """End the call that a task serves with an error, whatever it waits for, unless it has ended or is ending."""
    if not task.done() and task not in _ENDINGS:
        _ENDINGS[task] = error
        task.cancel()


def take_ending() -> CallError | None:
    """Return why the current task was cancelled and let it go on; None where its client left or the server stops."""
    task = asyncio.current_task()
    error = None if task is None else _ENDINGS.pop(task, None)
    if task is not None and error is not None:
        task.uncancel()
    return error


async def let_finish() -> None:
    """Let the call of the current task end as it is: it has its answer, which gRPC may still have to send."""
    task = asyncio.current_task()
    if task is None:
        return
    if _ENDINGS.get(task) is not None:  # it was cancelled in this moment, which the next await would raise
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        task.uncancel()
    _ENDINGS[task] = None


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """End every call that raised with its status; an error outside the table is logged and becomes INTERNAL.

    Put it before all other interceptors: it asks them for a method's handler once and keeps it.
    """

    def __init__(self) -> None:
        self._guarded: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the method's handler, guarded."""
        name = handler_call_details.method
        if name not in self._guarded:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            guard = self._guard_stream if handler.response_streaming else self._guard
            self._guarded[name] = wrapped(handler, lambda inner: guard(inner, name))
        return self._guarded[name]

    def _guard(self, method: Method, name: str) -> Method:
        async def guarded(request: Any, context: Context) -> Any:
            answer = await _outcome(lambda: method(request, context), name)
            return await abort(context, answer) if isinstance(answer, CallError) else answer

        return guarded

    def _guard_stream(self, method: Method, name: str) -> Method:
        """Guard a method that yields; its messages are written here, not by gRPC.

        There the end of a credential would end the call of a client that reads nothing without a status.
        """

        async def guarded(request: Any, context: Context) -> None:
            writes = _Writes(context)
            try:
                error = await _outcome(lambda: writes.write_all(method, request), name)
                if error is not None:
                    await writes.end_first()
                    await abort(context, error)
            finally:
                writes.close()

        return guarded


async def _outcome(work: Callable[[], Awaitable[T]], name: str) -> T | CallError:
    """Do the work of a call of the method `name`; return its result, or the error that ends the call."""
    try:
        result = await work()
        await let_finish()
        return result
    except grpc.aio.AbortError:
        raise
    except asyncio.CancelledError:
        if (ending := take_ending()) is None:
            raise
        return ending
    except Exception as error:
        return _as_call_error(error, name)


class _Writes:
    """The messages of one stream, as gRPC writes them.

    The first write ends before a status is sent, because gRPC notes after it that the call's metadata went with it; it
    refuses a status with these metadata again, and the client would wait for ever.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._first: asyncio.Future[None] | None = None

    async def write_all(self, method: Method, request: Any) -> None:
        """Write what a method yields."""
        responses = method(request, self._context)
        try:
            async for response in responses:
                await self._write(response)
        finally:
            if inspect.isasyncgen(responses):
                await responses.aclose()

    async def _write(self, response: Any) -> None:
        """Write a message; a call that is cancelled meanwhile leaves the first one to gRPC."""
        if self._first is None:
            self._first = asyncio.ensure_future(self._context.write(response))
            self._first.add_done_callback(retrieve_error)  # a client that has left waits for it no more
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


def _as_call_error(error: Exception, name: str) -> CallError:
    """Return the error that ends the call, without its traceback.

    gRPC keeps what `abort` raises with the call, whose frames know the call: a cycle that would hold the message.
    """
    if not isinstance(error, CallError):
        log.exception("%s failed", name, exc_info=error)
        return Internal("internal error; the server's log says more")
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


class UnreadableMessage:
    """Bytes of a client that are no message of the method's type."""


class ReadableMessages(Interceptor):
    """Refuses bytes that are no message with INVALID_ARGUMENT. Put it behind all other interceptors.

    gRPC itself answers UNKNOWN, logs a traceback, and does so before anybody has looked at the caller's credential.
    Here such bytes, for example invalid UTF-8 in a string, become an UnreadableMessage, which is refused where
    a method's own message would reach it.
    """

    def wrap(self, handler: Handler, method: str) -> Handler:
        """Wrap the handler and what reads its messages."""
        if handler.request_deserializer is None:
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


class CallMeter(Interceptor):
    """Counts and times calls. A stream counts when it ends; methods in `passed` are counted elsewhere.

    `ended` has the labels method and code, `seconds` method; see telemetry.metrics.Meters.rpc_calls.
    """

    def __init__(self, ended: Counter, seconds: Histogram, passed: Collection[str] = ()) -> None:
        self._ended = ended
        self._seconds = seconds
        self._passed = frozenset(passed)

    def wrap(self, handler: Handler, method: str) -> Handler:
        """Wrap the handler; calls of the health service are not counted."""
        name = method.rpartition("/")[2]
        if name in self._passed or method.startswith("/grpc."):
            return handler
        return within(handler, lambda request, context: self._metered(name))

    @contextmanager
    def _metered(self, name: str) -> Iterator[None]:
        began, code = time.monotonic(), "OK"
        try:
            yield
        except BaseException as error:
            code = _code_of(error)
            raise
        finally:
            self._ended.labels(name, code).inc()
            self._seconds.labels(name).observe(time.monotonic() - began)


def _code_of(error: BaseException) -> str:
    if isinstance(error, CallError):
        return CODES[type(error)].name
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return "CANCELLED"
    return "INTERNAL"
