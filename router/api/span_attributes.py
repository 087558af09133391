"""Attributes of requests' spans, by https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/."""

from __future__ import annotations

from typing import Any

from router.encode_request import EncodeRequest
from router.request import Request, Summary
from telemetry.tracing import Attributes


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
    sampling = request.sampling
    attributes |= {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.choice.count": request.n,
    }
    if request.stopping.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = request.stopping.max_tokens
    if request.seed is not None:
        attributes["gen_ai.request.seed"] = request.seed
    return attributes


def answered_attributes(summary: Summary, reasons: list[str]) -> Attributes:
    """Return the attributes of a request that ended well."""
    return {
        "gen_ai.response.id": summary.request_id,
        "gen_ai.response.finish_reasons": tuple(reasons),
        "gen_ai.usage.input_tokens": summary.prompt_tokens,
        "gen_ai.usage.output_tokens": summary.completion_tokens,
        "loraplex.adapter": summary.adapter_revision,
        "loraplex.prompt_tokens_cached": summary.cached_tokens,
        "loraplex.continuations": summary.continuations,
    }
