"""Conversations that a gateway remembers, so that a request names the answer before it instead of sending all again."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from loraplex.gateway.errors import HttpError
from loraplex.gateway.exchange import encode
from loraplex.runtime.rpc.shares import Shares

# Maximum bytes of the conversations that a gateway remembers; a caller gets a share of them.
_REMEMBERED_BYTES = 256 * 1024 * 1024
# Default time in seconds for which they are remembered: that of a person's conversation.
KEPT_S = 3_600.0


@dataclass(frozen=True)
class _Turn:
    """The items of a conversation up to an answer, as JSON, and the time of `time.monotonic` at which they go."""

    owner: str
    items: bytes
    ends: float


class Turns:
    """Conversations by the ids of their answers, so that a request may name one; each is kept for `kept_s`.

    A caller whose share is full loses its own oldest ones.
    """

    def __init__(self, kept_s: float = KEPT_S) -> None:
        self._kept_s = kept_s
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        self._bytes = Shares(_REMEMBERED_BYTES)

    def keep(self, owner: str, response_id: str, items: Sequence[Mapping[str, Any]]) -> None:
        """Remember a conversation, unless the caller's share is too small for it."""
        self._drop_ended()
        if not self._kept_s:
            return
        turn = _Turn(owner, encode(items), time.monotonic() + self._kept_s)
        while not self._bytes.take(owner, len(turn.items)):
            oldest = next((name for name, other in self._turns.items() if other.owner == owner), None)
            if oldest is None:
                return
            self._drop(oldest)
        self._turns[response_id] = turn

    def items(self, owner: str, response_id: str) -> list[dict[str, Any]]:
        """Return a conversation. Raises HttpError where it is not the caller's, or gone."""
        self._drop_ended()
        turn = self._turns.get(response_id)
        if turn is None or turn.owner != owner:
            why = (
                f"Previous response with id '{response_id[:100]}' not found: only the gateway that answered has it, "
                f"for {self._kept_s:g} s at most and for the same caller; send the whole conversation as input instead"
            )
            raise HttpError(400, "previous_response_not_found", why, "previous_response_id")
        items: list[dict[str, Any]] = msgspec.json.decode(turn.items)
        return items

    def _drop_ended(self) -> None:
        now = time.monotonic()
        while self._turns and (first := next(iter(self._turns.items())))[1].ends <= now:
            self._drop(first[0])

    def _drop(self, response_id: str) -> None:
        turn = self._turns.pop(response_id)
        self._bytes.give(turn.owner, len(turn.items))
