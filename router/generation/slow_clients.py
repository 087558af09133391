"""Clients that stop reading: each is dropped alone, after a bounded time, and nothing else waits for it.

gRPC buffers some messages of a stream and then blocks the next one. What the job makes meanwhile is bounded by that
time, and by the answer's length; the job is never paused. Then it is stopped and frees its row. Should the client read
again within the same time, it gets the messages up to there and CLIENT_TOO_SLOW; then its server cuts the call
(rpc.unread_messages).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rpc.errors import CallError, Exhausted

log = logging.getLogger(__name__)

# Interval in seconds between looks at the streams.
LOOK_S = 0.25
# Time in seconds after which a client that was too slow may call again.
RETRY_S = 1.0


@dataclass(slots=True, eq=False)
class ClientStream:
    """A stream to a client. `waits_since`: when gRPC was given the last message; None: it asks for the next one."""

    drop: Callable[[CallError], None]
    waits_since: float | None = None
    dropped: bool = False


class SlowClients:
    """The streams of one router. `limit_s`: maximum time in seconds that a client may leave a message unread."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._streams: set[ClientStream] = set()

    @contextmanager
    def watched(self, drop: Callable[[CallError], None]) -> Iterator[ClientStream]:
        """Watch a stream meanwhile. `drop` must free all that the stream holds, and end it with the error."""
        stream = ClientStream(drop)
        self._streams.add(stream)
        try:
            yield stream
        finally:
            self._streams.discard(stream)

    async def drop_stalled(self) -> None:
        """Drop clients that have not read for too long; never returns."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            for stream in tuple(self._streams):
                waited_s = 0.0 if stream.waits_since is None else now - stream.waits_since
                if waited_s > self._limit_s and not stream.dropped:
                    stream.dropped = True
                    log.info("a client has not read for %.1f s and is dropped", waited_s)
                    stream.drop(self._too_slow())

    def _too_slow(self) -> Exhausted:
        message = f"the client left its stream unread for {self._limit_s:g} s"
        return Exhausted("stream", message, retry_after_s=RETRY_S, reason="CLIENT_TOO_SLOW")
