"""Wake-ups reach a worker that can use them, and a backlog that suits nobody costs Redis next to nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from redis.asyncio import Redis

from loraplex.contracts.broker import terms
from loraplex.contracts.broker.claims import LOOKS_LIMIT, ClaimMemory
from loraplex.contracts.broker.messages import Capacity
from loraplex.contracts.broker.queue import JobQueue
from tests.broker.queued_jobs import KEYS, ROOMY, claim, job

SMALL = replace(ROOMY, max_tokens=5)
NARROW = replace(ROOMY, tokens=0)
BASES = ("sha256:0", "sha256:1")


async def parked(redis: Redis, count: int) -> None:
    """Wait until so many clients wait for a wake-up."""
    async with asyncio.timeout(30):
        while int((await redis.info("clients"))["blocked_clients"]) < count:  # noqa: ASYNC110 — nobody tells
            await asyncio.sleep(0.002)


async def commands(redis: Redis) -> int:
    """Return how many commands the server has run, those of functions included."""
    stats = await redis.info("commandstats")
    return sum(int(stat["calls"]) for name, stat in stats.items() if name != "cmdstat_info")


async def test_a_wake_up_reaches_the_one_worker_that_can_use_it(redis: Redis) -> None:
    async def wait(name: str, base: str, capacity: Capacity) -> list[str]:
        queue = JobQueue(redis, KEYS, worker_id=name)
        while True:
            claimed = await queue.claim(base, capacity, wait_s=60.0)
            if claimed.jobs:
                return [taken.job_id for taken in claimed.jobs]

    useless = [("small", BASES[0], SMALL), ("narrow", BASES[0], NARROW), ("other", BASES[1], ROOMY)]
    waiting = []
    for number, (name, base, capacity) in enumerate([*useless, ("fits", *useless[0][1:2], ROOMY)]):
        waiting.append(asyncio.create_task(wait(name, base, capacity)))
        await parked(redis, number + 1)  # the longest wait is woken first
    await JobQueue(redis, KEYS).enqueue(job("a"))
    async with asyncio.timeout(60):
        assert await waiting[-1] == ["a"]
    assert not any(task.done() for task in waiting[:-1])
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_wake_ups_are_passed_on_after_the_clock_went_back(redis: Redis) -> None:
    await redis.set(f"{KEYS.prefix}passed_on", terms.PASSED_ON_LIMIT, px=600_000)
    worker = JobQueue(redis, KEYS, worker_id="w")
    await JobQueue(redis, KEYS).enqueue(job("large", prompt_ids=tuple(range(50))))
    assert not (await worker.claim(BASES[0], SMALL, wait_s=1.0)).jobs
    assert await redis.llen(KEYS.wake) == 1
    assert 0 < await redis.pttl(f"{KEYS.prefix}passed_on") <= terms.PASSED_ON_MS


async def test_a_wake_up_that_nobody_can_use_ends(redis: Redis) -> None:
    queues = [JobQueue(redis, KEYS, worker_id=f"w{number}") for number in range(3)]
    await JobQueue(redis, KEYS).enqueue(job("large", prompt_ids=tuple(range(50))))
    passed_on = 0
    while await redis.lpop(KEYS.wake):
        for queue in queues:
            await redis.lpush(KEYS.wake, 1)
            assert not (await queue.claim("sha256:0", SMALL, wait_s=10.0)).jobs
        passed_on += 1
        assert passed_on <= 2
    assert passed_on == 2  # all have looked at it once


async def test_a_worker_rests_from_a_backlog_that_does_not_suit_it(redis: Redis) -> None:
    now_s = 0.0
    router, worker = JobQueue(redis, KEYS), JobQueue(redis, KEYS, memory=ClaimMemory(lambda: now_s))
    for number in range(200):
        await router.enqueue(job(f"old-{number}", tenant=f"t{number % 20}", base_digest="sha256:old"))
    before = await commands(redis)
    assert await claim(worker) == []
    full = await commands(redis) - before
    for _ in range(10):
        assert await claim(worker) == []
    rested = (await commands(redis) - before - full) / 10
    assert full > 200
    assert rested < 20
    # Newcomers are seen at once, whatever waits before them; also one that comes back.
    await router.enqueue(job("new"))
    await router.enqueue(job("again", attempt=2))
    assert await claim(worker) == ["new", "again"]
    # A worker with other limits looks at all jobs, and so does this one after its rest.
    await router.enqueue(job("newer"))
    assert await claim(worker, rows=0) == []
    assert await claim(worker, max_tokens=4_000) == ["newer"]
    before = await commands(redis)
    now_s += 3_600
    assert await claim(worker) == []
    assert await commands(redis) - before > 200


async def test_newcomers_beyond_the_windows_of_a_full_claim_are_seen(redis: Redis) -> None:
    router, worker = JobQueue(redis, KEYS), JobQueue(redis, KEYS, worker_id="w")
    for number in range(terms.SCANS_PER_CLAIM * terms.PASSES_PER_SCAN):
        await router.enqueue(job(f"old-{number}", tenant=f"t{number:03}", base_digest="sha256:old"))
    await router.enqueue(job("new", tenant="z"))
    assert await claim(worker) == ["new"]


def test_the_rest_grows_with_what_was_looked_at_and_with_the_workers() -> None:
    now_s = 0.0
    memory = ClaimMemory(lambda: now_s, rest_per_look_s=0.001)

    def rests() -> bool:
        return memory.plan("sha256:0", ROOMY, freed=False).news_only

    def look(looks: int, workers: int, *, freed: bool = False, found: bool = False, seen: int = 7) -> None:
        plan = memory.plan("sha256:0", ROOMY, freed=freed)
        memory.note(plan, ROOMY, jobs_found=found, seen=seen, looks=looks, live_workers=workers)

    def rests_for(looks: int, workers: int) -> float:
        nonlocal now_s
        now_s += 1_000
        look(looks, workers)
        began = now_s
        while rests():
            now_s += 0.01
        return now_s - began

    assert rests_for(LOOKS_LIMIT, 50) == 0
    assert 0.99 < rests_for(100, 10) < 1.02
    assert 1.99 < rests_for(100, 20) < 2.02
    look(100, 10, seen=9)
    # Freed capacity is worth one scan; a full worker does not rest; a job that was found by a full look ends the rest.
    freed = memory.plan("sha256:0", ROOMY, freed=True)
    assert (freed.news_only, freed.scans, freed.seen) == (False, 1, 9)
    assert not memory.plan("sha256:0", replace(ROOMY, rows=0), freed=False).news_only
    look(1, 10, found=True)
    assert rests()
    look(1, 10, freed=True, found=True)
    assert not rests()
    # Another kind of jobs, for example of a router to which a link has come up, was not looked at.
    look(100, 10)
    linked = memory.plan("sha256:0", replace(ROOMY, routers=("here",)), freed=False)
    assert (linked.news_only, linked.seen) == (False, 0)
