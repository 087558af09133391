"""Senders of requests to routers: streams of Generate, and calls of Embed and Classify."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import loraplex_client as lx
from loraplex.loadtest.plan import LoadPlan
from loraplex.loadtest.samples import LEFT, STOPPED, Outcome
from loraplex.loadtest.workload import LoadRequest, Workload
from loraplex_client.errors import STATUSES

# Sends a request and fills in its outcome.
Call = Callable[[Outcome], Awaitable[None]]


@dataclass(frozen=True)
class RequestFailure:
    """The error that ended a request. `status` is the protocol's own; `refused` says that a later one may succeed."""

    status: str
    message: str
    refused: bool = False
    retry_after_s: float | None = None
    # Nothing answered, not even with a refusal.
    unreachable: bool = False


class Sender(ABC):
    """Sends a workload's requests; `start_s` is the run's start on the monotonic clock."""

    def __init__(self, workload: Workload, pool: Sequence[int], plan: LoadPlan) -> None:
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
    def prepare(self, request: LoadRequest) -> Call:
        """Build the call that sends a request and reads its answer, before it is due."""

    @abstractmethod
    def failure_of(self, error: Exception) -> RequestFailure | None:
        """Return the failure that an exception of a call stands for; None for a defect of the load test."""

    def now_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.start_s

    async def send(self, call: Call, outcome: Outcome) -> RequestFailure | None:
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


def status_of(error: lx.LoraplexError) -> str:
    """Return the gRPC status, with the server's reason if that says more."""
    status = STATUSES.get(type(error), "UNKNOWN")
    return f"{status}: {error.reason}" if error.reason and error.reason not in status else status


class GrpcSender(Sender):
    """Sends a workload's requests to one router, or to several."""

    def __init__(self, router: str, workload: Workload, pool: Sequence[int], plan: LoadPlan) -> None:
        super().__init__(workload, pool, plan)
        # Few attempts: a lost stream moves to another router at once, and a dead cluster gives errors soon.
        self._clients = [lx.AsyncClient(router, tenant.name, resume_attempts=3) for tenant in workload.tenants]
        self._model = plan.model or None

    def _served(self, request: LoadRequest) -> dict[str, str | None]:
        """Return the options of the model and the adapter that a request is for."""
        adapter = None if request.adapter is None else self._workload.adapters[request.adapter][1]
        return {"model": self._model, "adapter_id": adapter}

    async def connect(self) -> None:
        """See Sender."""
        with contextlib.suppress(lx.LoraplexError):
            await self._clients[0].models()

    async def close(self) -> None:
        """See Sender."""
        await asyncio.gather(*(client.close() for client in self._clients))

    def failure_of(self, error: Exception) -> RequestFailure | None:
        """See Sender."""
        if not isinstance(error, lx.LoraplexError):
            return None
        return RequestFailure(
            status_of(error),
            error.message,
            refused=isinstance(error, lx.UnavailableError | lx.ResourceExhaustedError),
            retry_after_s=getattr(error, "retry_after_s", None),
            unreachable=isinstance(error, lx.UnavailableError) and not error.reason,
        )

    def prepare(self, request: LoadRequest) -> Call:
        """See Sender."""
        options: dict[str, Any] = {"max_tokens": request.answer_tokens, "ignore_eos": True, **self._served(request)}
        if request.prompt is None:
            options["token_ids"] = self._workload.prompt_ids(request, self._pool)
        return partial(self._generate, request, options)

    async def _generate(self, request: LoadRequest, options: Any, outcome: Outcome) -> None:
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


def _note_whole(outcome: Outcome, whole: lx.Generation | lx.Embeddings | lx.Classifications) -> None:
    outcome.prompt_tokens = whole.usage.prompt_tokens
    outcome.cached_tokens = whole.usage.cached_tokens
    outcome.queue_s = whole.timings.queue_s
    outcome.adapter_s = whole.timings.adapter_s
    outcome.server_ttft_s = whole.timings.ttft_s
    outcome.continuations = whole.continuations


class EncodeSender(GrpcSender):
    """Sends a workload's calls. The answer is one message, which comes with the last text's vector."""

    def __init__(self, router: str, workload: Workload, pool: Sequence[int], plan: LoadPlan) -> None:
        super().__init__(router, workload, pool, plan)
        self._task = plan.task
        self._texts = plan.texts

    def prepare(self, request: LoadRequest) -> Call:
        """Build what sends a call and reads its answer, before it is due."""
        texts = self._workload.texts(request, self._pool, self._texts)
        return partial(self._encode, request, texts, self._served(request))

    async def _encode(
        self, request: LoadRequest, texts: Sequence[str | list[int]], options: Any, outcome: Outcome
    ) -> None:
        client, timeout_s = self._clients[request.tenant], request.deadline_s or self._timeout_s
        answer: lx.Embeddings | lx.Classifications
        if self._task == "embed":
            answer = await client.embed(texts, timeout_s=timeout_s, **options)
            outcome.texts = len(answer.vectors)
        else:
            answer = await client.classify(texts, timeout_s=timeout_s, **options)
            outcome.texts = len(answer.classifications)
        outcome.first_s = outcome.last_s = self.now_s()
        outcome.messages = 1
        _note_whole(outcome, answer)
