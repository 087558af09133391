"""Recovery of lost streams, without a transport, so that blocking and async streams share it.

          lost before the first message: Generate again, a few times at every address if there are several
Generate ─┤
          lost after it: Resume with the token and the received ids, at any address that answers, until it ends
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from loraplex.inference.v1 import inference_pb2

from loraplex_client.addresses import Rotation
from loraplex_client.calls import Call
from loraplex_client.errors import (
    CancelledError,
    InternalError,
    LoraplexError,
    ResourceExhaustedError,
    UnavailableError,
)
from loraplex_client.generation import Fold, Generation, Piece

# Maximum number of failed resumes in a row of a lost stream; with the pauses between them about 20 seconds.
RESUME_ATTEMPTS = 10
# Maximum number of calls to each of several addresses for a stream that has not begun. While routers restart one after
# the other, the next may stop before the connection to the last is open again. Takes 1 to 2 seconds with two routers.
FIRST_ROUNDS = 3
_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 3.0


@dataclass(frozen=True)
class Attempt:
    """The next call: its address, and its timeout in seconds."""

    address: str
    call: Call
    timeout_s: float | None


class Recovery:
    """A generation over one or more calls. Raises InternalError if a stream breaks the protocol."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        rotation: Rotation,
        timeout_s: float | None,
        attempts: int = RESUME_ATTEMPTS,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._request = request
        if (
            not request.spec.request_id
        ):  # With an id, a call that gRPC repeats takes the first over instead of running twice.
            request.spec.request_id = secrets.token_hex(8)
        self._rotation = rotation
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._attempts = attempts
        self._uniform = uniform
        self._fold = Fold()
        self._token = ""
        self._address = ""
        # Whether the current call has brought any event.
        self._came = False
        # Addresses called since the last new event.
        self._tried: list[str] = []
        self.whole: Generation | None = None

    def attempt(self) -> Attempt:
        """Return the next call."""
        self._address = self._rotation.pick(self._tried)
        self._tried.append(self._address)
        self._came = False
        call = Call("Generate", self._request)
        if self._token:
            received = self._fold.received()
            call = Call(
                "Resume",
                inference_pb2.ResumeRequest(spec=self._request.spec, resume_token=self._token, received=received),
            )
            self._fold.resumed = True
        left_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        return Attempt(self._address, call, left_s)

    def take(self, event: inference_pb2.GenerateEvent) -> Piece | None:
        """Return the piece of an event, if it has one."""
        if not self._came:
            self._came = True
            self._rotation.answered(self._address)
            self._tried = [self._address]
        self._token = event.resume_token or self._token
        piece = self._fold.take(event)
        if piece is not None and piece.finished is not None:
            self.whole = piece.finished
        return piece

    def end(self) -> None:
        """Check that the answer is complete; called when a stream has ended without an error."""
        self._fold.end()

    def lost(self, error: LoraplexError) -> float:
        """Return the seconds to wait after a failed call before the next attempt. Raises if there is none."""
        if not self._is_loss(error):
            raise error
        self._rotation.failed(self._address)
        others = len(self._rotation.addresses) - 1
        failures = len(self._tried)
        first = FIRST_ROUNDS * len(self._rotation.addresses) - 1 if others else 0
        if failures > (self._attempts if self._token else first) or self._attempts == 0:
            raise error
        pause_s = 0.0
        if failures > others:  # Every address has been called.
            longest_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** (failures - others - 1))
            pause_s = self._uniform(0.5, 1.0) * longest_s
        pause_s = max(pause_s, self._uniform(1.0, 1.25) * (getattr(error, "retry_after_s", None) or 0.0))
        if self._deadline is not None and time.monotonic() + pause_s >= self._deadline:
            raise error
        return pause_s

    def _is_loss(self, error: LoraplexError) -> bool:
        """Return whether the call may succeed elsewhere or later, because the router or the way to it is lost."""
        if self._fold.begun and not self._token:  # A server that sends no resume tokens.
            return False
        if isinstance(error, UnavailableError):
            return True
        if isinstance(
            error, ResourceExhaustedError
        ):  # The queue is full: a stream that has begun waits until it is admitted.
            return bool(self._token) and not self._came and error.retry_after_s is not None
        # A broken connection shows as one of these classes without a reason of a Loraplex server.
        broke = isinstance(error, (CancelledError, InternalError)) or type(error) is LoraplexError
        return broke and not error.reason
