"""The states of local jobs and of their answers: every transition that is allowed works, every other one raises."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest

from loraplex.contracts.options import FinishReason
from loraplex.worker.engine_api import Failure, Output
from loraplex.worker.io.local_jobs import Ending, LocalChoice, LocalChoiceState, LocalJobs, LocalJobState
from tests.worker.io.relayed_worker import job

FAILURE = Failure("INTERNAL", "FETCH_FAILED", "gone")
CHOICE_PATHS = {
    LocalChoiceState.WAITING: (),
    LocalChoiceState.HANDED_OVER: ("hand_over",),
    LocalChoiceState.BEGUN: ("hand_over", "begin"),
    LocalChoiceState.ENDED: ("hand_over", "begin", "end"),
    LocalChoiceState.DROPPED: ("drop",),
}
CHOICE_STEPS = {
    "hand_over": {LocalChoiceState.WAITING},
    "begin": {LocalChoiceState.HANDED_OVER},
    "end": {LocalChoiceState.WAITING, LocalChoiceState.HANDED_OVER, LocalChoiceState.BEGUN},
    "drop": set(LocalChoiceState) - {LocalChoiceState.DROPPED},
}
JOB_PATHS = {
    LocalJobState.CLAIMED: (),
    LocalJobState.FETCHING_ADAPTER: (LocalJobState.WAITING_ALONE, LocalJobState.FETCHING_ADAPTER),
    LocalJobState.WAITING_ALONE: (LocalJobState.WAITING_ALONE,),
    LocalJobState.IN_ENGINE: (LocalJobState.IN_ENGINE,),
    LocalJobState.ENDED: (LocalJobState.IN_ENGINE, LocalJobState.ENDED),
    LocalJobState.RETURNED: (LocalJobState.RETURNED,),
    LocalJobState.REMOVED: (LocalJobState.ENDED, LocalJobState.REMOVED),
}
ORDER = list(LocalJobState)


def step(choice: LocalChoice, name: str) -> None:
    """Take one step of an answer's life."""
    match name:
        case "hand_over":
            choice.hand_over(1, 0.0)
        case "begin":
            choice.begin()
        case "end":
            choice.end(Ending())
        case _:
            choice.drop()


@pytest.mark.parametrize(("state", "name"), list(product(LocalChoiceState, CHOICE_STEPS)))
def test_an_answer_takes_the_steps_that_its_state_allows(state: LocalChoiceState, name: str) -> None:
    choice = LocalJobs().add(job("a")).choices[0]
    for earlier in CHOICE_PATHS[state]:
        step(choice, earlier)
    assert choice.state is state
    if state in CHOICE_STEPS[name]:
        step(choice, name)
        assert choice.state is not state
    else:
        with pytest.raises(RuntimeError, match="cannot become"):
            step(choice, name)
        assert choice.state is state


@pytest.mark.parametrize(("state", "following"), list(product(LocalJobState, LocalJobState)))
def test_a_job_only_goes_forward(state: LocalJobState, following: LocalJobState) -> None:
    local = LocalJobs().add(job("a"))
    for earlier in JOB_PATHS[state]:
        local.enter(earlier)
    over = {LocalJobState.ENDED, LocalJobState.RETURNED}
    if ORDER.index(following) > ORDER.index(state) and not {state, following} <= over:
        local.enter(following)
        assert local.state is following
    else:
        with pytest.raises(RuntimeError, match="cannot become"):
            local.enter(following)


def test_a_job_ends_with_its_last_answer() -> None:
    local = LocalJobs().add(job("a", n=2))
    local.enter(LocalJobState.IN_ENGINE)
    first, second = local.running
    first.record(Output(first.sequence_id, 0, (7,), FinishReason.LENGTH))
    local.end_if_done()
    states = [local.state]
    second.end(Ending(failure=FAILURE))
    local.end_if_done()
    states.append(local.state)
    assert states == [LocalJobState.IN_ENGINE, LocalJobState.ENDED]


def test_answers_that_have_ended_keep_their_end_when_their_job_is_given_back() -> None:
    local = LocalJobs().add(job("a", n=3))
    local.enter(LocalJobState.IN_ENGINE)
    first, second, third = local.running
    first.end(Ending(FinishReason.END))
    assert local.end_choices(LocalJobState.RETURNED, Ending(blamed=True)) == [second, third]
    assert first.ending == Ending(FinishReason.END)
    assert local.returned == [second, third]
    assert local.state is LocalJobState.RETURNED


def test_sequences_are_found_until_their_answer_is_dropped_or_their_job_removed() -> None:
    jobs = LocalJobs()
    local = jobs.add(job("a", n=2))
    first, second = local.running
    assert jobs.of_sequence(first.sequence_id) is first
    assert jobs.drop_choice(local, 0) is first
    assert jobs.of_sequence(first.sequence_id) is None
    assert jobs.remove("a", 1) is local
    assert jobs.of_sequence(second.sequence_id) is None
    assert jobs.remove("a", 1) is None


async def test_all_that_wait_for_a_change_see_the_next_one() -> None:
    jobs = LocalJobs()
    waiting = [asyncio.create_task(jobs.next_change.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    jobs.changed()
    await asyncio.gather(*waiting)
    assert not jobs.next_change.is_set()
