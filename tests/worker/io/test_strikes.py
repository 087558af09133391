"""What a worker tells of its jobs when its engine dies, and how a suspect runs: real engine, Valkey and relay."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from broker.messages import STRIKES_LIMIT, AdapterRef
from tests.worker.io.relayed_worker import MODEL, ROWS, Router, job, running
from worker.engine_api import AdapterSource, FinishKind, Output
from worker.io.local_jobs.jobs import CLEARED_ATTEMPTS, LocalJobs

# The rule

# What an engine has told: the sequences that it took, and its adapters.
NOTHING = (0, frozenset[str]())


def test_a_job_is_new_until_a_step_has_given_it_a_token() -> None:
    held = LocalJobs().add(job("a"))
    (choice,) = held.running
    assert not held.struck(*NOTHING)  # it is not in the engine
    choice.in_engine, choice.place = True, 1
    assert held.struck(*NOTHING)
    choice.begun = True
    choice.record(Output(choice.sequence_id, 0, (7,)), 0.0, 1)
    assert not held.struck(*NOTHING)


def test_a_job_that_only_waits_in_the_engine_is_no_cause() -> None:
    held = LocalJobs().add(job("a"))
    (choice,) = held.running
    choice.in_engine, choice.place = True, 3
    # To be taken, to be loaded for and to be begun may each be what kills.
    assert held.struck(2, frozenset())
    assert not held.struck(3, frozenset())
    held.source = AdapterSource("sha256:a")
    assert held.struck(3, frozenset({"sha256:b"}))
    assert not held.struck(3, frozenset({"sha256:a"}))
    choice.begun = True
    assert held.struck(3, frozenset({"sha256:a"}))


def test_answers_that_join_their_sibling_are_new_again() -> None:
    held = LocalJobs().add(job("a", n=2))
    first, second = held.running
    first.in_engine = first.begun = True
    first.record(Output(first.sequence_id, 0, (7,)), 0.0, 1)
    second.in_engine = second.begun = True
    assert held.struck(*NOTHING)
    second.record(Output(second.sequence_id, 0, (8,), finish=FinishKind.LENGTH), 0.0, 2)
    assert not held.struck(*NOTHING)


def test_a_continuation_is_new_though_it_has_ids_of_earlier_attempts() -> None:
    held = LocalJobs().add(replace(job("a"), attempt=2, emitted={0: (5, 6)}))
    held.running[0].in_engine = held.running[0].begun = True
    assert held.struck(*NOTHING)


def test_a_suspect_is_never_cleared_while_it_runs() -> None:
    held = LocalJobs().add(job("a", strikes=STRIKES_LIMIT))
    (choice,) = held.running
    assert not held.struck(*NOTHING)
    choice.in_engine = choice.begun = True
    choice.record(Output(choice.sequence_id, 0, (7,)), 0.0, 1)
    assert held.struck(*NOTHING)
    choice.record(Output(choice.sequence_id, 1, (8,), finish=FinishKind.LENGTH), 0.0, 2)
    assert not held.struck(*NOTHING)


@pytest.mark.parametrize("attempt", [1, CLEARED_ATTEMPTS, CLEARED_ATTEMPTS + 1, CLEARED_ATTEMPTS + 9])
def test_tokens_clear_a_job_only_in_its_first_attempts(attempt: int) -> None:
    """One that always gives some before it kills would cost an engine for each."""
    held = LocalJobs().add(replace(job("a"), attempt=attempt))
    (choice,) = held.running
    choice.in_engine = choice.begun = True
    choice.record(Output(choice.sequence_id, 0, (7,)), 0.0, 1)
    assert held.struck(*NOTHING) is (attempt > CLEARED_ATTEMPTS)


# The worker


@pytest.fixture
def router() -> Router:
    return Router()


async def test_a_dead_engine_s_jobs_are_given_back_and_only_the_new_ones_are_struck(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    async with running(router, redis, tmp_path) as worker:
        await worker.queue.enqueue(job("old", worker.address))
        await router.until(lambda: len(router.ids["old"]) >= 3)
        fetching = replace(job("fetching", worker.address), adapter=AdapterRef("r", "sha256:a", 8, 100))
        await worker.queue.enqueue(fetching)
        await worker.until_held("fetching")
        os.kill(worker.engine.pid, signal.SIGSTOP)  # so that what comes now gets no token
        await worker.queue.enqueue(job("new", worker.address))
        held = worker.intake.held
        await worker.until_held("new", lambda: any(choice.in_engine for choice in held.get("new", 1).running))  # type: ignore[union-attr]
        os.kill(worker.engine.pid, signal.SIGKILL)
        await router.until(lambda: len(router.returned) == 3)
        assert router.returned == {"old": False, "fetching": False, "new": True}
        assert worker.intake.held.running == []
        # What is claimed in the same moment comes back as well.
        await worker.queue.enqueue(job("late", worker.address))
        await router.until(lambda: "late" in router.returned)
        assert router.returned["late"] is False
        assert router.events.index(("claimed", "late")) < router.events.index(("ended", "late"))


async def test_a_job_that_waits_in_the_engine_for_a_row_is_not_struck(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    async with running(router, redis, tmp_path) as worker:
        old = [f"old-{number}" for number in range(ROWS)]
        worker.intake._accept([job(name, worker.address) for name in old])
        await router.until(lambda: all(router.ids[name] for name in old))
        # As one for which a row was lent.
        worker.intake._accept([job("waiting", worker.address)])
        await worker.until_held("waiting", lambda: worker.intake.stats.rows_waiting == 1)
        os.kill(worker.engine.pid, signal.SIGKILL)
        await router.until(lambda: len(router.returned) == ROWS + 1)
        assert router.returned == dict.fromkeys((*old, "waiting"), False)


async def test_a_job_of_whose_first_step_the_engine_dies_is_struck(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    async with running(router, redis, tmp_path, f"{MODEL}&die_on=599") as worker:
        worker.intake._accept([replace(job("kills", worker.address), prompt_ids=(1, 599))])
        await router.until(lambda: router.returned == {"kills": True})


async def test_a_suspect_runs_alone(router: Router, redis: Redis, tmp_path: Path) -> None:
    async with running(router, redis, tmp_path) as worker:
        await worker.queue.enqueue(job("before", worker.address, max_tokens=100))
        await router.until(lambda: len(router.ids["before"]) >= 1)
        await worker.queue.enqueue(job("suspect", worker.address, max_tokens=100, strikes=STRIKES_LIMIT))
        await router.until(lambda: ("claimed", "suspect") in router.events)
        await worker.queue.enqueue(job("after", worker.address, max_tokens=10))
        await router.until(lambda: ("ended", "after") in router.events)
        names = ("before", "suspect", "after")
        assert router.events == [(what, name) for name in names for what in ("claimed", "ended")]
        assert len(router.ids["suspect"]) == 100


async def test_a_suspect_that_was_claimed_beside_others_waits_until_they_have_ended(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    """Rows that were lent while an adapter was slow may be all rows."""
    async with running(router, redis, tmp_path) as worker:
        await worker.queue.enqueue(job("before", worker.address, max_tokens=100))
        await router.until(lambda: len(router.ids["before"]) >= 1)
        suspect = job("suspect", worker.address, max_tokens=10, strikes=STRIKES_LIMIT)
        worker.intake._accept([suspect])  # no claim does so but for a moment's chance
        await router.until(lambda: ("ended", "suspect") in router.events)
        assert router.events.index(("ended", "before")) < router.events.index(("ended", "suspect"))
        assert len(router.ids["before"]) == 100


async def test_a_suspect_whose_engine_dies_is_struck_whatever_it_has_got(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    async with running(router, redis, tmp_path) as worker:
        await worker.queue.enqueue(job("suspect", worker.address, strikes=STRIKES_LIMIT))
        await router.until(lambda: len(router.ids["suspect"]) >= 3)
        os.kill(worker.engine.pid, signal.SIGKILL)
        await router.until(lambda: router.returned == {"suspect": True})
