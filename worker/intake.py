"""From the queue into the engine: claims what there is room for, fetches its adapter, and hands it over.

A job waits for its adapter outside the engine, so that a slow store costs nobody else anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from broker.connection import REDIS_DOWN
from broker.messages import Capacity, Job
from broker.queue import JobQueue
from worker.adapter_fetch import AdapterFetcher, FetchFailedError
from worker.adapter_source import fetch_source
from worker.held import Ending, HeldChoice, HeldJob, HeldJobs, sequence_of
from worker.link import Abort, Add, Ready, Refused, Stepped
from worker.relay_client import RelayClients
from worker.scheduling.contract import Failure
from worker.supervisor import EngineProcess
from worker.usage import UsageLog

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


class Intake:
    """One incarnation's jobs, from claim to the router's ack."""

    def __init__(self, base_digest: str, engine: EngineProcess, queue: JobQueue, fetcher: AdapterFetcher) -> None:
        self._base_digest = base_digest
        self._engine = engine
        self._queue = queue
        self._fetcher = fetcher
        self.held = HeldJobs()
        self.usage = UsageLog(self.held, queue)
        self._relay: RelayClients | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def use(self, relay: RelayClients, ready: Ready) -> None:
        """Where tokens go, and what the engine can take; before anything is claimed."""
        self._relay = relay
        self.limits = ready.limits
        self.stats = ready.stats

    @property
    def relay(self) -> RelayClients:
        """The links to the routers."""
        assert self._relay is not None, "use() comes first"
        return self._relay

    # Claims

    async def claim(self) -> None:
        """Forever: claim whatever there is room for."""
        while True:
            self._changed.clear()
            capacity = self._capacity()
            full = capacity.rows <= 0
            if full and await self._changes_within(LOOK_S):
                continue
            try:
                await self.usage.report_ended()
                # Of a full worker a claim only tells what waits.
                claimed = await self._queue.claim(self._base_digest, capacity)
                if not full and not claimed.jobs and not (claimed.waiting and self.held.running):
                    # At once when somebody enqueues; what is held for another worker may be had a little later.
                    await self._queue.wait_for_work(claimed.hold_ms / 1e3 or IDLE_S)
            except REDIS_DOWN as error:
                log.warning("the queue does not answer: %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            self._accept(claimed.jobs)
            self._fetcher.prefetch(claimed.wanted)
            if not full and not claimed.jobs and claimed.waiting and self.held.running:
                # What waits does not fit now: it will when something here has ended, or somebody else takes it.
                await self._changes_within(claimed.hold_ms / 1e3 or FIT_S)

    def _capacity(self) -> Capacity:
        running, limit = self.held.running, self.limits.rows
        entering = sum(held.job.prefill_tokens for held in self.held.all() if held.entering is not None)
        # The rows of those whose adapter is slow to come are lent to others, once.
        late_at = time.monotonic() - LATE_S
        late = sum(len(held.running) for held in self.held.all() if held.entering and held.claimed_at < late_at)
        free = (self.stats.blocks_free + self.stats.blocks_cached) * self.limits.block_size
        return Capacity(
            rows=min(limit + late, 2 * limit) - len(running),
            rows_limit=limit,
            # A long prompt may always come in when nothing else is here.
            tokens=max(0, free - entering) if running else self.limits.max_tokens,
            max_tokens=self.limits.max_tokens,
            max_rank=self.limits.max_rank,
            adapters=self.stats.adapters,
        )

    async def _changes_within(self, most_s: float) -> bool:
        """Wait for room; whether there is more than at the last `clear`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), most_s)
        return self._changed.is_set()

    def _accept(self, jobs: Sequence[Job]) -> None:
        """Hold claimed jobs: their routers are told before anything else happens."""
        for job in jobs:
            if self.held.get(job.job_id, job.attempt) is not None:  # an enqueue that was retried
                continue
            held = self.held.add(job)
            self.relay.claimed(held)
            held.entering = self._spawn(self._enter(held))

    async def _enter(self, held: HeldJob) -> None:
        job, began = held.job, time.monotonic()
        if job.base_digest != self._base_digest:
            message = f"the job is for base model {job.base_digest}, this worker serves {self._base_digest}"
            self._end(held.running[0], Ending(failure=Failure("FAILED_PRECONDITION", "WRONG_BASE", message, "model")))
            return
        if job.adapter is not None:
            try:
                held.hold = self._fetcher.hold()
                held.source = await fetch_source(held.hold, job.adapter, job.tenant)
            except FetchFailedError as error:
                self._end(held.running[0], Ending(failure=error.failure))
                return
            except Exception:
                log.exception("job %s: its adapter could not be fetched", job.job_id)
                failure = Failure("INTERNAL", "FETCH_FAILED", f"{job.adapter.revision} could not be fetched", "adapter")
                self._end(held.running[0], Ending(failure=failure))
                return
            for choice in held.running:
                choice.adapter_ms = (time.monotonic() - began) * 1e3
        held.entering = None
        # The first alone: once it has a token, the others find the prompt in the prefix cache.
        self._add(held, held.running[:1])

    def _add(self, held: HeldJob, choices: Sequence[HeldChoice]) -> None:
        if choices:
            for choice in choices:
                choice.in_engine = True
            self._engine.expect()
            self._engine.send(Add([sequence_of(choice, held.source) for choice in choices]))

    # What the engine says

    def stepped(self, message: Stepped) -> None:
        """Record and relay what a step made."""
        self.stats = message.stats
        for output in message.outputs:
            choice = self.held.of_sequence(output.sequence_id)
            if choice is not None and choice.ending is None:  # else it was cancelled meanwhile
                choice.record(output)
                self.relay.progressed(choice)
                if choice.job.n > 1:
                    self._add_siblings(choice.job)
        # A step in which nothing ended has made no room.
        if not message.outputs or any(output.finish for output in message.outputs):
            self._changed.set()

    def _add_siblings(self, job: Job) -> None:
        held = self.held.get(job.job_id, job.attempt)
        if held is not None:
            self._add(held, [choice for choice in held.running if not choice.in_engine])

    def refused(self, message: Refused) -> None:
        """The engine did not take a sequence."""
        choice = self.held.of_sequence(message.sequence_id)
        if choice is not None:
            failure = Failure("INVALID_ARGUMENT", "REFUSED_BY_WORKER", message.message, message.field)
            self._end(choice, Ending(failure=failure))

    def _end(self, choice: HeldChoice, ending: Ending) -> None:
        choice.ending = ending
        self.relay.progressed(choice)
        self._changed.set()

    # What the routers say (see worker.relay_client.Orders)

    def acked(self, job_id: str, attempt: int) -> None:
        """The router has all of it."""
        held = self.held.pop(job_id, attempt)
        if held is not None:
            self.usage.ended(held)
            self._stop(held)  # one choice that failed ends its siblings
        self._changed.set()

    def cancel(self, job_id: str, attempt: int) -> None:
        """Stop it wherever it is, and forget it."""
        held = self.held.pop(job_id, attempt)
        if held is None:
            return
        self.usage.ended(held)
        self._stop(held)
        self._changed.set()

    def cancel_choice(self, job_id: str, attempt: int, choice: int) -> None:
        """Stop one answer of a job; the others go on."""
        held = self.held.get(job_id, attempt)
        stopped = held.choices.pop(choice, None) if held is not None else None
        if held is None or stopped is None:
            return
        if stopped.in_engine and stopped.ending is None:
            self._engine.send(Abort([stopped.sequence_id]))
        if held.entering is None and not any(sibling.in_engine for sibling in held.running):
            self._add(held, held.running)  # it was the one that the others waited for
        self._changed.set()

    def _stop(self, held: HeldJob) -> None:
        if held.entering is not None:
            held.entering.cancel()
        if held.hold is not None:
            held.hold.release()
        aborted = [choice.sequence_id for choice in held.running if choice.in_engine]
        if aborted:
            self._engine.send(Abort(aborted))

    def router_gone(self, address: str) -> None:
        """Drop its jobs."""
        for held in self.held.of_router(address):
            self.cancel(held.job.job_id, held.job.attempt)

    # The end

    async def drain(self, drain_s: float) -> None:
        """Let what runs end for `drain_s`, then give the rest back, to go on elsewhere."""
        try:
            async with asyncio.timeout(drain_s):
                while self.held.running:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        for held in self.held.all():
            self._stop(held)
            for choice in held.running[:1]:  # one says it for the whole job
                self._end(choice, Ending())

    async def close(self) -> None:
        """End what is under way."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for held in self.held.all():  # the engine is gone or will be
            self._stop(held)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
