"""The state of a link: whether the router answers, and when the next attempt to reach it is due."""

from __future__ import annotations

import asyncio
import contextlib
import logging
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
