"""What the router does with the queue while nobody waits for it: attempts that go in again, jobs that are to go out.

A bounded number at once, in their order: a worker that is lost with many jobs, or a Redis that comes back, must not
meet them all in the same moment. While Redis does not answer they are tried again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

from broker.connection import REDIS_DOWN
from broker.messages import DeadJob, Job
from broker.queue import JobQueue, QueueFullError
from broker.terms import Placement
from router.dispatch.routed_job import RoutedJob
from rpc.errors import Internal

log = logging.getLogger(__name__)

# Half of the connections to Redis: requests that come meanwhile need some too.
AT_ONCE = 8
RETRY_S = 0.2
# So often an errand fails in a way that no outage explains before it is given up.
FAULTS_LIMIT = 5
# So long the end of a job is told to a Redis that does not answer.
DRAIN_S = 60.0

Work = Callable[[], Awaitable[None]]


class Outbox:
    """The errands of one dispatcher. `owns` tells whether a routed is still one of its own."""

    def __init__(
        self,
        queue_of: Callable[[str], JobQueue],
        place: Callable[[Job], Placement],
        owns: Callable[[RoutedJob], bool],
    ) -> None:
        self._queue_of = queue_of
        self._place = place
        self._owns = owns
        self._enqueues = _Lane()
        # What empties Redis must not wait for what fills it: its memory may be full.
        self._drains = _Lane()

    def enqueue(self, routed: RoutedJob) -> None:
        """Put the routed's newest attempt into the queue; afterwards it is there, or the routed has ended."""
        routed.dispatching = True
        self._enqueues.put(lambda: self._enqueue(routed))

    async def _enqueue(self, routed: RoutedJob) -> None:
        enqueued = 0

        async def attempt() -> None:
            nonlocal enqueued
            job = routed.job
            await self._queue_of(job.model).enqueue(job, self._place(job))
            enqueued = job.attempt

        try:
            while self._owns(routed) and enqueued < routed.job.attempt:
                what = f"job {routed.job.job_id} attempt {routed.job.attempt}"
                await _persist(what, attempt, wanted=lambda: self._owns(routed))
        except Exception:  # told already
            routed.fail(Internal("the request could not be dispatched again", reason="DISPATCH_FAILED"))
        finally:
            routed.dispatching = False
            routed.missing_since = None
        if not self._owns(routed) and routed.link is None:  # it ended meanwhile
            self.finish(routed.job)

    def finish(self, job: Job) -> None:
        """Take a job out of the queue. If that can't be done, a worker that claims it is told to stop it."""

        async def finish() -> None:
            await self._queue_of(job.model).finish(job.job_id, job.attempt)

        self._drain(f"the end of job {job.job_id}", finish)

    def bury(self, routed: RoutedJob, reason: str) -> None:
        """Keep a dead letter of a job; `reason` is what its client was told."""
        dead = _dead_job(routed, reason)

        async def add() -> None:
            await self._queue_of(dead.model).dead.add(dead)

        self._drain(f"the dead letter of job {dead.job_id}", add)

    def _drain(self, what: str, work: Work) -> None:
        until = time.monotonic() + DRAIN_S
        self._drains.put(lambda: _persist(what, work, wanted=lambda: time.monotonic() < until))

    async def drain_tasks(self) -> None:
        """Wait until all are done."""
        await self._enqueues.drain_tasks()
        await self._drains.drain_tasks()


class _Lane:
    """Runs one after the other, `AT_ONCE` at a time."""

    def __init__(self) -> None:
        self._waiting: deque[Work] = deque()
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, work: Work) -> None:
        self._waiting.append(work)
        self._idle.clear()
        if self._running < AT_ONCE:
            self._running += 1
            task = asyncio.get_running_loop().create_task(self._run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        try:
            while self._waiting:
                work = self._waiting.popleft()
                try:
                    await work()
                except Exception:
                    log.exception("an errand to the queue failed")
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def drain_tasks(self) -> None:
        await self._idle.wait()


async def _persist(what: str, work: Work, *, wanted: Callable[[], bool]) -> None:
    """Do it; again while Redis does not answer or is full, as long as it is `wanted`.

    What no outage explains is tried FAULTS_LIMIT times and then raised.
    """
    faults, told = 0, False
    while wanted():
        try:
            return await work()
        except (*REDIS_DOWN, QueueFullError) as error:
            if not told:
                log.warning("%s waits for the queue: %r", what, error)
            told = True
        except Exception:
            faults += 1
            log.exception("%s failed", what)
            if faults == FAULTS_LIMIT:
                raise
        await asyncio.sleep(RETRY_S)
    return None


def _dead_job(routed: RoutedJob, reason: str) -> DeadJob:
    job = routed.job
    return DeadJob(
        job_id=job.job_id,
        request_id=job.request_id,
        tenant=job.tenant,
        model=job.model,
        adapter_revision=job.adapter.revision if job.adapter else "",
        prompt_tokens=len(job.prompt_ids),
        completion_tokens=routed.emitted_tokens,
        attempts=job.attempt,
        reason=reason,
        died_at_ms=round(time.time() * 1e3),
    )
