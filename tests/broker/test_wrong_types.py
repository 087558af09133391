"""Test keys of another type that all cells share: a router that finds one sets it aside and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis

from broker.keys import LEDGER, RESUME_KEYS, merge_resume_keys
from broker.ledger import Ledger, Reservation
from broker.queue import JobQueue, QueueFullError
from broker.terms import LOOKS_PER_CHECK, QueueLimits, QueueState
from tests.broker.queued_jobs import KEYS, claim, job
from tests.broker.role_clients import role_clients


async def _resume_keys(redis: Redis) -> list[str]:
    return await merge_resume_keys(redis, "made", [])


async def _charged(redis: Redis) -> list[str]:
    ledger = Ledger(redis)
    await ledger.fill([], [], closes=False)
    one = await ledger.reserve(Reservation("r", "acme", 1, 1, "{}"), None, {"acme": {}})
    one.use(1, 1)
    one.open = False
    await ledger.tell([one], renews=True)
    return [counts.name for counts in ledger.unsaved.values()]


@pytest.mark.parametrize(
    ("key", "use", "found"),
    [
        (RESUME_KEYS, _resume_keys, ["made"]),
        *((LEDGER + name, _charged, ["acme"]) for name in ("state", "routers", "usage", "account:acme")),
    ],
)
async def test_a_key_of_another_type_is_set_aside(
    redis: Redis, valkey_url: str, key: str, use: Callable[[Redis], Awaitable[list[str]]], found: list[str]
) -> None:
    if key == RESUME_KEYS:
        await redis.hset(key, "x", "y")
    else:
        await redis.rpush(key, "x")
    async with role_clients(redis, valkey_url) as (of_router, _):
        assert await use(of_router) == found
    assert await redis.exists(f"{key}:aside")
    assert key == RESUME_KEYS or await redis.xlen(LEDGER + "usage") == 1
    assert await redis.pttl(f"{key}:aside") > 0


async def test_routers_that_find_a_key_of_another_type_together_set_it_aside_once(redis: Redis) -> None:
    await asyncio.gather(*(redis.hset(RESUME_KEYS, "x", "y") for _ in range(8)))  # each has a connection of its own
    merges = [merge_resume_keys(redis, f"made {number}", []) for number in range(8)]
    (found, *others) = await asyncio.gather(*merges)
    assert others == [found] * 7
    assert await redis.hgetall(f"{RESUME_KEYS}:aside") == {b"x": b"y"}


async def test_a_queue_of_another_type_stops_no_other_tenant_before_a_census_finds_it(redis: Redis) -> None:
    queue = JobQueue(redis, KEYS, worker_id="w", limits=QueueLimits(jobs=3))
    await queue.enqueue(job("late", tenant="a", deadline_ms=1))
    for name in ("a1", "a2"):
        await queue.enqueue(job(name, tenant="a"))
    await redis.set(KEYS.prefix + "queue:a", "x")
    with pytest.raises(QueueFullError):  # the queue has no last job of the tenant that uses most of it
        await queue.enqueue(job("b1", tenant="b"))
    await queue.finish("a1", 1)
    await queue.enqueue(job("b1", tenant="b"))
    states = await queue.look_up([(name, 1) for name in ("a2", "b1") for _ in range(LOOKS_PER_CHECK)])
    assert set(states) == {QueueState.WAITS}
    assert "b1" in await claim(queue)
