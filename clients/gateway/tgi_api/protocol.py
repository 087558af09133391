"""Shapes of the errors of LoRAX's and TGI's protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clients.gateway.endpoint import Protocol
from clients.gateway.errors import HttpError
from clients.gateway.exchange import encode

_TYPES = {422: "validation", 429: "overloaded", 503: "overloaded"}


def event(payload: Any) -> bytes:
    """Return a value as an event of a stream."""
    return b"data:" + encode(payload) + b"\n\n"


def error_of(error: HttpError) -> Mapping[str, Any]:
    """Return an error's answer."""
    status = _STATUSES.get(error.status, error.status)
    return {"error": error.message, "error_type": _TYPES.get(status, error.code if status < 500 else "generation")}


# A wrong field is 422 in this protocol.
_STATUSES = {400: 422}
PROTOCOL = Protocol(error_of, lambda error: event(error_of(error)), _STATUSES)
