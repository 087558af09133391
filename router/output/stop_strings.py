"""Finds the stop strings of a request in an answer's text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request. `keep`: the answer has the one that ends it, instead of ending before it."""

    def __init__(self, strings: Sequence[str] = (), *, keep: bool = False) -> None:
        self._strings = tuple(strings)
        self._keep = keep

    def __bool__(self) -> bool:
        """Tell whether there are any."""
        return bool(self._strings)

    def find(self, text: str, before: int) -> tuple[int, str] | None:
        """Return where the answer ends in `text`, and the stop string that ends it; None while none does.

        The first `before` characters alone have none.
        """
        found = [(at, stop) for stop in self._strings if (at := text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        if not found:
            return None
        # Of the stop strings that one token completes: the earliest; of two at the same place the longer.
        at, stop = min(found, key=lambda match: (match[0], -len(match[1])))
        return (len(text) if self._keep else at), stop

    def safe_length(self, text: str) -> int:
        """Return how many characters of the text no stop string can begin in, whatever follows."""
        length = len(text)
        for stop in self._strings:
            for size in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:size]):
                    length = min(length, len(text) - size)
                    break
        return length
