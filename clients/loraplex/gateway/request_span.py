"""The span of an HTTP request, by OpenTelemetry's conventions of HTTP servers and GenAI. Never prompts or answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import context, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers

from loraplex.gateway.errors import HttpError
from loraplex.gateway.exchange import Exchange
from loraplex.runtime.telemetry.tracing import TRACEPARENT, Attributes, Spans
from loraplex_client import Generation
from loraplex_client.encoding import Embeddings

_propagator = TraceContextTextMapPropagator()
# Maximum characters of a text that the client has sent.
_TEXT_CHARACTERS = 200
# The attribute of a request's field, by the names that the protocols have for it.
_FIELDS = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), "gen_ai.request.max_tokens"),
    "n": "gen_ai.request.choice.count",
    **{name: f"gen_ai.request.{name}" for name in ("temperature", "top_p", "top_k", "seed", "stream")},
    **{name: f"gen_ai.request.{name}" for name in ("frequency_penalty", "presence_penalty")},
}


class RequestSpan:
    """The span of a request, whose calls to routers are beneath it, from its start until `end`.

    There is none while traces are off, nor of a GET: probes and the page make many. Calls then belong to the client's
    own span.
    """

    def __init__(self, spans: Spans, exchange: Exchange, path: str, operation: str) -> None:
        self._spans, self._exchange = spans, exchange
        self._span: trace.Span | None = None
        self._usage, self._reasons = [0, 0, 0], list[str]()
        self._model = ""
        if spans.on and exchange.method not in {"GET", "HEAD", "OPTIONS"}:
            attributes = _http_attributes(exchange, path)
            if operation:
                attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "loraplex", **attributes}
            parent = exchange.headers.get(TRACEPARENT, "")
            self._span = spans.begin(f"{exchange.method} {path}", parent, attributes, kind="SERVER")

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let tasks that are made here belong to the span, or to the client's where there is none."""
        if self._span is not None:
            own = trace.set_span_in_context(self._span)
        elif (parent := self._exchange.headers.get(TRACEPARENT)) is not None:
            own = _propagator.extract({TRACEPARENT: parent})
        else:
            yield
            return
        token = context.attach(own)
        try:
            yield
        finally:
            context.detach(token)

    def asked(self, fields: Mapping[str, Any]) -> None:
        """Take the fields of the request's body."""
        if self._span is not None:
            self._model = str(fields.get("model") or "")[:_TEXT_CHARACTERS]
            asked = {name: fields[field] for field, name in _FIELDS.items() if fields.get(field) is not None}
            if self._model:
                asked["gen_ai.request.model"] = self._model
            self._span.set_attributes(asked)

    def answered(self, whole: Generation | Embeddings) -> None:
        """Take an answer, of which a request may have several."""
        if self._span is None:
            return
        usage = whole.usage
        counts = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        self._usage = [sum(pair) for pair in zip(self._usage, counts, strict=True)]
        answered: dict[str, str | int | tuple[str, ...]] = {
            "gen_ai.response.id": whole.request_id,
            "gen_ai.response.model": whole.adapter_revision or self._model,
            "gen_ai.usage.input_tokens": self._usage[0],
            "gen_ai.usage.cache_read.input_tokens": self._usage[2],
        }
        if isinstance(whole, Generation):
            self._reasons += (choice.finish_reason.value for choice in whole.choices)
            answered["gen_ai.response.finish_reasons"] = tuple(self._reasons)
            answered["gen_ai.usage.output_tokens"] = self._usage[1]
        self._span.set_attributes(answered)

    def end(self, status: int, failure: HttpError | None) -> None:
        """End it with the status that the answer had, or would have had; an error of the client's leaves it unset."""
        if self._span is None:
            return
        self._span.set_attribute("http.response.status_code", self._exchange.status or status)
        if failure is not None:
            self._span.set_attribute("error.type", failure.code)
        self._spans.end(self._span, error=failure.code if failure is not None and failure.status >= 500 else "")


def _http_attributes(exchange: Exchange, path: str) -> Attributes:
    name, port = _server(exchange.headers)
    return {
        "http.request.method": exchange.method,
        "http.route": path,
        "url.path": exchange.path[:_TEXT_CHARACTERS],
        "url.scheme": exchange.scheme,
        "server.address": name,
        **({"server.port": port} if port else {}),
    }


def _server(headers: Headers) -> tuple[str, int]:
    """Return the name and the port by which the client calls the gateway; empty and 0 where it tells none."""
    try:
        host = urlsplit(f"//{headers.get('host', '')}")
        return (host.hostname or "")[:_TEXT_CHARACTERS], host.port or 0
    except ValueError:
        return "", 0
