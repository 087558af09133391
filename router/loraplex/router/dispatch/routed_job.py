"""A job inside its router: its attempts, the tokens made so far, and the call that reads them.

The tokens are kept until the job is released: they are the redo log that the next attempt starts from.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from loraplex.contracts.broker.ledger import Reservation
from loraplex.contracts.broker.messages import Job
from loraplex.contracts.broker.terms import Placement
from loraplex.contracts.options import NO_DRAFTS, DraftCounts, FinishReason, TokenLogprobs
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.router.dispatch.links import Frame, WorkerLink
from loraplex.runtime.rpc.errors import CallError


class JobState(Enum):
    """A state of a job inside its router.

                   ┌─────────────── attempt + 1 ──────────────┐
                   ▼                                          │
    admitted ──▶ ENQUEUEING ──▶ QUEUED ◀──▶ MISSING ──▶ ... BOUND ──▶ ENDED ──▶ RELEASED

    A worker can claim the job from ENQUEUEING (it is quicker than the queue's answer), QUEUED and MISSING. A MISSING
    job is dispatched again as well. Every job can end, or be released before it ends.
    """

    # The current attempt is on its way into the queue.
    ENQUEUEING = "enqueueing"
    # The queue has the attempt, or a worker that has claimed it and has not told the router yet.
    QUEUED = "queued"
    # The last look found the attempt neither in the queue nor at a worker; or it waits in a cell that it is to leave.
    MISSING = "missing"
    # A worker incarnation has the attempt.
    BOUND = "bound"
    # No worker needs to go on: every choice has ended, or the job has failed.
    ENDED = "ended"
    # The router has forgotten the job.
    RELEASED = "released"


_ENDS = frozenset({JobState.ENDED, JobState.RELEASED})
_ALLOWED: dict[JobState, frozenset[JobState]] = {
    JobState.ENQUEUEING: _ENDS | {JobState.QUEUED, JobState.BOUND},
    JobState.QUEUED: _ENDS | {JobState.MISSING, JobState.BOUND},
    JobState.MISSING: _ENDS | {JobState.QUEUED, JobState.BOUND, JobState.ENQUEUEING},
    JobState.BOUND: _ENDS | {JobState.ENQUEUEING},
    JobState.ENDED: frozenset({JobState.RELEASED}),
    JobState.RELEASED: frozenset(),
}


class JobTransitionError(Exception):
    """A transition that is not allowed: a fault of the router's own code."""


def check_transition(job_id: str, before: JobState, after: JobState) -> None:
    """Raise JobTransitionError where a job can't go from one state to the other."""
    if after not in _ALLOWED[before]:
        raise JobTransitionError(f"job {job_id} can't go from {before.value} to {after.value}")


# Length of the pause after a round, as a multiple of the round's own length. With 1, 64 streams of 200 tokens/s each
# took a router 0.7 of its core, and a new request had to find its way in between.
REST = 4
# Maximum pause in seconds: a round may take long, and readers should not notice.
REST_MOST_S = 0.05


class ReaderRounds:
    """Rounds in which readers of tokens are woken, so that tokens that come meanwhile make fewer, larger messages.

    A message to a client costs the router, gRPC and the client the same with one token as with ten. After a round the
    next one begins when REST times as much time has passed as that one took: a busy router keeps most of its time for
    what comes in, and the readers of an idle one, whose rounds take next to nothing, hardly wait.
    """

    def __init__(self) -> None:
        # Events of the readers with something to read, in their order, each once.
        self._waiting: dict[asyncio.Event, None] = {}
        self._going = False

    def wake(self, reader: asyncio.Event, *, urgent: bool) -> None:
        """Set the event of a reader that has something to read: at once if urgent, else in the next round."""
        if urgent:
            self._waiting.pop(reader, None)
            reader.set()
            return
        self._waiting[reader] = None
        if not self._going:
            self._going = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        if not self._waiting:
            self._going = False
            return
        readers, self._waiting = self._waiting, {}
        began = time.monotonic()
        for reader in readers:
            reader.set()
        # The loop runs this after all readers that were woken.
        asyncio.get_running_loop().call_soon(self._rest, began)

    def _rest(self, began: float) -> None:
        rest_s = min(REST_MOST_S, REST * (time.monotonic() - began))
        asyncio.get_running_loop().call_later(rest_s, self._round)


@dataclass(slots=True)
class Choice:
    """A choice of a job. `emitted` has every id produced so far, over all attempts."""

    index: int
    emitted: list[int] = field(default_factory=list)
    # The log probabilities of the emitted ids, in their order; empty unless the job asks for them.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    # The vector of a job that asks for one, once its worker has ended it.
    vector: tuple[float, ...] = ()
    # The drafts of the current attempt, and of those before it.
    drafts: DraftCounts = NO_DRAFTS
    earlier_drafts: DraftCounts = NO_DRAFTS
    # True if the router needs no more of it, though its worker has not ended it.
    closed: bool = False
    # Number of ids in `emitted` that the reader has got.
    read: int = 0

    @classmethod
    def of_job(cls, job: Job, index: int) -> Choice:
        """Make a choice as its job begins: ids that a resuming client has are read like those that come."""
        ids = job.emitted.get(index, ())
        # The client has their log probabilities; these entries only keep the places of those that come.
        placeholders = [TokenLogprobs(0.0)] * len(ids) if job.logprobs is not None else []
        return cls(index, list(ids), placeholders, closed=index in job.done)

    @property
    def ended(self) -> bool:
        """Return whether no worker needs to go on with the choice."""
        return self.closed or self.finish is not None

    def append(self, frame: Frame) -> bool:
        """Append a frame's new ids; it must not begin after the emitted ones. Returns whether anything was new."""
        repeated = len(self.emitted) - frame.offset
        if len(frame.token_ids) <= repeated and frame.finish is None:
            return False
        self.emitted.extend(frame.token_ids[repeated:] if repeated else frame.token_ids)
        if frame.logprobs:
            self.logprobs.extend(frame.logprobs[repeated:])
        self.finish, self.vector, self.drafts = frame.finish, frame.vector, frame.drafts
        return True

    def read_new(self, job: Job, limit: int) -> Frame:
        """Return at most so many tokens that the reader has not got yet; the end comes with the last of them."""
        start, self.read = self.read, min(len(self.emitted), self.read + limit)
        finish = self.finish if self.read == len(self.emitted) else None
        ids, logprobs = tuple(self.emitted[start : self.read]), tuple(self.logprobs[start : self.read])
        return Frame(job.job_id, job.attempt, start, ids, self.index, logprobs, finish)


# Maximum tokens of one read, which go into one message: with the most log probabilities, and those of the held back
# tokens, about 1.5 MiB of its 4 (loraplex.router.generation.admission).
READ_TOKENS = 4_096


@dataclass(slots=True, eq=False)
class Reader:
    """The call that reads a job; with an error it must stop.

    `waits_since`: when gRPC was given its last message; None: it asks for the next one.
    """

    error: CallError | None = None
    waits_since: float | None = None


class RoutedJob:
    """An admitted job: its state, its redo log, and the way of its tokens from the relay to its one reader."""

    def __init__(self, job: Job, rounds: ReaderRounds | None = None) -> None:
        self.job = job
        # The current attempt's place in the queue, and the time of the monotonic clock when it was sealed for it.
        self.placement, self.sealed_at = Placement(), 0.0
        # The reservation that was granted with it, if any.
        self.reservation: Reservation | None = None
        self.state = JobState.ENQUEUEING
        self.choices = [Choice.of_job(job, index) for index in range(job.n)]
        # The link of the worker that has the current attempt; it stays when the job ends.
        self.link: WorkerLink | None = None
        self.failure: CallError | None = None
        self.continuations = 0
        self.admitted_at = time.monotonic()
        self.claimed_at: float | None = None
        self.adapter_ms, self.cached_tokens = 0.0, 0
        self.prompt_logprobs: Sequence[pb.TokenLogprobs] = ()
        # Time of the monotonic clock when the first ids of any choice came.
        self.first_token_at: float | None = None
        self.reader = Reader()
        self._deadline = self.admitted_at + job.deadline_ms / 1e3 if job.deadline_ms else None
        self._missing_since = 0.0
        # Number of attempts in a row that were claimed and never bound.
        self.unclaimed = 0
        self._rounds = rounds or ReaderRounds()
        # Choices with something to read.
        self._unread: set[int] = set()
        self._readable = asyncio.Event()

    def _go(self, state: JobState) -> None:
        check_transition(self.job.job_id, self.state, state)
        self.state = state

    @property
    def ended(self) -> bool:
        """Return whether no worker needs to go on with the job."""
        # Looked at for every frame: a set of states would be hashed each time.
        return self.state is JobState.ENDED or self.state is JobState.RELEASED

    @property
    def late(self) -> bool:
        """Return whether the job's deadline has passed."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    @property
    def finished_by_worker(self) -> bool:
        """Return whether the worker ended all choices, and so holds nothing but what an ack frees."""
        return self.failure is not None or all(choice.finish is not None for choice in self.choices)

    @property
    def emitted_tokens(self) -> int:
        """Return the number of ids produced so far, of all choices."""
        return sum(len(choice.emitted) for choice in self.choices)

    @property
    def drafts(self) -> DraftCounts:
        """Return the drafts of all choices, over all attempts."""
        return sum((choice.earlier_drafts + choice.drafts for choice in self.choices), NO_DRAFTS)

    def limit(self, deadline_s: float | None) -> None:
        """Set the seconds that are left from now on; None: no deadline."""
        self._deadline = None if deadline_s is None else time.monotonic() + deadline_s

    # Attempts

    def awaits_enqueue(self, attempt: int) -> bool:
        """Return whether this attempt is still to be put into the queue."""
        return self.state is JobState.ENQUEUEING and self.job.attempt == attempt

    def enqueued(self, attempt: int) -> None:
        """Note that the queue has taken an attempt; a worker may have claimed it before the queue's answer came."""
        if self.awaits_enqueue(attempt):
            self._go(JobState.QUEUED)
            self.sealed_at = time.monotonic()

    def enqueue_failed(self, attempt: int, error: CallError) -> None:
        """End the job with the error of an attempt that could not be put into the queue."""
        if self.awaits_enqueue(attempt):
            self.fail(error)

    def looked_up(self, *, waiting: bool, now: float) -> float:
        """Note what a look into the queue found; return for how many seconds the job has been missing."""
        if self.state is JobState.QUEUED and not waiting:
            self._go(JobState.MISSING)
            self._missing_since = now
        elif self.state is JobState.MISSING and waiting:
            self._go(JobState.QUEUED)
        return now - self._missing_since if self.state is JobState.MISSING else 0.0

    def leave_cell(self) -> None:
        """Take the waiting attempt for lost, since its cell is: another cell gets the next one."""
        if self.state is JobState.QUEUED:
            self._go(JobState.MISSING)

    def bind(self, link: WorkerLink, attempt: int) -> bool:
        """Give the attempt to this link's incarnation; False when it is over, or another incarnation has it."""
        if attempt != self.job.attempt or self.ended:
            return False
        if self.link is not None:
            if self.link.incarnation != link.incarnation:
                return False
            self.link = link
            return True
        self._go(JobState.BOUND)
        self.link, self.unclaimed = link, 0
        self.claimed_at = self.claimed_at or time.monotonic()
        for index, choice in enumerate(self.choices):
            if choice.ended and index not in self.job.done:  # closed while the attempt waited
                link.cancel(self.job.job_id, attempt, index)
        return True

    def next_attempt(self, *, blamed: bool = False) -> None:
        """Unbind, and make the attempt that goes on from the last id; `blamed` counts a strike.

        A job that is not on trial has its strike taken back once an attempt has given a token and is not blamed.
        """
        before, done = self.job.emitted, self.job.done
        gave = any(len(c.emitted) > len(before.get(i, ())) for i, c in enumerate(self.choices) if i not in done)
        cleared = gave and not self.job.on_trial
        self._go(JobState.ENQUEUEING)
        self.link = None
        self.continuations += 1
        for choice in self.choices:
            choice.earlier_drafts, choice.drafts = choice.earlier_drafts + choice.drafts, NO_DRAFTS
        left_ms = 0
        if self._deadline is not None:
            left_ms = max(1, round((self._deadline - time.monotonic()) * 1e3))
        self.job = replace(
            self.job,
            attempt=self.job.attempt + 1,
            strikes=self.job.strikes + 1 if blamed else 0 if cleared else self.job.strikes,
            emitted={index: tuple(choice.emitted) for index, choice in enumerate(self.choices) if not choice.ended},
            done=tuple(index for index, choice in enumerate(self.choices) if choice.ended),
            deadline_ms=left_ms,
        )

    def fail(self, failure: CallError) -> None:
        """End the job with an error."""
        self._go(JobState.ENDED)
        self.failure = failure
        self._readable.set()

    def release(self) -> None:
        """Forget the job: whatever is still reported about it changes nothing."""
        self._go(JobState.RELEASED)

    # Tokens

    def accept(self, frame: Frame) -> bool:
        """Take what is new in a frame of the bound worker; False when ids before it are missing."""
        choice = self.choices[frame.choice]
        if choice.ended:
            return True
        if frame.offset > len(choice.emitted):
            return False
        first = not choice.emitted
        if not choice.append(frame):  # ids that came before, or none: only ids make a first token
            return True
        if first and (choice.emitted or frame.finish is FinishReason.LENGTH):  # max_tokens 0: no ids come
            self._begin_choice(frame)
        if frame.finish is not None:
            self._end_with_choices()
        self._unread.add(frame.choice)
        self._rounds.wake(self._readable, urgent=first or frame.finish is not None)
        return True

    def _begin_choice(self, frame: Frame) -> None:
        """Record the values that accompany a choice's first ids."""
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
            self.adapter_ms = frame.adapter_ms or 0.0
        self.cached_tokens = max(self.cached_tokens, frame.cached_tokens or 0)
        self.prompt_logprobs = frame.prompt_logprobs or self.prompt_logprobs

    def close_choice(self, index: int) -> None:
        """End a choice that the reader needs no more of; its worker is to stop it."""
        choice = self.choices[index]
        if choice.ended or self.ended:
            return
        choice.closed = True
        self._end_with_choices()
        if self.link is not None and not self.ended:
            self.link.cancel(self.job.job_id, self.job.attempt, index)

    def _end_with_choices(self) -> None:
        if all(choice.ended for choice in self.choices):
            self._go(JobState.ENDED)

    def end_reader(self, error: CallError) -> None:
        """Make the reader's next read raise an error. The job goes on."""
        self.reader.error = error
        self._readable.set()

    def replace_reader(self, error: CallError) -> Reader:
        """End the reader with an error; return a new one, which gets everything from the first token."""
        self.end_reader(error)
        self.reader = Reader()
        for index, choice in enumerate(self.choices):
            choice.read = 0
            if choice.emitted or choice.finish is not None:
                self._unread.add(index)
        return self.reader

    @property
    def _has_news(self) -> bool:
        """Return whether there are tokens to read; the prompt's log probabilities come before all of them.

        The first choice brings them, with its first ids, and another choice's ids may be quicker: over another link.
        """
        if self.job.prompt_logprobs is not None and not self.choices[0].emitted and not self.choices[0].ended:
            return False
        return bool(self._unread)

    async def arrivals(self, reader: Reader) -> list[Frame]:
        """Wait for tokens; return those since the last read, so that a slow moment makes fewer, larger messages.

        At most READ_TOKENS come at once. Empty when every choice has ended. Raises what ended the job, or its reader.
        """
        while True:
            if reader.error is not None:
                raise reader.error
            has_news = self._has_news
            if not has_news and self.failure is not None:
                raise self.failure
            if not has_news and self.ended:
                return []
            await self._readable.wait()
            if reader.error is None:
                self._readable.clear()
                if self._has_news:
                    return self._read_new()

    def _read_new(self) -> list[Frame]:
        """Return the unread tokens, at most READ_TOKENS, those of the first choices first."""
        arrivals, budget = list[Frame](), READ_TOKENS
        for choice in [self.choices[index] for index in sorted(self._unread)]:
            if budget <= 0:
                break
            arrivals.append(choice.read_new(self.job, budget))
            budget -= len(arrivals[-1].token_ids)
            if choice.read == len(choice.emitted):
                self._unread.discard(choice.index)
        if self._unread:
            self._readable.set()
        return arrivals
