"""The state of a link: whether the router answers, when to try it again, and when to send."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable

import grpc

log = logging.getLogger(__name__)


class NotARouterError(Exception):
    """The other end of a link has not proved that it is a router."""


class LinkState:
    """Knows whether a router answers. Calls `on_change` when a link comes up or is lost, and logs a loss once."""

    def __init__(self, address: str, on_change: Callable[[], None]) -> None:
        self._address = address
        self._on_change = on_change
        self._loss_logged = False
        self._hurry = asyncio.Event()
        # Whether the router has welcomed the stream that is open now.
        self.is_live = False
        self._lost_at = time.monotonic()

    @property
    def lost_s(self) -> float:
        """Return the seconds since the router answered last; 0 while it does."""
        return 0.0 if self.is_live else time.monotonic() - self._lost_at

    def welcomed(self) -> None:
        """Note that the router answers."""
        if not self.is_live:
            self.is_live = True
            if self._loss_logged:
                log.info("router %s: linked again", self._address)
            self._loss_logged = False
            self._on_change()

    def failed(self, error: grpc.aio.AioRpcError | NotARouterError) -> None:
        """Log why the stream ended or could not be opened, once until the router answers again."""
        if isinstance(error, NotARouterError):
            if not self._loss_logged:
                log.warning("%s answers as a router and is none: %s; nothing is sent to it", self._address, error)
        elif not self._loss_logged:
            what = "link lost" if self.is_live else "not reached"
            why = f"{error.code().name}: {error.details()}"
            log.info(
                "router %s: %s (%s); until it answers its jobs are left to other workers", self._address, what, why
            )
        self._loss_logged = True

    def ended(self) -> None:
        """Note that no stream is open."""
        if self.is_live:
            self.is_live, self._lost_at = False, time.monotonic()
            self._on_change()

    def hurry(self) -> None:
        """End the pause before the next attempt."""
        if not self.is_live:
            self._hurry.set()

    async def pause(self, pause_s: float) -> None:
        """Wait until the next attempt is due."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._hurry.wait()
        self._hurry.clear()


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
