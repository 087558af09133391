"""Sends requests as streams and records when their messages arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import loraplex_client as lx

from clients.loadtest.samples import LEFT, STOPPED, Outcome
from clients.loadtest.workload import Request, Workload

# What sends a request and fills in its outcome.
Call = Callable[[Outcome], Awaitable[None]]

_STATUSES: dict[type[lx.LoraplexError], str] = {
    lx.InvalidRequestError: "INVALID_ARGUMENT",
    lx.NotImplementedByServerError: "UNIMPLEMENTED",
    lx.NotFoundError: "NOT_FOUND",
    lx.FailedPreconditionError: "FAILED_PRECONDITION",
    lx.AlreadyExistsError: "ALREADY_EXISTS",
    lx.AbortedError: "ABORTED",
    lx.ResourceExhaustedError: "RESOURCE_EXHAUSTED",
    lx.UnauthenticatedError: "UNAUTHENTICATED",
    lx.UnavailableError: "UNAVAILABLE",
    lx.DeadlineExceededError: "DEADLINE_EXCEEDED",
    lx.CancelledError: "CANCELLED",
    lx.DataLossError: "DATA_LOSS",
    lx.InternalError: "INTERNAL",
}


def status_of(error: lx.LoraplexError) -> str:
    """Return the gRPC status, with the server's reason if that says more."""
    status = _STATUSES.get(type(error), "UNKNOWN")
    return f"{status}: {error.reason}" if error.reason and error.reason not in status else status


class Sender:
    """Sends a workload's requests to one router; `start_s` is the run's start on the monotonic clock."""

    def __init__(self, router: str, workload: Workload, pool: Sequence[int], *, model: str, timeout_s: float) -> None:
        # Few attempts: a lost stream moves to another router at once, and a dead cluster gives errors soon.
        self._clients = [lx.AsyncClient(router, tenant.name, resume_attempts=3) for tenant in workload.tenants]
        self._workload = workload
        self._pool = pool
        self._model = model or None
        self._timeout_s = timeout_s
        self.start_s = 0.0

    async def connect(self) -> None:
        """Open the connection, so that the first request does not pay for it. Raises LoraplexError."""
        await self._clients[0].models()

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(client.close() for client in self._clients))

    def now_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.start_s

    def prepare(self, request: Request) -> Call:
        """Build what sends a request and reads its answer, before it is due."""
        options = lx.GenerateOptions(
            max_tokens=request.answer_tokens,
            ignore_eos=True,
            adapter_id=None if request.adapter is None else self._workload.adapters[request.adapter][1],
            model=self._model,
        )
        if request.prompt is None:
            options["token_ids"] = self._workload.prompt_ids(request, self._pool)
        return partial(self._generate, request, options)

    async def send(self, call: Call, outcome: Outcome) -> lx.LoraplexError | None:
        """Make a call and fill in `outcome` until it ends. Returns the error that ended it, if any."""
        try:
            await call(outcome)
        except lx.LoraplexError as error:
            outcome.status, outcome.message = status_of(error), error.message
            return error
        except asyncio.CancelledError:
            outcome.status = STOPPED
            raise
        finally:
            outcome.end_s = self.now_s()
        return None

    async def _generate(self, request: Request, options: lx.GenerateOptions, outcome: Outcome) -> None:
        timeout_s = request.deadline_s or self._timeout_s
        async with self._clients[request.tenant].generate_stream(
            request.prompt, timeout_s=timeout_s, **options
        ) as stream:
            async for piece in stream:
                if piece.token_ids:
                    self._note(outcome, len(piece.token_ids))
                if piece.finished is not None:
                    _note_whole(outcome, piece.finished)
                elif request.cancel_after is not None and outcome.tokens >= request.cancel_after:
                    outcome.status = LEFT
                    break

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


def _note_whole(outcome: Outcome, whole: lx.Generation) -> None:
    outcome.prompt_tokens = whole.usage.prompt_tokens
    outcome.cached_tokens = whole.usage.cached_tokens
    outcome.queue_s = whole.timings.queue_s
    outcome.adapter_s = whole.timings.adapter_s
    outcome.server_ttft_s = whole.timings.ttft_s
    outcome.continuations = whole.continuations
