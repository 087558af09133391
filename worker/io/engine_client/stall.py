"""Whether the engine steps: its step beat, watched apart from everything that could wait for somebody."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from worker.io.engine_client.process import EngineLostError, EngineProcess

log = logging.getLogger(__name__)

LOOK_S = 0.1


class Service(Protocol):
    """Whether the cluster gives this worker jobs: worker.io.membership.presence.Presence."""

    @property
    def withdrawn(self) -> bool:
        """Whether this worker is out of service."""

    async def withdraw(self) -> None:
        """Take this worker out of service."""

    async def come_back(self) -> None:
        """Put this worker back into service."""


class Holder(Protocol):
    """Who holds the jobs: worker.io.jobs.intake.Intake."""

    @property
    def runs_suspect(self) -> bool:
        """Whether the engine runs a job that may end only where its engine dies of it."""

    def engine_stalled(self) -> None:
        """Give everything back."""


async def watch_steps(
    engine: EngineProcess, presence: Service, holder: Holder, stall_s: float, replace_s: float
) -> None:
    """Forever: after `stall_s` of silence this worker is none and gives its jobs back; after `replace_s` its engine is
    ended.

    An engine is never silent: it tells every step, and without work that it lives. A suspect's has until `replace_s`:
    a stall may pass, and a strike more ends the suspect, so that one must have cost its engine. Raises EngineLostError.
    """
    looked_at = time.monotonic()
    while True:
        await asyncio.sleep(LOOK_S)
        now = time.monotonic()
        if now - looked_at > 5 * LOOK_S:  # it was we who stood still: what it said meanwhile is still unread
            engine.expect()
        looked_at = now
        silent_s = engine.silent_s()
        patience_s = replace_s if holder.runs_suspect else stall_s
        if silent_s > replace_s:
            log.error("the engine has not stepped for %.1f s; ending it", silent_s)
            engine.kill()
            raise EngineLostError("the engine was ended")
        if silent_s > patience_s and not presence.withdrawn:
            log.error("the engine has not stepped for %.1f s; its jobs go on elsewhere", silent_s)
            engine.stalled = True
            # Before the jobs go: none of them is to be kept for this worker again.
            await presence.withdraw()
            holder.engine_stalled()
        elif silent_s <= patience_s and presence.withdrawn:
            log.warning("the engine steps again")
            engine.stalled = False
            await presence.come_back()
