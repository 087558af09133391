"""Recovery of lost streams, without a transport, so that blocking and async streams share it.

          lost before the first message: Generate, a few times at every address where there are several
Generate ─┤
          lost after it: Resume with the token and the ids received, wherever somebody answers, until it ends
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

# How often in a row a lost stream is resumed in vain: with these pauses about 20 seconds.
RESUME_ATTEMPTS = 10
# How often each of several addresses gets a call that has not begun: while routers are restarted one after the other,
# one may be stopping when the way to the other is not open again. 1 to 2 seconds with two.
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
    """A generation over as many calls as it takes. Raises InternalError where a stream breaks the protocol."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        rotation: Rotation,
        timeout_s: float | None,
        attempts: int = RESUME_ATTEMPTS,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._request = request
        if not request.spec.request_id:  # what gRPC itself sends twice takes itself over instead of running twice
            request.spec.request_id = secrets.token_hex(8)
        self._rotation = rotation
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._attempts = attempts
        self._uniform = uniform
        self._fold = Fold()
        self._token = ""
        self._address = ""
        # Whether the call of the moment has brought anything.
        self._came = False
        # Called since something new last came.
        self._tried: list[str] = []
        self.whole: Generation | None = None

    def attempt(self) -> Attempt:
        """The next call."""
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
        """The piece that an event makes, if it makes one."""
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
        """To be called when a stream has ended well."""
        self._fold.end()

    def lost(self, error: LoraplexError) -> float:
        """After a call that failed: how many seconds to wait before the next attempt. Raises where there is none."""
        if not self._is_loss(error):
            raise error
        self._rotation.failed(self._address)
        others = len(self._rotation.addresses) - 1
        failures = len(self._tried)
        first = FIRST_ROUNDS * len(self._rotation.addresses) - 1 if others else 0
        if failures > (self._attempts if self._token else first) or self._attempts == 0:
            raise error
        pause_s = 0.0
        if failures > others:  # everybody has had a turn
            longest_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** (failures - others - 1))
            pause_s = self._uniform(0.5, 1.0) * longest_s
        pause_s = max(pause_s, self._uniform(1.0, 1.25) * (getattr(error, "retry_after_s", None) or 0.0))
        if self._deadline is not None and time.monotonic() + pause_s >= self._deadline:
            raise error
        return pause_s

    def _is_loss(self, error: LoraplexError) -> bool:
        """Return whether the call may succeed elsewhere or later, because the router or the way to it is lost."""
        if self._fold.begun and not self._token:  # a server that gives no tokens
            return False
        if isinstance(error, UnavailableError):
            return True
        if isinstance(error, ResourceExhaustedError):  # a queue is full: what has begun waits until it is let in
            return bool(self._token) and not self._came and error.retry_after_s is not None
        # A connection that broke shows as one of these where no Loraplex server has said so.
        broke = isinstance(error, (CancelledError, InternalError)) or type(error) is LoraplexError
        return broke and not error.reason
