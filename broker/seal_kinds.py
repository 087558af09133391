"""The uses of seals, and the error of what is none: apart from broker.seals, which loads cryptography."""

from __future__ import annotations

from enum import StrEnum

# Time in seconds that a sealed job is valid. Its router seals it anew after half of that while it waits. Clocks of
# routers and workers may differ by minutes.
JOB_S = 900.0


class SealKind(StrEnum):
    """The uses of seals."""

    JOB = "job"
    COMMAND = "command"
    # Adapters that all workers keep: such a seal does not expire, and is opened by each worker that starts.
    PIN = "pin"


class SealError(Exception):
    """Something in Redis that no router has sealed for this place and time; `reason` is in UPPER_SNAKE_CASE."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
