"""What a worker claims from the queue: whatever there is room for, as soon as there is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from broker.connection import REDIS_DOWN
from broker.messages import AdapterRequest, Capacity, Job
from broker.queue import JobQueue
from broker.terms import Claimed
from worker.io.engine_client.process import EngineProcess
from worker.io.jobs.usage import UsageLog
from worker.io.local_jobs.jobs import LocalJobs
from worker.io.metrics import WorkerMetrics
from worker.ipc import Ready

log = logging.getLogger(__name__)

# An idle worker looks at the queue this often even when nobody wakes it, and a full one at what it may prefetch.
IDLE_S = 1.0
LOOK_S = 1.0
# A worker that could not take what waits looks again so soon: something it can take may have come.
FIT_S = 0.1
# A job that has waited so long for its adapter lends its row.
LATE_S = 0.5
# After no answer from Redis.
PAUSE_S = 0.1


class Claims:
    """One incarnation's claims. `limits` and `stats` are the engine's, and known before anything is claimed.

    `accept` is called with the jobs of a claim, `prefetch` with the adapters that many wait for.
    """

    def __init__(
        self,
        base_digest: str,
        queue: JobQueue,
        held: LocalJobs,
        usage: UsageLog,
        engine: EngineProcess,
        accept: Callable[[Sequence[Job]], None],
        prefetch: Callable[[Sequence[AdapterRequest]], None],
        metrics: WorkerMetrics,
    ) -> None:
        self._base_digest = base_digest
        self._queue = queue
        self._held = held
        self._usage = usage
        self._engine = engine
        self._accept = accept
        self._prefetch = prefetch
        self._metrics = metrics
        self._changed = asyncio.Event()
        self._claiming: asyncio.Task[Claimed] | None = None

    def use(self, ready: Ready) -> None:
        """What the engine can take."""
        self.limits = ready.limits
        self.stats = ready.stats

    def changed(self) -> None:
        """There may be more room than there was, or less is held."""
        self._changed.set()

    async def change(self) -> None:
        """Wait for the next one."""
        self._changed.clear()
        await self._changed.wait()

    async def run(self) -> None:
        """Forever: claim whatever there is room for."""
        while True:
            self._changed.clear()
            capacity = self._capacity()
            full = capacity.rows <= 0
            if full and await self._changes_within(LOOK_S):
                continue
            try:
                # Of a full worker a claim only tells what waits. What the queue has given away comes in, though we
                # are told to stop meanwhile.
                self._claiming = asyncio.create_task(self._claim(capacity))
                self._claiming.add_done_callback(_heard)
                claimed = await asyncio.shield(self._claiming)
                if self._is_idle(full, claimed):
                    # At once when somebody enqueues; what is held for another worker may be had a little later.
                    await self._queue.wait_for_work(claimed.hold_ms / 1e3 or IDLE_S)
            except REDIS_DOWN as error:
                log.warning("the queue does not answer: %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            self._prefetch(claimed.adapter_requests)
            if not full and not claimed.jobs and claimed.waiting and self._held.running:
                # What waits does not fit now: it will when something here has ended, or somebody else takes it.
                await self._changes_within(claimed.hold_ms / 1e3 or FIT_S)

    async def _claim(self, capacity: Capacity) -> Claimed:
        self._metrics.claims.inc()
        with self._metrics.claim_time.time(), self._usage.last_reports() as reports:
            claimed = await self._queue.claim(self._base_digest, capacity, reports)
        self._metrics.claimed.inc(len(claimed.jobs))
        self._accept(claimed.jobs)
        return claimed

    async def settle(self) -> None:
        """Wait for what is being claimed; call it when `run` was cancelled."""
        if self._claiming is not None:
            await asyncio.wait({self._claiming})

    async def close(self) -> None:
        """End what is under way."""
        if self._claiming is not None:
            self._claiming.cancel()
            await self.settle()

    def _is_idle(self, full: bool, claimed: Claimed) -> bool:
        """Whether there is room, and nothing waits that another claim could take into it now."""
        if not claimed.waiting:  # another claim would only say so again
            return not full and self._capacity().rows > 0
        return not full and not claimed.jobs and not self._held.running

    def _capacity(self) -> Capacity:
        running, limit = self._held.running, self.limits.rows
        entering = sum(held.job.prefill_tokens for held in self._held.all() if held.entering is not None)
        # The rows of those whose adapter is slow to come are lent to others, once.
        late_at = time.monotonic() - LATE_S
        late = sum(len(held.running) for held in self._held.all() if held.entering and held.claimed_at < late_at)
        free = (self.stats.blocks_free + self.stats.blocks_cached) * self.limits.block_size
        rows = min(limit + late, 2 * limit) - len(running)
        if running:  # a job that is to run alone takes all rows: these are not all
            rows = min(rows, max(1, limit - 1))
        return Capacity(
            rows=0 if self._engine.stalled or any(choice.job.suspect for choice in running) else rows,
            rows_limit=limit,
            # A long prompt may always come in when nothing else is here.
            tokens=max(0, free - entering) if running else self.limits.max_tokens,
            max_tokens=self.limits.max_tokens,
            max_rank=self.limits.max_rank,
            adapters=self.stats.adapters,
        )

    async def _changes_within(self, most_s: float) -> bool:
        """Wait for room; whether there is more than at the last `clear`."""
        # Not wait_for: in Python 3.11 that loses a cancellation which comes together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._changed.wait()
        return self._changed.is_set()


def _heard(claiming: asyncio.Task[Claimed]) -> None:
    """Whoever waited for a claim may have been told to stop: then asyncio is not to complain of its error."""
    if not claiming.cancelled():
        claiming.exception()
