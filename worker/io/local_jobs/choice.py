"""An answer of a local job: its state in this worker, and the tokens made here.

WAITING ──hand_over──▶ HANDED_OVER ──begin──▶ BEGUN ──end──▶ ENDED
   └──────────end──────────┴──────────────end───────────────▲
each of them ──drop──▶ DROPPED
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

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


class LocalChoiceState(Enum):
    """The states of an answer in this worker."""

    WAITING = "waiting"  # for its job's adapter, for other jobs to end, or for its sibling's first token
    HANDED_OVER = "handed over"  # the engine has it, and has computed nothing of it
    BEGUN = "begun"  # the engine computes it
    ENDED = "ended"  # finished, failed or given back; kept until its router acks the job
    DROPPED = "dropped"  # its router no longer wants it


_TRANSITIONS = {
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

    kind: FinishKind | None = None
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
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # Of a job that asks for a vector, which comes with its end.
    vector: tuple[float, ...] = ()
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
    _state: LocalChoiceState = LocalChoiceState.WAITING

    def __post_init__(self) -> None:
        """Compute what never changes once: both are read for every token."""
        self.sequence_id = f"{self.job.attempt}/{self.choice}/{self.job.job_id}"
        self.start = len(self.job.emitted.get(self.choice, ()))

    @property
    def state(self) -> LocalChoiceState:
        """Return the state."""
        return self._state

    @property
    def in_engine(self) -> bool:
        """Return whether the engine has its sequence."""
        return self._state in _IN_ENGINE

    @property
    def running(self) -> bool:
        """Return whether it takes a row of the engine, or will."""
        return self._state in _RUNNING

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
            self.prompt_logprobs = output.prompt_logprobs
        self.last_at, self.last_step = at_s, step
        self.ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs)
        self.vector = output.vector
        if output.finish is not None:
            kind = None if output.finish is FinishKind.FAILED else output.finish
            self.end(Ending(kind, output.failure))

    def rewind(self, offset: int) -> None:
        """Send again from this offset, which counts the tokens of all attempts."""
        self.sent = max(0, min(offset - self.start, len(self.ids)))

    def _enter(self, state: LocalChoiceState) -> None:
        if state not in _TRANSITIONS[self._state]:
            raise RuntimeError(f"answer {self.sequence_id} is {self._state.value} and cannot become {state.value}")
        self._state = state


def sequence_of(choice: LocalChoice, adapter: AdapterSource | None) -> NewSequence:
    """Build the engine's sequence for an answer."""
    job = choice.job
    return NewSequence(
        sequence_id=choice.sequence_id,
        prompt_ids=job.prompt_ids,
        emitted_ids=job.emitted.get(choice.choice, ()),
        adapter=adapter,
        choice=choice.choice,
        logprobs=job.logprobs,
        # One answer reports those of the prompt, and only in the first attempt that produces tokens.
        prompt_logprobs=job.prompt_logprobs if choice.choice == 0 and not choice.start else None,
        prompt_logprobs_start=job.prompt_logprobs_start,
        sampling=Sampling.seeded(job.sampling, job.seed),
        stopping=Stopping(
            job.stopping.max_tokens, job.stopping.min_tokens, job.stopping.stop_token_ids, job.stopping.ignore_eos
        ),
        # The claim has applied the job's priority: in the engine it would put the job before other tenants' sequences.
        tenant=job.tenant,
        weight=job.weight,
        grammar=job.grammar,
        encode=job.encode,
    )
