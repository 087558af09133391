"""The transports, sync and grpc.aio: they run scripts of calls, and generations as iterators of pieces.

Leaving an iterator early cancels the work on the server. A lost stream goes on with another call, as `recovery` says;
the iteration only pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

import grpc
from loraplex.inference.v1 import inference_pb2

from loraplex_client.calls import Call, Script
from loraplex_client.endpoint import ADMITTED_KEY, NOT_ENFORCED_KEY, Endpoint
from loraplex_client.errors import (
    CancelledError,
    ClientClosedError,
    LoraplexError,
    RateLimit,
    error_of,
    rate_limits_in,
    unknown_keyword,
)
from loraplex_client.generation import Attempt, Generation, Piece, Recovery

# Maximum tokens of a message whose log probabilities are read on the event loop, in some milliseconds.
_FEW = 256

P = ParamSpec("P")
R = TypeVar("R")


class _Running:
    """The current RPC, the events so far, and whether the caller has left the stream."""

    def __init__(self, endpoint: Endpoint, recovery: Recovery) -> None:
        self._endpoint = endpoint
        self._recovery = recovery
        # The Generation's fields of the same names; set once the request is admitted.
        self.not_enforced: tuple[str, ...] = ()
        self.rate_limits: Mapping[str, RateLimit] = {}
        self._closing = False
        self._start()

    def _start(self) -> None:
        self._attempt = self._recovery.attempt()
        self._rpc = self._endpoint.start(self._attempt)

    def _lost(self, error: grpc.RpcError) -> float:
        """Return the seconds to wait before the next attempt. Raises LoraplexError if the stream is over."""
        failure = error_of(error, self._attempt.address)
        if self._endpoint.closed:
            raise ClientClosedError from error
        try:
            return self._recovery.lost(failure)
        except LoraplexError:
            raise failure from error

    def _hear(self, metadata: Any) -> bool:
        """Take what an answer's metadata says of its request; return whether that is admitted."""
        told = dict(metadata or ())
        self.not_enforced = tuple(json.loads(told.get(NOT_ENFORCED_KEY, "[]")))
        if rates := rate_limits_in(metadata):
            self.rate_limits = self._recovery.rate_limits = rates
        return ADMITTED_KEY in told

    def _leave(self) -> None:
        self._closing = True
        self._rpc.cancel()

    def _result(self) -> Generation:
        if self._recovery.whole is None:
            raise CancelledError("the stream was left before its end")
        return self._recovery.whole

    def __del__(self) -> None:
        # A `break` drops the last reference, so the deletion cancels the call at once.
        if hasattr(self, "_rpc"):
            self._leave()


class GenerationStream(_Running, Iterator[Piece]):
    """An iterator of pieces; break, `close`, leaving a `with`, an exception or its deletion cancels the rest."""

    def __init__(self, endpoint: Endpoint, recovery: Recovery) -> None:
        self._leaving = threading.Event()
        super().__init__(endpoint, recovery)

    def __next__(self) -> Piece:
        """Return the next piece. Raises LoraplexError."""
        try:
            while not self._closing:
                try:
                    return self._read()
                except grpc.RpcError as error:
                    if self._closing:
                        break
                    self._leaving.wait(self._lost(error))
                if not self._closing:
                    self._start()
        except StopIteration:
            raise
        except BaseException:  # KeyboardInterrupt too
            self._leave()
            raise
        raise StopIteration

    def _read(self) -> Piece:
        for response in self._rpc:
            if response.event.HasField("summary"):
                self._hear(self._rpc.initial_metadata())
            piece = self._recovery.take(response.event)
            if piece is not None:
                return piece
        self._recovery.end()
        raise StopIteration

    def result(self) -> Generation:
        """Read to the end and return the whole answer. Raises LoraplexError."""
        for _ in self:
            pass
        return self._result()

    def close(self) -> None:
        """Cancel the rest of the stream; the iteration then ends without an error."""
        self._leave()
        self._leaving.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class AsyncGenerationStream(_Running, AsyncIterator[Piece]):
    """An async iterator of pieces; break, `aclose`, leaving an `async with` or a cancelled task cancels the rest."""

    def __init__(self, endpoint: Endpoint, recovery: Recovery) -> None:
        self._leaving = asyncio.Event()
        super().__init__(endpoint, recovery)

    async def __anext__(self) -> Piece:
        """Return the next piece. Raises LoraplexError."""
        try:
            while not self._closing:
                try:
                    return await self._read()
                except grpc.RpcError as error:
                    pause_s = self._lost(error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._leaving.wait(), pause_s)
                if not self._closing:
                    self._start()
        except asyncio.CancelledError:
            if self._closing and not _task_is_cancelled():
                raise StopAsyncIteration from None
            self._leave()
            if self._endpoint.closed and not _task_is_cancelled():
                raise ClientClosedError from None
            raise
        except LoraplexError:
            self._leave()
            raise
        raise StopAsyncIteration

    async def _read(self) -> Piece:
        async for response in self._rpc:
            event = response.event
            if event.HasField("summary"):
                await self.admitted()
            if len(event.prompt_logprobs.tokens) + len(event.delta.logprobs) > _FEW:
                piece = await asyncio.to_thread(self._recovery.take, event)
            else:
                piece = self._recovery.take(event)
            if piece is not None:
                return piece
        if not self._closing:
            self._recovery.end()
        raise StopAsyncIteration

    async def admitted(self) -> bool:
        """Return True once a router has admitted the request, which then may wait for long; else read the stream."""
        return self._hear(await self._rpc.initial_metadata())

    async def result(self) -> Generation:
        """Read to the end and return the whole answer. Raises LoraplexError."""
        async for _ in self:
            pass
        return self._result()

    async def aclose(self) -> None:
        """Cancel the rest of the stream; the iteration then ends without an error."""
        self._leave()
        self._leaving.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Connection(Endpoint):
    """Runs calls and blocks until their answers. Threads may share it."""

    _transport = grpc

    def run(self, script: Script[R]) -> R:
        """Run every call that the script yields; return the script's result. Raises LoraplexError.

        The script gets the error of a call first.
        """
        try:
            call = next(script)
            while True:
                try:
                    answer = self._call(call)
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
        return GenerationStream(self, Recovery(request, self._tries(timeout_s)))

    def close(self) -> None:
        """Cancel running calls and close the channels."""
        for channel in self._channels.forget():
            channel.close()

    def _call(self, call: Call) -> Any:
        if call.method == "Generate":
            with self.stream(call.request, call.timeout_s) as stream:
                return stream.result()
        tries = self._tries(call.timeout_s)
        while True:
            attempt = self._attempt(call, tries)
            try:
                return self._ask(attempt)
            except grpc.RpcError as error:
                if call.failure is not None:
                    raise call.failure from error
                pause_s = self._failed(attempt, tries, error)
            time.sleep(pause_s)

    def _ask(self, attempt: Attempt) -> Any:
        call = attempt.call
        if call.hear is not None:
            message, rpc = self.start(attempt, "with_call")
            call.hear(rpc.trailing_metadata())
            return message
        answer = self.start(attempt)
        if call.take is None:
            return answer
        try:
            for message in answer:
                call.take(message)
        finally:
            answer.cancel()
        return None


class AsyncConnection(Endpoint):
    """Runs calls on the running event loop."""

    _transport = grpc.aio

    async def run(self, script: Script[R]) -> R:
        """Run every call that the script yields; return the script's result. Raises LoraplexError.

        The script gets the error of a call first.
        """
        try:
            call = next(script)
            while True:
                try:
                    answer = await self._call(call)
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
        return AsyncGenerationStream(self, Recovery(request, self._tries(timeout_s)))

    async def close(self) -> None:
        """Cancel running calls and close the channels."""
        for channel in self._channels.forget():
            await channel.close()

    async def _call(self, call: Call) -> Any:
        if call.method == "Generate":
            async with self.stream(call.request, call.timeout_s) as stream:
                return await stream.result()
        tries = self._tries(call.timeout_s)
        while True:
            attempt = self._attempt(call, tries)
            try:
                return await self._ask(attempt)
            except (grpc.RpcError, asyncio.CancelledError) as error:
                # grpc.aio reports a request iterator that raised as a cancelled call.
                if call.failure is not None:
                    raise call.failure from error
                if not isinstance(error, grpc.RpcError):
                    if self.closed and not _task_is_cancelled():
                        raise ClientClosedError from None
                    raise
                pause_s = self._failed(attempt, tries, error)
            await asyncio.sleep(pause_s)

    async def _ask(self, attempt: Attempt) -> Any:
        call, answer = attempt.call, self.start(attempt)
        if call.take is None:
            message = await answer
            if call.hear is not None:
                call.hear(await answer.trailing_metadata())
            return message
        try:
            async for message in answer:
                call.take(message)
        finally:
            answer.cancel()
        return None


class BlockingClient:
    """Base of the clients that block until an answer is there."""

    _connect = Connection
    _connection: Connection

    def close(self) -> None:
        """Cancel running calls and free the connections; later calls raise ClientClosedError."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncioClient:
    """Base of the clients on the running event loop."""

    _connect = AsyncConnection
    _connection: AsyncConnection

    async def close(self) -> None:
        """Cancel running calls and free the connections; later calls raise ClientClosedError."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class method(Generic[P, R]):  # noqa: N801  # a decorator
    """Makes a method of both kinds of clients of a script: one blocks, the other has to be awaited."""

    def __init__(self, script: Callable[Concatenate[Any, P], Script[R]]) -> None:
        signature = inspect.signature(script)
        result = signature.return_annotation.removeprefix("Script[").removesuffix("]")

        def check(keywords: Mapping[str, Any]) -> None:
            for name in keywords:
                if name not in signature.parameters:
                    raise unknown_keyword(name, signature.parameters)

        @wraps(script)
        def blocking(client: Any, *args: P.args, **kwargs: P.kwargs) -> R:
            check(kwargs)
            answer: R = client._connection.run(script(client, *args, **kwargs))
            return answer

        @wraps(script)
        async def awaited(client: Any, *args: P.args, **kwargs: P.kwargs) -> R:
            check(kwargs)
            answer: R = await client._connection.run(script(client, *args, **kwargs))
            return answer

        self._blocking, self._awaited = blocking, awaited
        functions: tuple[Any, Any] = (blocking, awaited)
        for function in functions:
            function.__signature__ = signature.replace(return_annotation=result)

    @overload
    def __get__(self, client: None, owner: type) -> Callable[..., Any]: ...
    @overload
    def __get__(self, client: BlockingClient, owner: type) -> Callable[P, R]: ...
    @overload
    def __get__(self, client: AsyncioClient, owner: type) -> Callable[P, Coroutine[Any, Any, R]]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        """Return the method of a client, bound to it."""
        function: Any = self._awaited if issubclass(owner, AsyncioClient) else self._blocking
        return function if client is None else function.__get__(client)
