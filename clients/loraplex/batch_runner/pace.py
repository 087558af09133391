"""Choose how many lines of a batch run at once: as many as do not slow the cluster down, by the lines' own times.

    few lines: their time a token is the base ──▶ more, while it stays near the base ──▶ fewer, where it is above
         ▲                                                                                          │
         └──────────────────────── every PROBE_S, since others come and go ◀────────────────────────┘

Rows of one step share its time, so that what slows these lines slows interactive answers beside them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

# Minimum number of lines at once, and interval in seconds at which so few run, for the base.
FEW, PROBE_S = 4, 30.0
# Number of lines whose median is compared, and minimum tokens of one that counts.
_LINES, TOKENS = 8, 4


class LinePace:
    """The number of lines at once, from FEW to `most`; `slowdown` is how much longer a token may take than at FEW."""

    def __init__(self, most: int, slowdown: float, now: Callable[[], float] = time.monotonic) -> None:
        self.at_once = self._few = min(FEW, most)
        self._most, self._slowdown, self._now = most, slowdown, now
        # Seconds of a token with few lines; 0 before the first measurement.
        self._base = 0.0
        self._measured_at = now()
        # The number that goes on after a measurement.
        self._former = self.at_once
        self._probes = True
        self._seconds: list[float] = []
        # Lines that began before the number changed, which do not count.
        self._skipped = 0

    def took(self, seconds: float, tokens: int) -> None:
        """Take the time of a line between its first and last token."""
        if tokens < TOKENS:
            return
        if self._skipped:
            self._skipped -= 1
            return
        self._seconds.append(seconds / (tokens - 1))
        if len(self._seconds) < max(_LINES, self.at_once):
            return
        median = statistics.median(self._seconds)
        if self._probes:
            self._base, self._measured_at, self._probes = median, self._now(), False
            self._set(max(self._former, self._few + 1))
        elif self._now() - self._measured_at > PROBE_S:
            self._former, self._probes = self.at_once, True
            self._set(self._few)
        elif median > self._base * self._slowdown:
            self._set(self.at_once * 3 // 4)
        elif median < self._base * (1 + self._slowdown) / 2:
            self._set(self.at_once + max(1, self.at_once // 8))
        else:
            self._seconds.clear()

    def _set(self, at_once: int) -> None:
        at_once = max(self._few, min(self._most, at_once))
        self._skipped = self.at_once if at_once != self.at_once else 0
        self.at_once = at_once
        self._seconds.clear()
