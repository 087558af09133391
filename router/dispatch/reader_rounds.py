"""Rounds in which readers of tokens are woken, so that tokens that come meanwhile make fewer, larger messages.

A message to a client costs the router, gRPC and the client the same with one token as with ten. After a round the next
one begins when REST times as much time has passed as that one took: a busy router keeps most of its time for what comes
in, and the readers of an idle one, whose rounds take next to nothing, hardly wait.
"""

from __future__ import annotations

import asyncio
import time

# Length of the pause after a round, as a multiple of the round's own length. With 1, 64 streams of 200 tokens/s each
# took a router 0.7 of its core, and a new request had to find its way in between.
REST = 4
# Maximum pause in seconds: a round may take long, and readers should not notice.
REST_MOST_S = 0.05


class ReaderRounds:
    """The rounds of one router."""

    def __init__(self) -> None:
        # Events of the readers with something to read, in their order, each once.
        self._waiting: dict[asyncio.Event, None] = {}
        self._going = False

    def wake(self, reader: asyncio.Event, *, urgent: bool) -> None:
        """Set the event of a reader that has something to read: at once if urgent, else in the next round."""
        if urgent:
            self._waiting.pop(reader, None)
            reader.set()
            return
        self._waiting[reader] = None
        if not self._going:
            self._going = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        if not self._waiting:
            self._going = False
            return
        readers, self._waiting = self._waiting, {}
        began = time.monotonic()
        for reader in readers:
            reader.set()
        # The loop runs this after all readers that were woken.
        asyncio.get_running_loop().call_soon(self._rest, began)

    def _rest(self, began: float) -> None:
        rest_s = min(REST_MOST_S, REST * (time.monotonic() - began))
        asyncio.get_running_loop().call_later(rest_s, self._round)
