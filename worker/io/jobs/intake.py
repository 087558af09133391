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

from broker.messages import Job
from broker.queue import JobQueue
from telemetry.logging import fields
from worker.engine_api import EngineLimits, EngineStats, Failure
from worker.io.adapters.fetch import AdapterFetcher, FetchFailedError
from worker.io.adapters.source import fetch_source
from worker.io.engine_client.process import EngineProcess
from worker.io.jobs.claims import Claims
from worker.io.jobs.telemetry import JobTelemetry
from worker.io.jobs.usage import UsageLog
from worker.io.local_jobs.jobs import Ending, LocalChoice, LocalJob, LocalJobs, sequence_of
from worker.io.metrics import FetchStats
from worker.io.relay.links import RouterLinks
from worker.ipc import Abort, Add, Begun, Ready, Refused, Stepped

log = logging.getLogger(__name__)

# An adapter that another worker had is to be had again: so long an answer that has begun asks for it.
BEGUN_FETCH_S = 15.0


class Intake:
    """One incarnation's jobs, from claim to the router's ack."""

    def __init__(
        self,
        base_digest: str,
        engine: EngineProcess,
        queue: JobQueue,
        fetcher: AdapterFetcher,
        telemetry: JobTelemetry,
    ) -> None:
        self._base_digest = base_digest
        self._engine = engine
        self._fetcher = fetcher
        self._telemetry = telemetry
        self.held = LocalJobs()
        self.usage = UsageLog(self.held, queue)
        self._relay: RouterLinks | None = None
        self.claims = Claims(
            base_digest, queue, self.held, self.usage, engine, self._accept, fetcher.prefetch, telemetry.metrics
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._engine_lost = False
        # Sequences that the engine was handed, and those of them that it did not take.
        self._handed = self._refused = 0

    def use(self, relay: RouterLinks, ready: Ready) -> None:
        """Where tokens go, and what the engine can take; before anything is claimed."""
        self._relay = relay
        self.claims.use(ready)

    @property
    def limits(self) -> EngineLimits:
        """What the engine can take."""
        return self.claims.limits

    @property
    def stats(self) -> EngineStats:
        """What the engine said last."""
        return self.claims.stats

    @property
    def disk(self) -> FetchStats:
        """The adapters on disk."""
        return self._fetcher.stats

    @property
    def relay(self) -> RouterLinks:
        """The links to the routers."""
        assert self._relay is not None, "use() comes first"
        return self._relay

    def _accept(self, jobs: Sequence[Job]) -> None:
        """Hold claimed jobs: their routers are told before anything else happens."""
        for job in jobs:
            if self.held.get(job.job_id, job.attempt) is not None:  # an enqueue that was retried
                continue
            held = self.held.add(job)
            self.relay.claimed(held)
            if self._engine_lost or self._engine.stalled:
                self.give_back(held)
                continue
            if self._may_enter(job):
                self._add(held, held.running[:1])
                continue
            held.entering = self._spawn(self._enter(held))

    def _may_enter(self, job: Job) -> bool:
        """Whether there is nothing that it must wait for."""
        return job.adapter is None and not job.suspect and job.base_digest == self._base_digest

    async def _enter(self, held: LocalJob) -> None:
        job, began = held.job, time.monotonic()
        if job.base_digest != self._base_digest:
            message = f"the job is for base model {job.base_digest}, this worker serves {self._base_digest}"
            self._end(held.running[0], Ending(failure=Failure("FAILED_PRECONDITION", "WRONG_BASE", message, "model")))
            return
        if job.adapter is not None:
            try:
                held.hold = self._fetcher.hold()
                held.source = await fetch_source(held.hold, job.adapter, job.tenant, again_s=_patience_s(job))
            except FetchFailedError as error:
                self._end(held.running[0], Ending(failure=error.failure))
                return
            except Exception:
                log.exception("an adapter could not be fetched", extra=fields(job_id=job.job_id))
                failure = Failure("INTERNAL", "FETCH_FAILED", f"{job.adapter.revision} could not be fetched", "adapter")
                self._end(held.running[0], Ending(failure=failure))
                return
            held.fetched_at = time.monotonic()
            for choice in held.running:
                choice.adapter_ms = (held.fetched_at - began) * 1e3
        if job.suspect:
            await self._alone(held)
        held.entering = None
        # The first alone: once it has a token, the others find the prompt in the prefix cache.
        self._add(held, held.running[:1])

    async def _alone(self, held: LocalJob) -> None:
        """Wait until nothing else runs; meanwhile nothing is claimed."""
        while any(choice.job is not held.job for choice in self.held.running):
            await self.claims.change()

    def _add(self, held: LocalJob, choices: Sequence[LocalChoice]) -> None:
        if choices:
            now = time.monotonic()
            if not any(choice.in_engine for choice in self.held.running):  # else it owes a sign already
                self._engine.expect()
            for choice in choices:
                self._handed += 1
                choice.in_engine, choice.added_at, choice.place = True, now, self._handed
            self._engine.send(Add([sequence_of(choice, held.source) for choice in choices]))

    # What the engine says

    def stepped(self, message: Stepped) -> None:
        """Record and relay what a step made."""
        self.claims.stats = message.stats
        now = self._telemetry.stepped(message.outputs, message.stats)
        for output in message.outputs:
            choice = self.held.of_sequence(output.sequence_id)
            if choice is not None and choice.ending is None:  # else it was cancelled meanwhile
                choice.record(output, now, message.stats.steps)
                self.relay.progressed(choice)
                if choice.job.n > 1:
                    self._add_siblings(choice.job)
        # A step in which nothing ended has made no room.
        if not message.outputs or any(output.finish for output in message.outputs):
            self.claims.changed()

    def _add_siblings(self, job: Job) -> None:
        held = self.held.get(job.job_id, job.attempt)
        if held is not None:
            self._add(held, [choice for choice in held.running if not choice.in_engine])

    def begun(self, message: Begun) -> None:
        """The engine is about to compute the first of a sequence."""
        choice = self.held.of_sequence(message.sequence_id)
        if choice is not None:
            choice.begun = True

    def refused(self, message: Refused) -> None:
        """The engine did not take a sequence."""
        self._refused += 1
        choice = self.held.of_sequence(message.sequence_id)
        if choice is not None:
            failure = Failure("INVALID_ARGUMENT", "REFUSED_BY_WORKER", message.message, message.field)
            self._end(choice, Ending(failure=failure))

    def _end(self, choice: LocalChoice, ending: Ending) -> None:
        choice.ending = ending
        self.relay.progressed(choice)
        self.claims.changed()

    # What the routers say (see worker.io.relay.links.Orders)

    def acked(self, job_id: str, attempt: int) -> None:
        """The router has all of it."""
        held = self.held.pop(job_id, attempt)
        if held is not None:
            self.usage.ended(held)
            self._telemetry.ended(held)
            self._stop(held)  # one choice that failed ends its siblings
        self.claims.changed()

    def cancel(self, job_id: str, attempt: int) -> None:
        """Stop it wherever it is, and forget it."""
        held = self.held.pop(job_id, attempt)
        if held is None:
            return
        self.usage.ended(held)
        self._telemetry.ended(held)
        self._stop(held)
        self.claims.changed()

    def cancel_choice(self, job_id: str, attempt: int, choice: int) -> None:
        """Stop one answer of a job; the others go on."""
        held = self.held.get(job_id, attempt)
        stopped = held.drop(choice) if held is not None else None
        if held is None or stopped is None:
            return
        if stopped.in_engine and stopped.ending is None:
            self._engine.send(Abort([stopped.sequence_id]))
        if held.entering is None and not any(sibling.in_engine for sibling in held.running):
            self._add(held, held.running)  # it was the one that the others waited for
        self.claims.changed()

    def _stop(self, held: LocalJob) -> None:
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

    async def empties_within(self, most_s: float) -> bool:
        """Wait until nothing is held, which is when the routers have all of it; whether that is so."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while self.held.all():
                    await self.claims.change()
        return not self.held.all()

    def give_back(self, held: LocalJob, *, struck: bool = False) -> None:
        """Stop a job here, to go on elsewhere."""
        self._stop(held)
        running, ending = held.running, Ending(struck=struck)
        for choice in running:
            choice.ending = ending
        for choice in running[:1]:  # one says it for the whole job
            self._end(choice, ending)

    def engine_lost(self) -> None:
        """Give everything back at once, and what is still claimed, each with whether the engine may have died of it."""
        self._engine_lost = True
        self._give_all_back()

    def engine_stalled(self) -> None:
        """The same, as long as the engine is stalled: its step may be one that never ends."""
        self._give_all_back()

    def _give_all_back(self) -> None:
        taken, resident = self.stats.sequences_taken + self._refused, frozenset(self.stats.adapters)
        for held in self.held.all():
            self.give_back(held, struck=held.struck(taken, resident))

    @property
    def runs_suspect(self) -> bool:
        """Whether the engine has a job that runs alone."""
        return any(choice.in_engine and choice.job.suspect for choice in self.held.running)

    async def close(self) -> None:
        """End what is under way."""
        await self.claims.close()
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


def _patience_s(job: Job) -> float:
    """How long a job asks for an adapter that is not to be had: not at all, unless its answer has begun."""
    return BEGUN_FETCH_S if any(job.emitted.values()) else 0.0
