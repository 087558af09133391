"""Whether the engine steps: its step beat, watched apart from everything that could wait for somebody."""

from __future__ import annotations

import asyncio
import logging
import time

from worker.presence import Presence
from worker.supervisor import EngineLostError, EngineProcess

log = logging.getLogger(__name__)

LOOK_S = 0.1


async def watch_steps(engine: EngineProcess, presence: Presence, stall_s: float, replace_s: float) -> None:
    """Forever: after `stall_s` of silence this worker is none, after `replace_s` its engine is ended.

    An engine is never silent: it tells every step, and without work that it lives. Raises EngineLostError.
    """
    looked_at = time.monotonic()
    while True:
        await asyncio.sleep(LOOK_S)
        now = time.monotonic()
        if now - looked_at > 5 * LOOK_S:  # it was we who stood still: what it said meanwhile is still unread
            engine.expect()
        looked_at = now
        silent_s = engine.silent_s()
        if silent_s > replace_s:
            log.error("the engine has not stepped for %.1f s; ending it", silent_s)
            engine.kill()
            raise EngineLostError("the engine was ended")
        if silent_s > stall_s and not presence.withdrawn:
            log.error("the engine has not stepped for %.1f s; this worker takes no work", silent_s)
            engine.stalled = True
            await presence.withdraw()
        elif silent_s <= stall_s and presence.withdrawn:
            log.warning("the engine steps again")
            engine.stalled = False
            await presence.come_back()
