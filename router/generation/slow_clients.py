"""Clients that stop reading: each is dropped alone, after a bounded time, and nothing else waits for it.

gRPC buffers some messages of a stream and then keeps us from sending the next one. What its job makes meanwhile is
bounded by that time, and by the answer's length; the job is never paused. Then it is stopped and frees its row. Should
the client read again within the same time, it gets the messages up to there and CLIENT_TOO_SLOW; then its call is cut.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from rpc.errors import CallError, Exhausted

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 0.25
# When a client that was too slow may come back.
RETRY_S = 1.0


@dataclass(slots=True, eq=False)
class _Reader:
    """One stream. `waits_since`: since when gRPC has held its last message; None: it asks for the next one."""

    drop: Callable[[CallError], Awaitable[None]]
    call: asyncio.Task[Any] | None
    waits_since: float | None = None
    dropped: bool = False


class SlowClients:
    """The streams of one router. `limit_s`: how long a client may leave unread what is there for it."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._readers: set[_Reader] = set()

    async def watched(
        self, messages: AsyncGenerator[T], drop: Callable[[CallError], Awaitable[None]]
    ) -> AsyncGenerator[T]:
        """The same messages. `drop` is to free all that the stream holds, and to end `messages` with the error."""
        reader = _Reader(drop, asyncio.current_task())
        self._readers.add(reader)
        try:
            async with aclosing(messages):
                async for message in messages:
                    reader.waits_since = time.monotonic()
                    yield message
                    reader.waits_since = None
        finally:
            self._readers.discard(reader)

    async def watch(self) -> None:
        """Forever: drop who has not read for too long, and cut who has not even taken that."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            for reader in tuple(self._readers):
                waited_s = 0.0 if reader.waits_since is None else now - reader.waits_since
                if waited_s > self._limit_s and not reader.dropped:
                    reader.dropped = True
                    log.info("a client has not read for %.1f s; it is dropped", waited_s)
                    await reader.drop(self._too_slow())
                elif waited_s > 2 * self._limit_s and reader.call is not None:
                    reader.call.cancel()

    def _too_slow(self) -> Exhausted:
        message = f"the client left its stream unread for {self._limit_s:g} s"
        return Exhausted("stream", message, retry_after_s=RETRY_S, reason="CLIENT_TOO_SLOW")
