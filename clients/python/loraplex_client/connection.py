"""The transports, sync and grpc.aio: they run scripts of calls, and start streams."""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeVar

import grpc
from loraplex.inference.v1 import inference_pb2

from loraplex_client.calls import Call, Script
from loraplex_client.endpoint import Endpoint
from loraplex_client.errors import LoraplexError
from loraplex_client.recovery import Attempt
from loraplex_client.stream import AsyncGenerationStream, GenerationStream

R = TypeVar("R")


class Connection(Endpoint):
    """Runs calls and blocks until their answers. Threads may share it."""

    _transport = grpc

    def run(self, script: Script[R], timeout_s: float | None = None) -> R:
        """Run every call that the script yields; return the script's result. Raises LoraplexError.

        The script gets the error of a call first.
        """
        try:
            call = next(script)
            while True:
                try:
                    answer = self._call(call, timeout_s)
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
        return GenerationStream(self, self._recovery(request, timeout_s))

    def close(self) -> None:
        """Cancel running calls and close the channels; the next call opens new ones."""
        for channel in self._channels.forget():
            channel.close()

    def _call(self, call: Call, timeout_s: float | None) -> Any:
        tries, closings = self._tries(timeout_s), self.closings
        while True:
            attempt = self._attempt(call, tries)
            try:
                return self._ask(attempt)
            except grpc.RpcError as error:
                if call.failure is not None:
                    raise call.failure from error
                pause_s = self._failed(attempt, tries, error)
            time.sleep(pause_s)
            self._check_open(closings)

    def _ask(self, attempt: Attempt) -> Any:
        call, answer = attempt.call, self.start(attempt)
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

    async def run(self, script: Script[R], timeout_s: float | None = None) -> R:
        """Run every call that the script yields; return the script's result. Raises LoraplexError.

        The script gets the error of a call first.
        """
        try:
            call = next(script)
            while True:
                try:
                    answer = await self._call(call, timeout_s)
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
        return AsyncGenerationStream(self, self._recovery(request, timeout_s))

    async def close(self) -> None:
        """Cancel running calls and close the channels; the next call opens new ones."""
        for channel in self._channels.forget():
            await channel.close()

    async def _call(self, call: Call, timeout_s: float | None) -> Any:
        tries, closings = self._tries(timeout_s), self.closings
        while True:
            attempt = self._attempt(call, tries)
            try:
                return await self._ask(attempt)
            except (grpc.RpcError, asyncio.CancelledError) as error:
                # grpc.aio reports a request iterator that raised as a cancelled call.
                if call.failure is not None:
                    raise call.failure from error
                if not isinstance(error, grpc.RpcError):
                    raise
                pause_s = self._failed(attempt, tries, error)
            await asyncio.sleep(pause_s)
            self._check_open(closings)

    async def _ask(self, attempt: Attempt) -> Any:
        call, answer = attempt.call, self.start(attempt)
        if call.take is None:
            return await answer
        try:
            async for message in answer:
                call.take(message)
        finally:
            answer.cancel()
        return None
