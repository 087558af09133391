"""The jobs that wait between their claim and the engine: suspects until they may begin, others for their adapter."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from telemetry.logging import fields
from worker.engine_api import Failure
from worker.io.adapters.download import FetchFailedError
from worker.io.adapters.fetch import AdapterFetcher
from worker.io.adapters.source import fetch_source
from worker.io.jobs.capacity import is_crowded
from worker.io.jobs.results import Results
from worker.io.local_jobs.jobs import LocalJob, LocalJobState

log = logging.getLogger(__name__)

# Seconds for which a job fetches its adapter again after a failure that may pass, and between two tries: a store that
# restarts is back by then. An answer that has begun tries for longer: another worker had the adapter.
RETRY_S, BEGUN_RETRY_S, PAUSE_S = 5.0, 15.0, 0.25
_MAY_PASS = frozenset({"UNAVAILABLE", "DATA_LOSS"})


class Preparations:
    """The preparations of one engine session. `hand_over` brings a job into the engine."""

    def __init__(
        self, base_digest: str, fetcher: AdapterFetcher, results: Results, hand_over: Callable[[LocalJob], None]
    ) -> None:
        self._base_digest = base_digest
        self._fetcher = fetcher
        self._results = results
        self._jobs = results.jobs
        self._hand_over = hand_over
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, local: LocalJob) -> None:
        """Prepare a job in a task of its own."""
        local.preparing = asyncio.get_running_loop().create_task(self._prepare(local))
        self._tasks.add(local.preparing)
        local.preparing.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End what is under way."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _prepare(self, local: LocalJob) -> None:
        """Wait until a suspect may begin, fetch the adapter, and hand the job over; or fail it."""
        job = local.job
        if job.base_digest != self._base_digest:
            message = f"the job is for base model {job.base_digest}, this worker serves {self._base_digest}"
            self._results.fail(local, Failure("FAILED_PRECONDITION", "WRONG_BASE", message, "model"))
            return
        if job.suspect:  # before it pins an adapter, because the others may wait for the disk's bytes
            local.enter(LocalJobState.WAITING_ALONE)  # meanwhile nothing is claimed
            await self._wait_until_apart(local)
        failure = None if job.adapter is None else await self._fetch_adapter(local)
        if failure is not None:
            self._results.fail(local, failure)
            return
        self._hand_over(local)

    async def _wait_until_apart(self, suspect: LocalJob) -> None:
        """Wait until nothing runs that a suspect must not begin beside.

        Suspects that a token has cleared are given back: otherwise an engine could die a second time under them.
        """
        while others := self._jobs.in_the_way_of(suspect):
            change = self._jobs.next_change
            for other in others:
                if other.job.suspect and not other.needs_all:
                    self._results.give_back(other)
            await change.wait()  # set already where one was given back

    async def _fetch_adapter(self, local: LocalJob) -> Failure | None:
        """Fetch what the job's adapter consists of, again after a failure that may pass; returns why that failed."""
        job, began = local.job, time.monotonic()
        assert job.adapter is not None
        local.enter(LocalJobState.FETCHING_ADAPTER)
        local.pin = self._fetcher.disk_pin()
        self._fetcher.sets.note(job.adapter, job.tenant)
        until = 0.0  # counts from the first failure: a download may take long
        try:
            while local.source is None:
                try:
                    local.source = await fetch_source(local.pin, job.adapter, job.tenant)
                except FetchFailedError as error:
                    until = until or time.monotonic() + (BEGUN_RETRY_S if _has_begun(local) else RETRY_S)
                    if not self._may_retry(local, error.failure, until):
                        return error.failure
                    await asyncio.sleep(PAUSE_S)
        except Exception:
            log.exception("an adapter could not be fetched", extra=fields(job_id=job.job_id))
            return Failure("INTERNAL", "FETCH_FAILED", f"{job.adapter.revision} could not be fetched", "adapter")
        local.fetched_at = time.monotonic()
        for choice in local.running:
            choice.adapter_ms = (local.fetched_at - began) * 1e3
        return None

    def _may_retry(self, local: LocalJob, failure: Failure, until: float) -> bool:
        """Return whether a job fetches its adapter again: a newcomer only while it keeps no other job out."""
        if failure.code not in _MAY_PASS or time.monotonic() >= until:
            return False
        return _has_begun(local) or not is_crowded(self._jobs, self._results.limits)


def _has_begun(local: LocalJob) -> bool:
    return any(local.job.emitted.values())
