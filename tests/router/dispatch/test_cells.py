"""The cells that a router's jobs go to, by its last look: drained, away, without workers; and jobs that leave one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from loraplex.contracts.broker.cells import CellSight, DrainedCells
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.messages import AdapterRef, WorkerPhase, WorkerState
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import Placement
from loraplex.router.dispatch.cells import Cells
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.links import DispatchTiming, Frame
from loraplex.runtime.rpc.errors import Unavailable
from tests.broker.test_liveness import worker
from tests.router.recording_link import ROOMY, RecordingLink, claim, dispatched, frame, job, read

ADAPTER = AdapterRef("r/sha256:x", "sha256:x", 8, 1000)
JOB = replace(job(), adapter=ADAPTER)


def serving(name: str, **changes: Any) -> WorkerState:
    sizes: dict[str, Any] = {"rows_limit": 8, "rows_running": 0, "rows_waiting": 0, "max_tokens": 4096, "max_rank": 64}
    return replace(worker(name), model="tiny", base_digest=JOB.base_digest, **{**sizes, **changes})


def sight(name: str, **changes: Any) -> CellSight:
    """A cell with one worker of its name."""
    return CellSight([serving(name)], **changes)


class Seen:
    """Two cells as a router sees them; `home` is the adapter's."""

    def __init__(self) -> None:
        self.cells = Cells(["main", "second"])
        self.look()
        self.home = self.cells.choose(JOB)
        self.other = "main" if self.home == "second" else "second"

    def look(self, **sights: CellSight) -> None:
        """Look again: cells that are not named have a worker that is idle."""
        found = {name: sights.get(name, sight(name)) for name in ("main", "second")}
        self.cells.update({("tiny", name): one for name, one in found.items()}, [])

    def home_is(self, **changes: Any) -> None:
        """Look again, at a home that has changed."""
        self.look(**{self.home: replace(sight(self.home), **changes)})


@pytest.fixture
def seen() -> Seen:
    return Seen()


def test_jobs_leave_a_cell_alone_that_is_drained_until_it_is_opened(seen: Seen) -> None:
    seen.cells.note_drained({seen.home, "a cell of other routers"})
    assert (seen.cells.choose(JOB), seen.cells.leaves_after_s(JOB, seen.home, 5.0)) == (seen.other, 0.0)
    assert seen.cells.leaves_after_s(JOB, seen.other, 5.0) is None
    seen.cells.note_drained(())
    assert (seen.cells.choose(JOB), seen.cells.leaves_after_s(JOB, seen.home, 5.0)) == (seen.home, None)


@pytest.mark.parametrize(
    "workers", [(), (serving("failing", phase=WorkerPhase.FAILING),), (serving("small", max_rank=4),)]
)
def test_a_cell_without_a_worker_for_a_job_gets_none_and_loses_those_that_wait(
    seen: Seen, workers: tuple[WorkerState, ...]
) -> None:
    seen.home_is(workers=workers)
    assert (seen.cells.choose(JOB), seen.cells.leaves_after_s(JOB, seen.home, 5.0)) == (seen.other, 5.0)
    small = replace(JOB, adapter=replace(ADAPTER, rank=4))
    assert seen.cells.choose(small) == (seen.home if workers and workers[0].max_rank == 4 else seen.other)


def test_workers_without_a_link_to_this_router_do_not_count(seen: Seen) -> None:
    seen.cells._linked = lambda states: [state for state in states if state.worker_id != seen.home]
    seen.look()
    assert seen.cells.choose(JOB) == seen.other


def test_jobs_avoid_a_silent_redis_at_once_and_leave_it_when_it_is_away(seen: Seen) -> None:
    seen.home_is(answers=False)
    assert (seen.cells.choose(JOB), seen.cells.leaves_after_s(JOB, seen.home, 5.0)) == (seen.other, None)
    seen.home_is(answers=False, away=True)
    assert (seen.cells.choose(JOB), seen.cells.leaves_after_s(JOB, seen.home, 5.0)) == (seen.other, 0.0)
    seen.look()
    assert seen.cells.choose(JOB) == seen.home
    seen.cells.failed(seen.home)  # a job has found out before the next look
    assert seen.cells.choose(JOB) == seen.other
    assert seen.cells.another(JOB, seen.home) == seen.other
    seen.cells.failed(seen.other)
    assert seen.cells.another(JOB, seen.other) is None


def test_a_drained_cell_gets_the_jobs_that_its_workers_alone_can_take(seen: Seen) -> None:
    seen.look(**{seen.other: replace(sight(seen.other), workers=())})
    seen.cells.note_drained({seen.home})
    assert (seen.cells.choose(JOB), seen.cells.leaves_after_s(JOB, seen.home, 5.0)) == (seen.home, None)


def test_jobs_leave_an_open_cell_that_is_away_for_a_drained_one(seen: Seen) -> None:
    seen.cells.note_drained({seen.other})
    seen.home_is(answers=False, away=True)
    assert (seen.cells.choose(JOB), seen.cells.leaves_after_s(JOB, seen.home, 5.0)) == (seen.other, 0.0)
    assert seen.cells.another(JOB, seen.home) == seen.other
    seen.look()
    assert (seen.cells.choose(JOB), seen.cells.leaves_after_s(JOB, seen.other, 5.0)) == (seen.home, 0.0)


def test_where_all_cells_are_drained_all_get_jobs_and_one_line_says_so(
    seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        seen.cells.note_drained({"main", "second"})
    assert seen.cells.choose(JOB) == seen.home
    assert caplog.messages == ["all cells are drained: main, second; all get jobs until one is opened"]


def test_jobs_of_a_model_without_workers_wait_in_an_open_cell_that_answers(seen: Seen) -> None:
    seen.look(main=CellSight(()), second=CellSight((), answers=False))
    assert seen.cells.choose(JOB) == "main"
    assert Cells(["main", "second"]).choose(JOB) in {"main", "second"}, "no look was taken yet"


def test_a_suspect_stays_where_it_is_known_but_not_in_a_drained_cell(seen: Seen) -> None:
    suspect = replace(JOB, attempt=2, strikes=1)
    assert [seen.cells.choose(suspect, seen.other), seen.cells.choose(JOB, seen.other)] == [seen.other, seen.home]
    seen.cells.note_drained({seen.other})
    assert seen.cells.choose(suspect, seen.other) == seen.home


def test_the_last_try_of_a_job_that_workers_could_not_serve_is_elsewhere(seen: Seen) -> None:
    seen.home_is(workers=[serving(name) for name in ("w1", "w2", "w3")])
    tried = replace(JOB, failed_at=("w1",))
    assert seen.cells.choose(tried, seen.home) == seen.home
    assert seen.cells.choose(replace(tried, failed_at=("w1", "w2")), seen.home) == seen.other
    seen.home_is(workers=[serving("w1")])
    assert seen.cells.choose(tried, seen.home) == seen.other, "none is left"
    seen.look(**{seen.home: sight("w1"), seen.other: replace(sight(seen.other), workers=())})
    assert seen.cells.choose(tried, seen.home) == seen.home


class Router:
    """A dispatcher with two cells on one server."""

    def __init__(self, redis: Redis, **times: float) -> None:
        self.seen = Seen()
        self.queues = {name: JobQueue(redis, Keys("tiny", name)) for name in ("main", "second")}
        timing = DispatchTiming(look_s=0.01, pause_s=0.01, unservable_grace_s=0.0, late_enqueue_s=0.01, **times)
        self.dispatcher = Dispatcher(
            lambda _, cell: self.queues[cell],
            lambda _, cell: Placement(cell=cell),
            timing=timing,
            cells=self.seen.cells,
        )

    async def waiting(self) -> dict[str, int]:
        """Return how many jobs wait in each cell, once no operation is under way."""
        await self.dispatcher.drain_tasks()
        return {name: await queue.count_waiting() for name, queue in self.queues.items()}


async def test_waiting_jobs_leave_a_drained_cell_as_new_attempts(redis: Redis) -> None:
    router, link = Router(redis), RecordingLink("w")
    home, other = router.seen.home, router.seen.other
    async with dispatched(router.dispatcher, replace(JOB, job_id="runs")), dispatched(router.dispatcher, JOB) as waits:
        claimed = (await router.queues[home].claim("sha256:0", replace(ROOMY, rows=1))).jobs
        router.dispatcher.receive_claims(link, [(one.job_id, one.attempt) for one in claimed])
        assert await router.waiting() == {home: 1, other: 0}
        router.seen.cells.note_drained({home})
        router.dispatcher.update_live_workers({link.incarnation})
        assert await router.waiting() == {home: 0, other: 1}
        assert (waits.job.attempt, waits.placement.cell) == (2, other)
        assert [one.attempt for one in [await claim(router.queues[other])]] == [2]
        router.dispatcher.receive_claims(link, [("j", 1)])  # it was claimed just before it left
        assert ("cancel", "j", 1) in link.sent
        router.dispatcher.receive_frame(link, frame(0, 7, job_id="runs"))
        assert not [sent for sent in link.sent if sent[1] == "runs"], "it goes on where it runs"


async def test_a_new_job_whose_cell_does_not_answer_goes_to_another(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router(redis)

    async def fail(*_: object) -> None:
        raise RedisConnectionError("away")

    monkeypatch.setattr(router.queues[router.seen.home], "enqueue", fail)
    async with dispatched(router.dispatcher, JOB) as routed:
        assert (routed.placement.cell, routed.job.attempt) == (router.seen.other, 1)
        assert (await router.waiting())[router.seen.other] == 1
    monkeypatch.setattr(router.queues[router.seen.other], "enqueue", fail)
    router.dispatcher._timing = DispatchTiming(enqueue_s=0.0)
    with pytest.raises(Unavailable):
        await router.dispatcher.dispatch(replace(JOB, job_id="k"))


async def test_a_job_that_no_worker_of_its_cell_can_serve_goes_to_another_before_its_caller_gets_the_error(
    redis: Redis,
) -> None:
    router = Router(redis)
    home, other = router.seen.home, router.seen.other
    async with dispatched(router.dispatcher, JOB) as routed:
        for attempt, cell in ((1, home), (2, other)):
            assert (await claim(router.queues[cell])).attempt == attempt
            failure = Unavailable("no answer", reason="STORE_DOWN")
            failed = Frame(JOB.job_id, attempt, 0, (), failure=failure)
            router.dispatcher.receive_frame(RecordingLink(cell), failed)
            await router.dispatcher.drain_tasks()
        with pytest.raises(Unavailable, match="no answer"):
            await read(routed)


async def test_a_quarantine_reaches_a_cell_that_was_away_for_long(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router(redis, finish_s=0.0)
    queue, asked = router.queues[router.seen.other], asyncio.Event()

    async def fail(*_: object) -> int:
        asked.set()
        raise RedisConnectionError("away")

    with monkeypatch.context() as away:
        away.setattr(queue, "record_death", fail)
        router.dispatcher._outbox.record_death(JOB)
        await asyncio.wait_for(asked.wait(), 60)
    await router.dispatcher.drain_tasks()
    assert list(await queue.quarantined()) == [(JOB.tenant, ADAPTER.digest)]


async def test_a_drain_is_seen_by_every_router(redis: Redis) -> None:
    routers = [Cells(["main", "second"], drained_cells=DrainedCells(redis)) for _ in range(2)]
    assert await routers[0].drain("main")
    assert not await routers[0].drain("second"), "it is the last"
    await asyncio.gather(*(one.look_at_drained() for one in routers))
    assert [one.drained for one in routers] == [{"main"}] * 2
    await routers[1].open("main")
    await routers[0].look_at_drained()
    assert [one.drained for one in routers] == [frozenset()] * 2
    assert not await Cells(["main"], drained_cells=DrainedCells(redis)).drain("main")
