"""Metrics and spans of the jobs of a worker: where the time of each one went.

All is observed when a job is removed, from times that were written down meanwhile: the hot path pays for those alone.

claimed ── adapter fetch ── adapter load ── prefill ── decode ──▶ ended
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from telemetry.tracing import Attributes, Spans
from worker.engine_api import EngineStats, Output
from worker.io.local_jobs.choice import LocalChoice
from worker.io.local_jobs.jobs import LocalJob
from worker.io.metrics import WorkerMetrics

if TYPE_CHECKING:  # see telemetry/tracing.py
    from opentelemetry.trace import Span

# Outcomes of a job at this worker.
FINISHED, FAILED, RETURNED, CANCELLED = "finished", "failed", "returned", "cancelled"


class JobTelemetry:
    """The telemetry of one worker, over all its engine sessions."""

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
