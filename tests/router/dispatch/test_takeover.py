"""A worker that starts, and one that becomes a further home, takes an adapter over by warming: no job waits for it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis

from loraplex.contracts.broker.commands import Command, Verb
from loraplex.contracts.broker.functions import Library, shipped_functions
from loraplex.contracts.broker.homes import Roster, WorkerLoad
from loraplex.contracts.broker.liveness import Liveness
from loraplex.contracts.broker.messages import AdapterRef, AdapterRequest, WorkerState
from loraplex.contracts.broker.queue import JobQueue
from loraplex.router.catalog.cells import LiveWorkers
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.outbox import Placer
from tests.broker.test_liveness import worker
from tests.router.recording_link import KEYS, dispatched, job

ADAPTER = AdapterRef("r/sha256:x", "sha256:x", 8, 1000)
WARM = Command(Verb.WARM, AdapterRequest(ADAPTER, "acme"))
ROWS = 8


def ranked(*names: str) -> tuple[str, ...]:
    return Roster(WorkerLoad(name, 0, ROWS) for name in names).preferred(ADAPTER.digest).workers


def state(name: str, *, has: bool, used: int = 0) -> WorkerState:
    """A worker's state; it has three free slots at least."""
    changes: Any = {
        "rows_running": used,
        "rows_waiting": 0,
        "rows_limit": ROWS,
        "slots_total": 4,
        "slots_used": int(has),
    }
    changes |= {"adapters": (ADAPTER.digest,) * has, "max_rank": 64, "max_tokens": 4096}
    return replace(worker(name), **changes)


class Router:
    """The part of a router that places jobs, by its last census."""

    def __init__(self, redis: Redis) -> None:
        self.redis, self.queue = redis, JobQueue(redis, KEYS)
        self.liveness = Liveness(redis, KEYS, library=Library(shipped_functions(ROLL_MS=0)))
        self.live = LiveWorkers(time.monotonic)
        placer = Placer(lambda *_: self.live.of("tiny") or [], lambda _: 1.0, 0.0, homes_of=self.live.homes_of)
        self.dispatcher = Dispatcher(lambda *_: self.queue, placer.place)

    async def look(self, *states: WorkerState) -> None:
        """Look at the workers after their beats: twice, since a census is told of the load that the last one found."""
        for one in states:
            await self.liveness.beat(one)
        for _ in range(2):
            await self.live.look({("tiny", "main"): self.liveness}, "here")

    async def firsts(self, count: int = 4) -> list[str]:
        """Dispatch jobs; return the worker that each prefers to all others."""
        firsts = []
        for number in range(count):
            async with dispatched(self.dispatcher, replace(job(f"j{number}"), adapter=ADAPTER)) as routed:
                firsts.append(routed.placement.prefer[0])
        return firsts

    async def is_warming(self, name: str) -> bool:
        """Tell whether a worker has been told once to load the adapter."""
        command = await self.queue.commands.next(f"{name}-inc", timeout_s=10)
        return command == WARM and not await self.redis.exists(KEYS.commands(f"{name}-inc"))


async def test_a_new_worker_is_warmed_before_jobs_prefer_it(redis: Redis) -> None:
    router, (new, old) = Router(redis), ranked("w1", "w2")
    await router.look(state(old, has=True))
    assert {*await router.firsts()} == {old}
    await router.look(state(new, has=False))
    assert {*await router.firsts()} == {old}
    assert await router.is_warming(new)
    await router.look(state(new, has=True))
    assert {*await router.firsts()} == {new}
    assert not await redis.exists(KEYS.commands(f"{old}-inc"))


async def test_homes_are_added_by_warming_and_given_up(redis: Redis) -> None:
    router, (first, *others) = Router(redis), ranked("w1", "w2", "w3")
    await router.look(*(state(name, has=name == first, used=ROWS // 4) for name in (first, *others)))
    assert {*await router.firsts()} == {first}
    await router.look()  # these jobs have all of the demand, for as many rows as three homes should have
    assert {*await router.firsts()} == {first}
    assert [await router.is_warming(name) for name in others] == [True, True]
    await router.look(*(state(name, has=True, used=ROWS // 4) for name in others))
    assert {*await router.firsts(6)} == {first, *others}
    await router.look(*(state(name, has=True) for name in (first, *others)))
    assert {*await router.firsts()} == {first}, "the workers are idle"
