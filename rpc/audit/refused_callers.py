"""Records of refused callers, so many a minute: a flood of refusals must not fill the disk."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

# Interval in seconds after which refusals are counted anew.
WINDOW_S = 60.0
# Maximum records in a window, of one caller and of all.
CALLER_LIMIT, LIMIT = 10, 100
# Maximum callers with a count of their own in a window; the others have one together.
COUNTED_LIMIT = 50
OTHERS = "others"


class Log(Protocol):
    """Keeps events; telemetry.audit.log has the real one."""

    def record(self, event: str, **values: Any) -> None:
        """Record an event with its values soon."""

    def close(self) -> None:
        """Write what is recorded, and end."""


class RefusedCallers:
    """Records the first refusals of a caller in a window, and counts the rest."""

    def __init__(self, log: Log, now: Callable[[], float] = time.monotonic) -> None:
        self._log, self._now = log, now
        self._began = now()
        self._recorded: Counter[str] = Counter()
        self._counted: dict[str, Counter[str]] = {}

    def note(self, caller: str, peer: str, reason: str, **values: Any) -> None:
        """Record or count a refusal; callers without a name are told apart by their address, without its port."""
        if self._now() - self._began >= WINDOW_S:
            self.flush()
        who = caller or peer.rpartition(":")[0]
        if self._recorded[who] < CALLER_LIMIT and self._recorded.total() < LIMIT:
            self._recorded[who] += 1
            self._log.record("refused", caller=caller, peer=peer, reason=reason, **values)
            return
        if who not in self._counted and len(self._counted) >= COUNTED_LIMIT:
            who = OTHERS
        self._counted.setdefault(who, Counter())[reason] += 1

    def flush(self) -> None:
        """Record the counts, and begin another window."""
        for who, reasons in self._counted.items():
            self._log.record("refused more", caller=who, count=reasons.total(), reasons=dict(reasons))
        self._began = self._now()
        self._recorded.clear()
        self._counted.clear()
