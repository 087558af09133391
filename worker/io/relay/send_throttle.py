"""When what a link has to send may go."""

from __future__ import annotations

import asyncio
import math


class SendThrottle:
    """When the next frames may go: `due` is set at once for what is urgent, else `pace_s` after the last ones."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at = -math.inf
        self.due = asyncio.Event()

    def want(self, *, urgent: bool) -> None:
        """There is something to send."""
        loop, at = asyncio.get_running_loop(), self._sent_at + self._pace_s
        if urgent or at <= loop.time():
            self.due.set()
        elif self._timer is None:
            self._timer = loop.call_at(at, self._passed)

    def sent(self) -> None:
        """All frames were just taken."""
        self.stop()
        self.due.clear()
        self._sent_at = asyncio.get_running_loop().time()

    def stop(self) -> None:
        """End the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _passed(self) -> None:
        self._timer = None
        self.due.set()
