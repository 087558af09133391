"""The jobs that this worker holds, each with the ids it has made: kept until the router acks, so that it can rewind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from broker.messages import Job
from worker.engine_api import (
    AdapterSource,
    Failure,
    FinishKind,
    NewSequence,
    Output,
    Sampling,
    Stopping,
    TokenLogprobs,
)
from worker.io.adapters.fetch import DiskPin

# A token clears a job of an engine's death, but only in so many attempts: some may always give one before they kill.
CLEARED_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ends here. Neither kind nor failure: it is given back, to go on elsewhere.

    `struck`: given back since the engine died, perhaps of it.
    """

    kind: FinishKind | None = None
    failure: Failure | None = None
    struck: bool = False

    @property
    def returned(self) -> bool:
        """Whether the job is given back."""
        return self.kind is None and self.failure is None


@dataclass(slots=True, eq=False)
class LocalChoice:
    """One answer of a held job. `ids` were made here, after the `start` ids of earlier attempts."""

    job: Job
    choice: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    ending: Ending | None = None
    adapter_ms: float = 0.0
    cached_tokens: int = 0
    # How many of `ids` have been handed to the link.
    sent: int = 0
    in_engine: bool = False
    # Which of all sequences that the engine was handed it is, from 1 on, and whether the engine has begun it.
    place: int = 0
    begun: bool = False
    # When it was handed to the engine, and of that time how long it waited for its adapter; when its first and its last
    # token came, and the steps that made them.
    added_at: float | None = None
    load_ms: float = 0.0
    first_at: float | None = None
    last_at: float = 0.0
    first_step: int = 0
    last_step: int = 0

    @property
    def start(self) -> int:
        """How many ids earlier attempts had made."""
        return len(self.job.emitted.get(self.choice, ()))

    @property
    def sequence_id(self) -> str:
        """Its name in the engine."""
        return f"{self.job.attempt}/{self.choice}/{self.job.job_id}"

    def record(self, output: Output, at_s: float = 0.0, step: int = 0) -> None:
        """Keep what a step, which came at this time of the monotonic clock, made of it."""
        if not self.ids:
            self.load_ms = output.adapter_ms or 0.0
            self.adapter_ms += self.load_ms
            if output.token_ids:
                self.first_at, self.first_step = at_s, step
            self.cached_tokens = output.cached_tokens or 0
            self.prompt_logprobs = output.prompt_logprobs
        self.last_at, self.last_step = at_s, step
        self.ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs)
        if output.finish is not None:
            kind = None if output.finish is FinishKind.FAILED else output.finish
            self.ending = Ending(kind, output.failure)

    def rewind(self, offset: int) -> None:
        """Send again from this offset, a count over all attempts."""
        self.sent = max(0, min(offset - self.start, len(self.ids)))


@dataclass(slots=True, eq=False)
class LocalJob:
    """A claimed job with its choices. `hold` keeps its adapter on disk while the engine may read it."""

    job: Job
    choices: dict[int, LocalChoice]
    hold: DiskPin | None = None
    claimed_at: float = field(default_factory=time.monotonic)
    # When its adapter was on the disk; None: it has none, or never was.
    fetched_at: float | None = None
    # What gets it into the engine; None once it is there.
    entering: asyncio.Task[None] | None = None
    source: AdapterSource | None = None
    # Of answers that were stopped on their own.
    _dropped_tokens: int = 0
    _dropped_ran: bool = False

    @property
    def tokens(self) -> int:
        """Ids made here, of all answers, those that were stopped as well."""
        return self._dropped_tokens + sum(len(choice.ids) for choice in self.choices.values())

    @property
    def ran(self) -> bool:
        """Whether any of it has been handed to the engine."""
        return self._dropped_ran or any(choice.in_engine for choice in self.choices.values())

    def struck(self, taken: int, resident: Collection[str]) -> bool:
        """Whether the engine, if it died now, may have died of it: an answer that no step has given a token yet.

        A step that computes a part of its prompt clears nobody: what kills may lie in the next part. One that runs
        alone is never cleared, nor one that comes for more than the CLEARED_ATTEMPTS. One that waits in the engine is
        no cause: it is among the `taken` sequences that the engine has told of, has not begun, and needs no adapter to
        be loaded, since that is `resident`.
        """
        loads = self.source is not None and self.source.digest not in resident
        handed = (choice for choice in self.running if choice.in_engine)
        touched = (choice for choice in handed if choice.begun or choice.place > taken or loads)
        never_cleared = self.job.suspect or self.job.attempt > CLEARED_ATTEMPTS
        return any(never_cleared or not choice.ids for choice in touched)

    @property
    def returned(self) -> list[LocalChoice]:
        """Choices that say that the job is given back."""
        return [choice for choice in self.choices.values() if choice.ending is not None and choice.ending.returned]

    def drop(self, choice: int) -> LocalChoice | None:
        """DiskPin one of its answers no longer; None: it does not."""
        stopped = self.choices.pop(choice, None)
        if stopped is not None:
            self._dropped_tokens += len(stopped.ids)
            self._dropped_ran = self._dropped_ran or stopped.in_engine
        return stopped

    @property
    def running(self) -> list[LocalChoice]:
        """Choices that take a row, or will."""
        return [choice for choice in self.choices.values() if choice.ending is None]


class LocalJobs:
    """All of them, by job and attempt; another attempt of a job is another entry."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, int], LocalJob] = {}

    @property
    def running(self) -> list[LocalChoice]:
        """Answers that take a row, or will."""
        return [choice for held in self._jobs.values() for choice in held.running]

    def add(self, job: Job) -> LocalJob:
        """DiskPin a claimed job."""
        choices = {choice: LocalChoice(job, choice) for choice in range(job.n) if choice not in job.done}
        held = self._jobs[job.job_id, job.attempt] = LocalJob(job, choices)
        return held

    def get(self, job_id: str, attempt: int) -> LocalJob | None:
        """A held job."""
        return self._jobs.get((job_id, attempt))

    def of_sequence(self, sequence_id: str) -> LocalChoice | None:
        """The held answer of an engine's sequence."""
        attempt, choice, job_id = sequence_id.split("/", 2)
        held = self._jobs.get((job_id, int(attempt)))
        return held.choices.get(int(choice)) if held else None

    def pop(self, job_id: str, attempt: int) -> LocalJob | None:
        """DiskPin it no longer."""
        return self._jobs.pop((job_id, attempt), None)

    def of_router(self, address: str) -> list[LocalJob]:
        """What is held for one router."""
        return [held for held in self._jobs.values() if held.job.reply_to == address]

    def all(self) -> tuple[LocalJob, ...]:
        """Every held job."""
        return tuple(self._jobs.values())


def sequence_of(held: LocalChoice, adapter: AdapterSource | None) -> NewSequence:
    """What the engine is asked for."""
    job = held.job
    return NewSequence(
        sequence_id=held.sequence_id,
        prompt_ids=job.prompt_ids,
        emitted_ids=job.emitted.get(held.choice, ()),
        adapter=adapter,
        choice=held.choice,
        logprobs=job.logprobs,
        # Once is enough, and a later attempt has told it already.
        prompt_logprobs=job.prompt_logprobs if held.choice == 0 and not held.start else None,
        sampling=Sampling.seeded(job.sampling, job.seed),
        stopping=Stopping(
            job.stopping.max_tokens, job.stopping.min_tokens, job.stopping.stop_token_ids, job.stopping.ignore_eos
        ),
        # Its priority has done its work in the claim: in an engine it would put it before other tenants' sequences.
        tenant=job.tenant,
    )
