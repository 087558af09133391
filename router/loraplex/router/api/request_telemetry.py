"""Telemetry of requests: metrics, a span, and a log line for a failure. Never prompts or answers."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from functools import cache, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from loraplex.contracts.options import CLIENT_REASONS
from loraplex.router.catalog.models import Models
from loraplex.router.metrics import RouterMetrics
from loraplex.router.request import Delta, EncodeRequest, Event, Finished, Request, Summary
from loraplex.runtime.rpc.errors import CallError
from loraplex.runtime.rpc.interceptors import Context
from loraplex.runtime.rpc.principal import Principal, calling_tenant
from loraplex.runtime.rpc.status import CODES
from loraplex.runtime.telemetry.logging import fields
from loraplex.runtime.telemetry.tracing import Attributes, Spans, traceparent_in, traceparent_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)


class ModelSeries:
    """The series of one model. `success` has one for each reason of an answer's end."""

    def __init__(self, metrics: RouterMetrics, model: str) -> None:
        self.success = {reason.value: metrics.success.labels(model, reason.value) for reason in CLIENT_REASONS}
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.cached_tokens = metrics.cached_tokens.labels(model)
        self.generation_tokens = metrics.generation_tokens.labels(model)
        self.ttft = metrics.ttft.labels(model)
        self.itl = metrics.itl.labels(model)
        self.tpot = metrics.tpot.labels(model)
        self.e2e = metrics.e2e.labels(model)
        self.queue_time = metrics.queue_time.labels(model)
        self.prompt_length = metrics.prompt_length.labels(model)
        self.answer_length = metrics.answer_length.labels(model)


class TenantSeries:
    """The series of one tenant's answers by one adapter."""

    def __init__(self, metrics: RouterMetrics, tenant: str, adapter: str) -> None:
        self.requests = metrics.tenant_requests.labels(tenant, adapter)
        self.prompt_tokens = metrics.tenant_prompt_tokens.labels(tenant, adapter)
        self.generation_tokens = metrics.tenant_generation_tokens.labels(tenant, adapter)
        self.drafts = metrics.tenant_drafts.labels(tenant, adapter)
        self.draft_tokens = metrics.tenant_draft_tokens.labels(tenant, adapter)
        self.accepted_tokens = metrics.tenant_accepted_tokens.labels(tenant, adapter)
        self.ttft = metrics.tenant_ttft.labels(tenant, adapter)
        self.first_token = metrics.tenant_first_token.labels(tenant)


def operation(request: Request | EncodeRequest) -> str:
    """Return the name of what a request asks for."""
    if isinstance(request, EncodeRequest):
        return "embeddings" if request.task == "embed" else "classify"
    return "chat" if request.prompt_field == "chat" else "text_completion"


def asked_attributes(request: Request | EncodeRequest, model: str) -> Attributes:
    """Return the attributes of a request."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation(request),
        "gen_ai.provider.name": "loraplex",
        "gen_ai.request.model": model,
        "loraplex.tenant": request.tenant,
    }
    if isinstance(request, EncodeRequest):
        return attributes | {"loraplex.texts": len(request.inputs)}
    attributes |= {
        f"gen_ai.request.{name}": getattr(request.sampling, name)
        for name in ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")
        if name in request.sampling_set
    }
    attributes["gen_ai.request.choice.count"] = request.n
    if request.stopping.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = request.stopping.max_tokens
    if request.seed is not None:
        attributes["gen_ai.request.seed"] = request.seed
    return attributes


def answered_attributes(summary: Summary, reasons: list[str], model: str) -> Attributes:
    """Return the attributes of a request that ended well."""
    return {
        "gen_ai.response.id": summary.request_id,
        "gen_ai.response.model": summary.adapter_revision or model,
        "gen_ai.response.finish_reasons": tuple(reasons),
        "gen_ai.usage.input_tokens": summary.prompt_tokens,
        "gen_ai.usage.output_tokens": summary.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": summary.cached_tokens,
        "loraplex.adapter": summary.adapter_revision,
        "loraplex.prompt_tokens_cached": summary.cached_tokens,
        "loraplex.continuations": summary.continuations,
    }


# Methods whose calls are counted as requests; the metrics of other calls are rpc/interceptors.py's.
COUNTED_METHODS = ("Generate", "Resume", "Score", "Decide", "Rerank", "Embed", "Classify")

R = TypeVar("R", Request, EncodeRequest)


class RequestTelemetry:
    """Makes the records of one router's requests."""

    def __init__(self, metrics: RouterMetrics, spans: Spans, models: Models) -> None:
        self.metrics = metrics
        self.spans = spans
        self._models = models
        # Series by their labels, since finding one takes longer than counting: of models, and of tenants and adapters.
        self.of_model = cache(partial(ModelSeries, metrics))
        self._of_tenant = cache(partial(TenantSeries, metrics))

    def of_tenant(self, tenant: str, adapter: str) -> TenantSeries:
        """Return the series of a tenant and an adapter, whose numbers are bounded."""
        return self._of_tenant(self.metrics.tenants.bounded(tenant), self.metrics.adapters.bounded(adapter))

    def refused(self, method: str, tenant: str, error: CallError) -> None:
        """Count a call that ends before it has a record."""
        if method in COUNTED_METHODS:
            self.ended(CODES[type(error)].name, tenant, error)

    def refused_caller(self, method: str, caller: Principal | None, error: CallError) -> None:
        """Count a call that the guard refused."""
        self.metrics.refused.labels(error.reason).inc()
        self.refused(method.rpartition("/")[2], caller.tenant if caller is not None else "", error)

    def ended(self, code: str, tenant: str, error: BaseException | None) -> None:
        """Count the end of a call, and who was refused and why."""
        self.metrics.requests.labels(code).inc()
        if code != "OK":
            reason = error.reason if isinstance(error, CallError) else ""
            self.metrics.tenant_failures.labels(self.metrics.tenants.bounded(tenant), code, reason).inc()
        if isinstance(error, CallError):
            self.metrics.errors.labels(error.reason).inc()

    def label_of(self, model: str) -> str:
        """Return the label of a request's model; a name that no model has must not become one."""
        served = [model.manifest.name for model in self._models.served]
        named = [name for name in served if model in {name, ""}]
        return named[0] if len(named) == 1 else ""


class RequestRecord:
    """The record of a request, from its call to its end: enter it, then run the request that its `begin` returns.

    A message costs one observation, a request some twenty.
    """

    def __init__(self, telemetry: RequestTelemetry, context: Context) -> None:
        self._telemetry = telemetry
        self._spans = telemetry.spans
        self._context = context
        self._began = time.monotonic()
        self._first: float | None = None
        # Time of the last message of each choice.
        self._last: dict[int, float] = {}
        self._messages = 0
        self._reasons: list[str] = []
        self._summary: Summary | None = None
        self._span: Span | None = None
        self._model, self._request_id = "", ""
        self.tenant = ""

    def begin(self, request: R) -> R:
        """Take the request, once it is read; return it, with the traceparent of its span if there is one."""
        self._model, self._request_id = self._telemetry.label_of(request.model), request.request_id
        self._series = self._telemetry.of_model(self._model)
        if self._spans.on:
            parent = traceparent_in(self._context.invocation_metadata())
            name, asked = f"{operation(request)} {self._model}".strip(), asked_attributes(request, self._model)
            self._span = self._spans.begin(name, parent, asked, kind="SERVER", at_s=self._began)
            request = replace(request, traceparent=traceparent_of(self._span))
        return request

    def count(self, event: Event) -> None:
        """Count an event that the client gets now."""
        match event:
            case Delta() if event.token_ids:  # without ids: the prompt's text, or the rest of the last token's
                now = time.monotonic()
                last = self._last.get(event.choice)
                self._last[event.choice] = now
                self._messages += 1
                if last is not None:
                    self._series.itl.observe(now - last)
                elif self._first is None:
                    self._first = now
                    self._series.ttft.observe(now - self._began)
            case Finished():
                self._reasons.append(event.reason.value)
            case Summary():
                self._summary = event

    def count_texts(self, task: str, count: int, summary: Summary) -> None:
        """Count the texts of a call that is answered by their vectors, and take its summary."""
        self._telemetry.metrics.texts.labels(self._model, task).inc(count)
        self._summary = summary

    def __enter__(self) -> Self:
        self.tenant = calling_tenant()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        ended = time.monotonic()
        code = "OK" if self._summary is not None else self._code(error)
        self._telemetry.ended(code, self.tenant, error)
        if self._summary is not None:
            self._answered(self._summary, ended)
        if self._span is not None:
            self._trace(self._span, code, error, ended)
        self._log(code, error, ended)

    def _code(self, error: BaseException | None) -> str:
        if isinstance(error, CallError):
            return CODES[type(error)].name
        if error is None or isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            # grpc cancels a call whose deadline has passed.
            left_s = self._context.time_remaining()
            return "DEADLINE_EXCEEDED" if left_s is not None and left_s <= 0 else "CANCELLED"
        return "INTERNAL"

    def _answered(self, summary: Summary, ended: float) -> None:
        series = self._series
        for reason in self._reasons:
            series.success[reason].inc()
        series.e2e.observe(ended - self._began)
        series.queue_time.observe(summary.queue_s)
        if summary.completion_tokens > 1:
            series.tpot.observe(summary.decode_s / (summary.completion_tokens - 1))
        series.prompt_length.observe(summary.prompt_tokens)
        series.answer_length.observe(summary.completion_tokens)
        series.prompt_tokens.inc(summary.prompt_tokens)
        series.cached_tokens.inc(summary.cached_tokens)
        series.generation_tokens.inc(summary.completion_tokens)
        if summary.not_enforced:
            self._telemetry.metrics.not_enforced.labels(self._model).inc()
        whose = self._telemetry.of_tenant(self.tenant, adapter_label(summary))
        whose.requests.inc()
        whose.prompt_tokens.inc(summary.prompt_tokens)
        whose.generation_tokens.inc(summary.completion_tokens)
        whose.drafts.inc(summary.drafts.steps)
        whose.draft_tokens.inc(summary.drafts.tokens)
        whose.accepted_tokens.inc(summary.drafts.accepted)
        first_s = max(0.0, (self._first or ended) - self._began)
        whose.ttft.inc(first_s)
        whose.first_token.observe(first_s)

    def _trace(self, span: Span, code: str, error: BaseException | None, ended: float) -> None:
        """End the span; add the spans of the wait in the queue and of the relay of tokens beneath it."""
        summary = self._summary
        if summary is not None:
            span.set_attributes(answered_attributes(summary, self._reasons, self._model))
            # The wait of a resumed request belongs to an earlier call.
            if summary.queue_s <= ended - self._began:
                self._spans.record("queue", span, self._began, self._began + summary.queue_s, {})
        if self._first is not None:
            self._spans.record("relay", span, self._first, ended, {"loraplex.messages": self._messages})
        span.set_attribute("rpc.response.status_code", code)
        if code != "OK":
            span.set_attribute("error.type", error.reason if isinstance(error, CallError) else code)
        self._spans.end(span, error="" if code == "OK" else code, at_s=ended)

    def _log(self, code: str, error: BaseException | None, ended: float) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        summary = self._summary
        log_fields: dict[str, Any] = {"code": code, "tenant": self.tenant, "s": round(ended - self._began, 4)}
        if isinstance(error, CallError):
            log_fields["reason"] = error.reason
        if summary is not None:
            log_fields |= {"adapter": adapter_label(summary), "completion_tokens": summary.completion_tokens}
        request_id = summary.request_id if summary is not None else self._request_id
        if self._span is not None:
            log_fields["trace_id"] = format(self._span.get_span_context().trace_id, "032x")
        log.info("request ended", extra=fields(request_id=request_id, **log_fields))


def adapter_label(summary: Summary) -> str:
    """Return TENANT/ADAPTER; empty for the base model, `set` for a weighted set."""
    if summary.adapters:
        return "set"
    # tenants/{tenant}/adapters/{adapter}/revisions/{digest}
    adapter = summary.adapter_revision.rpartition("/revisions/")[0].split("/", 3)
    return f"{adapter[1]}/{adapter[3]}" if len(adapter) > 3 else ""
