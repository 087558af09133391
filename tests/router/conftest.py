"""Fixtures that tests of the router share."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from broker.queue import JobQueue
from broker.terms import Placement
from router.dispatch.dispatcher import Dispatcher
from tests.router.recording_link import KEYS


@pytest.fixture
def queue(redis: Redis) -> JobQueue:
    return JobQueue(redis, KEYS)


@pytest.fixture
def dispatcher(queue: JobQueue) -> Dispatcher:
    return Dispatcher(lambda model: queue, lambda job: Placement())
