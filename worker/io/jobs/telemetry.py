"""What the jobs of a worker leave behind: where each one's time went, as metrics and as spans of its request's trace.

Told when a job is held no more, from times that were written down meanwhile: the hot path pays for those alone.

claimed ── adapter fetch ── adapter load ── prefill ── decode ──▶ ended
"""

from __future__ import annotations

import time

from opentelemetry.trace import Span, SpanKind

from telemetry.tracing import Attributes, Spans
from worker.engine_api import EngineStats, Output
from worker.io.local_jobs.jobs import LocalChoice, LocalJob
from worker.io.metrics import WorkerMetrics

FINISHED, FAILED, RETURNED, CANCELLED = "finished", "failed", "returned", "cancelled"


class JobTelemetry:
    """One worker's, over all lives of its engine."""

    def __init__(self, metrics: WorkerMetrics, spans: Spans, worker_id: str) -> None:
        self.metrics = metrics
        self._spans = spans
        self.worker_id = worker_id
        for outcome in (FINISHED, FAILED, RETURNED, CANCELLED):
            metrics.ended.labels(outcome)
        # When the last step gave tokens, while steps follow each other.
        self._stepped_at: float | None = None

    def stepped(self, outputs: list[Output], stats: EngineStats) -> float:
        """A step has come: the time that counts for it."""
        now = time.monotonic()
        if outputs:
            if self._stepped_at is not None:
                self.metrics.step_time.observe(now - self._stepped_at)
            self.metrics.batch_size.observe(len(outputs))
            self.metrics.engine_tokens.inc(sum(len(output.token_ids) for output in outputs))
        self._stepped_at = now if outputs and stats.rows_running else None
        return now

    def ended(self, held: LocalJob) -> None:
        """A job is held no more."""
        outcome = _outcome(held)
        self.metrics.ended.labels(outcome).inc()
        self.metrics.tenant_tokens.labels(self.metrics.tenants.bounded(held.job.tenant)).inc(held.tokens)
        if held.fetched_at is not None:
            self.metrics.fetch_wait.observe(held.fetched_at - held.claimed_at)
        for choice in held.choices.values():
            if choice.first_at is not None and choice.added_at is not None:
                if choice.job.adapter is not None:
                    self.metrics.load_wait.observe(choice.load_ms / 1e3)
                self.metrics.prefill_time.observe(max(0.0, choice.first_at - choice.added_at - choice.load_ms / 1e3))
                self.metrics.decode_time.observe(choice.last_at - choice.first_at)
        if self._spans.on and held.job.traceparent:
            self._trace(held, outcome)

    def _trace(self, held: LocalJob, outcome: str) -> None:
        job = held.job
        attributes: Attributes = {
            "loraplex.worker": self.worker_id,
            "loraplex.job": job.job_id,
            "loraplex.attempt": job.attempt,
            "loraplex.outcome": outcome,
            "gen_ai.usage.output_tokens": held.tokens,
        }
        span = self._spans.begin("attempt", job.traceparent, attributes, kind=SpanKind.CONSUMER, at_s=held.claimed_at)
        if span is None:
            return
        if held.fetched_at is not None and job.adapter is not None:
            revision = {"loraplex.adapter": job.adapter.revision}
            self._spans.record("adapter fetch", span, held.claimed_at, held.fetched_at, revision)
        for choice in held.choices.values():
            self._trace_choice(span, choice)
        self._spans.end(span, error=outcome if outcome == FAILED else "")

    def _trace_choice(self, span: Span, choice: LocalChoice) -> None:
        if choice.added_at is None:
            return
        which: Attributes = {"loraplex.choice": choice.choice}
        loaded_at = choice.added_at + choice.load_ms / 1e3
        if choice.job.adapter is not None:
            self._spans.record("adapter load", span, choice.added_at, loaded_at, which)
        if choice.first_at is None:
            return
        prefill = {**which, "loraplex.step": choice.first_step, "loraplex.prompt_tokens_cached": choice.cached_tokens}
        self._spans.record("prefill", span, loaded_at, choice.first_at, prefill)
        decode = {**which, "loraplex.first_step": choice.first_step, "loraplex.last_step": choice.last_step}
        self._spans.record("decode", span, choice.first_at, choice.last_at, decode)


def _outcome(held: LocalJob) -> str:
    endings = [choice.ending for choice in held.choices.values()]
    if any(ending is not None and ending.failure is not None for ending in endings):
        return FAILED
    if held.returned:
        return RETURNED
    return FINISHED if endings and all(ending is not None for ending in endings) else CANCELLED
