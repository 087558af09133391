"""The telemetry of a job at its worker: one outcome, and spans for as far as it came."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from loraplex.contracts.broker.messages import AdapterRef, Job
from loraplex.contracts.options import FinishReason, SamplingParams, StoppingParams
from loraplex.runtime.telemetry.tracing import Spans
from loraplex.worker.engine_api import Failure, Output
from loraplex.worker.io.local_jobs import Ending, LocalJob, LocalJobs
from loraplex.worker.io.metrics import WorkerMetrics
from loraplex.worker.io.results import CANCELLED, FAILED, FINISHED, RETURNED, JobTelemetry

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"
ADAPTER = AdapterRef("tenants/acme/adapters/a/revisions/sha256:00", "sha256:00", 8, 100)


class Book:
    """A job telemetry with its metrics and the spans that it made."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.metrics = WorkerMetrics()
        self.telemetry = JobTelemetry(self.metrics, Spans(provider.get_tracer("test")), "w-1")

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def outcomes(self) -> dict[str, float]:
        (family,) = self.metrics.ended.collect()
        return {sample.labels["outcome"]: sample.value for sample in family.samples if sample.value}

    def count(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"loraplex_{name}")


def claimed_job(n: int = 1, traceparent: str = TRACEPARENT) -> LocalJob:
    """Return a job that was claimed at second 10."""
    job = Job(
        job_id="acme/r/1",
        tenant="acme",
        model="tiny",
        base_digest="sha256:0",
        reply_to="here",
        prompt_ids=(1, 2),
        stopping=StoppingParams(max_tokens=3),
        sampling=SamplingParams(seed=1),
        n=n,
        adapter=ADAPTER,
        traceparent=traceparent,
    )
    local = LocalJobs().add(job)
    local.claimed_at = 10.0
    return local


def run(job: LocalJob, finish: FinishReason | None) -> None:
    """Fetch until second 11, hand over then, load until 11.5, first token at 12, last token at 14."""
    job.fetched_at = 11.0
    for choice in job.choices.values():
        choice.hand_over(1, 11.0)
        choice.record(Output(choice.sequence_id, 0, (7,), adapter_ms=500.0, cached_tokens=1), 12.0, 30)
        choice.record(Output(choice.sequence_id, 1, (8, 9), finish), 14.0, 31)


def test_a_finished_job_has_all_of_it() -> None:
    book, job = Book(), claimed_job()
    run(job, FinishReason.LENGTH)
    book.telemetry.ended(job)
    assert book.outcomes() == {FINISHED: 1}
    spans = book.spans()
    assert set(spans) == {"attempt", "adapter fetch", "adapter load", "prefill", "decode"}
    attempt = spans["attempt"]
    assert attempt.parent is not None
    assert (format(attempt.context.trace_id, "032x"), format(attempt.parent.span_id, "016x")) == (TRACE, SPAN)
    seconds = {
        name: ((span.end_time or 0) - (span.start_time or 0)) / 1e9 for name, span in spans.items() if name != "attempt"
    }
    assert seconds == pytest.approx({"adapter fetch": 1.0, "adapter load": 0.5, "prefill": 0.5, "decode": 2.0})
    assert spans["decode"].attributes is not None
    assert (spans["decode"].attributes["loraplex.first_step"], spans["decode"].attributes["loraplex.last_step"]) == (
        30,
        31,
    )
    assert book.count("request_prefill_time_seconds_sum") == pytest.approx(0.5)
    assert book.count("request_decode_time_seconds_sum") == pytest.approx(2.0)
    assert book.count("request_adapter_fetch_time_seconds_sum") == pytest.approx(1.0)
    assert book.count("request_adapter_load_time_seconds_sum") == pytest.approx(0.5)


def test_one_that_never_came_in_has_its_attempt_alone() -> None:
    book, job = Book(), claimed_job()
    job.choices[0].end(Ending(failure=Failure("UNAVAILABLE", "STORE_TIMEOUT", "late")))
    book.telemetry.ended(job)
    assert book.outcomes() == {FAILED: 1}
    (attempt,) = book.spans().values()
    assert not attempt.status.is_ok
    assert book.count("request_prefill_time_seconds_count") == 0


def test_given_back_and_cancelled_ones_are_told_apart() -> None:
    book = Book()
    returned, cancelled, half = claimed_job(), claimed_job(), claimed_job(n=2)
    run(returned, None)
    returned.choices[0].end(Ending())
    run(cancelled, None)
    run(half, None)
    half.choices[0].end(Ending(FinishReason.LENGTH))
    for job in (returned, cancelled, half):
        book.telemetry.ended(job)
    assert book.outcomes() == {RETURNED: 1, CANCELLED: 2}


def test_a_job_without_a_trace_has_no_spans() -> None:
    book, job = Book(), claimed_job(traceparent="")
    run(job, FinishReason.LENGTH)
    book.telemetry.ended(job)
    assert book.spans() == {}
    assert book.outcomes() == {FINISHED: 1}
