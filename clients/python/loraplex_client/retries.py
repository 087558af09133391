"""Retries of calls that have brought nothing yet. Only this layer retries, and every retry is paid from two budgets:

    of a call     at most CALL_TRIES server calls, the last begun at most RETRY_S after the first of them failed
    of a client   a retry takes a token; a call brings RETRY_SHARE of a token, a second RETRIES_PER_S of one

The budget of a client is that of https://github.com/grpc/proposal/blob/master/A6-client-retries.md, with a minimum for
clients that call seldom. A stream that has begun is no such call: `recovery` resumes it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from loraplex_client.addresses import Rotation
from loraplex_client.errors import LoraplexError

# Maximum number of server calls for one call of the program, the first included.
CALL_TRIES = 4
# Time in seconds after a call's first failure in which another try may begin.
RETRY_S = 10.0
# Pause in seconds before the first try at an address that has failed; each further pause is twice as long.
PAUSE_S = 0.2
# Retries of a client: its share of the calls, its minimum in a second, how many may be saved up, how many at the start.
RETRY_SHARE = 0.1
RETRIES_PER_S = 1.0
RETRIES_KEPT = 100.0
RETRIES_AT_START = 10.0


class RetryBudget:
    """The retries that a client may make now, a token each. Threads may share it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = RETRIES_AT_START
        self._filled_at = clock()

    def earn(self) -> None:
        """Add a call's share of a token."""
        with self._lock:
            self._fill(RETRY_SHARE)

    def spend(self) -> bool:
        """Take a token for a retry; returns False where there is none."""
        with self._lock:
            self._fill(0.0)
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True

    def _fill(self, share: float) -> None:
        now = self._clock()
        earned = share + RETRIES_PER_S * (now - self._filled_at)
        self._tokens = min(RETRIES_KEPT, self._tokens + earned)
        self._filled_at = now


class Tries:
    """The server calls of one call of the program: where and when the next one goes, and whether there is one."""

    def __init__(
        self,
        rotation: Rotation,
        budget: RetryBudget,
        timeout_s: float | None,
        *,
        uniform: Callable[[float, float], float] = random.uniform,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rotation = rotation
        self._budget = budget
        self._uniform = uniform
        self._clock = clock
        self._deadline = None if timeout_s is None else clock() + timeout_s
        self._failed_at: float | None = None
        self._address = ""
        # Addresses called since one has answered.
        self._tried: list[str] = []
        budget.earn()

    @property
    def count(self) -> int:
        """Return the number of calls since one has answered."""
        return len(self._tried)

    @property
    def others(self) -> int:
        """Return the number of further addresses."""
        return len(self._rotation.addresses) - 1

    @property
    def failed_for_s(self) -> float:
        """Return the seconds since the first failure after the last answer."""
        return 0.0 if self._failed_at is None else self._clock() - self._failed_at

    @property
    def has_deadline(self) -> bool:
        """Return whether the call of the program has a deadline."""
        return self._deadline is not None

    def begin(self) -> tuple[str, float | None]:
        """Return the next call's address, and its timeout in seconds."""
        self._address = self._rotation.pick(self._tried)
        self._tried.append(self._address)
        return self._address, None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def answered(self) -> None:
        """Record that the call has brought something: from now on all other addresses are untried."""
        self._rotation.answered(self._address)
        self._tried = [self._address]
        self._failed_at = None

    def failed(self) -> None:
        """Record that the call's address has failed it."""
        self._rotation.failed(self._address)
        if self._failed_at is None:
            self._failed_at = self._clock()

    def retry(self, error: LoraplexError) -> float:
        """Return the seconds until the next try of a call that has brought nothing. Raises the error if it is over."""
        self.failed()
        if self.count >= CALL_TRIES:
            raise error
        pause_s = self.pause(error, PAUSE_S, RETRY_S)
        if self.failed_for_s + pause_s > RETRY_S or not self._budget.spend():
            raise error
        return pause_s

    def pause(self, error: LoraplexError, first_s: float, longest_s: float) -> float:
        """Return the seconds until the next call: none while an address is untried, then `first_s`, doubled each time.

        Never less than the server asks for (RetryInfo). Raises the error where the deadline comes before.
        """
        pause_s = 0.0
        if self.count > self.others:
            pause_s = self._uniform(0.5, 1.0) * min(longest_s, first_s * 2 ** (self.count - self.others - 1))
        pause_s = max(pause_s, self._uniform(1.0, 1.25) * (getattr(error, "retry_after_s", None) or 0.0))
        if self._deadline is not None and self._clock() + pause_s >= self._deadline:
            raise error
        return pause_s
