"""The breaker of a worker whose engines die one after the other: perhaps its device is broken, or its build.

    closed ──3 deaths in a row, of different jobs, or one in a step of its own──▶ open
      ▲                                                                           │
      └──────────────────────── a step gives a job a token ───────────────────────┘

After a death the worker claims nothing until its next engine has made a step of its own. With an open breaker it also
waits before this step, longer with each death, and blames no job for its deaths.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

# Number of deaths in a row, without a step between them and without a tenant and adapter in all of them, that open the
# breaker.
DEATHS_LIMIT = 3
# Seconds before the next engine's own step: after an engine that gave no job a token, so that jobs that may have killed
# it begin elsewhere; and with an open breaker, at first and at most.
SUSPICIOUS_S = 0.75
OPEN_S = 5.0
OPEN_LIMIT_S = 300.0

# A tenant and the digest of an adapter.
Pair = tuple[str, str]


class EngineBreaker:
    """Counts the deaths of one worker's engines since a step gave a job a token."""

    def __init__(self, *, suspicious_s: float = SUSPICIOUS_S, open_s: float = OPEN_S) -> None:
        self._suspicious_s = suspicious_s
        self._open_s = open_s
        self.deaths = 0
        # Pairs that may be the cause of each of the deaths; None before the first.
        self._common: AbstractSet[Pair] | None = None
        # Whether the present engine has given a job a token, and whether the last one died before it did.
        self._has_stepped, self._died_stepless = False, False
        self.is_open = False
        self._deaths_while_open = 0

    @property
    def pause_s(self) -> float:
        """Return the seconds before the next engine's own step."""
        if not self.is_open:
            return self._suspicious_s if self._died_stepless else 0.0
        return min(OPEN_LIMIT_S, self._open_s * 2.0 ** min(self._deaths_while_open, 16))

    def stepped(self) -> None:
        """Note that a step gave a job a token: the engine works."""
        self._has_stepped = True
        if self.deaths:
            self.deaths, self._common, self.is_open, self._deaths_while_open = 0, None, False, 0

    def opens_with(self, pairs: AbstractSet[Pair]) -> bool:
        """Return whether the breaker is open after one more death, for which jobs of these pairs may be the cause."""
        common = pairs if self._common is None else self._common & pairs
        return self.is_open or (self.deaths + 1 >= DEATHS_LIMIT and not common)

    def died(self, pairs: AbstractSet[Pair], *, in_own_step: bool = False) -> None:
        """Count a death, for which jobs of these pairs may be the cause; `in_own_step`: no job is."""
        self._deaths_while_open += self.is_open
        self.is_open = self.opens_with(pairs) or in_own_step
        self.deaths += 1
        self._died_stepless, self._has_stepped = not self._has_stepped, False
        self._common = pairs if self._common is None else self._common & pairs
