"""Fixtures that tests of the router share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.ledger import Ledger
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import Placement
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.quotas.plans import Plans
from loraplex.router.quotas.quotas import Quotas
from tests.router.recording_link import KEYS


@pytest.fixture
def queue(redis: Redis) -> JobQueue:
    return JobQueue(redis, KEYS)


@pytest.fixture
async def dispatcher(queue: JobQueue) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(lambda *_: queue, lambda *_: Placement())
    yield dispatcher
    # A task that is still pending when its loop closes would fail a later test.
    await dispatcher.drain_tasks()


@pytest.fixture
def quotas(redis: Redis) -> Quotas:
    """Quotas without a plan: nobody has a limit."""
    return Quotas(Ledger(redis), Plans())
