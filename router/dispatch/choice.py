"""A choice of a job inside its router: every token made so far, and how many of them its reader has got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.messages import Job
from router.dispatch.link import Frame, WorkerFinish
from router.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens of one choice that have come since the last read."""

    choice: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish: WorkerFinish | None


@dataclass(slots=True)
class Choice:
    """A choice of a job. `emitted` has every id produced so far, over all attempts."""

    index: int
    emitted: list[int] = field(default_factory=list)
    # The log probabilities of the emitted ids, in their order; empty unless the job asks for them.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: WorkerFinish | None = None
    # The vector of a job that asks for one, once its worker has ended it.
    vector: tuple[float, ...] = ()
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
        """Take what is new in a frame, which begins at most where the emitted ids end; False: nothing is new."""
        repeated = len(self.emitted) - frame.offset
        if len(frame.token_ids) <= repeated and frame.finish is None:
            return False
        self.emitted.extend(frame.token_ids[repeated:] if repeated else frame.token_ids)
        if frame.logprobs:
            self.logprobs.extend(frame.logprobs[repeated:])
        self.finish, self.vector = frame.finish, frame.vector
        return True

    def read_new(self, limit: int) -> Arrival:
        """Return at most so many tokens that the reader has not got yet; the end comes with the last of them."""
        start, self.read = self.read, min(len(self.emitted), self.read + limit)
        finish = self.finish if self.read == len(self.emitted) else None
        return Arrival(self.index, self.emitted[start : self.read], self.logprobs[start : self.read], finish)
