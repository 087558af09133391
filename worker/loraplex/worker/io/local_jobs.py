"""The jobs that this worker has claimed, by job id and attempt, each kept until its router acks or cancels it.

    CLAIMED ──▶ WAITING_ALONE ──▶ FETCHING_ADAPTER ──▶ IN_ENGINE ──▶ ENDED or RETURNED ──▶ REMOVED

A job may skip states, but never goes back; ENDED and RETURNED exclude each other. Its answers have states of their own:

    WAITING ──hand_over──▶ HANDED_OVER ──begin──▶ BEGUN ──end──▶ ENDED
       └──────────end──────────┴──────────────end───────────────▲
    each of them ──drop──▶ DROPPED
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from loraplex.contracts.broker.messages import Job
from loraplex.contracts.options import NO_DRAFTS, DraftCounts, FinishReason, TokenLogprobs
from loraplex.worker.engine_api import AdapterSource, Failure, NewSequence, Output
from loraplex.worker.io.adapters.fetch import DiskPin


class LocalChoiceState(Enum):
    """The states of an answer in this worker."""

    WAITING = "waiting"  # for its job's adapter, for other jobs to end, or for its sibling's first token
    HANDED_OVER = "handed over"  # the engine has it, and has computed nothing of it
    BEGUN = "begun"  # the engine computes it
    ENDED = "ended"  # finished, failed or given back; kept until its router acks the job
    DROPPED = "dropped"  # its router no longer wants it


_CHOICE_TRANSITIONS = {
    LocalChoiceState.WAITING: {LocalChoiceState.HANDED_OVER, LocalChoiceState.ENDED, LocalChoiceState.DROPPED},
    LocalChoiceState.HANDED_OVER: {LocalChoiceState.BEGUN, LocalChoiceState.ENDED, LocalChoiceState.DROPPED},
    LocalChoiceState.BEGUN: {LocalChoiceState.ENDED, LocalChoiceState.DROPPED},
    LocalChoiceState.ENDED: {LocalChoiceState.DROPPED},
    LocalChoiceState.DROPPED: set(),
}
_IN_ENGINE = frozenset({LocalChoiceState.HANDED_OVER, LocalChoiceState.BEGUN})
_RUNNING = _IN_ENGINE | {LocalChoiceState.WAITING}


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an answer in this worker. With neither kind nor failure, the answer is given back to its router.

    `blamed`: given back because the engine died or stalled, perhaps because of this job.
    """

    kind: FinishReason | None = None
    failure: Failure | None = None
    blamed: bool = False

    @property
    def returned(self) -> bool:
        """Return whether the answer is given back, to go on elsewhere."""
        return self.kind is None and self.failure is None


@dataclass(slots=True, eq=False)
class LocalChoice:
    """An answer of a local job. `ids` were made here, after the `start` ids of earlier attempts."""

    job: Job
    choice: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Log probabilities of the prompt, which may be of tens of thousands of tokens: encoded part by part, as they come.
    prompt_logprobs: bytearray = field(default_factory=bytearray)
    # Of a job that asks for a vector, which comes with its end.
    vector: tuple[float, ...] = ()
    drafts: DraftCounts = NO_DRAFTS
    ending: Ending | None = None
    adapter_ms: float = 0.0
    cached_tokens: int = 0
    # Number of `ids` that frames have taken.
    sent: int = 0
    # Name of its sequence in the engine, and number of ids that earlier attempts made.
    sequence_id: str = field(init=False)
    start: int = field(init=False)
    # Position among all sequences handed to the engine, from 1; 0: not handed over.
    handover_number: int = 0
    # Monotonic times in seconds: handed to the engine, first and last token; and the steps of those tokens.
    handed_over_at: float | None = None
    first_at: float | None = None
    last_at: float = 0.0
    first_step: int = 0
    last_step: int = 0
    # Milliseconds that it waited for its adapter inside the engine.
    load_ms: float = 0.0
    state: LocalChoiceState = LocalChoiceState.WAITING

    def __post_init__(self) -> None:
        """Compute what never changes once: both are read for every token."""
        self.sequence_id = f"{self.job.attempt}/{self.choice}/{self.job.job_id}"
        self.start = len(self.job.emitted.get(self.choice, ()))

    @property
    def in_engine(self) -> bool:
        """Return whether the engine has its sequence."""
        return self.state in _IN_ENGINE

    @property
    def running(self) -> bool:
        """Return whether it takes a row of the engine, or will."""
        return self.state in _RUNNING

    @property
    def has_news(self) -> bool:
        """Return whether a frame of it would tell its router something: ids that none has taken, or its end."""
        return self.sent < len(self.ids) or self.ending is not None

    def hand_over(self, number: int, at_s: float) -> None:
        """Note that the engine gets its sequence, as the `number`-th of all."""
        self._enter(LocalChoiceState.HANDED_OVER)
        self.handover_number, self.handed_over_at = number, at_s

    def begin(self) -> None:
        """Note that the engine's next step computes it for the first time."""
        self._enter(LocalChoiceState.BEGUN)

    def end(self, ending: Ending) -> None:
        """Set its end; nothing more is recorded of it."""
        self._enter(LocalChoiceState.ENDED)
        self.ending = ending

    def drop(self) -> None:
        """Note that nobody wants it any more."""
        self._enter(LocalChoiceState.DROPPED)

    def record(self, output: Output, at_s: float = 0.0, step: int = 0) -> None:
        """Keep what a step made of it; the step's output arrived at `at_s` of the monotonic clock."""
        if not self.ids:
            self.load_ms = output.adapter_ms or 0.0
            self.adapter_ms += self.load_ms
            if output.token_ids or output.vector:
                self.first_at, self.first_step = at_s, step
            self.cached_tokens = output.cached_tokens or 0
        self.last_at, self.last_step = at_s, step
        self.ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs)
        self.vector = output.vector
        if output.drafted:
            self.drafts += DraftCounts(1, output.drafted, output.accepted)
        if output.finish is not None:
            kind = None if output.finish is FinishReason.FAILED else output.finish
            self.end(Ending(kind, output.failure))

    def rewind(self, offset: int) -> None:
        """Send again from this offset, which counts the tokens of all attempts."""
        self.sent = max(0, min(offset - self.start, len(self.ids)))

    def _enter(self, state: LocalChoiceState) -> None:
        if state not in _CHOICE_TRANSITIONS[self.state]:
            raise RuntimeError(f"answer {self.sequence_id} is {self.state.value} and cannot become {state.value}")
        self.state = state


def sequence_of(choice: LocalChoice, adapter: AdapterSource | None) -> NewSequence:
    """Build the engine's sequence for an answer."""
    job = choice.job
    # An older router gives an activated adapter no place: at 0 its answer may be another one, so the engine refuses it.
    unplaced = -1 if adapter is not None and adapter.invocation else 0
    return NewSequence(
        sequence_id=choice.sequence_id,
        prompt_ids=job.prompt_ids,
        emitted_ids=job.emitted.get(choice.choice, ()),
        adapter=adapter,
        choice=choice.choice,
        logprobs=job.logprobs,
        logprob_token_ids=job.logprob_token_ids,
        # Choice 0 alone reports the prompt, and only in the first attempt that produces tokens.
        prompt_logprobs=job.prompt_logprobs if choice.choice == 0 and not choice.start else None,
        prompt_logprobs_start=job.prompt_logprobs_start,
        sampling=job.sampling,
        stopping=job.stopping,
        # The claim has applied the job's priority: in the engine it would put the job before other tenants' sequences.
        tenant=job.tenant,
        weight=job.weight,
        grammar=job.grammar,
        speculate=job.speculate,
        encode=job.encode,
        invoked_at=unplaced if job.invoked_at is None else job.invoked_at,
    )


# Number of attempts in which a token clears a job of an engine's death. A job that always gives a token before it kills
# its engine would otherwise never be blamed.
CLEARED_ATTEMPTS = 5


class LocalJobState(Enum):
    """The states of a job in this worker."""

    CLAIMED = "claimed"
    WAITING_ALONE = "waiting to run alone"
    FETCHING_ADAPTER = "fetching its adapter"
    IN_ENGINE = "in the engine"
    ENDED = "ended"  # every answer has finished, failed or been dropped; kept until the router acks
    RETURNED = "given back"  # to go on at another worker; kept until the router acks
    REMOVED = "removed"  # acked or cancelled


_OUT = frozenset({LocalJobState.ENDED, LocalJobState.RETURNED, LocalJobState.REMOVED})
_JOB_TRANSITIONS: dict[LocalJobState, frozenset[LocalJobState]] = {
    LocalJobState.CLAIMED: _OUT
    | {LocalJobState.WAITING_ALONE, LocalJobState.FETCHING_ADAPTER, LocalJobState.IN_ENGINE},
    LocalJobState.WAITING_ALONE: _OUT | {LocalJobState.FETCHING_ADAPTER, LocalJobState.IN_ENGINE},
    LocalJobState.FETCHING_ADAPTER: _OUT | {LocalJobState.IN_ENGINE},
    LocalJobState.IN_ENGINE: _OUT,
    LocalJobState.ENDED: frozenset({LocalJobState.REMOVED}),
    LocalJobState.RETURNED: frozenset({LocalJobState.REMOVED}),
    LocalJobState.REMOVED: frozenset(),
}


@dataclass(slots=True, eq=False)
class LocalJob:
    """A claimed job with its answers. `pin` keeps its adapter on disk while the engine may read it."""

    job: Job
    choices: dict[int, LocalChoice]
    pin: DiskPin | None = None
    source: AdapterSource | None = None
    # Task that brings it into the engine; None: it goes there directly.
    preparing: asyncio.Task[None] | None = None
    # Times of the monotonic clock in seconds; `fetched_at` is None without an adapter on the disk.
    claimed_at: float = field(default_factory=time.monotonic)
    fetched_at: float | None = None
    state: LocalJobState = LocalJobState.CLAIMED
    # Of dropped answers: ids made here, and whether one was handed to the engine.
    _dropped_tokens: int = 0
    _dropped_ran: bool = False

    @property
    def preparing_for_engine(self) -> bool:
        """Return whether it has yet to come into the engine."""
        return self.state not in _OUT and self.state is not LocalJobState.IN_ENGINE

    @property
    def running(self) -> list[LocalChoice]:
        """Return the answers that take a row of the engine, or will."""
        return [choice for choice in self.choices.values() if choice.running]

    @property
    def waiting(self) -> list[LocalChoice]:
        """Return the answers that are not handed to the engine yet."""
        return [choice for choice in self.choices.values() if choice.state is LocalChoiceState.WAITING]

    @property
    def returned(self) -> list[LocalChoice]:
        """Return the answers that are given back."""
        return [choice for choice in self.choices.values() if choice.ending is not None and choice.ending.returned]

    @property
    def tokens(self) -> int:
        """Return the number of ids made here, those of dropped answers included."""
        return self._dropped_tokens + sum(len(choice.ids) for choice in self.choices.values())

    @property
    def ran(self) -> bool:
        """Return whether any of its answers was handed to the engine."""
        return self._dropped_ran or any(choice.handover_number for choice in self.choices.values())

    @property
    def needs_all(self) -> bool:
        """Return whether nothing may begin beside it: a suspect, until every answer has a token or ends."""
        return self.job.suspect and any(self._never_cleared or not choice.ids for choice in self.running)

    @property
    def _never_cleared(self) -> bool:
        return self.job.on_trial or self.job.attempt > CLEARED_ATTEMPTS

    def may_have_killed(self, taken: int, resident: Collection[str]) -> bool:
        """Return whether the engine, if it died now, may have died of this job: no step has given an answer a token.

        A step that computes a part of the prompt clears no job: the cause may lie in the next part. A job on trial
        is never cleared, nor one beyond CLEARED_ATTEMPTS. An answer that only waits in the engine is no cause: it
        is among the `taken` sequences that the engine has reported, has not begun, and its adapter is `resident`.
        """
        loads = self.source is not None and self.source.digest not in resident
        touched = (
            choice
            for choice in self.choices.values()
            if choice.in_engine and (choice.state is LocalChoiceState.BEGUN or choice.handover_number > taken or loads)
        )
        return any(self._never_cleared or not choice.ids for choice in touched)

    def enter(self, state: LocalJobState) -> None:
        """Change the state. Raises RuntimeError where the present one does not allow it."""
        if state not in _JOB_TRANSITIONS[self.state]:
            name = f"{self.job.job_id}, attempt {self.job.attempt},"
            raise RuntimeError(f"job {name} is {self.state.value} and cannot become {state.value}")
        self.state = state

    def end_choices(self, state: LocalJobState, ending: Ending) -> list[LocalChoice]:
        """End all answers that run, and the job with them; returns those answers."""
        ended = self.running
        for choice in ended:
            choice.end(ending)
        self.enter(state)
        return ended

    def end_if_done(self) -> None:
        """Enter ENDED once no answer runs any more."""
        if self.state not in _OUT and not self.running:
            self.enter(LocalJobState.ENDED)

    def drop(self, choice: int) -> LocalChoice | None:
        """Remove the answer of this number; None if there is none."""
        dropped = self.choices.pop(choice, None)
        if dropped is not None:
            dropped.drop()
            self._dropped_tokens += len(dropped.ids)
            self._dropped_ran = self._dropped_ran or bool(dropped.handover_number)
        return dropped


class LocalJobs:
    """All local jobs; another attempt of a job is another entry."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, int], LocalJob] = {}
        self._sequences: dict[str, LocalChoice] = {}
        self._handed_over = 0
        # Set, and replaced, at the next change of what is here or of what the engine has room for.
        self.next_change = asyncio.Event()

    def changed(self) -> None:
        """Wake all that wait for `next_change`."""
        self.next_change.set()
        self.next_change = asyncio.Event()

    @property
    def running(self) -> list[LocalChoice]:
        """Return all answers that take a row of the engine, or will."""
        return [choice for local in self._jobs.values() for choice in local.choices.values() if choice.running]

    @property
    def any_in_engine(self) -> bool:
        """Return whether the engine has a sequence of any job."""
        return any(choice.in_engine for choice in self._sequences.values())

    def all(self) -> tuple[LocalJob, ...]:
        """Return every job."""
        return tuple(self._jobs.values())

    def get(self, job_id: str, attempt: int) -> LocalJob | None:
        """Return a job, if it is here."""
        return self._jobs.get((job_id, attempt))

    def of_sequence(self, sequence_id: str) -> LocalChoice | None:
        """Return the answer of an engine's sequence, if it is here."""
        return self._sequences.get(sequence_id)

    def in_the_way_of(self, suspect: LocalJob) -> list[LocalJob]:
        """Return the jobs that a suspect must not begin beside: those of other tenants, for a trial all others."""
        waits = {LocalJobState.CLAIMED, LocalJobState.WAITING_ALONE}
        others = [other for other in self._jobs.values() if other is not suspect and other.running]
        others = [other for other in others if not (other.job.suspect and other.state in waits)]
        if suspect.job.on_trial:
            return others
        return [other for other in others if other.job.tenant != suspect.job.tenant or other.needs_all]

    def of_router(self, address: str) -> list[LocalJob]:
        """Return the jobs of one router."""
        return [local for local in self._jobs.values() if local.job.reply_to == address]

    def add(self, job: Job) -> LocalJob:
        """Add a claimed job."""
        choices = {choice: LocalChoice(job, choice) for choice in range(job.n) if choice not in job.done}
        local = self._jobs[job.job_id, job.attempt] = LocalJob(job, choices)
        self._sequences.update((choice.sequence_id, choice) for choice in choices.values())
        return local

    def remove(self, job_id: str, attempt: int) -> LocalJob | None:
        """Remove a job, and return it; None: it is not here. Its answers keep their states."""
        local = self._jobs.pop((job_id, attempt), None)
        if local is not None:
            local.enter(LocalJobState.REMOVED)
            for choice in local.choices.values():
                del self._sequences[choice.sequence_id]
        return local

    def drop_choice(self, local: LocalJob, choice: int) -> LocalChoice | None:
        """Remove one answer of a job, and return it; None: it is not here."""
        dropped = local.drop(choice)
        if dropped is not None:
            del self._sequences[dropped.sequence_id]
        return dropped

    def hand_over(self, local: LocalJob, choices: Sequence[LocalChoice]) -> list[NewSequence]:
        """Note that the engine gets these answers, and build their sequences."""
        now = time.monotonic()
        for choice in choices:
            choice.hand_over(self.count_sequence(), now)
        return [sequence_of(choice, local.source) for choice in choices]

    def count_sequence(self) -> int:
        """Return the number of a sequence that the engine gets now."""
        self._handed_over += 1
        return self._handed_over

    async def empties_within(self, timeout_s: float) -> bool:
        """Wait until every job is removed, at most `timeout_s`; returns whether that is so."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._jobs:
                    await self.next_change.wait()
        return not self._jobs
