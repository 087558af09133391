"""A running generation: an iterator of pieces, sync or async. Leaving it early cancels the work on the server.

A lost stream goes on with another call (see loraplex_client.recovery); the iteration only pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Protocol, Self

import grpc

from loraplex_client.errors import CancelledError, LoraplexError, error_of
from loraplex_client.generation import Generation, Piece
from loraplex_client.recovery import Attempt, Recovery


class Starter(Protocol):
    """Starts a stream's calls. `closings` counts how often it was closed; streams that ran then are not resumed."""

    @property
    def closings(self) -> int:
        """Return how often it was closed."""

    def start(self, attempt: Attempt) -> Any:
        """Begin an RPC."""


class _Running:
    """The current RPC, the events so far, and whether the caller has left the stream."""

    def __init__(self, starter: Starter, recovery: Recovery) -> None:
        self._starter = starter
        self._recovery = recovery
        self._closings = starter.closings
        self._left = False
        self._start()

    def _start(self) -> None:
        if self._starter.closings != self._closings:
            raise CancelledError("the client was closed")
        self._attempt = self._recovery.attempt()
        self._rpc = self._starter.start(self._attempt)

    def _lost(self, error: grpc.RpcError) -> float:
        """Return the seconds to wait before the next attempt. Raises LoraplexError if the stream is over."""
        failure = error_of(error, self._attempt.address)
        if self._starter.closings != self._closings:
            raise failure from error
        try:
            return self._recovery.lost(failure)
        except LoraplexError:
            raise failure from error

    def _leave(self) -> None:
        self._left = True
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

    def __init__(self, starter: Starter, recovery: Recovery) -> None:
        self._leaving = threading.Event()
        super().__init__(starter, recovery)

    def __next__(self) -> Piece:
        """Return the next piece. Raises LoraplexError."""
        try:
            while not self._left:
                try:
                    return self._read()
                except grpc.RpcError as error:
                    if self._left:
                        break
                    self._leaving.wait(self._lost(error))
                if not self._left:
                    self._start()
        except StopIteration:
            raise
        except BaseException:  # KeyboardInterrupt too
            self._leave()
            raise
        raise StopIteration

    def _read(self) -> Piece:
        for response in self._rpc:
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

    def __init__(self, starter: Starter, recovery: Recovery) -> None:
        self._leaving = asyncio.Event()
        super().__init__(starter, recovery)

    async def __anext__(self) -> Piece:
        """Return the next piece. Raises LoraplexError."""
        try:
            while not self._left:
                try:
                    return await self._read()
                except grpc.RpcError as error:
                    pause_s = self._lost(error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._leaving.wait(), pause_s)
                if not self._left:
                    self._start()
        except asyncio.CancelledError:
            if self._left and not _task_is_cancelled():
                raise StopAsyncIteration from None
            self._leave()
            raise
        except LoraplexError:
            self._leave()
            raise
        raise StopAsyncIteration

    async def _read(self) -> Piece:
        async for response in self._rpc:
            piece = self._recovery.take(response.event)
            if piece is not None:
                return piece
        if not self._left:
            self._recovery.end()
        raise StopAsyncIteration

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
