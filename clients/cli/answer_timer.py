"""Times an answer where it arrives."""

from __future__ import annotations

import time


class AnswerTimer:
    """Measures an answer's time to first token and speed, from the timer's creation on."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._first_tokens = 0
        self.tokens = 0

    def record(self, tokens: int) -> None:
        """Record the arrival of `tokens` tokens."""
        if tokens == 0:
            return
        self._last_s = time.perf_counter()
        if self._first_s is None:
            self._first_s, self._first_tokens = self._last_s, tokens
        self.tokens += tokens

    @property
    def ttft_ms(self) -> float | None:
        """Time from the start to the first token, None before it."""
        return None if self._first_s is None else (self._first_s - self._start_s) * 1e3

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first message; None if there was only that one."""
        if self._first_s is None or self._last_s == self._first_s:
            return None
        return (self.tokens - self._first_tokens) / (self._last_s - self._first_s)


def format_figure(value: float | None, digits: int = 1) -> str:
    """Format a measured value, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"
