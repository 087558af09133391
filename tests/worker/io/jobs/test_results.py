"""Messages of engine and routers that come late or out of order: real engine, Valkey and relay."""

from __future__ import annotations

from pathlib import Path

from redis.asyncio import Redis

from tests.worker.io.relayed_worker import Router, job, running
from worker.io.local_jobs.jobs import LocalJobState
from worker.ipc import Begun, Refused


async def test_an_answer_that_was_given_back_stays_so_whatever_the_engine_says_of_it(
    redis: Redis, tmp_path: Path
) -> None:
    router = Router()
    async with running(router, redis, tmp_path) as worker:
        worker.intake.accept(job("a", worker.address))
        local = worker.jobs.get("a", 1)
        assert local is not None
        (choice,) = local.running
        worker.results.give_back(local, blamed=True)
        worker.results.begun(Begun(choice.sequence_id))
        worker.results.refused(Refused(choice.sequence_id, "prompt", "no"))
        assert local.returned == [choice]
        assert local.state is LocalJobState.RETURNED
        await router.until(lambda: ("ended", "a") in router.events)
        assert router.returned == {"a": True}


async def test_the_answers_that_waited_for_the_first_one_run_when_it_is_cancelled(redis: Redis, tmp_path: Path) -> None:
    router = Router()
    async with running(router, redis, tmp_path) as worker:
        worker.intake.accept(job("a", worker.address, n=2, max_tokens=5))
        worker.results.cancel_choice("a", 1, 0)
        await router.until(lambda: ("ended", "a") in router.events)
        assert len(router.ids["a"]) == 5


async def test_a_job_of_which_every_answer_is_cancelled_has_ended(redis: Redis, tmp_path: Path) -> None:
    async with running(Router(), redis, tmp_path) as worker:
        worker.intake.accept(job("a", worker.address, n=2))
        local = worker.jobs.get("a", 1)
        assert local is not None
        for choice in (1, 0):
            worker.results.cancel_choice("a", 1, choice)
        states = [local.state]
        worker.results.cancel("a", 1)
        states.append(local.state)
        assert states == [LocalJobState.ENDED, LocalJobState.REMOVED]
        assert worker.jobs.all() == ()
