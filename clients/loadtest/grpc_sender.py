"""Sends requests to routers as streams of Generate."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial

import loraplex_client as lx

from clients.loadtest.plan import Plan
from clients.loadtest.samples import LEFT, Outcome
from clients.loadtest.sender import Call, Failure, Sender
from clients.loadtest.workload import Request, Workload

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


class GrpcSender(Sender):
    """Sends a workload's requests to one router, or to several."""

    def __init__(self, router: str, workload: Workload, pool: Sequence[int], plan: Plan) -> None:
        super().__init__(workload, pool, plan)
        # Few attempts: a lost stream moves to another router at once, and a dead cluster gives errors soon.
        self._clients = [lx.AsyncClient(router, tenant.name, resume_attempts=3) for tenant in workload.tenants]
        self._model = plan.model or None

    async def connect(self) -> None:
        """See Sender."""
        with contextlib.suppress(lx.LoraplexError):
            await self._clients[0].models()

    async def close(self) -> None:
        """See Sender."""
        await asyncio.gather(*(client.close() for client in self._clients))

    def failure_of(self, error: Exception) -> Failure | None:
        """See Sender."""
        if not isinstance(error, lx.LoraplexError):
            return None
        return Failure(
            status_of(error),
            error.message,
            refused=isinstance(error, lx.UnavailableError | lx.ResourceExhaustedError),
            retry_after_s=getattr(error, "retry_after_s", None),
            unreachable=isinstance(error, lx.UnavailableError) and not error.reason,
        )

    def prepare(self, request: Request) -> Call:
        """See Sender."""
        options = lx.GenerateOptions(
            max_tokens=request.answer_tokens,
            ignore_eos=True,
            adapter_id=None if request.adapter is None else self._workload.adapters[request.adapter][1],
            model=self._model,
        )
        if request.prompt is None:
            options["token_ids"] = self._workload.prompt_ids(request, self._pool)
        return partial(self._generate, request, options)

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


def _note_whole(outcome: Outcome, whole: lx.Generation) -> None:
    outcome.prompt_tokens = whole.usage.prompt_tokens
    outcome.cached_tokens = whole.usage.cached_tokens
    outcome.queue_s = whole.timings.queue_s
    outcome.adapter_s = whole.timings.adapter_s
    outcome.server_ttft_s = whole.timings.ttft_s
    outcome.continuations = whole.continuations
