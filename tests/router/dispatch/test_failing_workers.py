"""A worker that can't serve a job for a fault of its own: another one gets the job, while there is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.homes import Roster, WorkerLoad
from loraplex.contracts.broker.queue import JobQueue
from loraplex.router.dispatch.links import Frame
from loraplex.runtime.rpc.errors import CallError, Unavailable
from tests.router.dispatch.test_takeover import ADAPTER, Router, ranked, state
from tests.router.recording_link import KEYS, ROOMY, RecordingLink, dispatched, job, read


def failed(attempt: int, reason: str) -> Frame:
    return Frame("j", attempt, 0, (), failure=Unavailable("no answer", reason=reason))


async def attempt_of(redis: Redis, worker: str) -> list[tuple[int, bool]]:
    """Let a worker claim once the last attempt is in the queue; return its attempts, and whether each is a last try."""
    queue = JobQueue(redis, KEYS, worker_id=worker)
    claimed = await queue.claim("sha256:0", ROOMY)
    return [(one.attempt, one.last_try) for one in claimed.jobs]


@pytest.mark.parametrize("adapter", [ADAPTER, None])
async def test_each_worker_fails_a_job_once_and_then_its_caller_gets_the_error(redis: Redis, adapter: object) -> None:
    router, (home, other) = Router(redis), ranked("w1", "w2")
    await router.look(state(home, has=False), state(other, has=False))
    async with dispatched(router.dispatcher, replace(job(), adapter=adapter)) as routed:  # type: ignore[arg-type]
        assert await attempt_of(redis, home) == [(1, adapter is None)]
        router.dispatcher.receive_frame(RecordingLink(home), failed(1, "STORE_DOWN"))
        await router.dispatcher.drain_tasks()
        assert await attempt_of(redis, home) == [], "it has failed there"
        assert await attempt_of(redis, other) == [(2, True)]
        router.dispatcher.receive_frame(RecordingLink(other), failed(2, "STORE_DOWN"))
        with pytest.raises(CallError, match="no answer"):
            await read(routed)


async def test_a_job_that_no_worker_can_read_is_sealed_anew_and_failures_of_the_job_are_final(redis: Redis) -> None:
    router, (home, _) = Router(redis), ranked("w1", "w2")
    await router.look(state(home, has=False))
    async with dispatched(router.dispatcher, job()) as routed:
        for attempt in (1, 2):
            assert await attempt_of(redis, home) == [(attempt, True)]
            router.dispatcher.receive_frame(RecordingLink(home), failed(attempt, "SEAL_REFUSED"))
            await router.dispatcher.drain_tasks()
        assert await attempt_of(redis, home) == [(3, True)]
        router.dispatcher.receive_frame(RecordingLink(home), failed(3, "ADAPTER_GONE"))
        with pytest.raises(CallError, match="no answer"):
            await read(routed)


def test_a_worker_whose_fetches_fail_is_home_of_what_it_has_alone() -> None:
    loads = [
        WorkerLoad(name, 0, 8, frozenset({"sha256:x"}) if name == "w1" else frozenset(), False, name == "w1")
        for name in ("w1", "w2")
    ]
    roster = Roster(loads)
    assert all(roster.preferred(f"sha256:{number}").workers == ("w2",) for number in range(8))
    assert "w1" in roster.preferred("sha256:x").workers
    nowhere = Roster([replace(load, fetch_fails=True) for load in loads])
    assert {*nowhere.preferred("sha256:y").workers} == {"w1", "w2"}, "then the store is away for all"
