"""Jobs whose engines die: strikes, suspects, dead letters; other jobs go on."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from loraplex.contracts.broker.messages import DeadJob, Job
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import Placement
from loraplex.contracts.options import FinishReason
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.links import DispatchTiming
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.runtime.rpc.errors import Exhausted, Internal
from tests.router.recording_link import ROOMY, RecordingLink, claim, dispatched, frame, job, read


async def lose(dispatcher: Dispatcher, queue: JobQueue, *, blamed: bool) -> Job:
    """Claim the next attempt and return it, as a worker whose engine died."""
    link = RecordingLink("w")
    claimed = await claim(queue)
    dispatcher.receive_frame(
        link, frame(0, attempt=claimed.attempt, job_id=claimed.job_id, returned=True, blamed=blamed)
    )
    assert link.sent == [("ack", claimed.job_id, claimed.attempt)]
    return claimed


async def wait_for_failure(routed: RoutedJob) -> Internal:
    with pytest.raises(Internal) as caught:
        await read(routed)
    return caught.value


async def test_a_strike_makes_a_suspect_and_a_second_one_a_trial_that_the_death_of_its_engine_ends(
    dispatcher: Dispatcher, queue: JobQueue
) -> None:
    began_ms = time.time() * 1e3
    async with dispatched(dispatcher, job()) as routed:
        seen = [await lose(dispatcher, queue, blamed=True) for _ in range(3)]
        assert [(one.attempt, one.strikes) for one in seen] == [(1, 0), (2, 1), (3, 2)]
        assert [(one.suspect, one.on_trial) for one in seen] == [(False, False), (True, False), (True, True)]
        failure = await wait_for_failure(routed)
        assert failure.reason == "POISON_REQUEST"
    await dispatcher.drain_tasks()
    (dead,) = await queue.dead.list()
    assert dead == DeadJob("j", "j", "acme", "tiny", "", 2, 0, 3, "POISON_REQUEST", dead.died_at_ms)
    assert began_ms - 1 <= dead.died_at_ms <= time.time() * 1e3 + 1
    assert await queue.count_waiting() == 0


async def test_a_job_that_was_not_new_in_the_batch_gets_no_strike(dispatcher: Dispatcher, queue: JobQueue) -> None:
    async with dispatched(dispatcher, job()):
        seen = [await lose(dispatcher, queue, blamed=False) for _ in range(5)]
        assert [one.attempt for one in seen] == [1, 2, 3, 4, 5]
        assert {one.strikes for one in seen} == {0}
        assert (await claim(queue)).strikes == 0


async def test_the_loss_of_a_whole_worker_gives_no_strike(dispatcher: Dispatcher, queue: JobQueue) -> None:
    link = RecordingLink("w")
    dispatcher.link_up(link, [])
    async with dispatched(dispatcher, job()):
        await claim(queue)
        dispatcher.receive_claims(link, [("j", 1)])
        dispatcher.link_down(link)
        again = await claim(queue)
        assert (again.attempt, again.strikes) == (2, 0)


async def test_a_suspect_that_was_not_in_the_engine_goes_on(dispatcher: Dispatcher, queue: JobQueue) -> None:
    async with dispatched(dispatcher, job()) as routed:
        for blamed in (True, True, False):
            await lose(dispatcher, queue, blamed=blamed)
        again = await claim(queue)
        assert (again.attempt, again.strikes, routed.failure) == (4, 2, None)


async def test_a_token_takes_a_strike_back_but_for_a_job_on_trial(dispatcher: Dispatcher, queue: JobQueue) -> None:
    async with dispatched(dispatcher, job()):
        offset, strikes = 0, []
        for blamed in (True, False, True, True, False):
            claimed = await claim(queue)
            strikes.append(claimed.strikes)
            tokens = () if blamed else (5,)
            given_back = frame(offset, *tokens, attempt=claimed.attempt, returned=True, blamed=blamed)
            dispatcher.receive_frame(RecordingLink("w"), given_back)
            offset += len(tokens)
        assert [*strikes, (await claim(queue)).strikes] == [0, 1, 0, 1, 2, 2]


async def test_a_tenant_whose_job_killed_engines_is_refused_and_so_are_its_jobs_that_wait(queue: JobQueue) -> None:
    timing = DispatchTiming(look_s=0.01, claim_grace_s=0.02)
    dispatcher = Dispatcher(lambda *_: queue, lambda *_: Placement(), timing=timing)
    looking = asyncio.create_task(dispatcher.redispatch_missing())
    async with dispatched(dispatcher, job("poison")) as poison:
        for _ in range(2):
            await lose(dispatcher, queue, blamed=True)
        async with dispatched(dispatcher, job("waits")) as waits:
            assert (await lose(dispatcher, queue, blamed=True)).job_id == "poison"
            await wait_for_failure(poison)
            await dispatcher.drain_tasks()
            # A claim drops what waits; its router misses it, and its next attempt is refused.
            assert not (await queue.claim("sha256:0", ROOMY)).jobs
            with pytest.raises(Exhausted) as caught:
                await read(waits)
    assert (caught.value.reason, caught.value.subject) == ("QUARANTINED", "tenants/acme/quarantine")
    assert caught.value.retry_after_s == pytest.approx(60, abs=10)
    with pytest.raises(Exhausted):
        await dispatcher.dispatch(job("new"))
    async with dispatched(dispatcher, replace(job("other"), tenant="globex")):
        assert (await claim(queue)).job_id == "other"
    looking.cancel()


async def test_a_suspect_that_is_innocent_completes_exactly(dispatcher: Dispatcher, queue: JobQueue) -> None:
    link = RecordingLink("w")
    async with dispatched(dispatcher, job()) as routed:
        await lose(dispatcher, queue, blamed=True)
        await lose(dispatcher, queue, blamed=True)
        assert (await claim(queue)).suspect
        dispatcher.receive_frame(link, frame(0, 5, 6, attempt=3, finish=FinishReason.LENGTH))
        assert await read(routed) == [5, 6]
    await dispatcher.drain_tasks()
    assert await queue.dead.list() == []


async def test_what_came_with_a_return_counts_and_a_gap_before_it_does_not_delay(
    dispatcher: Dispatcher, queue: JobQueue
) -> None:
    link = RecordingLink("w")
    async with dispatched(dispatcher, job()), dispatched(dispatcher, job("gap")):
        for name in ("j", "gap"):
            dispatcher.receive_frame(link, frame(0, 5, job_id=name))
        dispatcher.receive_frame(link, frame(1, 6, 7, returned=True))
        dispatcher.receive_frame(link, frame(3, 8, job_id="gap", returned=True))
        again: dict[str, dict[int, tuple[int, ...]]] = {}
        while len(again) < 2:
            jobs = (await queue.claim("sha256:0", ROOMY)).jobs
            again |= {one.job_id: one.emitted for one in jobs if one.attempt == 2}
        assert again == {"j": {0: (5, 6, 7)}, "gap": {0: (5,)}}
    assert ("rewind", "gap", 1, 0, 1) not in link.sent


async def test_others_of_the_same_engine_go_on_when_a_suspect_ends(dispatcher: Dispatcher, queue: JobQueue) -> None:
    async with dispatched(dispatcher, job("poison")) as poison:
        for _ in range(3):
            await lose(dispatcher, queue, blamed=True)
        async with dispatched(dispatcher, replace(job(), tenant="globex")) as innocent:
            await lose(dispatcher, queue, blamed=False)
            assert (await wait_for_failure(poison)).reason == "POISON_REQUEST"
            again = await claim(queue)
            assert (again.job_id, again.attempt, again.strikes) == ("j", 2, 0)
            assert innocent.failure is None


async def test_a_dead_letter_is_kept_though_redis_does_not_answer_at_first(
    dispatcher: Dispatcher, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    push, failed = queue.dead.push, asyncio.Event()

    async def down_once(dead: DeadJob) -> None:
        if not failed.is_set():
            failed.set()
            raise ConnectionError("down")
        await push(dead)

    monkeypatch.setattr(queue.dead, "push", down_once)
    async with dispatched(dispatcher, job()) as routed:
        for _ in range(3):
            await lose(dispatcher, queue, blamed=True)
        await wait_for_failure(routed)
    await dispatcher.drain_tasks()
    assert failed.is_set()
    assert [dead.job_id for dead in await queue.dead.list()] == ["j"]
