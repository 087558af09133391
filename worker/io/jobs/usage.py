"""Reports to the queue of the tokens that local jobs have made, for their tenants' counters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from broker.connection import REDIS_DOWN
from broker.queue import JobQueue
from broker.terms import UsageReport
from worker.io.local_jobs.jobs import LocalJob, LocalJobs

# Interval in seconds between reports of the jobs that run.
REPORT_S = 0.5


class UsageLog:
    """The usage of local jobs. Reports count from the attempt's start, so that one that comes twice does no harm."""

    def __init__(self, jobs: LocalJobs, queue: JobQueue) -> None:
        self._jobs = jobs
        self._queue = queue
        self._ended: list[UsageReport] = []

    def ended(self, local: LocalJob) -> None:
        """Keep the last report of a job that is removed."""
        self._ended.append(_usage(local, ended=True))

    @contextmanager
    def last_reports(self) -> Iterator[Sequence[UsageReport]]:
        """Hand out the last reports of removed jobs, to be sent inside the context; an error there keeps them.

        With them come reports of suspects with a token, which may clear their tenants and adapters.
        """
        ended, self._ended = self._ended, []
        cleared = (local for local in self._jobs.all() if local.job.suspect and _tokens(local))
        try:
            yield [*ended, *(_usage(local, ended=False) for local in cleared)]
        except BaseException:
            self._ended = ended + self._ended
            raise

    async def follow(self) -> None:
        """Report every REPORT_S; never returns. The next report makes up for one that Redis did not get."""
        while True:
            with suppress(*REDIS_DOWN):  # the worker's beats log it
                await self.report()
            await asyncio.sleep(REPORT_S)

    async def report(self) -> None:
        """Send the last reports, and one for each job that is here. Raises what a Redis that is down raises."""
        with self.last_reports() as ended:
            await self._queue.charge([*ended, *(_usage(local, ended=False) for local in self._jobs.all())])


def _usage(local: LocalJob, *, ended: bool) -> UsageReport:
    return UsageReport(local.job.job_id, local.job.attempt, _tokens(local), ended=ended, ran=local.ran)


def _tokens(local: LocalJob) -> int:
    """Return the tokens to charge for; 1 for the vector, or the end, of a job that makes none: it clears a suspect."""
    return local.tokens or int(any(choice.ending and choice.ending.kind for choice in local.choices.values()))
