"""Jobs that a worker blames when its engine dies, and suspects, which run alone: real engine, Valkey and relay."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.messages import STRIKES_LIMIT, SUSPECT_STRIKES, AdapterRef, Capacity, Job
from loraplex.contracts.options import FinishReason
from loraplex.worker.engine_api import AdapterSource, Output
from loraplex.worker.io.intake import free_capacity
from loraplex.worker.io.local_jobs import CLEARED_ATTEMPTS, LocalChoice, LocalJob, LocalJobs, LocalJobState
from tests.worker.io.relayed_worker import MODEL, ROWS, Router, job, running

# The rule

# Reported by an engine: the number of sequences that it took, and its adapters.
NOTHING = (0, frozenset[str]())


def local_job(job: Job) -> LocalJob:
    """Return a claimed job."""
    return LocalJobs().add(job)


def handed_over(choice: LocalChoice, number: int = 1, *, begun: bool = False) -> None:
    """Hand an answer to an engine that begins it, or does not."""
    choice.hand_over(number, 0.0)
    if begun:
        choice.begin()


def test_a_job_may_have_killed_until_a_step_has_given_it_a_token() -> None:
    local = local_job(job("a"))
    (choice,) = local.running
    assert not local.may_have_killed(*NOTHING)  # it is not in the engine
    handed_over(choice)
    assert local.may_have_killed(*NOTHING)
    choice.begin()
    choice.record(Output(choice.sequence_id, 0, (7,)), 0.0, 1)
    assert not local.may_have_killed(*NOTHING)


def test_a_job_that_only_waits_in_the_engine_is_no_cause() -> None:
    local = local_job(job("a"))
    (choice,) = local.running
    handed_over(choice, 3)
    # To be taken, to be loaded for and to be begun may each be what kills.
    assert local.may_have_killed(2, frozenset())
    assert not local.may_have_killed(3, frozenset())
    local.source = AdapterSource("sha256:a")
    assert local.may_have_killed(3, frozenset({"sha256:b"}))
    assert not local.may_have_killed(3, frozenset({"sha256:a"}))
    choice.begin()
    assert local.may_have_killed(3, frozenset({"sha256:a"}))


def test_answers_that_join_their_sibling_are_new_again() -> None:
    local = local_job(job("a", n=2))
    first, second = local.running
    handed_over(first, begun=True)
    first.record(Output(first.sequence_id, 0, (7,)), 0.0, 1)
    handed_over(second, 2, begun=True)
    assert local.may_have_killed(*NOTHING)
    second.record(Output(second.sequence_id, 0, (8,), finish=FinishReason.LENGTH), 0.0, 2)
    assert not local.may_have_killed(*NOTHING)


def test_a_continuation_is_new_though_it_has_ids_of_earlier_attempts() -> None:
    local = local_job(replace(job("a"), attempt=2, emitted={0: (5, 6)}))
    handed_over(local.running[0], begun=True)
    assert local.may_have_killed(*NOTHING)


def test_a_suspect_lets_nothing_begin_beside_it_until_every_answer_has_a_token() -> None:
    local = local_job(job("a", strikes=SUSPECT_STRIKES, n=2))
    first, second = local.running
    assert local.needs_all
    handed_over(first, begun=True)
    first.record(Output(first.sequence_id, 0, (7,)), 0.0, 1)
    assert local.needs_all
    handed_over(second, 2, begun=True)
    assert local.may_have_killed(*NOTHING)
    second.record(Output(second.sequence_id, 0, (7,)), 0.0, 1)
    assert not local.needs_all
    assert not local.may_have_killed(*NOTHING)


def test_a_job_on_trial_is_never_cleared_while_it_runs() -> None:
    local = local_job(job("a", strikes=STRIKES_LIMIT))
    (choice,) = local.running
    assert not local.may_have_killed(*NOTHING)
    handed_over(choice, begun=True)
    choice.record(Output(choice.sequence_id, 0, (7,)), 0.0, 1)
    assert local.may_have_killed(*NOTHING)
    choice.record(Output(choice.sequence_id, 1, (8,), finish=FinishReason.LENGTH), 0.0, 2)
    assert not local.may_have_killed(*NOTHING)


@pytest.mark.parametrize("attempt", [1, CLEARED_ATTEMPTS, CLEARED_ATTEMPTS + 1, CLEARED_ATTEMPTS + 9])
def test_tokens_clear_a_job_only_in_its_first_attempts(attempt: int) -> None:
    """Otherwise a job that always gives some before it kills could crash any number of engines."""
    local = local_job(replace(job("a"), attempt=attempt))
    (choice,) = local.running
    handed_over(choice, begun=True)
    choice.record(Output(choice.sequence_id, 0, (7,)), 0.0, 1)
    assert local.may_have_killed(*NOTHING) is (attempt > CLEARED_ATTEMPTS)


# The worker


@pytest.fixture
def router() -> Router:
    return Router()


async def test_a_dead_engine_s_jobs_are_given_back_and_only_the_new_ones_are_blamed(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    async with running(router, redis, tmp_path) as worker:
        await worker.queue.enqueue(job("old", worker.address))
        await router.until(lambda: len(router.ids["old"]) >= 3)
        fetching = replace(job("fetching", worker.address), adapter=AdapterRef("r", "sha256:a", 8, 100))
        await worker.queue.enqueue(fetching)
        await worker.until_here("fetching")
        os.kill(worker.engine.pid, signal.SIGSTOP)  # so that what comes now gets no token
        await worker.queue.enqueue(job("new", worker.address))
        await worker.until_here("new", lambda: worker.jobs.get("new", 1).state is LocalJobState.IN_ENGINE)  # type: ignore[union-attr]
        os.kill(worker.engine.pid, signal.SIGKILL)
        await router.until(lambda: len(router.returned) == 3)
        assert router.returned == {"old": False, "fetching": False, "new": True}
        assert worker.jobs.running == []
        # A job that is claimed in the same moment comes back as well.
        await worker.queue.enqueue(job("late", worker.address))
        await router.until(lambda: "late" in router.returned)
        assert router.returned["late"] is False
        assert router.events.index(("claimed", "late")) < router.events.index(("ended", "late"))


async def test_a_job_that_waits_in_the_engine_for_a_row_is_not_blamed(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    async with running(router, redis, tmp_path) as worker:
        old = [f"old-{number}" for number in range(ROWS)]
        for name in old:
            worker.intake.accept(job(name, worker.address))
        await router.until(lambda: all(router.ids[name] for name in old))
        # A job may wait here because a row was lent for it.
        worker.intake.accept(job("waiting", worker.address))
        await worker.until_here("waiting", lambda: worker.results.stats.rows_waiting == 1)
        os.kill(worker.engine.pid, signal.SIGKILL)
        await router.until(lambda: len(router.returned) == ROWS + 1)
        assert router.returned == dict.fromkeys((*old, "waiting"), False)


async def test_a_job_of_whose_first_step_the_engine_dies_is_blamed(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    async with running(router, redis, tmp_path, f"{MODEL}&die_on=599") as worker:
        worker.intake.accept(replace(job("kills", worker.address), prompt_ids=(1, 599)))
        await router.until(lambda: router.returned == {"kills": True})


async def test_suspects_begin_one_after_the_other_and_go_on_beside_each_other(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    async with running(router, redis, tmp_path) as worker:
        for name in ("one", "two"):
            await worker.queue.enqueue(job(name, worker.address, strikes=SUSPECT_STRIKES))
        await router.until(lambda: all(len(router.ids[name]) >= 3 for name in ("one", "two")))
        assert ("ended", "one") not in router.events
        await worker.queue.enqueue(job("after", worker.address, max_tokens=10))
        await router.until(lambda: ("ended", "after") in router.events)
        claimed = [name for what, name in router.events if what == "claimed"]
        assert claimed == ["one", "two", "after"]


async def test_a_suspect_that_is_cleared_is_given_back_before_another_tenant_s_begins(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    """Else the engine could die a second time under it."""
    async with running(router, redis, tmp_path) as worker:
        for name, tenant in (("one", "acme"), ("two", "globex"), ("three", "globex")):
            await worker.queue.enqueue(replace(job(name, worker.address, strikes=SUSPECT_STRIKES), tenant=tenant))
        await router.until(lambda: all(len(router.ids[name]) >= 3 for name in ("two", "three")))
        assert router.returned == {"one": False}
        assert router.ids["one"]


async def test_beside_a_job_of_a_suspect_tenant_nothing_of_others_begins_until_it_has_a_token(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    async with running(router, redis, tmp_path) as worker:

        def capacity() -> Capacity:
            results = worker.results
            return free_capacity(worker.jobs, results.limits, results.stats, results.links, stalled=False)

        await worker.queue.enqueue(job("old", worker.address))
        await router.until(lambda: len(router.ids["old"]) >= 3)
        assert capacity().only_tenant == "acme"
        os.kill(worker.engine.pid, signal.SIGSTOP)  # so that what comes now gets no token
        await worker.queue.enqueue(job("struck", worker.address, strikes=SUSPECT_STRIKES))
        await worker.queue.finish("struck", 2)  # its client has left
        await worker.queue.enqueue(job("new", worker.address))
        await worker.until_here("new")
        assert capacity().rows == 0
        await worker.queue.enqueue(replace(job("other", worker.address), tenant="globex"))
        os.kill(worker.engine.pid, signal.SIGCONT)
        await router.until(lambda: len(router.ids["other"]) >= 1)
        assert router.ids["new"]
        assert capacity().only_tenant == ""


async def test_a_job_on_trial_runs_alone(router: Router, redis: Redis, tmp_path: Path) -> None:
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
    """Rows that are lent while adapters are late may be all rows."""
    async with running(router, redis, tmp_path) as worker:
        await worker.queue.enqueue(job("before", worker.address, max_tokens=100))
        await router.until(lambda: len(router.ids["before"]) >= 1)
        suspect = job("suspect", worker.address, max_tokens=10, strikes=STRIKES_LIMIT)
        worker.intake.accept(suspect)  # no claim does so but for a moment's chance
        await router.until(lambda: ("ended", "suspect") in router.events)
        assert router.events.index(("ended", "before")) < router.events.index(("ended", "suspect"))
        assert len(router.ids["before"]) == 100


async def test_a_suspect_whose_engine_dies_is_blamed_whatever_it_has_got(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    async with running(router, redis, tmp_path) as worker:
        await worker.queue.enqueue(job("suspect", worker.address, strikes=STRIKES_LIMIT))
        await router.until(lambda: len(router.ids["suspect"]) >= 3)
        os.kill(worker.engine.pid, signal.SIGKILL)
        await router.until(lambda: router.returned == {"suspect": True})
