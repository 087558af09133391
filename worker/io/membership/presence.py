"""An engine session as the cluster sees it: its liveness key in Redis and its health, which change together.

Beats overlap: however slow Redis is, the key is written every BEAT_MS, as long as an answer comes within the key's time
to live. So a beat that was sent before the key's removal may arrive after it; the removal is repeated with every beat.
A Redis that hangs delays neither the health nor the callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from broker.connection import REDIS_DOWN
from broker.liveness import BEAT_MS, Liveness
from broker.terms import WORKER_TTL_MS
from broker.worker_state import WorkerPhase, WorkerState
from worker.io.membership.health import WorkerHealth

log = logging.getLogger(__name__)

# Timeout in seconds for one beat: without a later one the key has expired by then.
BEAT_TIMEOUT_S = WORKER_TTL_MS / 1e3
# Timeout in seconds for removing the key of a worker that stops. It expires on its own as well.
LEAVE_S = 1.0


class Presence:
    """The presence of one incarnation. Each beat writes what `state` returns for the phase, and calls `follow_routers`
    with the relay addresses of the live routers.
    """

    def __init__(
        self,
        incarnation: str,
        liveness: Liveness,
        health: WorkerHealth,
        state: Callable[[WorkerPhase], WorkerState],
        follow_routers: Callable[[Sequence[str]], None],
    ) -> None:
        self._incarnation = incarnation
        self._liveness = liveness
        self._health = health
        self._state = state
        self._follow_routers = follow_routers
        self._phase = WorkerPhase.SERVING
        self._changed = asyncio.Event()
        # True while the key is removed although this process lives.
        self.withdrawn = False

    async def announce(self) -> None:
        """Write the key, then turn the health to SERVING: only a live worker may claim."""
        self._phase = WorkerPhase.SERVING
        await self._write()
        await self._health.set_serving(True)

    async def announce_failing(self) -> None:
        """Write the key of a worker that claims nothing, since its engines died one after the other."""
        self._phase = WorkerPhase.FAILING
        await self._write()

    async def beat(self) -> None:
        """Write the key every BEAT_MS, and at every change; never returns."""
        async with asyncio.TaskGroup() as writes:
            while True:
                # Not wait_for: in Python 3.11 that loses a cancellation which comes together with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_MS / 1e3):
                        await self._changed.wait()
                self._changed.clear()
                writes.create_task(self._write())

    async def withdraw(self) -> None:
        """Remove the key and turn the health to NOT_SERVING: the engine does not step."""
        self.withdrawn = True
        self._changed.set()
        await self._health.set_serving(False)

    async def restore(self) -> None:
        """Write the key again, with the health that goes with the phase: the engine steps again."""
        self.withdrawn = False
        self._changed.set()
        if self._phase is WorkerPhase.SERVING:
            await self._health.set_serving(True)

    async def announce_draining(self) -> None:
        """Announce that the worker takes no more jobs, though those that it has go on."""
        self._phase = WorkerPhase.DRAINING
        self._changed.set()
        await self._health.set_serving(False)

    async def leave(self) -> None:
        """Remove the key for good, and turn the health to NOT_SERVING; call it when `beat` has ended."""
        self.withdrawn = True
        await self._health.set_serving(False)
        await self._write(LEAVE_S)

    async def _write(self, timeout_s: float = BEAT_TIMEOUT_S) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                if self.withdrawn:
                    await self._liveness.declare_dead(self._incarnation)
                    return
                self._follow_routers(await self._liveness.beat(self._state(self._phase)))
        except REDIS_DOWN as error:  # a timeout is one of them
            log.warning("Redis does not answer: %s", str(error) or type(error).__name__)
