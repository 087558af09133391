"""One admitted job inside its router, from the first dispatch to the end. The routed is the job's redo log.

dispatched ──▶ bound to one worker's incarnation ──▶ finished
    ▲                    │ link lost, job returned, claim without a sign
    └── attempt + 1 ─────┘
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import msgspec

from broker.messages import Job
from router.dispatch.reader_rounds import ReaderRounds
from router.request import TokenLogprobs
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

    def ack(self, job_id: str, attempt: int) -> None:
        """The worker may forget the job."""

    def cancel(self, job_id: str, attempt: int, choice: int | None = None) -> None:
        """The worker is to stop the job, or one of its choices, and free what it holds."""

    def rewind(self, job_id: str, attempt: int, choice: int, offset: int) -> None:
        """The worker is to send again from this offset of a choice."""


class Frame(msgspec.Struct, frozen=True):  # one is made for each token: a dataclass takes seven times as long
    """Tokens of one job as a worker sends them. `failure` ends the job; `returned` gives it back.

    `struck`: since the worker's engine died, perhaps of this job.
    """

    job_id: str
    attempt: int
    offset: int
    token_ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: WorkerFinish | None = None
    failure: CallError | None = None
    returned: bool = False
    struck: bool = False
    adapter_ms: float | None = None
    cached_tokens: int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(slots=True)
class Choice:
    """One answer of a job. `emitted` has every id produced so far, over all attempts."""

    emitted: list[int] = field(default_factory=list)
    # One for each id, where the job asks for them.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: WorkerFinish | None = None
    # Whether the router needs no more of it, though its worker has not ended it.
    closed: bool = False
    # How many of `emitted` have been handed to the reader.
    read: int = 0

    @property
    def ended(self) -> bool:
        """Whether no worker needs to go on with it."""
        return self.closed or self.finish is not None


@dataclass(frozen=True, slots=True)
class Arrival:
    """What has come of one choice since it was last read."""

    choice: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish: WorkerFinish | None


@dataclass(slots=True)
class _Seat:
    """Whose turn it is to read; with an error, no longer."""

    error: CallError | None = None


class RoutedJob:
    """A job's state, and the queue between the relay and the one reader of its tokens."""

    def __init__(self, job: Job, rounds: ReaderRounds | None = None) -> None:
        self.job = job
        self._rounds = rounds or ReaderRounds()
        self.choices = [_choice(job, index) for index in range(job.n)]
        self.link: Link | None = None
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
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        # Choices with something to read.
        self._news: set[int] = set()
        self._arrived = asyncio.Event()
        self._seat = _Seat()

    @property
    def ended(self) -> bool:
        """Whether no worker needs to go on with it."""
        return self.failure is not None or all(choice.ended for choice in self.choices)

    @property
    def late(self) -> bool:
        """Whether its deadline has passed."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    @property
    def finished_by_worker(self) -> bool:
        """Whether its worker ended all of it, and so holds nothing but what an ack frees."""
        return self.failure is not None or all(choice.finish is not None for choice in self.choices)

    @property
    def emitted_tokens(self) -> int:
        """Ids produced so far, of all choices."""
        return sum(len(choice.emitted) for choice in self.choices)

    def bind(self, link: Link) -> bool:
        """Give the current attempt to this link's incarnation; False when another has it."""
        if self.link is None:
            self.link = link
            self.missing_since = None
            self.claimed_at = self.claimed_at or time.monotonic()
            for index, choice in enumerate(self.choices):
                if choice.ended and index not in self.job.done:  # while it waited
                    link.cancel(self.job.job_id, self.job.attempt, index)
            return True
        if self.link.incarnation != link.incarnation:
            return False
        self.link = link
        return True

    def next_attempt(self, *, struck: bool = False) -> Job:
        """Unbind, and mint the attempt that goes on from the last id; `struck` counts a strike."""
        self.link = None
        self.missing_since = None
        self.continuations += 1
        left_ms = 0
        if self._deadline is not None:
            left_ms = max(1, round((self._deadline - time.monotonic()) * 1e3))
        self.job = replace(
            self.job,
            attempt=self.job.attempt + 1,
            strikes=self.job.strikes + struck,
            emitted={index: tuple(choice.emitted) for index, choice in enumerate(self.choices) if not choice.ended},
            done=tuple(index for index, choice in enumerate(self.choices) if choice.ended),
            deadline_ms=left_ms,
        )
        return self.job

    def accept(self, frame: Frame) -> bool:
        """Take what is new in a frame of the bound worker; False when ids before it are missing."""
        choice = self.choices[frame.choice]
        if choice.ended:
            return True
        if frame.offset > len(choice.emitted):
            return False
        first, known = not choice.emitted, len(choice.emitted) - frame.offset
        choice.emitted.extend(frame.token_ids[known:])
        choice.logprobs.extend(frame.logprobs[known:])
        choice.finish = frame.finish
        if frame.adapter_ms is not None:
            self.adapter_ms = frame.adapter_ms
        if frame.cached_tokens is not None and self.continuations == 0:
            self.cached_tokens = max(self.cached_tokens, frame.cached_tokens)
        if frame.prompt_logprobs:
            self.prompt_logprobs = frame.prompt_logprobs
        self._news.add(frame.choice)
        self._rounds.ready(self._arrived, urgent=first or frame.finish is not None)
        return True

    def close(self, index: int) -> None:
        """The reader needs no more of a choice: its worker is to stop it."""
        choice = self.choices[index]
        if not choice.ended:
            choice.closed = True
            if self.link is not None and not self.ended:
                self.link.cancel(self.job.job_id, self.job.attempt, index)

    def fail(self, failure: CallError) -> None:
        """End the job with an error."""
        self.failure = failure
        self._arrived.set()

    def turn_away(self, error: CallError) -> None:
        """End the reader's `arrivals` with an error. The job goes on; the next reader gets all of it."""
        self._seat.error = error
        self._seat = _Seat()
        for index, choice in enumerate(self.choices):
            choice.read = 0
            if choice.emitted or choice.finish is not None:
                self._news.add(index)
        self._arrived.set()

    def limit(self, deadline_s: float | None) -> None:
        """The time that is left from now on; None: any."""
        self._deadline = None if deadline_s is None else time.monotonic() + deadline_s

    async def arrivals(self) -> AsyncGenerator[list[Arrival]]:
        """All that has come since the last turn, so that a slow moment makes fewer, larger messages.

        Ends when every choice has ended; raises the failure that ended the job.
        """
        seat = self._seat
        while True:
            if seat.error is None:
                await self._arrived.wait()
            if seat.error is not None:
                raise seat.error
            self._arrived.clear()
            news = [self._take(index) for index in sorted(self._news)]
            self._news.clear()
            if news:
                yield news
            if self.failure is not None:
                raise self.failure
            if self.ended and not self._news:
                return

    def _take(self, index: int) -> Arrival:
        choice = self.choices[index]
        arrival = Arrival(index, choice.emitted[choice.read :], choice.logprobs[choice.read :], choice.finish)
        choice.read = len(choice.emitted)
        return arrival


def _choice(job: Job, index: int) -> Choice:
    """A choice as the job begins with it: what a client that resumes has of it, to be read like what comes."""
    ids = job.emitted.get(index, ())
    # Its client has the log probabilities; these only keep the places of those that come.
    unknown = [TokenLogprobs(0.0)] * len(ids) if job.logprobs is not None else []
    return Choice(list(ids), unknown, closed=index in job.done)
