"""Calls of one request: takeover, another body, calls at the same moment, resumption, drain."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from loraplex.contracts.artifacts.outcomes import Outcomes
from loraplex.contracts.broker.ledger import Reservation
from loraplex.contracts.broker.messages import Job
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.options import FinishReason
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.links import Frame
from loraplex.router.dispatch.routed_job import READ_TOKENS, JobState, RoutedJob
from loraplex.router.generation.generation import Generation
from loraplex.router.generation.resume import Began, ResumeKeys, ResumePayload, ResumeTokens, Resumption
from loraplex.router.generation.rollouts import Side
from loraplex.router.generation.run import Run
from loraplex.router.quotas.quotas import CallBudget, Quotas
from loraplex.router.request import Delta, Message, Received, Request, Summary
from loraplex.router.text.tokenizer import SHORT_IDS, HashTokenizer
from loraplex.runtime.rpc.errors import Aborted, AlreadyExists, CallError, Exhausted, InvalidField, Unavailable
from tests.router.generation.test_rollouts import Store
from tests.router.generation.test_rollouts import side as candidate_side
from tests.router.recording_link import RecordingLink, claim, job

REQUEST = Request("acme", "x", "prompt", request_id="j", fingerprint="one")
BEGAN = Began(0, 0.0, 0.0, 0.0, 0.0)
PAYLOAD = ResumePayload("j", "one", "tiny", "sha256:0", None, seed=1, max_tokens=100, began=BEGAN)
TOKENS = ResumeTokens(ResumeKeys())


class Admission:
    """Makes jobs without looking anything up, and counts them; raises what `refusals` has first."""

    def __init__(self) -> None:
        self.made = 0
        self.worked_on: list[int] = []
        self.refusals: list[CallError] = []

        self.side: Side | None = None

    async def side_of(self, request: Request) -> Side | None:
        return self.side

    async def admit(self, request: Request, deadline_s: float | None, side: Side | None = None) -> Run:
        await asyncio.sleep(0)
        if self.refusals:
            raise self.refusals.pop()
        self.made += 1
        made = replace(job(), job_id=f"j{self.made}", tenant=request.tenant, request_id=request.request_id)
        return Run(request, made, HashTokenizer())

    async def readmit(self, request: Request, resumption: Resumption, deadline_s: float | None) -> Run:
        run = await self.admit(request, deadline_s)
        run.job = replace(run.job, emitted={choice: part.token_ids for choice, part in resumption.received.items()})
        run.resumption = resumption
        return run

    async def run(self, tenant: str, ids: int, work: Callable[[], Any]) -> Any:
        """See PromptTokenizer."""
        self.worked_on.append(ids)
        return work() if ids <= SHORT_IDS else await asyncio.to_thread(work)


@pytest.fixture
def admission() -> Admission:
    return Admission()


@pytest.fixture
def generation(dispatcher: Dispatcher, admission: Any, quotas: Quotas) -> Generation:
    return Generation(admission, dispatcher, TOKENS, quotas, admission)


async def ids_of(messages: AsyncGenerator[Message]) -> list[int]:
    """Read a call to its Summary; return the ids."""
    ids: list[int] = []
    async with aclosing(messages):
        async for message in messages:
            match message.event:
                case Delta(token_ids=token_ids):
                    ids += token_ids
                case Summary(completion_tokens=counted):
                    assert counted >= len(ids)
    return ids


def call(
    generation: Generation, request: Request = REQUEST, resumption: Resumption | None = None
) -> asyncio.Task[list[int]]:
    return asyncio.create_task(ids_of(generation.run(request, None, resumption)))


def make(dispatcher: Dispatcher, job_id: str, offset: int, *ids: int, finish: FinishReason | None = None) -> None:
    """Let a worker make tokens."""
    dispatcher.receive_frame(RecordingLink("w"), Frame(job_id, 1, offset, ids, finish=finish))


async def test_the_last_of_many_calls_reads_what_is_computed_once(
    generation: Generation, dispatcher: Dispatcher, admission: Admission
) -> None:
    # All at once: the later ones wait until the first has been admitted.
    calls = [call(generation) for _ in range(4)]
    ended = await asyncio.gather(*calls[:3], return_exceptions=True)
    assert [type(error) for error in ended] == [Aborted] * 3
    make(dispatcher, "j1", 0, 5, 6)
    make(dispatcher, "j1", 2, 7, finish=FinishReason.END)
    assert await calls[3] == [5, 6, 7]
    assert admission.made == 1
    assert dispatcher.jobs == ()


async def test_a_call_that_takes_over_gets_everything_from_the_first_token(
    generation: Generation, dispatcher: Dispatcher, queue: JobQueue
) -> None:
    async with aclosing(generation.run(REQUEST, None)) as first:
        waiting = asyncio.ensure_future(anext(first))
        await claim(queue)
        make(dispatcher, "j1", 0, 5, 6)
        message = await waiting
        assert message.event == Delta(0, (5, 6), "\x05\x06")
        assert (await TOKENS.verify(message.resume_token, "acme")).request_id == "j"
        second = call(generation)
        with pytest.raises(Aborted):
            await anext(first)
        make(dispatcher, "j1", 2, 7, finish=FinishReason.END)
        assert await second == [5, 6, 7]


async def test_the_live_revision_answers_where_the_candidate_fails_before_a_token(
    generation: Generation, dispatcher: Dispatcher, queue: JobQueue, admission: Admission
) -> None:
    admission.side, admission.refusals = candidate_side(candidate=True), [Unavailable("too large", reason="NO_WORKER")]
    announced, store = list[object](), Store()

    async def announce(not_enforced: object, rates: object) -> None:
        announced.append((not_enforced, rates))

    running = asyncio.create_task(ids_of(generation.run(REQUEST, 60.0, on_admitted=announce)))
    await claim(queue)
    make(dispatcher, "j1", 0, 5, 6, finish=FinishReason.END)
    assert await running == [5, 6]
    assert len(announced) == 1
    taker: Any = store
    await generation.rollouts.report(taker)
    (sums,) = store.sums.values()
    assert (sums.candidate, sums.live) == (Outcomes(requests=1, errors=1), Outcomes())
    admission.refusals = [Exhausted("q", "full", retry_after_s=1.0)]
    with pytest.raises(Exhausted):  # which the live revision would get too
        await call(generation)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_part_that_is_taken_over_is_charged_to_the_later_call_alone(
    generation: Generation, dispatcher: Dispatcher, queue: JobQueue, leaves: bool
) -> None:
    budgets = [CallBudget(Reservation("r", "acme", 9, 0), Mock()) for _ in range(2)]
    first = asyncio.create_task(ids_of(generation.run(REQUEST, None, part_of=budgets[0])))
    await claim(queue)
    (routed,) = dispatcher.jobs
    async with asyncio.timeout(60):
        # The claim may be answered before the first call's enqueue.
        while routed.state is not JobState.QUEUED:  # noqa: ASYNC110
            await asyncio.sleep(0)
    second = asyncio.create_task(ids_of(generation.run(REQUEST, None, part_of=budgets[1])))
    make(dispatcher, "j1", 0, 5, finish=FinishReason.END)  # it ends before the first call can read that
    if leaves:
        first.cancel()
    with pytest.raises(asyncio.CancelledError if leaves else Aborted):
        await first
    assert await second == [5]
    charged = [budget.count(ended=True).used_input for budget in budgets]
    assert charged == [0, len(job().prompt_ids)]


async def test_another_body_or_tenant_is_another_request(
    generation: Generation, dispatcher: Dispatcher, queue: JobQueue
) -> None:
    running = call(generation)
    await claim(queue)
    with pytest.raises(AlreadyExists):
        await call(generation, replace(REQUEST, fingerprint="two"))
    other = call(generation, replace(REQUEST, tenant="globex"))
    assert (await claim(queue)).tenant == "globex"
    # The first call never noticed.
    make(dispatcher, "j1", 0, 5, finish=FinishReason.END)
    assert await running == [5]
    again = call(generation, replace(REQUEST, fingerprint="two"))
    assert (await claim(queue)).job_id == "j3"
    for task in (other, again):
        task.cancel()
    await asyncio.gather(other, again, return_exceptions=True)
    assert dispatcher.jobs == ()


async def test_a_call_that_is_not_admitted_leaves_the_id_free(
    generation: Generation, dispatcher: Dispatcher, queue: JobQueue, admission: Admission
) -> None:
    admission.refusals.append(Exhausted("queue", "full", retry_after_s=1.0))
    refused, admitted = call(generation), call(generation)
    with pytest.raises(Exhausted):
        await refused
    await claim(queue)
    make(dispatcher, "j1", 0, 5, finish=FinishReason.END)
    assert await admitted == [5]


async def test_a_call_that_leaves_stops_the_work(
    generation: Generation, dispatcher: Dispatcher, queue: JobQueue
) -> None:
    link, leaving = RecordingLink("w"), call(generation)
    await claim(queue)
    dispatcher.receive_claims(link, [("j1", 1)])
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert dispatcher.jobs == ()
    assert link.sent == [("cancel", "j1", 1)]


RECEIVED = {0: Received((5, 6))}
RESUMPTIONS = {
    "the same": (Resumption(PAYLOAD, RECEIVED), True),
    "another seed": (Resumption(msgspec.structs.replace(PAYLOAD, seed=2), RECEIVED), False),
    "another base": (Resumption(msgspec.structs.replace(PAYLOAD, base_digest="sha256:1"), RECEIVED), False),
    "other values of the model": (Resumption(msgspec.structs.replace(PAYLOAD, filled={"top_k": 3}), RECEIVED), False),
    "another length": (Resumption(msgspec.structs.replace(PAYLOAD, max_tokens=99), RECEIVED), False),
    "from the start": (Resumption(PAYLOAD), True),
}


@pytest.mark.parametrize("kind", RESUMPTIONS)
async def test_a_resume_reads_what_runs_if_it_is_its_own(
    generation: Generation, dispatcher: Dispatcher, queue: JobQueue, kind: str
) -> None:
    resumption, same = RESUMPTIONS[kind]
    older = call(generation)
    await claim(queue)
    newer = call(generation, resumption=resumption)
    with pytest.raises(Aborted):
        await older
    job_id = "j1" if same else (await claim(queue)).job_id
    assert job_id == ("j1" if same else "j2")
    assert [routed.job.job_id for routed in dispatcher.jobs] == [job_id]
    make(dispatcher, job_id, 0, 5, 6, 7, finish=FinishReason.END)
    assert await newer == ([5, 6, 7] if not resumption.received else [7])
    assert dispatcher.jobs == ()


async def test_many_received_tokens_are_read_in_parts_each_at_its_tenants_turn(
    generation: Generation, dispatcher: Dispatcher, queue: JobQueue, admission: Admission
) -> None:
    received = (7,) * (2 * READ_TOKENS + 10)
    rest = call(generation, resumption=Resumption(PAYLOAD, {0: Received(received)}))
    await claim(queue)
    make(dispatcher, "j1", len(received), 5, finish=FinishReason.LENGTH)
    assert await rest == [5]
    assert admission.worked_on == [0, READ_TOKENS, READ_TOKENS, 11]


async def test_a_run_that_was_resumed_serves_no_call_that_has_less(
    generation: Generation, dispatcher: Dispatcher, queue: JobQueue
) -> None:
    def resumed(*ids: int) -> asyncio.Task[list[int]]:
        return call(generation, resumption=Resumption(PAYLOAD, {0: Received(ids)}))

    first = resumed(5, 6)
    assert (await claim(queue)).job_id == "j1"
    more = resumed(5, 6, 7)
    assert isinstance(await error_of(first), Aborted)
    assert [routed.job.job_id for routed in dispatcher.jobs] == ["j1"]
    less = resumed(5)
    assert isinstance(await error_of(more), Aborted)
    assert (await claim(queue)).job_id == "j2"
    whole = call(generation)
    assert isinstance(await error_of(less), Aborted)
    assert (await claim(queue)).job_id == "j3"
    assert [routed.job.job_id for routed in dispatcher.jobs] == ["j3"]
    make(dispatcher, "j3", 0, 5, 6, 7, finish=FinishReason.END)
    assert await whole == [5, 6, 7]


async def error_of(task: asyncio.Task[list[int]]) -> object:
    (error,) = await asyncio.gather(task, return_exceptions=True)
    return error


async def test_a_client_that_has_all_tokens_gets_the_summary_alone(
    generation: Generation, dispatcher: Dispatcher
) -> None:
    token = TOKENS.sign(PAYLOAD, "acme")
    received = {0: Received((5, 6), finished=True)}
    payload = await generation.verify(REQUEST, token)
    messages = [message async for message in generation.resume(REQUEST, payload, received, None)]
    assert [type(message.event) for message in messages] == [Summary]
    assert dispatcher.jobs == ()
    with pytest.raises(InvalidField, match="spec"):
        await generation.verify(replace(REQUEST, fingerprint="two"), token)


async def test_a_client_that_has_all_tokens_gets_no_more_of_them_from_an_older_call(
    generation: Generation, dispatcher: Dispatcher, queue: JobQueue
) -> None:
    """End its reservation with the Summary: nothing may be made under it any more."""
    older = call(generation)
    await claim(queue)
    await call(generation, resumption=Resumption(PAYLOAD, {0: Received(finished=True)}))
    assert isinstance(await error_of(older), Aborted)
    assert dispatcher.jobs == ()


async def test_the_text_of_a_prompt_is_not_made_on_the_loop(
    generation: Generation, dispatcher: Dispatcher, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_in: list[threading.Thread] = []
    decode = HashTokenizer.decode

    def noted(text: HashTokenizer, *ids: Any, **options: Any) -> str:
        made_in.append(threading.current_thread())
        return decode(text, *ids, **options)

    monkeypatch.setattr(HashTokenizer, "decode", noted)
    monkeypatch.setattr(sys.modules[__name__], "SHORT_IDS", 0)
    echoed = call(generation, replace(REQUEST, echo=True))
    await claim(queue)
    make(dispatcher, "j1", 0, 5, finish=FinishReason.END)
    assert await echoed == [5]
    assert made_in
    assert threading.main_thread() not in made_in


async def test_a_drain_ends_every_call(
    generation: Generation, dispatcher: Dispatcher, queue: JobQueue, admission: Admission
) -> None:
    running = call(generation)
    await claim(queue)
    generation.drain()
    for ended in (running, call(generation)):
        with pytest.raises(Unavailable) as raised:
            await ended
        assert raised.value.reason == "ROUTER_DRAINING"
    assert dispatcher.jobs == ()
    assert admission.made == 1


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("resumed", [False, True])
async def test_a_drain_leaves_the_reservations_of_those_who_can_resume(
    generation: Generation,
    dispatcher: Dispatcher,
    queue: JobQueue,
    quotas: Quotas,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    resumed: bool,
) -> None:
    """A request that only waited is made anew elsewhere: until its reservation ends, its tokens would count twice."""
    ends = Mock()

    async def admit(dispatcher: Dispatcher, job: Job, *_: object) -> tuple[RoutedJob, CallBudget]:
        return await dispatcher.dispatch(job), CallBudget(Reservation("r", "acme", 0, 0), ends)

    monkeypatch.setattr(quotas, "admit", admit)
    running = generation.run(REQUEST, None, Resumption(PAYLOAD) if resumed else None)
    first = asyncio.ensure_future(anext(running))
    await claim(queue)
    if tokens:
        make(dispatcher, "j1", 0, 5)
        await first
        first = asyncio.ensure_future(anext(running))
    generation.drain()
    with pytest.raises(Unavailable):
        await first
    ((_, (_, linger_s), _),) = ends.method_calls
    assert (linger_s > 0) == bool(tokens or resumed)
