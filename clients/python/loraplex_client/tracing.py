"""The caller's trace context as call metadata, for programs that use opentelemetry; optional for others."""

from __future__ import annotations

import sys

Metadata = tuple[tuple[str, str], ...]


def trace_metadata() -> Metadata:
    """Return W3C's traceparent and the program's other propagated values; nothing without a current span."""
    # A program that has not imported opentelemetry has no current span.
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())
