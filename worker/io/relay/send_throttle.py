"""The moments at which a link may send frames."""

from __future__ import annotations

import asyncio
import math


class SendThrottle:
    """Limits how often a link sends: `due` is set at once for an urgent frame, else `interval_s` after the last one."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at = -math.inf
        self.due = asyncio.Event()

    def request(self, *, urgent: bool) -> None:
        """Set `due`, now or when the interval is over: there is something to send."""
        if self.due.is_set():
            return
        if urgent:
            self.due.set()
            return
        loop, at = asyncio.get_running_loop(), self._sent_at + self.interval_s
        if at <= loop.time():
            self.due.set()
        elif self._timer is None:
            self._timer = loop.call_at(at, self._interval_over)

    def sent(self) -> None:
        """Begin an interval: all frames were taken just now."""
        self.stop()
        self.due.clear()
        self._sent_at = asyncio.get_running_loop().time()

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _interval_over(self) -> None:
        self._timer = None
        self.due.set()
