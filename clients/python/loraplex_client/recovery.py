"""Recovery of lost streams, without a transport, so that blocking and async streams share it.

          lost before the first message: Generate again, as `retries` says
Generate ─┤
          lost after it: Resume with the token and the received ids, at any address that answers, until it ends
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from loraplex.inference.v1 import inference_pb2

from loraplex_client.calls import Call
from loraplex_client.errors import InvalidRequestError, LoraplexError, UnavailableError, is_broken
from loraplex_client.fold import Fold
from loraplex_client.generation import Generation, Piece
from loraplex_client.retries import Tries

# Reasons for which one router refuses a token that another may accept: their keys or versions differ for a while.
_TOKEN_REFUSED = frozenset({"RESUME_TOKEN_INVALID", "RESUME_TOKEN_VERSION"})


@dataclass(frozen=True)
class Attempt:
    """The next call: its address, and its timeout in seconds."""

    address: str
    call: Call
    timeout_s: float | None


class Recovery:
    """A generation over one or more calls. Raises InternalError if a stream breaks the protocol."""

    def __init__(self, request: inference_pb2.GenerateRequest, tries: Tries) -> None:
        self._request = request
        if not request.spec.request_id:  # With an id, a repeated call takes the first over instead of running twice.
            request.spec.request_id = secrets.token_hex(8)
        self._tries = tries
        self._fold = Fold()
        self._token = ""
        # Whether the current call has brought any event.
        self._came = False
        self.whole: Generation | None = None

    def attempt(self) -> Attempt:
        """Return the next call."""
        address, timeout_s = self._tries.begin()
        self._came = False
        call = Call("Generate", self._request)
        if self._token:
            received = self._fold.received()
            call = Call(
                "Resume",
                inference_pb2.ResumeRequest(spec=self._request.spec, resume_token=self._token, received=received),
            )
            self._fold.resumed = True
        return Attempt(address, call, timeout_s)

    def take(self, event: inference_pb2.GenerateEvent) -> Piece | None:
        """Return the piece of an event, if it has one."""
        if not self._came:
            self._came = True
            self._tries.answered()
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
        if not self._is_loss(error) or self._tries.resume_attempts == 0:
            raise error
        return self._tries.failed(error)

    def _is_loss(self, error: LoraplexError) -> bool:
        """Return whether the call may succeed elsewhere or later, because the router or the way to it is lost."""
        if self._fold.begun and not self._token:  # A server that sends no resume tokens.
            return False
        if isinstance(error, UnavailableError):
            return True
        if self._tries.waits(error):
            return not self._came
        if isinstance(error, InvalidRequestError):
            return error.reason in _TOKEN_REFUSED and self._tries.count <= self._tries.others
        return is_broken(error)
