"""One admitted job inside its router, from the first dispatch to the end. The track is the job's redo log.

dispatched ──▶ bound to one worker's incarnation ──▶ finished
    ▲                    │ link lost, job returned, claim without a sign
    └── attempt + 1 ─────┘
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from broker.messages import Job
from rpc.errors import CallError


class WorkerFinish(StrEnum):
    """Why a worker ended an answer."""

    LENGTH = "length"
    END = "end"
    STOP_TOKEN = "stop_token"


class Link(Protocol):
    """A router's end of the relay stream of one worker's incarnation."""

    worker_id: str
    incarnation: str

    def ack(self, job_id: str, attempt: int, offset: int) -> None:
        """The worker may forget the job."""

    def cancel(self, job_id: str, attempt: int) -> None:
        """The worker is to stop the job and free what it holds."""

    def rewind(self, job_id: str, attempt: int, offset: int) -> None:
        """The worker is to send again from this offset."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Tokens of one job as a worker sends them. `failure` ends the job; `returned` gives it back."""

    job_id: str
    attempt: int
    offset: int
    token_ids: tuple[int, ...]
    finish: WorkerFinish | None = None
    failure: CallError | None = None
    returned: bool = False
    adapter_ms: float | None = None
    cached_tokens: int | None = None


class Track:
    """A job's state, and the queue between the relay and the one reader of its tokens."""

    def __init__(self, job: Job) -> None:
        self.job = job
        # Every id produced so far, over all attempts.
        self.emitted: list[int] = []
        self.link: Link | None = None
        self.finish: WorkerFinish | None = None
        self.failure: CallError | None = None
        self.continuations = 0
        self.admitted_at = time.monotonic()
        self.claimed_at: float | None = None
        self.adapter_ms = 0.0
        self.cached_tokens = 0
        # Since when a dispatched job has been neither queued nor bound.
        self.missing_since: float | None = None
        # Whether an attempt is on its way into the queue.
        self.dispatching = False
        self._deadline = self.admitted_at + job.deadline_ms / 1e3 if job.deadline_ms else None
        self._read = 0
        self._arrived = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether no more tokens can come."""
        return self.finish is not None or self.failure is not None

    def bind(self, link: Link) -> bool:
        """Give the current attempt to this link's incarnation; False when another has it."""
        if self.link is None:
            self.link = link
            self.missing_since = None
            self.claimed_at = self.claimed_at or time.monotonic()
            return True
        if self.link.incarnation != link.incarnation:
            return False
        self.link = link
        return True

    def next_attempt(self) -> Job:
        """Unbind, and mint the attempt that goes on from the last id."""
        self.link = None
        self.missing_since = None
        self.continuations += 1
        left_ms = 0
        if self._deadline is not None:
            left_ms = max(1, round((self._deadline - time.monotonic()) * 1e3))
        self.job = replace(
            self.job, attempt=self.job.attempt + 1, emitted={0: tuple(self.emitted)}, deadline_ms=left_ms
        )
        return self.job

    def accept(self, frame: Frame) -> bool:
        """Take what is new in a frame of the bound worker; False when ids before it are missing."""
        if frame.offset > len(self.emitted):
            return False
        self.emitted.extend(frame.token_ids[len(self.emitted) - frame.offset :])
        if frame.adapter_ms is not None:
            self.adapter_ms = frame.adapter_ms
        if frame.cached_tokens is not None and self.continuations == 0:
            self.cached_tokens = frame.cached_tokens
        self.finish = frame.finish
        self._arrived.set()
        return True

    def fail(self, failure: CallError) -> None:
        """End the job with an error."""
        self.failure = failure
        self._arrived.set()

    async def arrivals(self) -> AsyncGenerator[tuple[Sequence[int], WorkerFinish | None]]:
        """All that has come since the last turn, so that a slow moment makes fewer, larger messages.

        Ends after the turn with a finish; raises the failure that ended the job.
        """
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            ids, finish = self.emitted[self._read :], self.finish
            self._read += len(ids)
            if ids or finish is not None:
                yield ids, finish
            if finish is not None:
                return
            if self.failure is not None:
                raise self.failure
