"""Test the entries of new jobs: made while something else is waited for, once, and not after it has failed."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from broker.messages import Job
from broker.queue import JobQueue
from broker.queue_entry import Entry
from broker.terms import Placement
from router.dispatch.dispatcher import PreparedEntry
from tests.broker.both_queues import KEYS, make_job

JOB = make_job("j", "acme")
# Passes of the event loop until an entry is made.
PASSES = 3


class Made:
    """The entries that a queue has made of JOB."""

    def __init__(self) -> None:
        self.count = 0
        self.early = PreparedEntry(JobQueue(Redis(), KEYS), JOB, self._place)  # Redis is not asked

    def _place(self, job: Job) -> Placement:
        self.count += 1
        return Placement(weight=2.0)


@pytest.mark.parametrize("waits", [True, False])
async def test_an_entry_is_made_once_at_the_latest_when_it_is_taken(waits: bool) -> None:
    made = Made()
    with made.early as early:
        for _ in range(PASSES if waits else 0):
            await asyncio.sleep(0)
        assert made.count == int(waits)
        placement = Placement(weight=2.0)
        assert early.take() == early.take() == (placement, Entry.from_job(JOB, placement))
    for _ in range(PASSES):
        await asyncio.sleep(0)
    assert made.count == 1


async def test_no_entry_is_made_of_a_refused_job() -> None:
    made = Made()
    with pytest.raises(LookupError), made.early:
        raise LookupError
    for _ in range(PASSES):
        await asyncio.sleep(0)
    assert made.count == 0
