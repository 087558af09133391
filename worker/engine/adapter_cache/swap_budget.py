"""The budget of time that bringing adapters into slots may take from running sequences: copies, on CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Maximum seconds of copies for each second of steps, in the long run.
SHARE = 0.5
# Maximum time of copies between two steps, as a share of a step; one adapter may always be copied.
STALL_SHARE = 0.2


class SwapBudget:
    """Measures steps (the time between polls) and copies; in polls without running sequences nothing is bounded."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy = False
        self._polled_at: float | None = None
        self._step_s = 0.0
        self._spent_s = 0.0
        self._last_s = 0.0
        # Below zero: the next steps pay for what was spent.
        self._credit_s = 0.0

    def begin_poll(self, *, busy: bool) -> None:
        """Begin a poll; `busy`: sequences run."""
        now = self._clock()
        if busy and self._polled_at is not None:
            self._step_s = max(0.0, now - self._polled_at - self._spent_s)
            earned_s = SHARE * self._step_s
            self._credit_s = min(earned_s, self._credit_s + earned_s)
        else:
            self._credit_s = 0.0
        self._busy, self._polled_at, self._spent_s = busy, now if busy else None, 0.0

    def allows(self) -> bool:
        """Tell whether one more adapter may be copied in this poll."""
        if not self._busy:
            return True
        if not self._spent_s:
            return self._credit_s >= 0
        return self._spent_s + self._last_s <= STALL_SHARE * self._step_s

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Measure one copy."""
        began = self._clock()
        try:
            yield
        finally:
            self._last_s = self._clock() - began
            self._spent_s += self._last_s
            self._credit_s -= self._last_s
