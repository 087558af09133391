"""Senders: each sends a workload's requests by one protocol, and records when the messages of the answers arrive."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from clients.loadtest.plan import Plan
from clients.loadtest.samples import STOPPED, Outcome
from clients.loadtest.workload import Request, Workload

# Sends a request and fills in its outcome.
Call = Callable[[Outcome], Awaitable[None]]


@dataclass(frozen=True)
class Failure:
    """The error that ended a request. `status` is the protocol's own; `refused` says that a later one may succeed."""

    status: str
    message: str
    refused: bool = False
    retry_after_s: float | None = None
    # Nothing answered, not even with a refusal.
    unreachable: bool = False


class Sender(ABC):
    """Sends a workload's requests; `start_s` is the run's start on the monotonic clock."""

    def __init__(self, workload: Workload, pool: Sequence[int], plan: Plan) -> None:
        self._workload = workload
        self._pool = pool
        self._timeout_s = plan.timeout_s
        self.start_s = 0.0

    @abstractmethod
    async def connect(self) -> None:
        """Open the connection, so that the first request does not pay for it. Where it fails, the requests show it."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""

    @abstractmethod
    def prepare(self, request: Request) -> Call:
        """Build the call that sends a request and reads its answer, before it is due."""

    @abstractmethod
    def failure_of(self, error: Exception) -> Failure | None:
        """Return the failure that an exception of a call stands for; None for a defect of the load test."""

    def now_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.start_s

    async def send(self, call: Call, outcome: Outcome) -> Failure | None:
        """Make a call and fill in `outcome` until it ends. Returns the failure that ended it, if any."""
        try:
            await call(outcome)
        except asyncio.CancelledError:
            outcome.status = STOPPED
            raise
        except Exception as error:
            failure = self.failure_of(error)
            if failure is None:
                raise
            outcome.status, outcome.message = failure.status, failure.message
            return failure
        finally:
            outcome.end_s = self.now_s()
        return None

    def _note(self, outcome: Outcome, tokens: int) -> None:
        now_s = self.now_s()
        if outcome.messages == 0:
            outcome.first_s = now_s
        else:
            gap_s = now_s - outcome.last_s
            outcome.gaps_s.append(gap_s)
            outcome.longest_gap_s = max(outcome.longest_gap_s, gap_s)
        outcome.last_s = now_s
        outcome.messages += 1
        outcome.tokens += tokens
