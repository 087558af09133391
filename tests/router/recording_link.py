"""Parts that tests of the dispatcher share: links that record what is sent, jobs, frames, claims."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.messages import Capacity, Job
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.options import FinishReason, SamplingParams, StoppingParams
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.links import Frame, WorkerLink
from loraplex.router.dispatch.routed_job import RoutedJob

KEYS = Keys("tiny", "main")
ROOMY = Capacity(rows=8, rows_limit=8, tokens=10_000, max_tokens=4096, max_rank=64)


class RecordingLink(WorkerLink):
    """A worker's link; `sent` is what the router sent, in order."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"{name}-1")
        self.sent: list[tuple[str | int, ...]] = []

    def ack(self, job_id: str, attempt: int) -> None:
        self.sent.append(("ack", job_id, attempt))

    def cancel(self, job_id: str, attempt: int, choice: int | None = None) -> None:
        self.sent.append(("cancel", job_id, attempt) if choice is None else ("cancel", job_id, attempt, choice))

    def rewind(self, job_id: str, attempt: int, choice: int, offset: int) -> None:
        self.sent.append(("rewind", job_id, attempt, choice, offset))


def job(job_id: str = "j", max_tokens: int = 100, n: int = 1) -> Job:
    return Job(
        job_id=job_id,
        request_id=job_id,
        tenant="acme",
        model="tiny",
        base_digest="sha256:0",
        reply_to="here",
        prompt_ids=(1, 2),
        stopping=StoppingParams(max_tokens=max_tokens),
        sampling=SamplingParams(seed=1),
        n=n,
    )


def frame(
    offset: int,
    *ids: int,
    attempt: int = 1,
    finish: FinishReason | None = None,
    returned: bool = False,
    blamed: bool = False,
    job_id: str = "j",
) -> Frame:
    return Frame(job_id, attempt, offset, ids, finish=finish, returned=returned, blamed=blamed)


@asynccontextmanager
async def dispatched(dispatcher: Dispatcher, job: Job) -> AsyncIterator[RoutedJob]:
    """Dispatch a job and release it at the end."""
    routed = await dispatcher.dispatch(job)
    try:
        yield routed
    finally:
        dispatcher.release(routed)


async def claim(queue: JobQueue) -> Job:
    """Claim the next job, once there is one."""
    while not (jobs := (await queue.claim("sha256:0", ROOMY)).jobs):
        await queue.wait_for_work(timeout_s=1)
    return jobs[0]


async def read(routed: RoutedJob) -> list[int]:
    """Read a job to its end; return its ids."""
    got: list[int] = []
    reader = routed.reader
    while arrivals := await routed.arrivals(reader):
        for arrival in arrivals:
            got += arrival.token_ids
    return got
