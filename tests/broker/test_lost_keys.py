"""Keys that are deleted or evicted: every job is claimed in the end, and no count is left over."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.liveness import Liveness
from loraplex.contracts.broker.messages import AdapterRef
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import (
    LOOKS_PER_CHECK,
    NO_KEY,
    KeyTerms,
    Placement,
    QueueLimits,
    QueueState,
    UsageReport,
)
from tests.broker.queued_jobs import KEYS, ROOMY, job

TENANTS = ("a", "b", "c")


class Cluster:
    """A router that dispatches missing jobs again, as the dispatcher does, and a worker."""

    def __init__(self, redis: Redis, chance: random.Random) -> None:
        self.redis = redis
        self.queue = JobQueue(redis, KEYS, worker_id="w")
        self.liveness = Liveness(redis, KEYS)
        self.chance = chance
        self.count = 0
        # Jobs with their attempts.
        self.waiting: dict[str, int] = {}
        self.running: dict[str, int] = {}

    async def enqueue(self) -> None:
        """Enqueue a new job."""
        self.count += 1
        name = f"{self.chance.choice(TENANTS)}{self.count}"
        self.waiting[name] = 1
        await self._enqueue(name)

    async def _enqueue(self, name: str) -> None:
        adapter = AdapterRef("r", "sha256:x", 8, 1) if name.endswith("3") else None
        new = job(name, tenant=name[0], attempt=self.waiting[name], adapter=adapter)
        key = KeyTerms("k", weight=2.0, queue_share=0.9) if name.endswith(("1", "2", "4")) else NO_KEY
        await self.queue.enqueue(replace(new, deadline_ms=60_000 * name.endswith("5")), Placement(key=key))

    async def look(self) -> None:
        """Dispatch again what is missing."""
        asked = list(self.waiting.items())
        for (name, attempt), state in zip(asked, await self.queue.look_up(asked), strict=True):
            if state is not QueueState.WAITS:
                self.waiting[name] = attempt + 1
                await self._enqueue(name)

    async def give_back(self) -> None:
        """Dispatch a running job again."""
        if self.running:
            name = self.chance.choice(list(self.running))
            attempt = self.running.pop(name)
            await self.queue.charge([UsageReport(name, attempt, 0, ended=True, ran=False)])
            self.waiting[name] = attempt + 1
            await self._enqueue(name)

    async def claim(self) -> None:
        """Claim a few jobs."""
        for taken in (await self.queue.claim("sha256:0", replace(ROOMY, rows=self.chance.randint(1, 4)))).jobs:
            assert self.waiting.pop(taken.job_id) == taken.attempt, "handed out twice, or an older attempt"
            self.running[taken.job_id] = taken.attempt

    async def finish(self) -> None:
        """End a running job, or one that waits."""
        jobs = self.waiting if self.chance.random() < 0.2 else self.running
        if jobs:
            name = self.chance.choice(list(jobs))
            attempt = jobs.pop(name)
            await self.queue.charge([UsageReport(name, attempt, 3, ended=True)])
            await self.queue.finish(name, attempt)

    async def census(self) -> None:
        """Let the router beat."""
        await self.liveness.take_census("127.0.0.1:1")

    async def delete(self) -> None:
        """Lose a key."""
        names = sorted(name for name in await self.redis.keys(KEYS.prefix + "*") if isinstance(name, bytes))
        if names:
            # Of each kind: most keys are those of jobs.
            kinds = {name.decode().removeprefix(KEYS.prefix).partition(":")[0] for name in names}
            kind = self.chance.choice(sorted(kinds))
            await self.redis.delete(self.chance.choice([n for n in names if n.decode().startswith(KEYS.prefix + kind)]))

    async def end_all(self) -> None:
        """Let every job be claimed and end, within a few looks."""
        for _ in range(3 * LOOKS_PER_CHECK):
            await self.look()
            await self.claim()
            await self.census()
        for name, attempt in self.running.items():
            await self.queue.finish(name, attempt)


@pytest.mark.parametrize("seed", range(2))
async def test_every_job_is_claimed_and_no_count_is_left(redis: Redis, seed: int) -> None:
    print(f"seed {seed}")
    cluster = Cluster(redis, random.Random(seed))
    operations = (
        (cluster.enqueue, 8),
        (cluster.claim, 4),
        (cluster.look, 3),
        (cluster.give_back, 1),
        (cluster.finish, 2),
        (cluster.census, 1),
        (cluster.delete, 3),
    )
    calls, weights = [call for call, _ in operations], [weight for _, weight in operations]
    for _ in range(300):
        (call,) = cluster.chance.choices(calls, weights)
        await call()
    await cluster.end_all()
    assert cluster.waiting == {}
    kept = (
        "arrivals",
        "arrived_work",
        "claimed_work",
        "demand",
        "news",
        "floor",
        "idle",
        "wake",
        "rooms",
        "routers",
        "born",
        "roll:",
        "passed_on",
        "charged",
    )
    left = {name.decode().removeprefix(KEYS.prefix) for name in await redis.keys("*") if isinstance(name, bytes)}
    assert {name for name in left if not name.startswith(kept)} == set()


@pytest.mark.parametrize("lost", ["job:a0", "queue:acme", "tenants", "waiting", "totals"])
async def test_what_lost_keys_leave_behind_blocks_nobody(redis: Redis, lost: str) -> None:
    size = 300
    limits = QueueLimits(jobs=9, tenant_jobs=6, tenant_bytes=6 * size, bytes=9 * size)
    queue = JobQueue(redis, KEYS, worker_id="w", limits=limits)
    for round_ in range(4):
        names = [f"{'ab'[number]}{round_}" for number in range(2)]
        for name in names:
            await queue.enqueue(job(name))
        await redis.delete(KEYS.prefix + lost.replace("0", str(round_)))
        for look in range(LOOKS_PER_CHECK):
            for name, state in zip(names, await queue.look_up([(name, 1) for name in names]), strict=True):
                if state is QueueState.ABSENT and look == 0:
                    await queue.enqueue(job(name, attempt=2))
        assert sorted(taken.job_id for taken in (await queue.claim("sha256:0", ROOMY)).jobs) == names
        await queue.claim("sha256:0", ROOMY)
        assert await redis.exists(KEYS.prefix + "totals", KEYS.waiting, KEYS.prefix + "tenants") == 0


async def test_no_router_is_taken_for_dead_when_their_list_is_lost(redis: Redis) -> None:
    queue = JobQueue(redis, KEYS, worker_id="w")
    await queue.enqueue(job("a"))
    await redis.delete(KEYS.prefix + "routers")
    assert [taken.job_id for taken in (await queue.claim("sha256:0", ROOMY)).jobs] == ["a"]
