"""The claims of a worker, their moments and reports: real Valkey, engine and relay."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.messages import Capacity
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import SEALED_JOB_S, Claimed, Entry, QueueState, UsageReport
from tests.credentials_files import router_seals, worker_seals
from tests.worker.io.relayed_worker import KEYS, LINKS, ROWS, Router, Worker, job, listening, running


class RecordedQueue:
    """Records what a worker asks its queue, in order: `claim` with the number of jobs it got, `wait`."""

    def __init__(self, worker: Worker, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self.reports: list[UsageReport] = []
        self.waited_without_room = 0
        self._worker = worker
        self._claim = worker.queue.claim
        patch.setattr(worker.queue, "claim", self.claim)

    async def claim(
        self,
        base: str,
        capacity: Capacity,
        reports: Sequence[UsageReport] = (),
        *,
        wait_s: float = 0.0,
        freed: bool = False,
    ) -> Claimed:
        if wait_s:
            self.events.append(("wait", 0))
            self.waited_without_room += len(self._worker.jobs.running) >= ROWS
        claimed = await self._claim(base, capacity, reports, wait_s=wait_s, freed=freed)
        self.reports += reports
        self.events.append(("claim", len(claimed.jobs)))
        return claimed


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
async def worker(router: Router, redis: Redis, tmp_path: Path) -> AsyncIterator[Worker]:
    async with running(router, redis, tmp_path) as worker:
        yield worker


async def test_who_took_all_that_waited_waits_for_more_and_does_not_ask_again(
    router: Router, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = RecordedQueue(worker, monkeypatch)
    for name in ("a", "b", "c"):
        await worker.queue.enqueue(job(name, worker.address, max_tokens=2))
        await router.until(lambda name=name: ("ended", name) in router.events)  # type: ignore[misc]
    await worker.queue.enqueue(job("last", worker.address, max_tokens=2))
    await router.until(lambda: ("ended", "last") in router.events)
    took = [index for index, event in enumerate(asked.events) if event == ("claim", 1)]
    assert len(took) == 4
    assert all(asked.events[index + 1] == ("wait", 0) for index in took[:-1])
    # Their tokens are reported with a claim, but those that a heartbeat found before it.
    assert {(usage.job_id, usage.tokens, usage.ended) for usage in asked.reports} & {("a", 2, True), ("b", 2, True)}


async def test_a_worker_that_its_last_claim_filled_takes_no_wake_up(
    router: Router, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = RecordedQueue(worker, monkeypatch)
    for number in range(ROWS):
        await worker.queue.enqueue(job(f"endless-{number}", worker.address))
    await router.until(lambda: all(router.ids[f"endless-{number}"] for number in range(ROWS)))
    # Another claim only asks what waits; then a job is cancelled, and there is room.
    await router.until(lambda: asked.events[-1] == ("claim", 0))
    await worker.queue.enqueue(job("another", worker.address, max_tokens=2))
    worker.results.remove("endless-0", 1)
    await router.until(lambda: ("ended", "another") in router.events)
    assert sum(jobs for what, jobs in asked.events if what == "claim") == ROWS + 1
    assert asked.waited_without_room == 0


async def test_a_busy_worker_claims_several_rows_at_once(
    router: Router, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.worker.io.intake.PACE_S", 600.0)
    monkeypatch.setattr("loraplex.worker.io.intake.PACED_ROWS", 2)
    asked = RecordedQueue(worker, monkeypatch)
    for number in range(ROWS):
        await worker.queue.enqueue(job(f"endless-{number}", worker.address))
    await router.until(lambda: all(router.ids[f"endless-{number}"] for number in range(ROWS)))
    for name in ("one", "other"):
        await worker.queue.enqueue(job(name, worker.address))
    await router.until(lambda: asked.events[-1] == ("claim", 0))
    for number in range(2):
        worker.results.remove(f"endless-{number}", 1)
    await router.until(lambda: all(router.ids[name] for name in ("one", "other")))
    assert ("claim", 2) in asked.events


async def test_jobs_of_a_router_that_the_worker_does_not_reach_are_left_to_others(
    router: Router, worker: Worker
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"127.0.0.1:{closed.getsockname()[1]}"
    await worker.queue.enqueue(job("unreached", nowhere))
    await worker.queue.enqueue(job("reached", worker.address, max_tokens=2))
    await router.until(lambda: ("ended", "reached") in router.events)
    assert worker.jobs.get("unreached", 1) is None
    assert await worker.queue.look_up([("unreached", 1)]) == [QueueState.WAITS]


async def test_a_full_worker_takes_a_row_of_a_lost_router_for_a_job_that_needs_it(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    lost, kept = Router(), [f"endless-{number}" for number in range(ROWS)]
    server, address = await listening(lost)
    async with running(router, redis, tmp_path, links=replace(LINKS, spare_s=0.05, gone_s=600.0)) as worker:
        for name in kept:
            await worker.queue.enqueue(job(name, address))
        await lost.until(lambda: all(lost.ids[name] for name in kept))
        await server.stop(0)
        await worker.queue.enqueue(job("other", worker.address, max_tokens=2))
        await router.until(lambda: ("ended", "other") in router.events)
        jobs = [worker.jobs.get(name, 1) for name in kept]
        assert [one is not None and bool(one.running) for one in jobs].count(True) == ROWS - 1


async def test_a_worker_gives_back_what_it_can_t_read_and_pauses_after_three_in_a_row(
    router: Router, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = list[bool]()

    async def note(begins: bool) -> None:
        pauses.append(begins)
        async with router.news:
            router.news.notify_all()

    worker.intake.on_pause = note
    await worker.queue.stop_waiting()
    names = ["acme/unread-1", "acme/unread-2", "acme/unread-3"]
    with monkeypatch.context() as damage:
        damage.setattr(worker.queue, "make_entry", partial(Entry.from_job, body=b"no job"))
        for name in names:
            await worker.queue.enqueue(job(name, worker.address))
    await router.until(lambda: pauses == [True, False])
    assert [name for kind, name in router.events if kind == "ended"] == names
    await worker.queue.enqueue(job("read", worker.address, max_tokens=2))
    await router.until(lambda: ("ended", "read") in router.events)


async def test_a_worker_does_not_pause_for_seals_that_have_expired_for_all(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    async def note(begins: bool) -> None:
        pauses.append(begins)

    pauses, behind_s = list[bool](), SEALED_JOB_S
    queue = JobQueue(redis, KEYS, seals=router_seals(tmp_path, lambda: time.time() - behind_s))
    async with running(router, redis, tmp_path, seals=worker_seals(tmp_path, time.time)[0]) as worker:
        worker.intake.on_pause = note
        names = [f"acme/old-{number}" for number in range(5)]
        for name in names:
            await queue.enqueue(job(name, worker.address))
        await router.until(lambda: {("ended", name) for name in names} <= {*router.events})
        behind_s = 0.0
        await queue.enqueue(job("read", worker.address, max_tokens=2))
        await router.until(lambda: ("ended", "read") in router.events)
        assert pauses == []
