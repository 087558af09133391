"""States of a job: every transition that is allowed happens, and every other one raises."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from loraplex.contracts.options import NO_DRAFTS, DraftCounts, FinishReason
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.router.dispatch.links import Frame, read_frame
from loraplex.router.dispatch.routed_job import (
    _ALLOWED,
    READ_TOKENS,
    JobState,
    JobTransitionError,
    ReaderRounds,
    RoutedJob,
    check_transition,
)
from loraplex.router.generation.run import Run
from loraplex.router.request import Request
from loraplex.router.text.tokenizer import HashTokenizer
from loraplex.runtime.rpc.errors import Internal
from tests.router.recording_link import RecordingLink, job

LINK = RecordingLink("w")
# The calls that bring a new job into each state.
PATHS: dict[JobState, list[Callable[[RoutedJob], object]]] = {
    JobState.ENQUEUEING: [],
    JobState.QUEUED: [lambda routed: routed.enqueued(1)],
    JobState.MISSING: [lambda routed: routed.enqueued(1), lambda routed: routed.looked_up(waiting=False, now=1.0)],
    JobState.BOUND: [lambda routed: routed.bind(LINK, 1)],
    JobState.ENDED: [lambda routed: routed.fail(Internal("over"))],
    JobState.RELEASED: [lambda routed: routed.release()],
}


def in_state(state: JobState) -> RoutedJob:
    routed = RoutedJob(job())
    for step in PATHS[state]:
        step(routed)
    assert routed.state is state
    return routed


def test_only_the_allowed_transitions_pass() -> None:
    for before in JobState:
        for after in JobState:
            if after in _ALLOWED[before]:
                check_transition("j", before, after)
            else:
                with pytest.raises(JobTransitionError, match=f"can't go from {before.value} to {after.value}"):
                    check_transition("j", before, after)


@pytest.mark.parametrize("state", JobState)
def test_a_job_is_released_once_from_every_state(state: JobState) -> None:
    routed = in_state(state)
    if state is not JobState.RELEASED:
        routed.release()
    with pytest.raises(JobTransitionError):
        routed.release()


@pytest.mark.parametrize("state", [JobState.ENQUEUEING, JobState.QUEUED, JobState.ENDED, JobState.RELEASED])
def test_an_attempt_that_may_still_be_claimed_or_is_over_is_not_made_again(state: JobState) -> None:
    with pytest.raises(JobTransitionError):
        in_state(state).next_attempt()


@pytest.mark.parametrize("state", [JobState.ENDED, JobState.RELEASED])
def test_reports_about_a_job_that_is_over_change_nothing(state: JobState) -> None:
    routed = in_state(state)
    routed.enqueued(1)
    routed.enqueue_failed(1, Internal("late"))
    assert routed.looked_up(waiting=False, now=9.0) == 0.0
    assert not routed.bind(LINK, 1)
    routed.close_choice(0)
    assert routed.state is state


def test_a_claim_that_is_quicker_than_the_queue_s_answer_stands() -> None:
    routed = in_state(JobState.BOUND)
    routed.enqueued(1)
    assert routed.state is JobState.BOUND
    routed.next_attempt()
    routed.enqueued(1)  # the older attempt's answer
    assert routed.awaits_enqueue(2)
    assert not routed.bind(LINK, 1)


def test_a_job_is_missing_from_the_first_look_that_does_not_find_it() -> None:
    routed = in_state(JobState.QUEUED)
    assert routed.looked_up(waiting=True, now=1.0) == 0.0
    assert routed.looked_up(waiting=False, now=2.0) == 0.0
    assert routed.looked_up(waiting=False, now=5.0) == 3.0
    routed.looked_up(waiting=True, now=6.0)
    assert routed.state is JobState.QUEUED


async def test_a_failure_lets_the_reader_have_what_came_before_it() -> None:
    routed = in_state(JobState.BOUND)
    routed.accept(Frame("j", 1, 0, (5, 6)))
    routed.fail(Internal("over"))
    (arrival,) = await routed.arrivals(routed.reader)
    assert arrival.token_ids == (5, 6)
    with pytest.raises(Internal):
        await routed.arrivals(routed.reader)


async def test_the_end_of_all_choices_ends_the_job() -> None:
    routed = RoutedJob(job(n=2))
    routed.bind(LINK, 1)
    routed.accept(Frame("j", 1, 0, (5,), finish=FinishReason.END))
    assert not routed.ended
    routed.close_choice(1)
    assert routed.ended
    async with asyncio.timeout(60):
        assert [arrival.choice for arrival in await routed.arrivals(routed.reader)] == [0]
        assert await routed.arrivals(routed.reader) == []


async def test_many_tokens_are_read_in_parts_and_the_end_comes_with_the_last() -> None:
    routed = RoutedJob(job(n=2))
    routed.bind(LINK, 1)
    routed.accept(Frame("j", 1, 0, (5,) * (2 * READ_TOKENS + 10), finish=FinishReason.LENGTH))
    routed.accept(Frame("j", 1, 0, (6,), 1, finish=FinishReason.END))
    reads = list[list[tuple[int, int, FinishReason | None]]]()
    async with asyncio.timeout(60):
        while arrivals := await routed.arrivals(routed.reader):
            reads.append([(arrival.choice, len(arrival.token_ids), arrival.finish) for arrival in arrivals])
    whole = (0, READ_TOKENS, None)
    assert reads == [[whole], [whole], [(0, 10, FinishReason.LENGTH), (1, 1, FinishReason.END)]]


OF_PROMPT = (pb.TokenLogprobs(logprob=-1.0),)


def asks_for_prompt_logprobs(n: int = 1) -> RoutedJob:
    routed = RoutedJob(replace(job(n=n), prompt_logprobs=0))
    routed.bind(LINK, 1)
    return routed


async def test_a_frame_without_ids_is_no_first_token() -> None:
    routed = asks_for_prompt_logprobs()
    reading = asyncio.ensure_future(routed.arrivals(routed.reader))
    assert routed.accept(Frame("j", 1, 0, (), adapter_ms=0.0, cached_tokens=0))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not reading.done()
    assert routed.first_token_at is None
    routed.accept(Frame("j", 1, 0, (5,), adapter_ms=7.0, cached_tokens=1, prompt_logprobs=OF_PROMPT))
    async with asyncio.timeout(60):
        (arrival,) = await reading
    assert (arrival.token_ids, routed.prompt_logprobs) == ((5,), OF_PROMPT)
    assert (routed.adapter_ms, routed.cached_tokens) == (7.0, 1)
    assert routed.first_token_at is not None
    run = Run(Request("acme", (1, 2), "token_ids"), routed.job, HashTokenizer())
    run.routed = routed
    assert run.began.ttft_s == routed.first_token_at - routed.admitted_at


def test_the_log_probabilities_of_a_long_prompt_keep_no_other_frame_waiting() -> None:
    # Read here, those of 30,000 tokens held the loop, or in a thread all later frames of the worker, for 0.15 s.
    token = pb.TokenLogprobs(logprob=-1.0, token_ids=range(5), logprobs=[-1.0] * 5)
    frame = pb.Frame(job_id="j", attempt=1, token_ids=[5], first=pb.FirstToken(prompt_logprobs=[token] * 30_000))
    began = time.thread_time()
    read = read_frame(frame)
    assert time.thread_time() - began < 0.005
    assert len(read.prompt_logprobs) == 30_000


async def test_the_prompt_s_log_probabilities_come_before_another_choice_s_ids() -> None:
    routed = asks_for_prompt_logprobs(n=2)
    routed.accept(Frame("j", 1, 0, (8, 9), choice=1, cached_tokens=1))
    reading = asyncio.ensure_future(routed.arrivals(routed.reader))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not reading.done()
    # The worker died: the next attempt is asked for them again.
    routed.next_attempt()
    assert routed.job.emitted == {0: (), 1: (8, 9)}
    routed.bind(LINK, 2)
    routed.accept(Frame("j", 2, 0, (5,), prompt_logprobs=OF_PROMPT))
    async with asyncio.timeout(60):
        arrivals = await reading
    assert [(arrival.choice, arrival.token_ids) for arrival in arrivals] == [(0, (5,)), (1, (8, 9))]
    assert routed.prompt_logprobs == OF_PROMPT


async def test_a_job_that_fails_before_its_prompt_s_log_probabilities_shows_its_failure() -> None:
    routed = asks_for_prompt_logprobs(n=2)
    routed.accept(Frame("j", 1, 0, (8, 9), choice=1))
    routed.fail(Internal("over"))
    with pytest.raises(Internal):
        await routed.arrivals(routed.reader)


async def test_what_was_sent_again_is_told_once() -> None:
    routed = in_state(JobState.BOUND)
    routed.accept(Frame("j", 1, 0, (5, 6)))
    (arrival,) = await routed.arrivals(routed.reader)
    assert arrival.token_ids == (5, 6)
    reading = asyncio.ensure_future(routed.arrivals(routed.reader))
    assert routed.accept(Frame("j", 1, 0, (5, 6)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not reading.done()
    routed.accept(Frame("j", 1, 1, (6, 7), finish=FinishReason.LENGTH))
    async with asyncio.timeout(60):
        (arrival,) = await reading
    assert arrival.token_ids == (7,)


async def test_drafts_are_counted_once_over_choices_attempts_and_frames_that_come_again() -> None:
    routed = RoutedJob(job(n=2))
    routed.bind(LINK, 1)
    routed.accept(Frame("j", 1, 0, (5, 6), drafts=DraftCounts(1, 4, 1)))
    routed.accept(Frame("j", 1, 0, (5, 6, 7), drafts=DraftCounts(2, 8, 1)))  # after a rewind
    routed.accept(Frame("j", 1, 0, (8,), choice=1))
    assert routed.drafts == DraftCounts(2, 8, 1)
    for attempt in (2, 3):  # two workers die, the second one before it gave anything
        routed.next_attempt()
        assert routed.drafts == DraftCounts(2, 8, 1)
        routed.bind(LINK, attempt)
    routed.accept(Frame("j", 3, 3, (9,), drafts=DraftCounts(1, 4, 0)))
    routed.accept(Frame("j", 3, 1, (9, 9), choice=1, drafts=DraftCounts(1, 3, 1), finish=FinishReason.LENGTH))
    assert routed.drafts == DraftCounts(4, 15, 2)
    assert (routed.drafts.mean_acceptance_length, NO_DRAFTS.mean_acceptance_length) == (1.5, 0.0)


async def test_what_is_urgent_is_read_at_once() -> None:
    rounds, reader = ReaderRounds(), asyncio.Event()
    rounds.wake(reader, urgent=False)
    assert not reader.is_set()
    rounds.wake(reader, urgent=True)
    assert reader.is_set()
    reader.clear()
    another = asyncio.Event()
    rounds.wake(another, urgent=False)
    await another.wait()
    # Its turn was the urgent one: it has none in the round.
    assert not reader.is_set()


async def test_what_comes_during_a_round_is_read_in_the_next_one_all_at_once() -> None:
    rounds, events = ReaderRounds(), [asyncio.Event() for _ in range(3)]
    come = [0, 0, 0]

    async def source() -> None:
        for _ in range(300):
            for index, event in enumerate(events):
                come[index] += 1
                rounds.wake(event, urgent=False)
            await asyncio.sleep(0)

    async def reader(index: int) -> int:
        taken = messages = 0
        while taken < 300:
            await events[index].wait()
            events[index].clear()
            taken, messages = come[index], messages + 1
        return messages

    async with asyncio.timeout(30):
        readers = asyncio.gather(*(reader(index) for index in range(3)))
        await source()
        messages = await readers
    assert come == [300, 300, 300]
    assert all(1 <= count < 300 for count in messages)


async def test_it_goes_on_after_a_pause() -> None:
    rounds, reader = ReaderRounds(), asyncio.Event()
    for _ in range(3):
        rounds.wake(reader, urgent=False)
        async with asyncio.timeout(30):
            await reader.wait()
        reader.clear()
        while rounds._going:  # noqa: ASYNC110 — nobody is told of the end of the rounds
            await asyncio.sleep(0.001)
