"""Test jobs that are sent to Redis together with their reservations: one that is refused is not in the queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from loraplex.contracts.broker.keys import LEDGER
from loraplex.contracts.broker.ledger import (
    Ledger,
    LedgerUnreadyError,
    QuotaReachedError,
    Reservation,
    ReserveCall,
)
from loraplex.contracts.broker.queue import JobQueue, QueueFullError, UnreservedError
from loraplex.contracts.broker.terms import QueueLimits
from tests.broker.clocked_queue import KEYS, make_job
from tests.broker.test_functions import round_trips

ROOMY, NARROW = {"tokens_per_day": 1000}, {"tokens_per_day": 10}


class Router:
    """Reserves and enqueues; `error` is what the last enqueue raised."""

    def __init__(self, redis: Redis, limits: QueueLimits | None = None) -> None:
        self.queue, self.ledger = JobQueue(redis, KEYS, limits=limits), Ledger(redis, router="router-a")
        self.error: Exception | None = None

    async def reserve(self, limits: Mapping[str, int]) -> Reservation:
        """Reserve tokens, and enqueue a job with them."""

        async def send(call: ReserveCall) -> None:
            try:
                await self.queue.enqueue(make_job("j", "acme"), reserve=call)
            except (UnreservedError, QueueFullError) as error:
                self.error = error

        return await self.ledger.reserve(Reservation("r", "acme", 10, 50), None, {"acme": limits}, send)


async def test_a_job_and_its_reservation_go_in_one_round_trip(redis: Redis) -> None:
    router = Router(redis)
    await router.ledger.fill([], closes=False)  # loads the functions
    before = await round_trips(redis)
    reservation = await router.reserve(ROOMY)
    assert await round_trips(redis) - before == 2  # this question is the other
    assert (reservation.input, reservation.output, reservation.resumes) == (10, 50, 0)
    assert await router.queue.count_waiting() == 1


async def test_a_job_whose_reservation_is_refused_is_not_queued(redis: Redis) -> None:
    router = Router(redis)
    with pytest.raises(LedgerUnreadyError):
        await router.reserve(ROOMY)
    await router.ledger.fill([], closes=False)
    with pytest.raises(QuotaReachedError, match="tokens_per_day"):
        await router.reserve(NARROW)
    assert isinstance(router.error, UnreservedError)
    assert await router.queue.count_waiting() == 0
    assert await redis.keys(KEYS.prefix + "*") == []


async def test_a_reservation_is_granted_though_its_job_is_refused(redis: Redis) -> None:
    router = Router(redis, replace(QueueLimits(), jobs=0))
    await router.ledger.fill([], closes=False)
    await router.reserve(ROOMY)
    assert isinstance(router.error, QueueFullError)
    assert await redis.scard(LEDGER + "held:router-a") == 1


async def test_a_server_that_has_lost_its_functions_gets_both_calls_again(redis: Redis) -> None:
    router = Router(redis)
    await router.ledger.fill([], closes=False)
    await redis.function_flush()
    await router.reserve(ROOMY)
    assert await router.queue.count_waiting() == 1


async def test_a_full_server_refuses_the_reservation_first(redis: Redis) -> None:
    router = Router(redis)
    await router.ledger.fill([], closes=False)
    await router.reserve(ROOMY)
    await redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(OutOfMemoryError):
            await router.reserve(ROOMY)
        assert isinstance(router.error, QueueFullError)
    finally:
        await redis.config_set("maxmemory", 0)
