"""The broker's classes for the processes of the simulated cluster, as far as a simulation needs more of them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from loraplex.contracts.broker.claims import ClaimMemory, Claims
from loraplex.contracts.broker.functions import LIBRARY
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.ledger import Ledger
from loraplex.contracts.broker.messages import Job, decode_job
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import Entry, Placement, QueueLimits
from loraplex.usage_events.log import WRITE_S
from tests.simulation.loop import NODE
from tests.simulation.redis import HELD, SimulatedClient, SimulatedRedis


def break_library(monkeypatch: pytest.MonkeyPatch, text: str, broken: str) -> None:
    """Replace a text of the shipped library, so that an invariant does not hold."""
    assert text in LIBRARY.text
    monkeypatch.setattr(LIBRARY, "text", LIBRARY.text.replace(text, broken))


class SimulatedSeals:
    """A worker's seals, which hide nothing, and are as good as others until they are too old."""

    def __init__(self, redis: SimulatedRedis, worker: str) -> None:
        self._redis, self._worker = redis, worker

    def look(self) -> bool:
        """See Seals."""
        return False

    def open_job(self, prefix: str, body: bytes, facts: bytes) -> Job:
        """See Seals."""
        self._redis.check_seal(self._worker, body)
        return decode_job(body)


class SimulatedQueue(JobQueue):
    """A queue with simulated seals."""

    def __init__(
        self,
        redis: SimulatedClient,
        keys: Keys,
        *,
        limits: QueueLimits | None = None,
        worker_id: str = "",
        seals: None = None,
    ) -> None:
        # Few jobs wait here at a time: workers rest after a few of them.
        memory = ClaimMemory(looks_limit=2, rest_per_look_s=0.02)
        limits = redis.simulated.limits or limits
        super().__init__(redis, keys, limits=limits, worker_id=worker_id, memory=memory)
        self._simulated = redis.simulated
        opener: Any = SimulatedSeals(redis.simulated, worker_id)
        self._claims = Claims(redis, keys, worker_id, LIBRARY, memory, opener)

    def make_entry(self, job: Job, placement: Placement) -> Entry:
        """See JobQueue."""
        entry = super().make_entry(job, placement)
        self._simulated.jobs[entry.body] = job
        return entry

    async def renew(self, job: Job, placement: Placement) -> None:
        """See JobQueue."""
        entry = self.make_entry(job, placement)
        await self._renew([job.attempt, entry.body, entry.wanted], self.keys.job(job.job_id))


class SimulatedUsage:
    """Stands in for loraplex.usage_events.log.UsageLog: the events that it reads are on the disk at once."""

    def __init__(self, redis: SimulatedRedis) -> None:
        self._redis = redis

    async def write(self) -> None:
        """Read what waits."""
        with contextlib.suppress(RedisConnectionError):
            await self._redis.send(((self._redis.read_usage,),))

    async def close(self, timeout_s: float) -> None:
        """Read what waits, for the last time."""
        await self.write()

    async def follow(self) -> None:
        """Read again and again; never returns."""
        while True:
            await self.write()
            await asyncio.sleep(WRITE_S)


class SimulatedLedger(Ledger):
    """A ledger whose calls are noted with what is known here of their callers."""

    def __init__(self, redis: SimulatedClient) -> None:
        super().__init__(redis)
        self._callers = redis.simulated.callers

    def _pack(self, **message: Any) -> bytes:
        packed = super()._pack(**message)
        self._callers[packed] = NODE.get(), HELD.get(), asyncio.get_running_loop().time()
        return packed
