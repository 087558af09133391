"""Traces: OpenTelemetry spans, sent over OTLP. Off, and free, unless the standard environment asks for them.

OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT), or OTEL_TRACES_EXPORTER=otlp, turns them on; OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_BSP_* and the exporter's own variables mean what they mean elsewhere
(https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/). A context travels as W3C's
traceparent: in gRPC metadata, and in a job through Redis.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # imported by `set_up_tracing`: without traces a tenth of a process's start would be for nothing
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.trace import Span, Tracer

TRACEPARENT = "traceparent"
# Timeout in seconds for sending the last spans of a process that stops.
CLOSE_S = 1.0
Attributes = Mapping[str, str | bool | int | float | tuple[str, ...]]
# Names of OpenTelemetry's SpanKind.
Kind = Literal["SERVER", "CONSUMER", "INTERNAL"]


def asked_for(environ: Mapping[str, str]) -> bool:
    """Return whether the environment turns traces on."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if exporters:
        return "otlp" in (name.strip() for name in exporters.split(","))
    return bool(environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))


class Spans:
    """Makes the spans of a process; `on` is False while traces are off. Times are of the monotonic clock."""

    def __init__(self, tracer: Tracer | None = None, close: Callable[[], None] = lambda: None) -> None:
        self._tracer = tracer
        self.on = tracer is not None
        # Sends the remaining spans; blocks for CLOSE_S at most.
        self.close = close
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def begin(
        self, name: str, parent: str | Span, attributes: Attributes, *, kind: Kind, at_s: float | None = None
    ) -> Span | None:
        """Begin a span beneath another span or a traceparent; an empty traceparent begins a trace. `end` ends it."""
        if self._tracer is None:
            return None
        from opentelemetry.trace import SpanKind

        began_ns = self._ns(time.monotonic() if at_s is None else at_s)
        return self._tracer.start_span(
            name, _context(parent), kind=SpanKind[kind], attributes=dict(attributes), start_time=began_ns
        )

    def end(self, span: Span, *, error: str = "", at_s: float | None = None) -> None:
        """End a span; `error` says what went wrong."""
        if error:
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, error))
        span.end(self._ns(time.monotonic() if at_s is None else at_s))

    def record(self, name: str, parent: Span, began_s: float, ended_s: float, attributes: Attributes) -> None:
        """Record a span of work that is over, beneath another span."""
        span = self.begin(name, parent, attributes, kind="INTERNAL", at_s=began_s)
        if span is not None:
            self.end(span, at_s=max(began_s, ended_s))

    def _ns(self, at_s: float) -> int:
        return self._epoch_ns + round(at_s * 1e9)


def set_up_tracing(process: str, environ: Mapping[str, str]) -> Spans:
    """Return the process's spans, which a thread sends in batches; `close` sends the last ones."""
    if not asked_for(environ):
        return Spans()
    # The SDK takes a fifth of a second to import.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter()
    provider = TracerProvider(resource=resource_of(process, environ), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))

    def close() -> None:
        # A collector that does not answer would be tried for ten seconds.
        ending = threading.Thread(target=provider.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_S)
        if ending.is_alive():
            exporter.shutdown()
            ending.join(CLOSE_S)

    return Spans(provider.get_tracer("loraplex"), close)


def resource_of(process: str, environ: Mapping[str, str]) -> Resource:
    """Return what telemetry names a process by: the environment's attributes, and its service's name."""
    from opentelemetry.sdk.resources import Resource

    if environ.get("OTEL_SERVICE_NAME") or "service.name" in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        return Resource.create({})
    return Resource.create({}).merge(Resource({"service.name": f"loraplex-{process}"}))


def traceparent_of(span: Span | None) -> str:
    """Return a span's W3C traceparent, under which other processes put their spans; empty without a span."""
    if span is None:
        return ""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    return carrier.get(TRACEPARENT, "")


def traceparent_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the traceparent of a call's metadata; empty without one. A malformed one is ignored when it is used."""
    values = (value for key, value in metadata or () if key == TRACEPARENT)
    value = next(values, "")
    return value if isinstance(value, str) else ""


def _context(parent: str | Span) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if isinstance(parent, str):
        return TraceContextTextMapPropagator().extract({TRACEPARENT: parent}, Context())
    return set_span_in_context(parent, Context())
