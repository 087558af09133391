"""The caller's trace context as call metadata, for programs that use opentelemetry; it is not needed otherwise."""

from __future__ import annotations

import sys

Metadata = tuple[tuple[str, str], ...]


def trace_metadata() -> Metadata:
    """W3C's traceparent and what else the program propagates; nothing where no span is current."""
    # A program that has not imported it has no current span.
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())
