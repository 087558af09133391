"""Shapes of the errors of LoRAX's and TGI's protocol."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from clients.gateway.endpoint import Protocol
from clients.gateway.errors import HttpError, renamed
from clients.gateway.exchange import encode

# Parameters of this protocol by the cluster's names.
_PARAMETERS = {
    "adapters": "merged_adapters",
    "ignore_eos": "ignore_eos_token",
    "max_tokens": "max_new_tokens",
    "prompt": "inputs",
    "truncate_prompt_tokens": "truncate",
}
_PARAMETER = re.compile(rf"^({'|'.join(_PARAMETERS)})\b")
_TYPES = {422: "validation", 429: "overloaded", 503: "overloaded"}


def event(payload: Any) -> bytes:
    """Return a value as an event of a stream."""
    return b"data:" + encode(payload) + b"\n\n"


def error_of(error: HttpError) -> Mapping[str, Any]:
    """Return an error's answer."""
    error = renamed(error, _PARAMETER, lambda found: _PARAMETERS[found[0]])
    status = _STATUSES.get(error.status, error.status)
    return {"error": error.message, "error_type": _TYPES.get(status, error.code if status < 500 else "generation")}


# A wrong field is 422 in this protocol.
_STATUSES = {400: 422}
PROTOCOL = Protocol(error_of, lambda error: event(error_of(error)), _STATUSES)
