"""Jobs that kill engines: a suspect gets a worker of its own, and a dead letter is kept of it, within bounds."""

from __future__ import annotations

from dataclasses import replace

from redis.asyncio import Redis

from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.messages import STRIKES_LIMIT, Capacity, DeadJob
from loraplex.contracts.broker.queue import DeadLetters
from loraplex.contracts.broker.terms import PATIENCE_MS
from tests.broker.clocked_queue import Clock, ClockedQueue, make_job

KEYS = Keys("tiny", "main")
IDLE = Capacity(rows=4, rows_limit=4, tokens=1000, max_tokens=1000, max_rank=8)


def dead_job(number: int, *, request_id: str = "r") -> DeadJob:
    return DeadJob(
        job_id=f"acme/{number}",
        request_id=request_id,
        tenant="acme",
        model="tiny",
        adapter_revision="tenants/acme/adapters/a/revisions/sha256:00",
        prompt_tokens=7,
        completion_tokens=3,
        attempts=4,
        reason="POISON_REQUEST",
        died_at_ms=1_700_000_000_000 + number,
    )


async def test_a_suspect_takes_all_rows_of_a_worker_that_has_nothing_else(clock: Clock) -> None:
    queue = ClockedQueue(clock.redis)
    await queue.start()
    suspect = replace(make_job("suspect", "acme", attempt=3), strikes=STRIKES_LIMIT)
    await queue.enqueue(suspect)
    await queue.enqueue(make_job("other", "globex"))
    busy = await queue.claim("busy", replace(IDLE, rows=3))
    assert [job.job_id for job in busy.jobs] == ["other"]
    await queue.enqueue(make_job("later", "globex"))
    idle = await queue.claim("idle", IDLE)
    assert idle.jobs == [suspect]
    assert [job.job_id for job in (await queue.claim("busy", replace(IDLE, rows=2))).jobs] == ["later"]


async def test_a_worker_makes_room_for_a_suspect_that_nobody_has_room_for(clock: Clock) -> None:
    queue = ClockedQueue(clock.redis)
    await queue.start()
    await queue.enqueue(replace(make_job("suspect", "acme", attempt=3), strikes=STRIKES_LIMIT))
    await queue.advance(PATIENCE_MS)
    assert not (await queue.claim("w", replace(IDLE, rows=2))).jobs  # but it is reserved from now on
    await queue.enqueue(make_job("other", "globex"))
    assert not (await queue.claim("w", replace(IDLE, rows=3))).jobs
    assert [job.job_id for job in (await queue.claim("w", IDLE)).jobs] == ["suspect"]


async def test_an_empty_worker_takes_a_suspect_before_all_others(clock: Clock) -> None:
    queue = ClockedQueue(clock.redis)
    await queue.start()
    await queue.enqueue(make_job("again", "globex", attempt=2))
    await queue.enqueue(replace(make_job("struck", "acme", attempt=2), strikes=1))
    assert [job.job_id for job in (await queue.claim("w", IDLE)).jobs] == ["struck"]
    assert [job.job_id for job in (await queue.claim("w", replace(IDLE, rows=3))).jobs] == ["again"]


async def test_one_worker_at_a_time_is_emptied_for_suspects(clock: Clock) -> None:
    queue = ClockedQueue(clock.redis)
    await queue.start()
    for name in ("one", "two"):
        await queue.enqueue(replace(make_job(name, "acme", attempt=2), strikes=1))
    await queue.advance(PATIENCE_MS)
    assert not (await queue.claim("emptied", replace(IDLE, rows=2))).jobs
    await queue.enqueue(make_job("other", "globex"))
    assert [job.job_id for job in (await queue.claim("busy", replace(IDLE, rows=2))).jobs] == ["other"]


async def test_dead_letters_come_back_whole_and_the_newest_first(redis: Redis) -> None:
    dead = DeadLetters(redis, KEYS)
    assert await dead.list() == []
    for number in range(3):
        await dead.push(dead_job(number))
    await dead.push(dead_job(2))  # a call whose answer was lost
    assert await dead.list() == [dead_job(2), dead_job(1), dead_job(0)]


async def test_dead_letters_are_bounded_in_count_and_bytes(redis: Redis) -> None:
    few = DeadLetters(redis, KEYS, limit=5)
    for number in range(12):
        await few.push(dead_job(number))
    assert await few.list() == [dead_job(number) for number in range(11, 6, -1)]
    small = DeadLetters(redis, KEYS, bytes_limit=1_000)
    for number in range(20):
        await small.push(dead_job(number, request_id="r" * 100))
    kept = [len(data) for data in await redis.lrange(KEYS.dead, 0, -1)]
    assert 900 - max(kept) < sum(kept) <= 1_000
    assert (await small.list())[0] == dead_job(19, request_id="r" * 100)


async def test_a_letter_that_cannot_be_read_hides_no_other(redis: Redis) -> None:
    dead = DeadLetters(redis, KEYS)
    await dead.push(dead_job(1))
    await redis.lpush(KEYS.dead, b"\xff\xff")
    assert await dead.list() == [dead_job(1)]
