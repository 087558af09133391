"""The life of a request in its router, read together with docs/request-life.md: admitted or taken over, read, ended.

first call ──▶ admitted ──▶ reader 1 ───────────✗ Aborted (or Unavailable: the router drains)
                               second call ──▶ reader 2: all messages again, computed once

A run and the calls that read it share every state, so they stand in one file.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from loraplex.contracts.broker.messages import Job
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.routed_job import Reader, RoutedJob
from loraplex.router.generation.admission import Admission, Admitted
from loraplex.router.generation.answer import Answer
from loraplex.router.generation.resume import Began, ResumePayload, ResumeTokens, Resumption
from loraplex.router.generation.rollouts import NOT_OF_REVISIONS, Rollouts, Side, Trial
from loraplex.router.quotas.quotas import CallBudget, Quotas
from loraplex.router.quotas.usage import NO_FACTS, Facts
from loraplex.router.request import Message, Received, Request, Summary, adapter_names
from loraplex.router.text.tokenizer import PromptTokenizer
from loraplex.runtime.rpc.errors import Aborted, AlreadyExists, CallError, Exhausted, InvalidField, Unavailable

log = logging.getLogger(__name__)

Key = tuple[str, str]
# Takes the paths of what the answer's calls need not keep to.
OnAdmitted = Callable[[Sequence[str]], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Run:
    """An admitted request; where it was resumed here, `resumption` has what its client had by then."""

    fingerprint: str
    routed: RoutedJob
    admitted: Admitted
    resumption: Resumption | None = None
    # Time of the wall clock in seconds that the request's chat template saw.
    rendered_at_s: float = 0.0
    # The reservation of the request's tokens; None: its tenant has no limits, or it is a part of a larger call.
    budget: CallBudget | None = None
    # The reservation of the larger call that it is a part of.
    part_of: CallBudget | None = None
    # True once its client has a resume token of this router.
    gave_token: bool = False
    # True once the whole answer is on its way to the client.
    complete: bool = False
    # Figures for the adapter's rollout; None: the adapter is not being rolled out.
    trial: Trial | None = None

    @property
    def key(self) -> Key:
        """Return the tenant and the request id."""
        return self.routed.job.tenant, self.routed.job.request_id

    @property
    def resumes(self) -> int:
        """Return how many times the request has been resumed."""
        return self.resumption.payload.resumes + 1 if self.resumption else 0

    @property
    def began(self) -> Began:
        """Return how the request began, here or where it was first admitted."""
        if self.resumption is not None:
            return self.resumption.payload.began
        routed, now = self.routed, time.monotonic()
        first_at = routed.first_token_at or now
        return Began(
            cached_tokens=routed.cached_tokens,
            queue_s=(routed.claimed_at or now) - routed.admitted_at,
            adapter_s=routed.adapter_ms / 1e3,
            ttft_s=first_at - routed.admitted_at,
            first_at_s=time.time() - (now - first_at),
        )

    @property
    def payload(self) -> ResumePayload:
        """Return what a router needs to go on with the request."""
        job = self.routed.job
        return ResumePayload(
            request_id=job.request_id,
            fingerprint=self.fingerprint,
            model=job.model,
            base_digest=job.base_digest,
            adapter=job.adapter,
            seed=job.sampling.seed,
            max_tokens=job.stopping.max_tokens,
            began=self.began,
            resumes=self.resumes,
            rendered_at_s=self.rendered_at_s,
            reservation=self.budget.reservation.id if self.budget else "",
            epochs=self.resumption.payload.epochs if self.resumption else (),
            filled=dict(self.admitted.filled),
            free_parts=tuple(sorted(self.admitted.calls.free)),
        )

    def move_to(self, call: CallBudget) -> None:
        """Count the request in the reservation of a later call, and no longer in that of the call it was a part of."""
        if self.part_of is not None:
            self.part_of.jobs.remove(self.routed)
        call.jobs.append(self.routed)
        self.part_of = call

    def settle(self) -> None:
        """End the request's reservation, but leave one whose client may resume it for a while."""
        if self.budget is not None:
            if self.complete or not (self.gave_token or self.resumption):
                self.budget.settle()
            else:
                self.budget.leave()

    def suits(self, resumption: Resumption | None) -> bool:
        """Return whether a call can read this run: the same answer, from as early on as the call needs it."""
        if resumption is None:
            return self.resumption is None
        payload, job = resumption.payload, self.routed.job
        if (payload.seed, payload.adapter, payload.base_digest) != (job.sampling.seed, job.adapter, job.base_digest):
            return False
        if (payload.filled, payload.max_tokens) != (self.admitted.filled, job.stopping.max_tokens):
            return False
        if frozenset(payload.free_parts) != self.admitted.calls.free:
            return False
        began_with = self.resumption.received if self.resumption else {}
        return all(
            len(resumption.of_choice(choice).token_ids) >= len(here.token_ids)
            and resumption.of_choice(choice).finished >= here.finished
            for choice, here in began_with.items()
        )

    def summary(self, completion_tokens: int) -> Summary:
        """Return the last message of the stream."""
        job, began = self.routed.job, self.began
        revision, parts = adapter_names(job.adapter)
        return Summary(
            request_id=job.request_id,
            adapter_revision=revision,
            prompt_tokens=len(job.prompt_ids),
            cached_tokens=began.cached_tokens,
            completion_tokens=completion_tokens,
            queue_s=began.queue_s,
            adapter_s=began.adapter_s,
            ttft_s=began.ttft_s,
            # By the wall clock, since it spans routers; two hosts may disagree on it.
            decode_s=max(0.0, time.time() - began.first_at_s),
            continuations=self.resumes + self.routed.continuations,
            adapters=parts,
            not_enforced=self.admitted.calls.not_enforced,
        )


class Runs:
    """The runs of one router, each once."""

    def __init__(self) -> None:
        self._runs: dict[Key, Run] = {}
        # Requests that are being admitted, and the end of that.
        self._admitting: dict[Key, asyncio.Event] = {}

    def __iter__(self) -> Iterator[Run]:
        return iter(tuple(self._runs.values()))

    async def find(self, request: Request) -> Run | None:
        """Return the run of that tenant and request id, once no call is being admitted under it.

        Raises AlreadyExists where another body runs under that id.
        """
        run = await self.named(request.tenant, request.request_id)
        if run is not None and run.fingerprint != request.fingerprint:
            message = f"request_id {request.request_id} is running with another body"
            raise AlreadyExists(message, reason="REQUEST_ID_RUNNING")
        return run

    async def named(self, tenant: str, request_id: str) -> Run | None:
        """Return the run of that tenant and request id, once no call is being admitted under it."""
        key = (tenant, request_id)
        while key in self._admitting:
            await self._admitting[key].wait()
        return self._runs.get(key)

    @contextmanager
    def admitting(self, request: Request) -> Iterator[None]:
        """Make other calls of that request id wait meanwhile."""
        key = (request.tenant, request.request_id)
        event = self._admitting[key] = asyncio.Event()
        try:
            yield
        finally:
            del self._admitting[key]
            event.set()

    def add(self, run: Run) -> None:
        """Add a new run."""
        self._runs[run.key] = run

    def remove(self, run: Run) -> bool:
        """Remove a run; False where it is removed already."""
        removed = self._runs.get(run.key) is run
        if removed:
            del self._runs[run.key]
        return removed


# Interval in seconds between looks at the streams.
STALLED_LOOK_S = 0.25
# Time in seconds after which a client that was too slow may call again.
RETRY_S = 1.0


@dataclass(slots=True, eq=False)
class ClientStream:
    """A stream to a client. `waits_since`: when gRPC was given the last message; None: it asks for the next one."""

    drop: Callable[[CallError], None]
    waits_since: float | None = None
    dropped: bool = False


class SlowClients:
    """Drops clients that stop reading, each alone; `limit_s`: maximum seconds that one may leave a message unread.

    gRPC buffers some messages of a stream and then blocks the next one. What the job makes meanwhile is bounded by that
    time, and by the answer's length; the job is never paused. Then it is stopped and frees its row. Should the client
    read again, it gets the messages up to there and CLIENT_TOO_SLOW; until then the call counts as open for its tenant
    (router.api.service).
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._streams: set[ClientStream] = set()

    @contextmanager
    def watched(self, drop: Callable[[CallError], None]) -> Iterator[ClientStream]:
        """Watch a stream meanwhile. `drop` must free all that the stream holds, and end it with the error."""
        stream = ClientStream(drop)
        self._streams.add(stream)
        try:
            yield stream
        finally:
            self._streams.discard(stream)

    def drop_stalled(self) -> None:
        """Drop clients that have not read for too long; called every STALLED_LOOK_S."""
        now = time.monotonic()
        for stream in tuple(self._streams):
            waited_s = 0.0 if stream.waits_since is None else now - stream.waits_since
            if waited_s > self._limit_s and not stream.dropped:
                stream.dropped = True
                log.info("a client has not read for %.1f s and is dropped", waited_s)
                stream.drop(self._too_slow())

    def _too_slow(self) -> Exhausted:
        message = f"the client left its stream unread for {self._limit_s:g} s"
        return Exhausted("stream", message, retry_after_s=RETRY_S, reason="CLIENT_TOO_SLOW")


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a request: what `Generation.run` takes."""

    request: Request
    deadline_s: float | None
    resumption: Resumption | None
    part_of: CallBudget | None
    on_admitted: OnAdmitted | None


class Generation:
    """Runs the requests of one router."""

    def __init__(
        self,
        admission: Admission,
        dispatcher: Dispatcher,
        tokens: ResumeTokens,
        quotas: Quotas,
        prompts: PromptTokenizer,
        *,
        client_stall_s: float = math.inf,
    ) -> None:
        self._admission = admission
        self._dispatcher = dispatcher
        self._tokens = tokens
        self._quotas = quotas
        self._prompts = prompts
        self._runs = Runs()
        # Jobs of calls that have no stream.
        self._unstreamed: set[RoutedJob] = set()
        self._draining = False
        self.rollouts = Rollouts()
        self.slow_clients = SlowClients(client_stall_s)

    def drain(self) -> None:
        """End every call with UNAVAILABLE, now and from now on: its client resumes at another router."""
        self._draining = True
        for routed in (*(run.routed for run in self._runs), *self._unstreamed):
            routed.end_reader(_router_draining())

    async def abort(self, tenant: str, request_id: str) -> bool:
        """End a request that runs here, and its call with ABORTED; return whether there was one."""
        run = await self._runs.named(tenant, request_id)
        if run is None:
            return False
        self._drop(run, run.routed.reader, Aborted(f"a call ended request_id {request_id}", reason="REQUEST_ABORTED"))
        return True

    async def verify(self, request: Request, token: str) -> ResumePayload:
        """Return the payload of a request's resume token. Raises InvalidField or Unavailable."""
        payload = await self._tokens.verify(token, request.tenant)
        if payload.fingerprint != request.fingerprint:
            raise InvalidField("spec", "is not what the resume_token was given for", reason="RESUME_TOKEN_MISMATCH")
        return payload

    def resume(
        self,
        request: Request,
        payload: ResumePayload,
        received: Mapping[int, Received],
        deadline_s: float | None,
        on_admitted: OnAdmitted | None = None,
    ) -> AsyncGenerator[Message]:
        """Return the messages after what the client has received; see `run`."""
        request = replace(
            request,
            request_id=payload.request_id,
            seed=payload.seed,
            stopping=replace(request.stopping, max_tokens=payload.max_tokens),
            rendered_at_s=payload.rendered_at_s,
        )
        return self.run(request, deadline_s, Resumption(payload, received), on_admitted=on_admitted)

    async def run(
        self,
        request: Request,
        deadline_s: float | None,
        resumption: Resumption | None = None,
        part_of: CallBudget | None = None,
        on_admitted: OnAdmitted | None = None,
    ) -> AsyncGenerator[Message]:
        """Yield the request's messages, a Summary last. Leaving early stops the work. Raises a CallError.

        `part_of` is the reservation of a larger call, which has the request's tokens too. `on_admitted` is called when
        the request waits for a worker.
        """
        if resumption is not None and resumption.is_complete(request):
            yield await self._summary_alone(request, resumption, deadline_s)
            return
        if not request.request_id:
            request = replace(request, request_id=secrets.token_hex(8))
        if not request.rendered_at_s:
            request = replace(request, rendered_at_s=time.time())
        side = await self._admission.side_of(request) if resumption is None else None
        call = _Call(request, deadline_s, resumption, part_of, on_admitted)
        messages = self._messages(call, side)
        if side is not None and side.is_candidate:
            messages = self._with_fallback(call, side)
        async with aclosing(messages):
            async for message in messages:
                yield message

    async def _with_fallback(self, call: _Call, side: Side) -> AsyncGenerator[Message]:
        """Yield the messages of a candidate's answer, or of the live revision's where that fails before a token."""
        ends_at, begun = time.monotonic() + (math.inf if call.deadline_s is None else call.deadline_s), False
        on_admitted = call.on_admitted

        async def announce(not_enforced: Sequence[str]) -> None:
            nonlocal on_admitted
            if on_admitted is not None:  # once, whichever revision answers
                announced, on_admitted = on_admitted, None
                await announced(not_enforced)

        call = replace(call, on_admitted=announce)
        try:
            async with aclosing(self._messages(call, side)) as messages:
                async for message in messages:
                    begun = True
                    yield message
            return
        except CallError as error:
            if begun or self._draining or isinstance(error, NOT_OF_REVISIONS):
                raise
            log.warning("%s cannot answer, the live revision does: %s", side.release, error.message)
        if call.deadline_s is not None:
            call = replace(call, deadline_s=ends_at - time.monotonic())
        live = replace(side, resolved=side.live, is_candidate=False, is_counted=False)
        async with aclosing(self._messages(call, live)) as messages:
            async for message in messages:
                if not begun and self.rollouts.takes(side, call.request.tenant):  # so it was not the request's fault
                    self.rollouts.count_error(side)
                begun = True
                yield message

    async def _messages(self, call: _Call, side: Side | None) -> AsyncGenerator[Message]:
        request = call.request
        run, reader = await self._enter(call, side)
        try:
            run.routed.limit(call.deadline_s)
            if call.on_admitted is not None:
                await call.on_admitted(run.admitted.calls.not_enforced)
            job = run.routed.job
            received = call.resumption.received if call.resumption else None
            make_answer = partial(
                Answer, request, run.admitted.tokenizer, run.routed, received, run.admitted.chat_format
            )
            answer = await self._prompts.run(job.tenant, len(job.prompt_ids) if request.echo else 0, make_answer)
            started = False
            with self.slow_clients.watched(partial(self._drop, run, reader)) as stream:
                while arrivals := await run.routed.arrivals(reader):
                    count = sum(len(arrival.token_ids) for arrival in arrivals)
                    if not started:
                        count += len(run.routed.prompt_logprobs) * (1 + (job.prompt_logprobs or 0))
                    events = await self._prompts.run(job.tenant, count, partial(answer.events_of, arrivals))
                    answer.close_ended()
                    if run.trial is not None:
                        run.trial.read(events)
                    for event in events:
                        token = "" if started else self._tokens.sign(run.payload, request.tenant)
                        if run.budget is not None and not started:
                            run.budget.delivered = lambda: answer.completion_tokens
                        started = run.gave_token = True
                        stream.waits_since = time.monotonic()
                        yield Message(event, token)
                        stream.waits_since = None
                stream.waits_since = time.monotonic()
                run.complete = True
                if run.budget is not None:
                    await run.budget.finish()
                yield Message(run.summary(answer.completion_tokens))
        except CallError as error:
            if run.trial is not None:
                run.trial.failure = error
            raise
        finally:
            if run.routed.reader is reader:
                self._end(run)

    async def complete(self, job: Job, part_of: CallBudget | None = None) -> RoutedJob:
        """Run a job that has no stream to its end. Cancelling it stops the work. Raises a CallError."""
        if self._draining:
            raise _router_draining()
        routed = await self._dispatcher.dispatch(self._quotas.apply_plan(job))
        if part_of is not None:
            part_of.jobs.append(routed)
        self._unstreamed.add(routed)
        try:
            if self._draining:
                raise _router_draining()
            while await routed.arrivals(routed.reader):
                pass
            return routed
        finally:
            self._unstreamed.discard(routed)
            self._dispatcher.release(routed)

    async def _enter(self, call: _Call, side: Side | None) -> tuple[Run, Reader]:
        """Take over the request's run, or admit it."""
        request, resumption, part_of = call.request, call.resumption, call.part_of
        run = await self._runs.find(request)
        if run is not None:
            reader = run.routed.replace_reader(_taken_over(request))
            if run.suits(resumption) and not self._draining:
                if part_of is not None:
                    run.move_to(part_of)
                return run, reader
            self._end(run)
        if self._draining:
            raise _router_draining()
        with self._runs.admitting(request):
            if resumption is None:
                admitted = await self._admission.admit(request, call.deadline_s, side)
                is_open_ended = request.stopping.max_tokens != admitted.job.stopping.max_tokens
                job = self._quotas.apply_plan(admitted.job, is_open_ended=is_open_ended)
            else:
                admitted = await self._admission.readmit(request, resumption, call.deadline_s)
                job = admitted.job
            if part_of is not None:  # it is in the larger call's reservation
                routed, budget = await self._dispatcher.dispatch(job), None
                part_of.jobs.append(routed)
            else:
                facts, resumed = (resumption.facts, resumption.reserved) if resumption else (NO_FACTS, None)
                routed, budget = await self._quotas.admit(self._dispatcher, job, facts, resumed)
            run = Run(request.fingerprint, routed, admitted, resumption, request.rendered_at_s, budget, part_of)
            if side is not None and side.is_counted and self.rollouts.takes(side, request.tenant):
                run.trial = Trial(side)
            self._runs.add(run)
        if self._draining:
            run.routed.end_reader(_router_draining())
        return run, run.routed.reader

    @asynccontextmanager
    async def reserved(self, tenant: str, request_id: str, prompt_tokens: int) -> AsyncGenerator[CallBudget | None]:
        """Reserve the tokens of a call of several jobs that make no new ones, and that is not resumed.

        A call that ends with a CallError is not charged: its client gets nothing of it.
        """
        budget = await self._quotas.reserve(tenant, prompt_tokens, 0, facts=Facts(request_id=request_id))
        try:
            yield budget
            if budget is not None:
                await budget.finish()
        except CallError:
            if budget is not None:
                budget.jobs.clear()
            raise
        finally:
            if budget is not None:
                budget.settle()

    def _drop(self, run: Run, reader: Reader, error: CallError) -> None:
        """End a run and its reader, which may stand still, unless another call reads the run by now."""
        if run.routed.reader is reader:
            run.routed.end_reader(error)
            self._end(run)

    def _end(self, run: Run) -> None:
        if self._runs.remove(run):
            self._dispatcher.release(run.routed)
            run.settle()
            if run.trial is not None:
                self.rollouts.count(run.trial, run.routed, complete=run.complete, begun=run.gave_token)
                if run.complete and run.routed.job.n == 1:
                    self.rollouts.shadow(run.trial, run.routed, self.complete)

    async def _summary_alone(self, request: Request, resumption: Resumption, deadline_s: float | None) -> Message:
        if older := await self._runs.find(request):  # its client has all of it
            self._drop(older, older.routed.reader, _taken_over(request))
        admitted = await self._admission.readmit(request, resumption, deadline_s)
        with suppress(Exhausted):  # its reservation has ended, with all that was used of it
            facts = resumption.facts.of_job(admitted.job)
            if budget := await self._quotas.reserve(request.tenant, 0, 0, facts=facts, resumed=resumption.reserved):
                await budget.finish()
        run = Run(request.fingerprint, RoutedJob(admitted.job), admitted, resumption)
        return Message(run.summary(resumption.received_tokens))


def _taken_over(request: Request) -> CallError:
    return Aborted(f"another call of request_id {request.request_id} took it over", reason="TAKEN_OVER")


def _router_draining() -> CallError:
    return Unavailable("the router is shutting down", retry_after_s=0.0, reason="ROUTER_DRAINING")
