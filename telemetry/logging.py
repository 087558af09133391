"""Logging for a process: one line an event on stderr, never a prompt or an output."""

from __future__ import annotations

import logging
import sys


def set_up_logging(process: str, level: str = "INFO") -> None:
    """Log to stderr as `time level process logger: message`. Raises ValueError on an unknown level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
