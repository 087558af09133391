"""Messages of engine and routers that come late or out of order: real engine, Valkey and relay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from loraplex.worker.io import results
from loraplex.worker.io.local_jobs import LocalJobState
from loraplex.worker.ipc import PROMPT_TOKENS, Add, Begun, Refused, ToEngine
from tests.hash_oracle import expected_prompt_logprobs
from tests.worker.io.relayed_worker import MODEL, Router, job, running


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
        worker.results.remove("a", 1)
        states.append(local.state)
        assert states == [LocalJobState.ENDED, LocalJobState.REMOVED]
        assert worker.jobs.all() == ()


async def test_resumed_answers_with_many_ids_come_to_the_engine_one_after_the_other(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, added = Router(), list[int]()
    monkeypatch.setattr(results, "STEP_IDS", 7)
    async with running(router, redis, tmp_path) as worker:
        send = worker.engine.send

        def note(message: ToEngine) -> None:
            if isinstance(message, Add):
                added.append(len(message.sequences))
            send(message)

        monkeypatch.setattr(worker.engine, "send", note)
        emitted = dict.fromkeys(range(3), tuple([5] * 4))
        worker.intake.accept(replace(job("a", worker.address, n=6, max_tokens=9), emitted=emitted))
        await router.until(lambda: ("ended", "a") in router.events)
    assert added == [1, 1, 4]


async def test_log_probabilities_of_a_long_prompt_reach_the_router_as_the_engine_made_them(
    redis: Redis, tmp_path: Path
) -> None:
    router, prompt = Router(), tuple(range(256, 600)) * 4
    assert len(prompt) > 2 * PROMPT_TOKENS
    async with running(router, redis, tmp_path) as worker:
        worker.intake.accept(
            replace(job("a", worker.address, max_tokens=2), prompt_ids=prompt, logprobs=0, prompt_logprobs=2)
        )
        await router.until(lambda: ("ended", "a") in router.events)
    expected = expected_prompt_logprobs(MODEL, prompt, 2)
    assert [[token for token, _ in one.alternatives] for one in router.prompts["a"]] == [
        [token for token, _ in one.alternatives] for one in expected
    ]
    assert [one.logprob for one in router.prompts["a"]] == pytest.approx([one.logprob for one in expected])
