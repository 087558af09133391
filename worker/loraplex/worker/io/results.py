"""The way back of a job: what the engine and the routers say of local jobs, and the jobs that are given back.

engine ──Stepped, Begun, ...──▶ Results ──frames──▶ RouterLinks ──▶ routers
engine ◀──Abort, Add (siblings)──── Results ◀──acks, cancels──────────── routers
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING

from loraplex.contracts.broker.messages import Job, WorkerState
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import UsageReport
from loraplex.contracts.options import Encode, StoppingParams
from loraplex.runtime.telemetry.tracing import Attributes, Spans
from loraplex.worker.engine_api import EngineStats, Failure, NewSequence, Output
from loraplex.worker.io.engine_client import EngineBreaker, EngineProcess
from loraplex.worker.io.local_jobs import Ending, LocalChoice, LocalChoiceState, LocalJob, LocalJobs, LocalJobState
from loraplex.worker.io.metrics import WorkerMetrics
from loraplex.worker.io.relay.frames import encode_prompt
from loraplex.worker.io.relay.links import LinkSettings, RouterLinks
from loraplex.worker.ipc import Abort, Add, Begun, PromptLogprobsPart, Ready, Refused, Stepped

if TYPE_CHECKING:  # see telemetry/tracing.py
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

# Interval in seconds between reports of the jobs that run.
REPORT_S = 1.0


class TokenReports:
    """Reports to the queue of the tokens that local jobs have made, for their tenants' counters.

    They count from the attempt's start, so that one that comes twice does no harm.
    """

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

    async def report(self) -> None:
        """Send the last reports, and one for each job that is here. Raises what a Redis that is down raises.

        The next report makes up for one that Redis did not get.
        """
        with self.last_reports() as ended:
            await self._queue.charge([*ended, *(_usage(local, ended=False) for local in self._jobs.all())])


def _usage(local: LocalJob, *, ended: bool) -> UsageReport:
    return UsageReport(local.job.job_id, local.job.attempt, _tokens(local), ended=ended, ran=local.ran)


def _tokens(local: LocalJob) -> int:
    """Return the tokens to charge for; 1 for the vector, or the end, of a job that makes none: it clears a suspect."""
    return local.tokens or int(any(choice.ending and choice.ending.kind for choice in local.choices.values()))


# Outcomes of a job at this worker.
FINISHED, FAILED, RETURNED, CANCELLED = "finished", "failed", "returned", "cancelled"


class JobTelemetry:
    """Metrics and spans of a worker's jobs, over all its engine sessions: where the time of each one went.

    All is observed when a job is removed, from times that were written down meanwhile: the hot path pays for those
    alone.

        claimed ── adapter fetch ── adapter load ── prefill ── decode ──▶ ended
    """

    def __init__(self, metrics: WorkerMetrics, spans: Spans, worker_id: str) -> None:
        self.metrics = metrics
        self._spans = spans
        self.worker_id = worker_id
        for outcome in (FINISHED, FAILED, RETURNED, CANCELLED):
            metrics.ended.labels(outcome)
        # Time of the last step that gave tokens, while steps follow each other.
        self._stepped_at: float | None = None

    def stepped(self, outputs: list[Output], stats: EngineStats) -> float:
        """Observe a step that has just come; returns the monotonic time that counts for its outputs."""
        now = time.monotonic()
        if outputs:
            if self._stepped_at is not None:
                self.metrics.step_time.observe(now - self._stepped_at)
            self.metrics.batch_size.observe(len(outputs))
            self.metrics.engine_tokens.inc(sum(len(output.token_ids) for output in outputs))
        self._stepped_at = now if outputs and stats.rows_running else None
        return now

    def ended(self, local: LocalJob) -> None:
        """Observe a job that is removed."""
        outcome = _outcome(local)
        self.metrics.ended.labels(outcome).inc()
        self.metrics.tenant_tokens.labels(self.metrics.tenants.bounded(local.job.tenant)).inc(local.tokens)
        if local.fetched_at is not None:
            self.metrics.fetch_wait.observe(local.fetched_at - local.claimed_at)
        for choice in local.choices.values():
            if choice.first_at is not None and choice.handed_over_at is not None:
                load_s = choice.load_ms / 1e3
                if choice.job.adapter is not None:
                    self.metrics.load_wait.observe(load_s)
                self.metrics.prefill_time.observe(max(0.0, choice.first_at - choice.handed_over_at - load_s))
                self.metrics.decode_time.observe(choice.last_at - choice.first_at)
        if self._spans.on and local.job.traceparent:
            self._trace(local, outcome)

    def _trace(self, local: LocalJob, outcome: str) -> None:
        job = local.job
        attributes: Attributes = {
            "loraplex.worker": self.worker_id,
            "loraplex.job": job.job_id,
            "loraplex.attempt": job.attempt,
            "loraplex.outcome": outcome,
            "gen_ai.usage.output_tokens": local.tokens,
        }
        span = self._spans.begin("attempt", job.traceparent, attributes, kind="CONSUMER", at_s=local.claimed_at)
        if span is None:
            return
        if local.fetched_at is not None and job.adapter is not None:
            revision = {"loraplex.adapter": job.adapter.revision}
            self._spans.record("adapter fetch", span, local.claimed_at, local.fetched_at, revision)
        for choice in local.choices.values():
            self._trace_choice(span, choice)
        self._spans.end(span, error=outcome if outcome == FAILED else "")

    def _trace_choice(self, span: Span, choice: LocalChoice) -> None:
        if choice.handed_over_at is None:
            return
        number: Attributes = {"loraplex.choice": choice.choice}
        loaded_at = choice.handed_over_at + choice.load_ms / 1e3
        if choice.job.adapter is not None:
            self._spans.record("adapter load", span, choice.handed_over_at, loaded_at, number)
        if choice.first_at is None:
            return
        prefill = {**number, "loraplex.step": choice.first_step, "loraplex.prompt_tokens_cached": choice.cached_tokens}
        self._spans.record("prefill", span, loaded_at, choice.first_at, prefill)
        decode = {**number, "loraplex.first_step": choice.first_step, "loraplex.last_step": choice.last_step}
        self._spans.record("decode", span, choice.first_at, choice.last_at, decode)


def _outcome(local: LocalJob) -> str:
    endings = [choice.ending for choice in local.choices.values()]
    if any(ending is not None and ending.failure is not None for ending in endings):
        return FAILED
    if local.returned:
        return RETURNED
    return FINISHED if endings and all(ending is not None for ending in endings) else CANCELLED


# Maximum ids of earlier attempts in the answers that the engine gets between two steps, beyond those of one: it reads
# and hashes so many in some ten milliseconds.
STEP_IDS = 1 << 16
# Name of the sequence of an engine's own step.
WARM_UP = "warm-up"


class Results:
    """The results of one engine session. Handles what the session's links to the routers receive (RelayHandler)."""

    def __init__(
        self,
        jobs: LocalJobs,
        engine: EngineProcess,
        ready: Ready,
        usage: TokenReports,
        telemetry: JobTelemetry,
        link_settings: LinkSettings,
        breaker: EngineBreaker | None = None,
    ) -> None:
        self.jobs = jobs
        self.limits = ready.limits
        # The engine's latest.
        self.stats: EngineStats = ready.stats
        self.links = RouterLinks(link_settings, jobs, self, telemetry.metrics)
        # False once the engine is gone: what is still claimed is given back at once.
        self.accepting = True
        self._engine = engine
        self._usage = usage
        self._telemetry = telemetry
        self._refused = 0
        self._breaker = breaker or EngineBreaker()
        # The jobs of which the engine may have died or stalled.
        self._may_have_killed: list[Job] = []
        # Set by the engine's own step, once `warm_up` has asked for it; None before.
        self._warm: asyncio.Event | None = None

    # From the engine

    def stepped(self, message: Stepped) -> None:
        """Record and relay what a step made."""
        self.stats = message.stats
        now = self._telemetry.stepped(message.outputs, message.stats)
        freed = not message.outputs  # an abort, or a sign of life; a step with outputs frees rows only by an end
        any_token = False
        for output in message.outputs:
            choice = self.jobs.of_sequence(output.sequence_id)
            if self._warm is not None and output.sequence_id == WARM_UP:
                self._warm.set()
            elif choice is not None and choice.ending is None:  # else it was cancelled or given back meanwhile
                choice.record(output, now, message.stats.steps)
                any_token = any_token or bool(output.token_ids or output.vector)
                self.links.progressed(choice)
                if output.finish is not None or choice.job.n > 1:
                    self._advance(choice.job.job_id, choice.job.attempt)
                freed = freed or choice.job.suspect  # a token may clear it
            freed = freed or output.finish is not None
        if any_token:
            self._breaker.stepped()
            self._may_have_killed.clear()  # of a stall that has passed
        if freed:
            self.jobs.changed()

    def begun(self, message: Begun) -> None:
        """Note that the engine's next step is the first of a sequence."""
        choice = self.jobs.of_sequence(message.sequence_id)
        if choice is not None and choice.state is LocalChoiceState.HANDED_OVER:  # else it was given back meanwhile
            choice.begin()

    def prompt_read(self, message: PromptLogprobsPart) -> None:
        """Keep log probabilities of a sequence's prompt for its first frame."""
        choice = self.jobs.of_sequence(message.sequence_id)
        if choice is not None and choice.ending is None:
            choice.prompt_logprobs += encode_prompt(message.tokens)

    def refused(self, message: Refused) -> None:
        """End an answer whose sequence the engine did not take."""
        self._refused += 1
        choice = self.jobs.of_sequence(message.sequence_id)
        if choice is not None and choice.in_engine:
            failure = Failure("INVALID_ARGUMENT", "REFUSED_BY_WORKER", message.message, message.field)
            choice.end(Ending(failure=failure))
            self.links.progressed(choice)
            self._advance(choice.job.job_id, choice.job.attempt)
            self.jobs.changed()

    def _advance(self, job_id: str, attempt: int) -> None:
        """Hand over a job's other answers once the first has a token; end the job when all have ended."""
        local = self.jobs.get(job_id, attempt)
        if local is not None:
            self._hand_over_siblings(local)
            local.end_if_done()

    def _hand_over_siblings(self, local: LocalJob) -> None:
        """Hand over the answers that waited for the first one: they find the prompt in the prefix cache.

        Of resumed ones, whose ids the engine has to read, each step gets a part.
        """
        if local.state is LocalJobState.IN_ENGINE and (waiting := local.waiting):
            emitted = accumulate(choice.start for choice in waiting)
            count = max(1, sum(ids <= STEP_IDS for ids in emitted))
            self.hand_over(local, waiting[:count])

    # From the routers (RelayHandler)

    def cancel_choice(self, job_id: str, attempt: int, choice: int) -> None:
        """Stop and remove one answer of a job; the others go on."""
        local = self.jobs.get(job_id, attempt)
        stopped = local.choices.get(choice) if local is not None else None
        if local is None or stopped is None:
            return
        if stopped.in_engine:
            self._engine.send(Abort([stopped.sequence_id]))
        self.jobs.drop_choice(local, choice)
        if not any(sibling.in_engine for sibling in local.choices.values()):
            self._hand_over_siblings(local)  # they may have waited for this answer
        local.end_if_done()
        if local.state is LocalJobState.ENDED:
            self._release(local)
        self.jobs.changed()

    def router_gone(self, address: str) -> None:
        """Remove the jobs of a router that is out of reach."""
        for local in self.jobs.of_router(address):
            self.remove(local.job.job_id, local.job.attempt)

    def remove(self, job_id: str, attempt: int) -> None:
        """Stop and remove a job: its router has all of it, or wants no more."""
        local = self.jobs.remove(job_id, attempt)
        if local is None:
            return
        self._usage.ended(local)
        self._telemetry.ended(local)
        self._release(local)  # an answer that failed ends its siblings
        self.jobs.changed()

    def _release(self, local: LocalJob) -> None:
        """Stop its preparation, let go of its adapter, and abort it in the engine."""
        if local.preparing is not None:
            local.preparing.cancel()
        if local.pin is not None:
            local.pin.release()
        aborted = [choice.sequence_id for choice in local.choices.values() if choice.in_engine]
        if aborted:
            self._engine.send(Abort(aborted))

    # From this worker

    def hand_over(self, local: LocalJob, choices: Sequence[LocalChoice]) -> None:
        """Hand answers of a job to the engine."""
        if not self.jobs.any_in_engine:  # otherwise the engine owes a message already
            self._engine.expect()
        self._engine.send(Add(self.jobs.hand_over(local, choices)))

    def fail(self, local: LocalJob, failure: Failure) -> None:
        """End a job that can't come into the engine."""
        self._end(local, LocalJobState.ENDED, Ending(failure=failure))

    def give_back(self, local: LocalJob, *, blamed: bool = False) -> None:
        """Stop a job here, to go on elsewhere."""
        if local.running:
            self._release(local)
            self._end(local, LocalJobState.RETURNED, Ending(blamed=blamed))

    def _end(self, local: LocalJob, state: LocalJobState, ending: Ending) -> None:
        for choice in local.end_choices(state, ending)[:1]:  # the first tells it for the whole job
            self.links.progressed(choice)
        self.jobs.changed()

    def engine_lost(self) -> None:
        """Give every job back at once, and those that are still claimed, each with whether it is blamed."""
        self.accepting = False
        self.give_all_back()
        in_own_step = self._warm is not None and not self._warm.is_set()
        others = [job for job in self._may_have_killed if not job.suspect]
        pairs = {(job.tenant, job.adapter.digest if job.adapter else "") for job in others}
        of_suspect = bool(self._may_have_killed) and not others
        self._breaker.died(pairs, in_own_step=in_own_step, of_suspect=of_suspect)

    def give_all_back(self, peers: Sequence[WorkerState] | None = None) -> None:
        """Give every job back, those of whose step the engine may have died or stalled with a blame.

        With `peers`, the other workers, only what one of them is large enough for.
        """
        taken, resident = self.stats.sequences_taken + self._refused, frozenset(self.stats.adapters)
        leaving = [local for local in self.jobs.all() if local.running and (peers is None or _fits(local.job, peers))]
        blamed = {local for local in leaving if local.may_have_killed(taken, resident)}
        self._may_have_killed += (local.job for local in blamed)
        for local in leaving:
            self.give_back(local, blamed=local in blamed)

    async def warm_up(self, *, generates: bool) -> None:
        """Let the engine make a step that no job needs: a broken device or build kills it now."""
        self._warm = asyncio.Event()
        self.jobs.count_sequence()
        self._engine.expect()
        self._engine.send(Add([warm_up_sequence(generates=generates)]))
        await self._warm.wait()

    @property
    def runs_suspect(self) -> bool:
        """Return whether the engine has a job that must be alone."""
        return any(local.needs_all and not local.preparing_for_engine for local in self.jobs.all())

    async def close(self, flush_s: float) -> None:
        """Release every job, as the engine is gone or will be; the links send for `flush_s` what still waits."""
        for local in self.jobs.all():
            self._release(local)
        await self.links.close(flush_s)


def _fits(job: Job, workers: Sequence[WorkerState]) -> bool:
    return any(job.tokens <= state.max_tokens and job.rank <= state.max_rank for state in workers)


def warm_up_sequence(*, generates: bool) -> NewSequence:
    """Return the sequence of an engine's own step; of an encoder, which generates nothing, a vector."""
    if generates:
        return NewSequence(WARM_UP, prompt_ids=(0,), stopping=StoppingParams(max_tokens=1, ignore_eos=True))
    return NewSequence(WARM_UP, prompt_ids=(0,), stopping=StoppingParams(max_tokens=0), encode=Encode("embed"))
