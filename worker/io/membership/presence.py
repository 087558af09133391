"""One incarnation of a worker as the others see it: its key in Redis and its health, which change together.

One task writes the key, so that no beat comes after its removal; a Redis that hangs delays neither the health nor
whoever calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from broker.connection import REDIS_DOWN
from broker.liveness import BEAT_MS, Liveness
from broker.messages import WorkerPhase, WorkerState
from worker.io.membership.health import WorkerHealth

log = logging.getLogger(__name__)

# So long one beat may take: its key dies by itself when Redis hangs.
TELL_S = 1.0


class Presence:
    """`state` is asked for what a beat says of the phase; `report` tells Redis the rest, with every beat."""

    def __init__(
        self,
        incarnation: str,
        liveness: Liveness,
        health: WorkerHealth,
        state: Callable[[WorkerPhase], WorkerState],
        report: Callable[[], Awaitable[None]],
    ) -> None:
        self._incarnation = incarnation
        self._liveness = liveness
        self._health = health
        self._state = state
        self._report = report
        self._phase = WorkerPhase.SERVING
        self._changed = asyncio.Event()
        # Whether the key is taken away, though this process lives.
        self.withdrawn = False

    async def serve(self) -> None:
        """The first beat, then health: who claims a job must live."""
        await self._tell()
        await self._health.serves()

    async def beat(self) -> None:
        """Forever: say that we live, or see to it that nothing says so."""
        while True:
            # Not wait_for: in Python 3.11 that loses a cancellation which comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_MS / 1e3):
                    await self._changed.wait()
            self._changed.clear()
            await self._tell()

    async def withdraw(self) -> None:
        """The engine does not step: no key, NOT_SERVING, both at once."""
        self.withdrawn = True
        self._changed.set()
        await self._health.serves_not()

    async def come_back(self) -> None:
        """The engine steps again."""
        self.withdrawn = False
        self._changed.set()
        if self._phase is WorkerPhase.SERVING:
            await self._health.serves()

    async def drain(self) -> None:
        """It takes no more work, though what it holds goes on."""
        self._phase = WorkerPhase.DRAINING
        self._changed.set()
        await self._health.serves_not()

    async def leave(self) -> None:
        """The incarnation has ended; `beat` must not run any more."""
        self.withdrawn = True
        await self._health.serves_not()
        await self._tell()

    async def _tell(self) -> None:
        try:
            async with asyncio.timeout(TELL_S):
                if self.withdrawn:
                    await self._liveness.remove(self._incarnation)
                    return
                await self._liveness.beat(self._state(self._phase))
                await self._report()
        except REDIS_DOWN as error:  # a timeout is one of them
            log.warning("Redis does not answer: %s", error or type(error).__name__)
