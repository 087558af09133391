"""Shapes of Anthropic's protocol that its endpoints share: events, errors, token counts, reasons of an end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from loraplex_client import FinishReason, Usage

from clients.gateway.endpoint import Protocol
from clients.gateway.errors import HttpError, renamed
from clients.gateway.exchange import encode

REASONS = {
    FinishReason.LENGTH: "max_tokens",
    FinishReason.END: "end_turn",
    FinishReason.STOP: "stop_sequence",
    FinishReason.TOOL_CALLS: "tool_use",
}
# A tool's schema, in the cluster's words.
_SCHEMA = re.compile(r"^(tools\[\d+\])\.parameters")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def event(kind: str, **fields: Any) -> bytes:
    """Return an event of a stream."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode({"type": kind, **fields}))


def error_of(error: HttpError) -> Mapping[str, Any]:
    """Return an error's answer."""
    error = renamed(error, _SCHEMA, r"\1.input_schema")
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


PROTOCOL = Protocol(error_of, lambda error: event("error", error=error_of(error)["error"]))


def usage_of(usage: Usage) -> dict[str, int]:
    """Return token counts; those of the prompt that were in a prefix cache are counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
