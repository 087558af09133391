"""A request's reservation at its router, which counts what is used of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import msgspec

from broker.ledger_records import Reservation
from router.dispatch.routed_job import RoutedJob
from router.quotas.usage import Facts
from rpc.errors import CallError

# Timeout in seconds for the settling that the last message of a call waits for.
FINISH_S = 0.5


class End(StrEnum):
    """The ends of a call with a reservation: with its whole answer, before it, or before it and perhaps resumed."""

    FINISHED = "finished"
    ENDED = "ended"
    LEFT = "left"


@dataclass(slots=True, eq=False)
class Grant:
    """The reservation of a call: of one job, or of all jobs of a call of Score, Embed or Classify.

    It is held in the account of the call's tenant, and in that of its API key where this has a plan.
    """

    # By account, all with the same id.
    reservations: dict[str, Reservation]
    # Ends the reservation; the answer is done once the ledger knows.
    on_end: Callable[[Grant, End], asyncio.Future[Any]]
    jobs: list[RoutedJob] = field(default_factory=list)
    # Counts the output tokens that the client got, from the request's first one; None: the call has no stream, and is
    # made again where its router dies.
    delivered: Callable[[], int] | None = None
    # Facts for the usage event; None: events are not written.
    facts: Facts | None = None
    began_at: float = field(default_factory=time.monotonic)
    _settled: asyncio.Future[Any] | None = None

    @property
    def id(self) -> str:
        """Return the reservation's id."""
        return next(iter(self.reservations.values())).id

    def settle(self, end: End) -> asyncio.Future[Any]:
        """End it in the background; the answer is done once the ledger knows. Further ends do nothing."""
        if self._settled is None:
            self._settled = self.on_end(self, end)
        return self._settled

    async def finish(self) -> None:
        """Settle before the client gets the last message, so that it knows of no token that is not charged.

        A Redis that does not answer delays nobody for long: then the reservation is settled later.
        """
        await asyncio.wait({self.settle(End.FINISHED)}, timeout=FINISH_S)

    def end_calls(self, error: CallError) -> None:
        """End the call of the reservation with an error."""
        for routed in self.jobs:
            routed.end_reader(error)

    def count(self, account: str) -> Reservation:
        """Return an account's reservation with what is used of it by now, as it would stand if this router died."""
        if self.delivered is not None:
            given = sum(len(routed.job.prompt_ids) for routed in self.jobs if routed.first_token_at is not None)
            self._count(account, given)
        return self.reservations[account]

    def count_all(self) -> dict[str, Reservation]:
        """Return the reservations with what is used of them in the end."""
        given = sum(len(routed.job.prompt_ids) for routed in self.jobs if _is_charged(routed))
        for account in self.reservations:
            self._count(account, given)
        return self.reservations

    def _count(self, account: str, given: int) -> None:
        kept = self.reservations[account]
        self.reservations[account] = replace(
            kept,
            used_input=max(kept.used_input, min(given, kept.input) if kept.requests else 0),
            used_output=max(kept.used_output, self.delivered() if self.delivered else 0),
            subject=self._subject() if kept.subject else "",
        )

    def _subject(self) -> str:
        if self.facts is None:
            return ""
        facts = self.facts.of_job(self.jobs[0].job) if self.jobs else self.facts
        # A resumed request has those of its beginning.
        cached = facts.cached_tokens or sum(routed.cached_tokens for routed in self.jobs)
        seconds = time.monotonic() - self.began_at
        return msgspec.structs.replace(facts, cached_tokens=cached, seconds=round(seconds, 4)).encode()


def _is_charged(routed: RoutedJob) -> bool:
    """Return whether a job's prompt is charged: it made a token, or its client left while a worker computed it."""
    given_up = routed.claimed_at is not None and routed.failure is None and routed.reader.error is None
    return routed.first_token_at is not None or given_up
