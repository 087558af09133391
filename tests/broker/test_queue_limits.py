"""Limits of the queue, and a server that is out of memory."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.messages import encode_record
from loraplex.contracts.broker.queue import JobQueue, QueueFullError
from loraplex.contracts.broker.terms import Placement, QueueLimits
from tests.broker.queued_jobs import KEYS, claim, job


@pytest.fixture
def queue(redis: Redis) -> JobQueue:
    return JobQueue(redis, KEYS)


async def test_a_full_queue_refuses_newcomers_only(redis: Redis) -> None:
    queue = JobQueue(redis, KEYS, limits=QueueLimits(jobs=2, tenant_jobs=1))
    await queue.enqueue(job("a"))
    with pytest.raises(QueueFullError, match="1 jobs may wait of acme") as refused:
        await queue.enqueue(job("b"))
    assert refused.value.tenant == "acme"
    await queue.enqueue(job("b", tenant="beta"))
    with pytest.raises(QueueFullError, match="2 jobs may wait") as refused:
        await queue.enqueue(job("c", tenant="carol"))
    assert refused.value.tenant == ""
    await queue.enqueue(job("c", attempt=2))


async def test_a_tenant_may_have_a_smaller_share_of_the_queue(redis: Redis) -> None:
    queue = JobQueue(redis, KEYS, limits=QueueLimits(jobs=8, tenant_jobs=4))
    for share, allowed in ((0.01, 1), (0.25, 2), (0.9, 4)):
        placement, tenant = Placement(queue_share=share), f"t{allowed}"
        for number in range(allowed):
            await queue.enqueue(job(f"{tenant}-{number}", tenant=tenant), placement)
        with pytest.raises(QueueFullError, match=f"{allowed} jobs may wait of {tenant}"):
            await queue.enqueue(job(f"{tenant}-more", tenant=tenant), placement)


async def test_a_queue_is_bounded_in_bytes_and_what_leaves_counts_no_more(redis: Redis) -> None:
    size = len(encode_record(job("a")))
    queue = JobQueue(redis, KEYS, limits=QueueLimits(bytes=3 * size, tenant_bytes=2 * size))
    await queue.enqueue(job("a"))
    await queue.enqueue(job("b"))
    with pytest.raises(QueueFullError, match=f"{2 * size} bytes may wait of acme"):
        await queue.enqueue(job("c"))
    await queue.enqueue(job("c", tenant="abcd"))
    with pytest.raises(QueueFullError, match=f"{3 * size} bytes may wait"):
        await queue.enqueue(job("d", tenant="abcd"))
    await queue.finish("a", 1)
    await queue.enqueue(job("d"))
    assert sorted(await claim(queue)) == ["b", "c", "d"]
    assert await redis.exists(KEYS.prefix + "totals") == 0


async def test_out_of_memory_refuses_new_jobs_but_not_claims(redis: Redis, queue: JobQueue) -> None:
    await queue.enqueue(job("a"))
    await redis.config_set("maxmemory", "1")
    try:
        with pytest.raises(QueueFullError, match="out of memory"):
            await queue.enqueue(job("b"))
        assert await claim(queue) == ["a"]
        await queue.finish("a", 1)
    finally:
        await redis.config_set("maxmemory", "0")
