"""The watch over the engine's steps, apart from everything that could wait for another process."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from worker.io.engine_client.process import EngineLostError, EngineProcess

log = logging.getLogger(__name__)

# Seconds between two looks at the engine's silence.
LOOK_S = 0.1


class ServiceSwitch(Protocol):
    """Takes this worker out of service and back: worker.io.membership.presence.Presence."""

    @property
    def withdrawn(self) -> bool:
        """Return whether this worker is out of service."""

    async def withdraw(self) -> None:
        """Take this worker out of service."""

    async def restore(self) -> None:
        """Put this worker back into service."""


class StallHandler(Protocol):
    """The jobs of an engine that may stall: worker.io.jobs.results.Results."""

    @property
    def runs_suspect(self) -> bool:
        """Return whether the engine has a job that runs alone."""

    def engine_stalled(self) -> None:
        """Give every job back."""


class Claims(Protocol):
    """The claims of this worker: worker.io.jobs.intake.Intake."""

    async def end_wait(self) -> None:
        """End the wait of a claim for a job."""


async def watch_steps(
    engine: EngineProcess,
    service: ServiceSwitch,
    handler: StallHandler,
    claims: Claims,
    stall_s: float,
    replace_s: float,
) -> None:
    """Watch the engine; never returns. Raises EngineLostError when it has ended the engine.

    After `stall_s` seconds of silence the worker goes out of service and gives its jobs back; after `replace_s` the
    engine is ended. An engine is never silent: it reports every step, and without work that it lives. An engine that
    runs a suspect has until `replace_s`: a stall may pass, and another blame ends the suspect, so it must cost an
    engine.
    """
    looked_at = time.monotonic()
    while True:
        await asyncio.sleep(LOOK_S)
        now = time.monotonic()
        if now - looked_at > 5 * LOOK_S:  # this process stood still: messages of the meantime are still unread
            engine.expect()
        looked_at = now
        silent_s = engine.silent_s()
        patience_s = replace_s if handler.runs_suspect else stall_s
        if silent_s > replace_s:
            log.error("the engine has not stepped for %.1f s; ending it", silent_s)
            engine.kill()
            raise EngineLostError("the engine was ended")
        if silent_s > patience_s and not service.withdrawn:
            log.error("the engine has not stepped for %.1f s; its jobs go on elsewhere", silent_s)
            engine.stalled = True
            # First, so that no job that is given back comes to this worker again.
            await service.withdraw()
            await claims.end_wait()
            handler.engine_stalled()
        elif silent_s <= patience_s and service.withdrawn:
            log.warning("the engine steps again")
            engine.stalled = False
            await service.restore()
