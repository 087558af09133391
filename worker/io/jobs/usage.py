"""Tells the queue what this worker's jobs have made, for their tenants' counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from broker.queue import JobQueue
from broker.terms import Usage
from worker.io.local_jobs.jobs import LocalJob, LocalJobs


class UsageLog:
    """Reports are counts since the attempt's start: one that comes twice does no harm. Redis may be down."""

    def __init__(self, held: LocalJobs, queue: JobQueue) -> None:
        self._held = held
        self._queue = queue
        self._ended: list[Usage] = []

    def ended(self, held: LocalJob) -> None:
        """A job is held no more."""
        self._ended.append(_usage(held, ended=True))

    @contextmanager
    def last_reports(self) -> Iterator[Sequence[Usage]]:
        """Those of jobs that are held no more, to be told to the queue inside; an error there keeps them."""
        ended, self._ended = self._ended, []
        try:
            yield ended
        except BaseException:
            self._ended = ended + self._ended
            raise

    async def report(self) -> None:
        """These, and what the others have made so far."""
        with self.last_reports() as ended:
            await self._queue.charge(ended)
        await self._queue.charge([_usage(held, ended=False) for held in self._held.all()])


def _usage(held: LocalJob, *, ended: bool) -> Usage:
    return Usage(held.job.job_id, held.job.attempt, held.tokens, ended=ended, ran=held.ran)
