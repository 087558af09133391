"""The life of a request in its router, read together with docs/request-life.md: admitted or taken over, read, ended.

first call ──▶ admitted ──▶ reader 1 ───────────✗ Aborted (or Unavailable: the router drains)
                               second call ──▶ reader 2: all messages again, computed once

A run and the calls that read it share every state, so they stand in one file.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from loraplex.contracts.broker.messages import Job
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.routed_job import Reader, RoutedJob
from loraplex.router.generation.admission import Admission
from loraplex.router.generation.answer import Answer
from loraplex.router.generation.resume import ResumePayload, ResumeTokens, Resumption
from loraplex.router.generation.rollouts import NOT_OF_REVISIONS, OF_ROUTER, Rollouts, Side, Trial
from loraplex.router.generation.run import Run, Runs
from loraplex.router.quotas.quotas import NO_FACTS, CallBudget, Facts, Quotas, rates_of
from loraplex.router.request import EncodeRequest, Event, Message, Received, Request
from loraplex.router.text.tokenizer import PromptTokenizer
from loraplex.runtime.rpc.errors import Aborted, CallError, Exhausted, InvalidField, RateLimits, Unavailable

log = logging.getLogger(__name__)

# Takes the paths of what the answer's calls need not keep to.
OnAdmitted = Callable[[Sequence[str], RateLimits], Awaitable[None]]


# Interval in seconds between looks at the streams.
STALLED_LOOK_S = 0.25
# Time in seconds after which a client that was too slow may call again.
RETRY_S = 1.0


class AnswerCheck(Protocol):
    """Checks the answer that one call reads."""

    async def passed(self, events: Sequence[Event]) -> list[Event]:
        """Return the events that may go to the client now; others come later, or their choice ends."""


class ContentHook(Protocol):
    """Checks prompts and answers of calls, as loraplex.content_hooks does. A check may raise a CallError."""

    async def check_prompt(self, request: Request | EncodeRequest, continuations: Sequence[Any] = ()) -> None:
        """Check the prompt of a call, and what Score appends to it."""

    def answer_check(self, run: Run, answer: Answer, received: Mapping[int, Received] | None) -> AnswerCheck | None:
        """Return the check of an answer; `received`: what the client of a resumed request has."""

    async def close(self) -> None:
        """Close the hook's channel."""


@dataclass(eq=False)
class Generation:
    """Runs the requests of one router."""

    admission: Admission
    dispatcher: Dispatcher
    tokens: ResumeTokens
    quotas: Quotas
    prompts: PromptTokenizer
    # Maximum seconds that a client may leave a message unread.
    client_stall_s: float = math.inf
    hook: ContentHook | None = None

    def __post_init__(self) -> None:
        """Begin without requests."""
        self._runs = Runs()
        # Jobs of calls that have no stream.
        self._unstreamed: set[RoutedJob] = set()
        self._draining = False
        self.rollouts = Rollouts()

    def drain(self) -> None:
        """End every call with UNAVAILABLE, now and from now on: its client resumes at another router."""
        self._draining = True
        for routed in (*(run.routed for run in self._runs), *self._unstreamed):
            routed.end_reader(_router_draining())

    def drop_stalled(self) -> None:
        """Drop clients that have not read for too long, each alone; called every STALLED_LOOK_S.

        gRPC buffers some messages of a stream and then blocks the next one; the job is not paused until it is stopped
        here. A client that reads again gets the messages up to there and CLIENT_TOO_SLOW; until then its call counts as
        open (router.api.service).
        """
        for run in self._runs:
            reader = run.routed.reader
            waited_s = 0.0 if reader.waits_since is None else time.monotonic() - reader.waits_since
            if waited_s > self.client_stall_s:
                log.info("a client has not read for %.1f s and is dropped", waited_s)
                message = f"the client left its stream unread for {self.client_stall_s:g} s"
                error = Exhausted("stream", message, retry_after_s=RETRY_S, reason="CLIENT_TOO_SLOW")
                self._drop(run, reader, error)

    async def abort(self, tenant: str, request_id: str) -> bool:
        """End a request that runs here, and its call with ABORTED; return whether there was one."""
        run = await self._runs.find(tenant, request_id)
        if run is None:
            return False
        self._drop(run, run.routed.reader, Aborted(f"a call ended request_id {request_id}", reason="REQUEST_ABORTED"))
        return True

    async def check_prompt(self, request: Request | EncodeRequest, continuations: Sequence[Any] = ()) -> None:
        """Have the content hook check a call's prompt, where there is one. Raises a CallError."""
        if self.hook is not None:
            await self.hook.check_prompt(request, continuations)

    async def verify(self, request: Request, token: str) -> ResumePayload:
        """Return the payload of a request's resume token. Raises InvalidField or Unavailable."""
        payload = await self.tokens.verify(token, request.tenant)
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
        sides = [await self.admission.side_of(request) if resumption is None else None]
        if (candidate := sides[0]) and candidate.is_candidate:  # the live revision answers where it fails
            sides.append(replace(candidate, resolved=candidate.live, is_candidate=False, is_counted=False))
        ends_at, begun = time.monotonic() + (deadline_s or 0.0), False

        async def announce(not_enforced: Sequence[str], rates: RateLimits) -> None:
            nonlocal on_admitted
            if on_admitted is not None:  # once, whichever revision answers
                announced, on_admitted = on_admitted, None
                await announced(not_enforced, rates)

        for side in sides:
            left_s = None if deadline_s is None else ends_at - time.monotonic()
            try:
                run, reader = await self._enter(request, resumption, part_of, side, left_s)
                received = resumption.received if resumption else None
                async with aclosing(self._messages(run, reader, received, announce)) as messages:
                    async for message in messages:
                        if side and not (begun or side.is_counted) and self.rollouts.takes(side, request.tenant):
                            self.rollouts.count_error(side)  # of the candidate: it was not the request's fault
                        begun = True
                        yield message
                return
            except CallError as error:
                if begun or side is sides[-1] or isinstance(error, NOT_OF_REVISIONS) or error.reason in OF_ROUTER:
                    raise
                release = side.release if side else ""
                log.warning("%s cannot answer, the live revision does: %s", release, error.message)

    async def _messages(
        self, run: Run, reader: Reader, received: Mapping[int, Received] | None, on_admitted: OnAdmitted
    ) -> AsyncGenerator[Message]:
        """Yield the messages of a run to its reader; `received`: what the client of a resumed request has."""
        request, job = run.request, run.routed.job
        try:
            await on_admitted(run.calls.not_enforced, rates_of(run.budget))
            make_answer = partial(Answer, request, run.tokenizer, run.routed, received, run.chat_format)
            answer = await self.prompts.run(job.tenant, len(job.prompt_ids) if request.echo else 0, make_answer)
            check = self.hook.answer_check(run, answer, received) if self.hook is not None else None
            started = False
            while arrivals := await run.routed.arrivals(reader):
                count = sum(len(arrival.token_ids) for arrival in arrivals)
                if not started:
                    count += len(run.routed.prompt_logprobs) * (1 + (job.prompt_logprobs or 0))
                events = await self.prompts.run(job.tenant, count, partial(answer.events_of, arrivals))
                if run.trial is not None:
                    run.trial.read(events)
                if check is not None:
                    events = await check.passed(events)
                answer.close_ended()
                for event in events:
                    token = "" if started else self.tokens.sign(run.payload, request.tenant)
                    if run.budget is not None and not (started or run.budget.reservation.once):
                        run.budget.delivered = lambda: answer.completion_tokens
                    started = run.gave_token = True
                    reader.waits_since = time.monotonic()
                    yield Message(event, token)
                    reader.waits_since = None
            reader.waits_since = time.monotonic()
            run.complete = True
            if run.budget is not None:
                run.budget.delivered = lambda: answer.completion_tokens  # a resumed answer may bring no more events
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
        routed = await self.dispatcher.dispatch(self.quotas.apply_plan(job))
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
            self.dispatcher.release(routed)

    async def _enter(
        self,
        request: Request,
        resumption: Resumption | None,
        part_of: CallBudget | None,
        side: Side | None,
        deadline_s: float | None,
    ) -> tuple[Run, Reader]:
        """Take over the request's run, or admit it. Without an await in between the run is to be read."""
        run = await self._runs.find(request.tenant, request.request_id, request.fingerprint)
        if run is not None:
            self.quotas.check_allowed(run.job)
            reader = run.routed.replace_reader(_taken_over(request))
            if run.suits(resumption) and not self._draining:
                run.routed.limit(deadline_s)
                if part_of is not None:
                    run.move_to(part_of)
                return run, reader
            self._end(run)
        if self._draining:
            raise _router_draining()
        with self._runs.admitting(request):
            if resumption is None:
                run = await self.admission.admit(request, deadline_s, side)
                is_open_ended = request.stopping.max_tokens != run.job.stopping.max_tokens
                run.job = self.quotas.apply_plan(run.job, is_open_ended=is_open_ended)
            else:
                run = await self.admission.readmit(request, resumption, deadline_s)
            if part_of is not None:  # it is in the larger call's reservation
                run.routed = await self.dispatcher.dispatch(run.job)
                run.move_to(part_of)
            else:
                facts, resumed = (resumption.facts, resumption.reserved) if resumption else (NO_FACTS, None)
                run.routed, run.budget = await self.quotas.admit(self.dispatcher, run.job, facts, resumed)
            if side is not None and side.is_counted and self.rollouts.takes(side, request.tenant):
                run.trial = Trial(side)
            self._runs.add(run)
        run.routed.limit(deadline_s)
        if self._draining:
            run.routed.end_reader(_router_draining())
        return run, run.routed.reader

    @asynccontextmanager
    async def reserved(self, tenant: str, facts: Facts, prompt_tokens: int) -> AsyncGenerator[CallBudget | None]:
        """Reserve the tokens of a call of several jobs that make no new ones, and that is not resumed.

        A call that ends with a CallError is not charged: its client gets nothing of it.
        """
        budget = await self.quotas.reserve(tenant, prompt_tokens, 0, facts=facts)
        try:
            yield budget
            if budget is not None:
                budget.delivered = lambda: 0
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
            self.dispatcher.release(run.routed)
            run.settle()
            if run.trial is not None:
                self.rollouts.count(run.trial, run.routed, complete=run.complete, begun=run.gave_token)
                if run.complete and run.routed.job.n == 1:
                    self.rollouts.shadow(run.trial, run.routed, self.complete)

    async def _summary_alone(self, request: Request, resumption: Resumption, deadline_s: float | None) -> Message:
        # An older call's client has all of it.
        if older := await self._runs.find(request.tenant, request.request_id, request.fingerprint):
            self._drop(older, older.routed.reader, _taken_over(request))
        run = await self.admission.readmit(request, resumption, deadline_s)
        with suppress(Exhausted):  # its reservation has ended, with all that was used of it
            facts = resumption.facts.of_job(run.job)
            if budget := await self.quotas.reserve(request.tenant, 0, 0, facts=facts, resumed=resumption.reserved):
                await budget.finish()
        run.routed = RoutedJob(run.job)
        return Message(run.summary(resumption.received_tokens))


def _taken_over(request: Request) -> CallError:
    return Aborted(f"another call of request_id {request.request_id} took it over", reason="TAKEN_OVER")


def _router_draining() -> CallError:
    return Unavailable("the router is shutting down", retry_after_s=0.0, reason="ROUTER_DRAINING")
