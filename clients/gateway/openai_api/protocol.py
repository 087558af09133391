"""Shapes of OpenAI's protocol that its endpoints share: errors, events, token counts, reasons of an end."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from loraplex_client import FinishReason, Usage

from clients.gateway.endpoint import Protocol
from clients.gateway.errors import HttpError, renamed
from clients.gateway.exchange import encode

DONE = b"data: [DONE]\n\n"
REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.END: "stop",
    FinishReason.STOP: "stop",
    FinishReason.TOOL_CALLS: "tool_calls",
}
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
# Fields of a tool, which the cluster has without the object around them.
_FUNCTION = re.compile(r"^(tools\[\d+\])\.(?=name|description|parameters)")
# Codes for which OpenAI has a word of its own.
_CODES = {"context_exceeded": "context_length_exceeded"}


def event(payload: Mapping[str, Any]) -> bytes:
    """Return a value as an event of a stream."""
    return b"data: " + encode(payload) + b"\n\n"


def error_of(error: HttpError) -> Mapping[str, Any]:
    """Return an error's answer."""
    error = renamed(error, _FUNCTION, r"\1.function.")
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    code = _CODES.get(error.code, error.code)
    if error.status == 404 and error.field == "model":
        code = "model_not_found"
    return {"error": {"message": error.message, "type": kind, "param": error.field or None, "code": code}}


PROTOCOL = Protocol(error_of, lambda error: event(error_of(error)))


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return token counts."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def head_of(kind: str, prefix: str, request_id: str, model: str) -> dict[str, Any]:
    """Return the fields that an answer and each of its chunks begin with."""
    return {"id": f"{prefix}-{request_id}", "object": kind, "created": int(time.time()), "model": model}
