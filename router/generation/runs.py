"""The requests that run on this router, and who reads each: takeover by a second call of the same id, and drain.

first call ──▶ admitted ──▶ reader 1 ───────────✗ Aborted (or Unavailable: the router drains)
                               second call ──▶ reader 2: all of it again, computed once
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from broker.messages import Job
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.routed_job import RoutedJob
from router.generation.resume import Began, Resumption
from router.request import Request
from rpc.errors import Aborted, AlreadyExists, CallError, Unavailable


@dataclass(slots=True, eq=False)
class Run:
    """One admitted request; of one that was resumed here, `resumption` tells what its client had by then."""

    fingerprint: str
    routed: RoutedJob
    stack: AsyncExitStack
    resumption: Resumption | None = None
    # When the first message was ready, by the monotonic clock.
    first_at: float | None = None
    # Which call reads it.
    reader: object = None

    @property
    def resumes(self) -> int:
        """How often the request has been resumed."""
        return self.resumption.claims.resumes + 1 if self.resumption else 0

    @property
    def began(self) -> Began:
        """How the request began, here or where it was first admitted."""
        if self.resumption is not None:
            return self.resumption.claims.began
        routed, now = self.routed, time.monotonic()
        first_at = self.first_at or now
        return Began(
            cached_tokens=routed.cached_tokens,
            queue_s=(routed.claimed_at or now) - routed.admitted_at,
            adapter_s=routed.adapter_ms / 1e3,
            ttft_s=first_at - routed.admitted_at,
            first_at_s=time.time() - (now - first_at),
        )

    def serves(self, resumption: Resumption | None) -> bool:
        """Whether what it computes is what the call needs, and from as early on."""
        if resumption is None:
            return self.resumption is None
        claims, job = resumption.claims, self.routed.job
        if (claims.seed, claims.adapter, claims.base_digest) != (job.seed, job.adapter, job.base_digest):
            return False
        began_with = self.resumption.received if self.resumption else {}
        return all(
            len(resumption.has(choice).token_ids) >= len(here.token_ids)
            and resumption.has(choice).finished >= here.finished
            for choice, here in began_with.items()
        )


class Runs:
    """All of them, by tenant and request id."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._runs: dict[tuple[str, str], Run] = {}
        # Those that are being admitted: when that is over.
        self._entering: dict[tuple[str, str], asyncio.Event] = {}
        self._draining = False

    @asynccontextmanager
    async def read(
        self, request: Request, resumption: Resumption | None, make_job: Callable[[], Awaitable[Job]]
    ) -> AsyncIterator[Run]:
        """The run of that tenant and request id, new or taken over; it ends with its last reader.

        Raises AlreadyExists where another body runs under that id, and what admission raises.
        """
        key = (request.tenant, request.request_id)
        while key in self._entering:
            await self._entering[key].wait()
        run = self._runs.get(key)
        if run is not None and run.fingerprint != request.fingerprint:
            raise AlreadyExists(f"request_id {key[1]} is running with another body", reason="REQUEST_ID_RUNNING")
        if run is not None:
            run.routed.turn_away(Aborted(f"another call of request_id {key[1]} took it over", reason="TAKEN_OVER"))
        if run is None or not run.serves(resumption):
            run = await self._enter(key, request.fingerprint, resumption, make_job)
        run.reader = reader = object()
        try:
            if self._draining:
                raise _draining()
            yield run
        finally:
            if run.reader is reader:
                del self._runs[key]
                await run.stack.aclose()

    async def _enter(
        self,
        key: tuple[str, str],
        fingerprint: str,
        resumption: Resumption | None,
        make_job: Callable[[], Awaitable[Job]],
    ) -> Run:
        entered = self._entering[key] = asyncio.Event()
        try:
            if (older := self._runs.pop(key, None)) is not None:
                older.reader = None
                await older.stack.aclose()
            if self._draining:
                raise _draining()
            job = await make_job()
            stack = AsyncExitStack()
            routed = await stack.enter_async_context(self._dispatcher.dispatch(job))
            run = self._runs[key] = Run(fingerprint, routed, stack, resumption)
            return run
        finally:
            del self._entering[key]
            entered.set()

    async def drop(self, run: Run, reader: object, error: CallError) -> None:
        """End a run and its reader with an error, and free what it holds though the reader stands still.

        Nothing happens where another call reads it by now.
        """
        if run.reader is reader:
            run.reader = None
            run.routed.turn_away(error)
            del self._runs[run.routed.job.tenant, run.routed.job.request_id]
            await run.stack.aclose()

    def drain(self) -> None:
        """End every call with UNAVAILABLE, now and from now on: its client resumes elsewhere."""
        self._draining = True
        for run in self._runs.values():
            run.routed.turn_away(_draining())


def _draining() -> CallError:
    return Unavailable("the router is shutting down", retry_after_s=0.0, reason="ROUTER_DRAINING")
