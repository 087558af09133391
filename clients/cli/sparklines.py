"""Drawings of blocks: bars, and sparklines of the rates of the last looks at a cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from clients.cli.cluster import Interval

_LEVELS = "▁▂▃▄▅▆▇█"
# Number of looks that are drawn.
_KEPT = 24
# Width of a bar, in columns.
_BAR = 12


def bar(part: int, whole: int) -> str:
    """Draw a bar filled in proportion to `part`."""
    full = min(_BAR, -(-_BAR * part // whole)) if whole else 0
    return "█" * full + "░" * (_BAR - full)


def sparkline(values: Sequence[float]) -> str:
    """Draw values as blocks between 0 and the largest of them."""
    top = max(values, default=0.0)
    return "".join(_LEVELS[min(len(_LEVELS) - 1, int(len(_LEVELS) * value / top))] if top else "▁" for value in values)


class Rates:
    """Requests and tokens a second of the last looks."""

    def __init__(self) -> None:
        self._requests: deque[float] = deque(maxlen=_KEPT)
        self._tokens: deque[float] = deque(maxlen=_KEPT)

    def add(self, interval: Interval) -> None:
        """Add the rates of an interval; one since the router's start is too long to be one of them."""
        if not interval.since_start:
            self._requests.append(interval.requests().get("OK", 0) / interval.seconds)
            self._tokens.append(interval.count("completion_tokens") / interval.seconds)

    def lines(self) -> list[tuple[str, str]]:
        """Return each rate's name and sparkline; none before the second look."""
        if not self._requests:
            return []
        return [("requests/s", sparkline(self._requests)), ("tokens/s", sparkline(self._tokens))]
