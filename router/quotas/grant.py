"""A call's reservation of tokens at its router, which counts what is used of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from broker.ledger import Reservation
from router.dispatch.routed_job import RoutedJob
from router.quotas.usage import Facts
from rpc.errors import CallError

# Timeout in seconds for the settling that the last message of a call waits for.
FINISH_S = 0.5


class Ends(Protocol):
    """The ends of reservations, in the background; LedgerSession has them."""

    def settle(self, grant: Grant) -> asyncio.Future[None]:
        """End a reservation; the answer is done once the ledger knows."""

    def leave(self, grant: Grant) -> asyncio.Future[None]:
        """End it unless the request is resumed soon."""


@dataclass(slots=True, eq=False)
class Grant:
    """The reservation of a call: of one job, or of all jobs of a call of Score, Embed or Classify."""

    reservation: Reservation
    ends: Ends
    # Output tokens that the client of a resumed request had.
    received: int = 0
    jobs: list[RoutedJob] = field(default_factory=list)
    # Counts the output tokens that the client got, from the request's first one; None: the call has no stream, and is
    # made again where its router dies.
    delivered: Callable[[], int] | None = None
    # Facts for the usage event; None: events are not written.
    facts: Facts | None = None
    began_at: float = field(default_factory=time.monotonic)
    _end: asyncio.Future[None] | None = None

    @property
    def id(self) -> str:
        """Return the reservation's id."""
        return self.reservation.id

    def settle(self) -> asyncio.Future[None]:
        """End it in the background; the answer is done once the ledger knows. Further ends do nothing."""
        if self._end is None:
            self._end = self.ends.settle(self)
        return self._end

    def leave(self) -> None:
        """End it in the background, unless the request is resumed soon."""
        if self._end is None:
            self._end = self.ends.leave(self)

    async def finish(self) -> None:
        """Settle before the client gets the last message, so that it knows of no token that is not charged.

        A Redis that does not answer delays nobody for long: then the reservation is settled later.
        """
        await asyncio.wait({self.settle()}, timeout=FINISH_S)

    def end_calls(self, error: CallError) -> None:
        """End the call of the reservation with an error."""
        for routed in self.jobs:
            routed.end_reader(error)

    def count(self, *, ended: bool = False) -> Reservation:
        """Return the reservation with what is used of it by now, as it would stand if this router died."""
        if ended or self.delivered is not None:
            computed = [one for one in self.jobs if one.first_token_at is not None or (ended and _is_given_up(one))]
            prompts = sum(len(routed.job.prompt_ids) for routed in computed)
            used_input = min(prompts + self.received, self.reservation.numbers["held_input"]) if computed else 0
            self.reservation.use(used_input, self.delivered() if self.delivered else 0)
            self.reservation.facts = self._encoded_facts()
        return self.reservation

    def _encoded_facts(self) -> str:
        if self.facts is None:
            return ""
        facts = self.facts.of_job(self.jobs[0].job) if self.jobs else self.facts
        # A resumed request has those of its beginning.
        cached = facts.cached_tokens or sum(routed.cached_tokens for routed in self.jobs)
        seconds = time.monotonic() - self.began_at
        return msgspec.structs.replace(facts, cached_tokens=cached, seconds=round(seconds, 4)).encode()


def _is_given_up(routed: RoutedJob) -> bool:
    """Return whether a job's client left while a worker computed its prompt, which is charged then."""
    return routed.claimed_at is not None and routed.failure is None and routed.reader.error is None
