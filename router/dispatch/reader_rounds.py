"""When readers of tokens have their turn: in rounds, so that what comes meanwhile makes fewer, larger messages.

A message to a client costs the router, gRPC and the client the same with one token as with ten. After a round of them
the next one begins when REST times as much time has passed as that one took: a busy router keeps most of its time for
what comes in, and the readers of an idle one, whose rounds take next to nothing, wait for nobody.
"""

from __future__ import annotations

import asyncio
import time

# How many times as long as a round the pause after it is. With 1, 64 streams of 200 tokens/s each took a router 0.7 of
# its core, and a new request had to find its way in between.
REST = 4
# A round may take long; whoever reads should not see it.
REST_MOST_S = 0.05


class ReaderRounds:
    """The rounds of one router."""

    def __init__(self) -> None:
        # In their order, each once.
        self._ready: dict[asyncio.Event, None] = {}
        self._going = False

    def ready(self, reader: asyncio.Event, *, urgent: bool) -> None:
        """Set the event of a reader that has something to read: at once where that is urgent, else with the others."""
        if urgent:
            self._ready.pop(reader, None)
            reader.set()
            return
        self._ready[reader] = None
        if not self._going:
            self._going = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        if not self._ready:
            self._going = False
            return
        readers, self._ready = self._ready, {}
        began = time.monotonic()
        for reader in readers:
            reader.set()
        # It runs when all of them have had their turn.
        asyncio.get_running_loop().call_soon(self._rest, began)

    def _rest(self, began: float) -> None:
        rest_s = min(REST_MOST_S, REST * (time.monotonic() - began))
        asyncio.get_running_loop().call_later(rest_s, self._round)
