"""Jobs that go into the queue together with their reservations: both, or neither."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.keys import LEDGER
from loraplex.contracts.broker.ledger import Asked, Ledger, LedgerUnreadyError, QuotaReachedError, Reservation
from loraplex.contracts.broker.queue import ADMITTED_TOKENS, JobQueue, QueueFullError, RedisFullError
from loraplex.contracts.broker.terms import Placement, QueueLimits
from tests.broker.clocked_queue import KEYS, make_job
from tests.broker.test_functions import round_trips

ROOMY, NARROW = {"tokens_per_day": 1000}, {"tokens_per_day": 10}


class Router:
    """Admits a job."""

    def __init__(self, redis: Redis, limits: QueueLimits | None = None) -> None:
        self.queue, self.ledger = JobQueue(redis, KEYS, limits=limits), Ledger(redis, router="router-a")

    def asked(self, limits: Mapping[str, int] = ROOMY, received: int | None = None) -> Asked:
        """Return what the job asks for."""
        return Asked(self.ledger, Reservation("r", "acme", 10, 50), received, {"acme": limits})

    async def admit(self, limits: Mapping[str, int] = ROOMY) -> Reservation:
        """Reserve tokens, and enqueue a job with them."""
        return await self.queue.admit(make_job("j", "acme"), Placement(), self.asked(limits))


async def test_a_job_and_its_reservation_go_in_one_round_trip(redis: Redis) -> None:
    router = Router(redis)
    await router.ledger.fill([], closes=False)  # loads the functions
    before = await round_trips(redis)
    reservation = await router.admit()
    assert await round_trips(redis) - before == 2  # this question is the other
    assert (reservation.input, reservation.output, reservation.resumes) == (10, 50, 0)
    assert await router.queue.count_waiting() == 1


async def test_a_job_whose_reservation_is_refused_is_not_queued(redis: Redis) -> None:
    router = Router(redis)
    with pytest.raises(LedgerUnreadyError):
        await router.admit()
    await router.ledger.fill([], closes=False)
    with pytest.raises(QuotaReachedError, match="tokens_per_day"):
        await router.admit(NARROW)
    assert await router.queue.count_waiting() == 0
    assert await redis.keys(KEYS.prefix + "*") == []


async def test_nothing_is_reserved_for_a_job_that_the_queue_refuses(redis: Redis) -> None:
    router = Router(redis, replace(QueueLimits(), jobs=0))
    await router.ledger.fill([], closes=False)
    with pytest.raises(QueueFullError):
        await router.admit()
    assert await redis.keys(LEDGER + "of:*") == await redis.keys(LEDGER + "held:*") == []


async def test_a_job_that_is_admitted_again_is_there_once(redis: Redis) -> None:
    router = Router(redis)
    await router.ledger.fill([], closes=False)
    first, again = await router.admit(), await router.admit()
    assert [one.left for one in first.room] == [one.left for one in again.room] == [940]
    assert msgspec.structs.replace(first, room=[]) == msgspec.structs.replace(again, room=[])
    assert await router.queue.count_waiting() == await redis.scard(LEDGER + "held:router-a") == 1


async def test_a_server_that_has_lost_its_functions_gets_the_call_again(redis: Redis) -> None:
    router = Router(redis)
    await router.ledger.fill([], closes=False)
    await redis.function_flush()
    await router.admit()
    assert await router.queue.count_waiting() == 1


async def test_a_full_server_refuses_both(redis: Redis) -> None:
    router = Router(redis)
    await router.ledger.fill([], closes=False)
    await redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(RedisFullError):
            await router.admit()
    finally:
        await redis.config_set("maxmemory", 0)
    assert not await router.queue.count_waiting()
    assert not await redis.exists(LEDGER + "of:r")


async def test_long_or_resumed_jobs_and_those_of_other_servers_take_two_steps(redis: Redis) -> None:
    router, job = Router(redis), make_job("j", "acme")
    assert router.queue.admits(job, router.asked())
    assert not router.queue.admits(job, router.asked(received=0))
    assert not router.queue.admits(replace(job, prompt_ids=(0,) * (ADMITTED_TOKENS + 1)), router.asked())
    assert not router.queue.admits(job, replace(router.asked(), ledger=Ledger(Redis())))
