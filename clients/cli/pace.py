"""How fast an answer came, measured where it arrived."""

from __future__ import annotations

import time


class Pace:
    """The clock of one answer, started when it is made."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._first_tokens = 0
        self.tokens = 0

    def note(self, tokens: int) -> None:
        """So many tokens have just come."""
        if tokens == 0:
            return
        self._last_s = time.perf_counter()
        if self._first_s is None:
            self._first_s, self._first_tokens = self._last_s, tokens
        self.tokens += tokens

    @property
    def ttft_ms(self) -> float | None:
        """From the start to the first token."""
        return None if self._first_s is None else (self._first_s - self._start_s) * 1e3

    @property
    def tokens_per_s(self) -> float | None:
        """Of what came after the first message; None where that was all."""
        if self._first_s is None or self._last_s == self._first_s:
            return None
        return (self.tokens - self._first_tokens) / (self._last_s - self._first_s)


def shown(value: float | None, digits: int = 1) -> str:
    """A measured value, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"
