"""Decides when and where a failed call is made again. Only this layer retries.

A call that has brought nothing yet pays each retry from two budgets:

    of a call     at most CALL_TRIES server calls, the last begun at most RETRY_S after the first of them failed
    of a client   a retry takes a token; a call brings RETRY_SHARE of a token, a second RETRIES_PER_S of one

The budget of a client is that of https://github.com/grpc/proposal/blob/master/A6-client-retries.md, with a minimum for
clients that call seldom. A call that was admitted pays nothing: a stream that has begun, which `recovery` resumes, or a
call that a router handed back when it was told to stop. It goes on until RESUME_ATTEMPTS calls in a row were answered
by no server, or until servers have told it for RESUME_PATIENCE_S to wait.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Sequence

from loraplex_client.errors import InvalidRequestError, LoraplexError, ResourceExhaustedError

# Seconds after a failure during which an address is called only if the others have failed too.
SHUN_S = 2.0
# Maximum number of server calls for one call of the program, the first included.
CALL_TRIES = 4
# Time in seconds after a call's first failure in which another try may begin.
RETRY_S = 10.0
# Pause in seconds before the first try at an address that has failed; each further pause is twice as long.
PAUSE_S = 0.2
# Maximum number of calls in a row, of one that was admitted, that no server answers; with the pauses between them about
# 20 seconds.
RESUME_ATTEMPTS = 10
# Maximum time in seconds for which an admitted call without a deadline is made again while servers answer that it has
# to wait: the cluster is full, or has no worker.
RESUME_PATIENCE_S = 120.0
# First and longest pause in seconds between two calls of an admitted one, while no address answers.
_RESUME_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 3.0
# Reason with which a router that is told to stop hands back its calls.
_HANDED_BACK = "ROUTER_DRAINING"
# Retries of a client: its share of the calls, its minimum in a second, how many may be saved up, how many at the start.
RETRY_SHARE = 0.1
RETRIES_PER_S = 1.0
RETRIES_KEPT = 100.0
RETRIES_AT_START = 10.0


def read_addresses(text: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses in `a:1,b:2`, or in a sequence. Raises InvalidRequestError."""
    listed = text.split(",") if isinstance(text, str) else text
    addresses = tuple(dict.fromkeys(address.strip() for address in listed))
    for address in addresses:
        if address.startswith(("http://", "https://")):
            message = f"address: {address!r} is a URL: write HOST:PORT, of a gRPC port"
            raise InvalidRequestError(message, field="address")
    if not addresses or not all(addresses):
        raise InvalidRequestError(
            f"address: {text!r} is not HOST:PORT, or several with commas between them", field="address"
        )
    return addresses


class AddressRotation:
    """The order in which addresses are called. Threads may share it."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)
        self._lock = threading.Lock()
        self._turn = 0
        self._shunned_until: dict[str, float] = {}

    def pick(self, tried: Collection[str] = ()) -> str:
        """Return the next address, preferably one that has not been tried and has not failed lately."""
        with self._lock:
            now = time.monotonic()
            turns = self.addresses[self._turn :] + self.addresses[: self._turn]
            chosen = min(turns, key=lambda address: (address in tried, self._shunned_until.get(address, 0.0) > now))
            self._turn = (self.addresses.index(chosen) + 1) % len(self.addresses)
            return chosen

    def failed(self, address: str) -> None:
        """Record that a call failed at the address."""
        with self._lock:
            self._shunned_until[address] = time.monotonic() + SHUN_S

    def answered(self, address: str) -> None:
        """Record that the service answered at the address."""
        if address in self._shunned_until:
            with self._lock:
                self._shunned_until.pop(address, None)


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
        rotation: AddressRotation,
        budget: RetryBudget,
        timeout_s: float | None,
        resume_attempts: int = RESUME_ATTEMPTS,
        *,
        uniform: Callable[[float, float], float] = random.uniform,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rotation = rotation
        self._budget = budget
        self.resume_attempts = resume_attempts
        self._uniform = uniform
        self._clock = clock
        self._deadline = None if timeout_s is None else clock() + timeout_s
        self._failed_at: float | None = None
        self._address = ""
        # Addresses called since one has answered.
        self._tried: list[str] = []
        # Whether a router has had the call in its queue, or has begun to answer it.
        self._admitted = False
        # Number of calls in a row that no server has answered, since it was admitted.
        self._unanswered = 0
        budget.earn()

    @property
    def count(self) -> int:
        """Return the number of calls since one has answered."""
        return len(self._tried)

    @property
    def others(self) -> int:
        """Return the number of further addresses."""
        return len(self._rotation.addresses) - 1

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
        self._admitted = True
        self._unanswered = 0

    def waits(self, error: LoraplexError) -> bool:
        """Return whether the error only tells an admitted call to wait for room; to others it is a refusal."""
        return self._admitted and isinstance(error, ResourceExhaustedError) and error.retry_after_s is not None

    def failed(self, error: LoraplexError) -> float:
        """Record that a call failed; return the seconds until the next one. Raises the error if it is over."""
        self._rotation.failed(self._address)
        handed_back = error.reason == _HANDED_BACK
        self._admitted |= handed_back
        if self._failed_at is None or handed_back:  # it may have waited in a queue for long
            self._failed_at = self._clock()
        failed_for_s = self._clock() - self._failed_at
        if self._admitted:
            pause_s = self._pause(error, _RESUME_PAUSE_S, _LONGEST_PAUSE_S)
            if error.reason and getattr(error, "retry_after_s", None) is not None:  # the cluster lives
                self._unanswered = 0
                impatient = self._deadline is None and failed_for_s + pause_s > RESUME_PATIENCE_S
            else:
                self._unanswered += 1
                impatient = self._unanswered > self.resume_attempts
            if impatient:
                raise error
            return pause_s
        if self.count >= CALL_TRIES:
            raise error
        pause_s = self._pause(error, PAUSE_S, RETRY_S)
        if failed_for_s + pause_s > RETRY_S or not self._budget.spend():
            raise error
        return pause_s

    def _pause(self, error: LoraplexError, first_s: float, longest_s: float) -> float:
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
