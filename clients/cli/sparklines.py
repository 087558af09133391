"""Drawings of blocks: bars, and sparklines of the rates of the last looks at a cluster; lines of figures."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from clients.cli.cluster import Interval

if TYPE_CHECKING:
    from rich.text import Text

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


def wrapped(figures: Sequence[Text], width: int) -> Text:
    """Join figures into lines of at most `width` columns, which break between figures alone."""
    from rich.text import Text

    lines = Text()
    used = 0
    for figure in figures:
        apart = "" if not used else "   " if used + 3 + len(figure) <= width else "\n"
        used = len(figure) + (used + 3 if apart == "   " else 0)
        lines.append(apart).append(figure)
    return lines


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
