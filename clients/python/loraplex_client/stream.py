"""A running generation: an iterator of pieces, sync or async. Leaving it early cancels the work on the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Self

import grpc
from loraplex.inference.v1 import inference_pb2

from loraplex_client.errors import CancelledError, LoraplexError, error_of
from loraplex_client.generation import Fold, Generation, Piece


class _Running:
    """The RPC, the fold of its events, and whether the caller has left it."""

    def __init__(self, rpc: Any, address: str) -> None:
        self._rpc = rpc
        self._address = address
        self._fold = Fold()
        self._left = False
        self._whole: Generation | None = None

    def _take(self, response: inference_pb2.GenerateResponse) -> Piece | None:
        piece = self._fold.take(response.event)
        if piece is not None and piece.finished is not None:
            self._whole = piece.finished
        return piece

    def _leave(self) -> None:
        self._left = True
        self._rpc.cancel()

    def _result(self) -> Generation:
        if self._whole is None:
            raise CancelledError("the stream was left before its end")
        return self._whole

    def __del__(self) -> None:
        # A `break` drops the last reference: this is what makes it cancel at once.
        if hasattr(self, "_left"):
            self._leave()


class GenerationStream(_Running, Iterator[Piece]):
    """Pieces as they come; break, `close`, leaving a `with`, an exception or its deletion cancels what is left."""

    def __next__(self) -> Piece:
        """The next piece. Raises LoraplexError."""
        try:
            for response in self._rpc:
                piece = self._take(response)
                if piece is not None:
                    return piece
            self._fold.end()
        except grpc.RpcError as error:
            if self._left:
                raise StopIteration from None
            raise error_of(error, self._address) from error
        except BaseException:  # KeyboardInterrupt too
            self._leave()
            raise
        raise StopIteration

    def result(self) -> Generation:
        """Read to the end; the whole answer. Raises LoraplexError."""
        for _ in self:
            pass
        return self._result()

    def close(self) -> None:
        """Cancel what is left of it; the iteration then just ends."""
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class AsyncGenerationStream(_Running, AsyncIterator[Piece]):
    """Pieces as they come; break, `aclose`, leaving an `async with` or a cancelled task cancels what is left."""

    async def __anext__(self) -> Piece:
        """The next piece. Raises LoraplexError."""
        try:
            async for response in self._rpc:
                piece = self._take(response)
                if piece is not None:
                    return piece
            if not self._left:
                self._fold.end()
        except grpc.RpcError as error:
            raise error_of(error, self._address) from error
        except asyncio.CancelledError:
            if self._left and not _task_is_cancelled():
                raise StopAsyncIteration from None
            self._leave()
            raise
        except LoraplexError:
            self._leave()
            raise
        raise StopAsyncIteration

    async def result(self) -> Generation:
        """Read to the end; the whole answer. Raises LoraplexError."""
        async for _ in self:
            pass
        return self._result()

    async def aclose(self) -> None:
        """Cancel what is left of it; the iteration then just ends."""
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
