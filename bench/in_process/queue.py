"""A cell's queue at a time that its caller sets: the broker's own class, on a Redis in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from bench.in_process.redis import Client, Server
from loraplex.contracts.broker.claims import ClaimMemory
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.liveness import Census, Liveness
from loraplex.contracts.broker.messages import Capacity, Job
from loraplex.contracts.broker.queue import DeadlineUnattainableError, JobQueue, QuarantinedError, QueueFullError
from loraplex.contracts.broker.terms import Claimed, Placement, QueueLimits, UsageReport

T = TypeVar("T")

# Time in ms by the server's clock at the time 0 of its caller.
START_MS = 1_700_000_000_000
_KEYS = Keys("model", "main")


class TimedQueue:
    """A queue whose calls take no time; workers never rest."""

    def __init__(self, limits: QueueLimits | None = None) -> None:
        self._now_ms = 0
        self._loop = asyncio.new_event_loop()
        self._limits = limits
        self._client = Client(Server(lambda: START_MS + self._now_ms))
        self._queues: dict[str, JobQueue] = {}
        self._liveness = Liveness(self._client, _KEYS)

    def _queue(self, worker: str = "") -> JobQueue:
        if worker not in self._queues:
            memory = ClaimMemory(looks_limit=1 << 60)
            self._queues[worker] = JobQueue(self._client, _KEYS, limits=self._limits, worker_id=worker, memory=memory)
        return self._queues[worker]

    def _run(self, call: Coroutine[Any, Any, T], now_ms: float) -> T:
        self._now_ms = max(self._now_ms, int(now_ms))
        return self._loop.run_until_complete(call)

    def enqueue(self, job: Job, placement: Placement, now_ms: float) -> str:
        """Put a job into the queue; return why it was refused, empty where it was not."""
        try:
            self._run(self._queue().enqueue(job, placement), now_ms)
        except (QueueFullError, DeadlineUnattainableError, QuarantinedError) as error:
            return str(error)
        return ""

    def claim(self, worker: str, base_digest: str, capacity: Capacity, now_ms: float) -> Claimed:
        """Take the next jobs that suit a worker."""
        return self._run(self._queue(worker).claim(base_digest, capacity), now_ms)

    def charge(self, reports: Sequence[UsageReport], now_ms: float) -> None:
        """Charge tenants what their jobs have made since the last report."""
        self._run(self._queue().charge(reports), now_ms)

    def finish(self, job_id: str, attempt: int, now_ms: float) -> None:
        """Forget a job, up to this attempt."""
        self._run(self._queue().finish(job_id, attempt), now_ms)

    def take_census(self, busy: float, now_ms: float) -> Census:
        """Take a census, as a router does; see Liveness."""
        return self._run(self._liveness.take_census(busy=busy), now_ms)

    def count_waiting(self, now_ms: float) -> int:
        """Return how many jobs wait."""
        return self._run(self._queue().count_waiting(), now_ms)

    def close(self) -> None:
        """Close the loop."""
        self._loop.close()
