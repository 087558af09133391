"""The claim rate, as broker/lua/include/claim_rate.lua measures it."""

from __future__ import annotations

from broker import terms


class ClaimRate:
    """The amount of work that the workers of a cell claim in a ms while more waits than they take."""

    def __init__(self) -> None:
        # Begin of the interval, None while nothing is measured; the work claimed in it; the rate of the one before.
        self._since_ms: int | None = None
        self._work = 0
        self._per_ms = 0.0

    def measure(self, work: int | None, now_ms: int) -> None:
        """Count the work of a scan; None: the queue ran empty, or the worker found no more."""
        if work is None:
            self._since_ms, self._work, self._per_ms = None, 0, 0.0
        elif self._since_ms is None or self._since_ms > now_ms:
            self._since_ms, self._work = now_ms, 0
        elif now_ms - self._since_ms >= terms.CLAIM_RATE_MAX_MS:
            self._since_ms, self._work, self._per_ms = now_ms, 0, 0.0
        elif now_ms - self._since_ms >= terms.CLAIM_RATE_MS:
            self._per_ms = (self._work + work) / (now_ms - self._since_ms)
            self._since_ms, self._work = now_ms, 0
        else:
            self._work += work

    def per_ms(self, now_ms: int) -> float:
        """Return the rate of the last interval, or of the current one if it is higher; 0 where none is measured."""
        if self._since_ms is None or (measured_ms := now_ms - self._since_ms) >= terms.CLAIM_RATE_MAX_MS:
            return 0.0
        return max(self._per_ms, self._work / measured_ms if measured_ms >= terms.CLAIM_RATE_MIN_MS else 0.0)
