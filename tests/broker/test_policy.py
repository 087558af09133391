"""The promises of the queue's policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker import terms
from loraplex.contracts.broker.messages import Capacity
from loraplex.contracts.broker.terms import Placement, QueueLimits, QueueLoad, QueueState, UsageReport
from tests.broker.clocked_queue import KEYS, Clock, ClockedQueue, make_job

ROOMY = Capacity(rows=8, rows_limit=8, tokens=10_000, max_tokens=4096, max_rank=64)
ONE = replace(ROOMY, rows=1)


async def claim(queue: ClockedQueue, capacity: Capacity = ROOMY, worker: str = "w") -> list[str]:
    return [job.job_id for job in (await queue.claim(worker, capacity)).jobs]


async def test_inside_a_tenant_priority_goes_before_deadline_before_arrival(queue: ClockedQueue) -> None:
    await queue.enqueue(make_job("plain", "a"))
    await queue.enqueue(make_job("later", "a", deadline_ms=9_000))
    await queue.enqueue(make_job("soon", "a", deadline_ms=4_000))
    await queue.enqueue(make_job("low", "a", priority=-1, deadline_ms=1_000))
    await queue.enqueue(make_job("high", "a", priority=100))
    await queue.enqueue(make_job("again", "a", attempt=2, priority=-100))
    assert await claim(queue) == ["again", "high", "soon", "later", "plain", "low"]


async def test_a_job_that_only_waited_goes_before_its_tenant_s_newcomers_and_no_other_tenant_s(
    queue: ClockedQueue,
) -> None:
    """Redis has lost its data: routers dispatch again what waited, and newcomers have come meanwhile."""
    waited = Placement(begun=False)
    await queue.enqueue(make_job("new", "loud"))
    for number in range(3):
        assert not await queue.enqueue(make_job(f"old{number}", "loud", attempt=2), waited)
    await queue.enqueue(make_job("urgent", "loud", attempt=2, deadline_ms=10_000), waited)
    await queue.enqueue(make_job("quiet", "quiet"))
    assert await claim(queue) == ["urgent", "quiet", "old0", "old1", "old2", "new"]


async def test_no_limit_refuses_a_job_that_was_admitted_before(redis: Redis, clock: Clock) -> None:
    queue = ClockedQueue(redis, QueueLimits(jobs=3, tenant_jobs=2))
    await queue.start()
    for number in range(4):
        assert not await queue.enqueue(make_job(f"{number}", "a", attempt=2), Placement(begun=False))
    assert await queue.enqueue(make_job("new", "a")) == "tenant_jobs"


@pytest.mark.parametrize("weight", [1e-300, 1e-306, 0.001])
async def test_counters_that_have_grown_large_are_as_exact_as_small_ones(queue: ClockedQueue, weight: float) -> None:
    """Of a weight that is allowed no more, or after years."""
    prompt = 1 << 31 if weight == 0.001 else 4000
    await queue.enqueue(make_job("first", "tiny"), Placement(weight))
    await claim(queue)
    await queue.charge(UsageReport("first", 1, prompt, ended=True))
    for name in ("a0", "a1", "a2", "b0", "b1"):
        await queue.enqueue(make_job(name, name[0]))
    await queue.beat_router("here")
    assert await claim(queue) == ["a0", "b0", "a1", "b1", "a2"]
    assert await queue.counter("a") < terms.COUNTERS_LIMIT


async def test_priority_takes_nothing_from_other_tenants(queue: ClockedQueue) -> None:
    for number in range(4):
        await queue.enqueue(make_job(f"a{number}", "a", priority=100))
        await queue.enqueue(make_job(f"b{number}", "b", priority=-100))
    assert await claim(queue) == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]


async def test_of_equal_tenants_the_one_that_waits_longest_is_next(queue: ClockedQueue) -> None:
    for turn in range(2):
        tenants = ("zoe", "mel", "abe") if not turn else ("new/z", "new/a", "new/m", "zoe")
        for tenant in tenants:
            await queue.enqueue(make_job(f"{tenant} {turn}", tenant))
            await queue.enqueue(make_job(f"{tenant} {turn} again", tenant))
        assert await claim(queue) == [f"{t} {turn}{more}" for more in ("", " again") for t in tenants]


async def test_a_job_waits_a_moment_for_the_worker_that_its_adapter_prefers(queue: ClockedQueue) -> None:
    await queue.want("sha256:x")
    for worker in ("best", "next", "w"):
        await claim(queue, worker=worker)
    await queue.enqueue(make_job("j", "a", adapter="sha256:x"), Placement(1, ("best", "next")))
    other = await queue.claim("w", ROOMY)
    assert (other.jobs, other.hold_ms) == ([], terms.HOLD_MS)
    assert await claim(queue, worker="next") == []
    assert await claim(queue, worker="best") == ["j"]


async def test_a_preferred_worker_without_room_or_life_passes_to_the_next(queue: ClockedQueue) -> None:
    await queue.want("sha256:x")
    for worker in ("best", "next"):
        await claim(queue, replace(ROOMY, rows=0 if worker == "best" else 8), worker)
    placement = Placement(1, ("best", "next"))
    await queue.enqueue(make_job("j", "a", adapter="sha256:x"), placement)
    assert await claim(queue) == []
    assert await claim(queue, worker="next") == ["j"]
    await queue.clear_free_rows("next")
    await queue.enqueue(make_job("k", "a", adapter="sha256:x"), placement)
    assert await claim(queue) == ["k"]


async def test_held_jobs_go_to_whoever_holds_the_adapter_or_comes_after_the_hold(queue: ClockedQueue) -> None:
    await queue.want("sha256:x")
    await claim(queue, worker="best")
    for name in ("j", "k"):
        await queue.enqueue(make_job(name, "a", adapter="sha256:x"), Placement(1, ("best",)))
    assert await claim(queue, replace(ONE, adapters=("sha256:x",))) == ["j"]
    assert await claim(queue) == []
    await queue.advance(terms.HOLD_MS)
    assert await claim(queue) == ["k"]


async def test_an_enqueue_wakes_the_preferred_worker(queue: ClockedQueue) -> None:
    await claim(queue, worker="best")
    await queue.enqueue(make_job("j", "a", adapter="sha256:x"), Placement(1, ("best",)))
    assert {"wake:best"} == {name for name in await queue.names() if name.startswith("wake")}


async def test_a_job_past_its_deadline_is_never_handed_out(queue: ClockedQueue) -> None:
    await queue.enqueue(make_job("late", "a", deadline_ms=1_000))
    await queue.enqueue(make_job("again", "a", attempt=2, deadline_ms=1_000))
    await queue.enqueue(make_job("in time", "a", deadline_ms=1_001))
    await queue.advance(1_000)
    assert await claim(queue) == ["in time"]
    assert {"job:late", "job:again", "totals", "again", "queue:a"} & await queue.names() == set()


async def test_a_deadline_that_the_tenant_s_own_queue_outlasts_is_refused(queue: ClockedQueue) -> None:
    for number in range(40):
        assert not await queue.enqueue(make_job(f"{number}", "a", deadline_ms=9_000))
    await claim(queue, replace(ROOMY, rows=2, rows_limit=2))
    for _ in range(5):  # one job a second
        await queue.advance(1_000)
        await claim(queue, ONE)
    # About 33 s, which is beyond twice of ten. Who goes before the others, or another tenant, does not wait so long.
    assert await queue.enqueue(make_job("short", "a", deadline_ms=10_000)) == "late"
    assert not await queue.enqueue(make_job("long", "a", deadline_ms=20_000))
    assert not await queue.enqueue(make_job("urgent", "a", deadline_ms=10_000, priority=1))
    assert not await queue.enqueue(make_job("other", "b", deadline_ms=10_000))


@pytest.mark.parametrize(("weight", "jobs_of_others", "refused"), [(1.0, 20, "late"), (3.0, 20, ""), (1.0, 2, "")])
async def test_a_deadline_is_measured_by_the_tenant_s_share_of_the_workers(
    queue: ClockedQueue, weight: float, jobs_of_others: int, refused: str
) -> None:
    for number in range(20):
        assert not await queue.enqueue(make_job(f"a{number}", "a", deadline_ms=30_000), Placement(weight))
        for tenant in "bcd":
            if number < jobs_of_others:
                assert not await queue.enqueue(make_job(f"{tenant}{number}", tenant))
    await claim(queue, replace(ROOMY, rows=2, rows_limit=2))
    for _ in range(5):  # one job a second
        await queue.advance(1_000)
        await claim(queue, ONE)
    # Of the first tenant some 18 jobs wait. Three others with as many and the same weight make that four times as long.
    assert await queue.enqueue(make_job("j", "a", deadline_ms=26_000), Placement(weight)) == refused


async def test_without_a_full_cluster_no_deadline_is_refused(queue: ClockedQueue) -> None:
    for number in range(40):
        await queue.enqueue(make_job(f"{number}", "a", rank=128, adapter="sha256:wide"))
    for _ in range(5):
        await queue.advance(1_000)
        await queue.enqueue(make_job(f"b{queue.now_ms}", "b"))
        assert len(await claim(queue)) == 1
    assert not await queue.enqueue(make_job("j", "a", deadline_ms=1))


async def test_what_nobody_takes_is_never_in_front_of_others(queue: ClockedQueue) -> None:
    for tenant in range(100):
        for number in range(3):
            await queue.enqueue(make_job(f"{tenant}/{number}", f"unfit{tenant:03}", base="sha256:old"))
    await queue.enqueue(make_job("fits", "zoe"))
    assert await claim(queue) == ["fits"]
    for number in range(100):
        await queue.enqueue(make_job(f"again/{number}", "a", attempt=2, base="sha256:old"))
    await queue.enqueue(make_job("fits too", "zoe"))
    assert await claim(queue) == ["fits too"]


async def test_a_wide_job_gets_a_worker_that_makes_room_for_it(queue: ClockedQueue) -> None:
    await queue.enqueue(make_job("wide", "a", n=6))
    for number in range(20):
        await queue.enqueue(make_job(f"{number}", "b"))
    assert await claim(queue, replace(ROOMY, rows=2)) == ["0", "1"]
    await queue.advance(terms.PATIENCE_MS)
    assert await claim(queue, replace(ROOMY, rows=2)) == []
    # The others go on meanwhile, and don't take it.
    assert await claim(queue, replace(ROOMY, rows=2), "other") == ["2", "3"]
    assert await claim(queue, replace(ROOMY, rows=7)) == ["wide", "4"]


async def test_nobody_passes_a_long_prompt_for_ever(queue: ClockedQueue) -> None:
    await queue.enqueue(make_job("long", "a", prompt=50))
    await queue.enqueue(make_job("short", "a"))
    few = replace(ROOMY, tokens=20)
    assert await claim(queue, few) == ["short"]
    await queue.advance(terms.PATIENCE_MS)
    assert await claim(queue, few) == ["long"]


async def test_bounds_are_of_all_and_of_a_tenant(redis: Redis, clock: Clock) -> None:
    queue = ClockedQueue(redis, QueueLimits(jobs=3, tenant_jobs=2))
    await queue.start()
    for name in ("a", "b"):
        assert not await queue.enqueue(make_job(name, "x"))
    assert await queue.enqueue(make_job("c", "x")) == "tenant_jobs"
    assert not await queue.enqueue(make_job("c", "y"))
    # Of a full queue each has its share; nobody has more than who comes last.
    assert not await queue.enqueue(make_job("d", "z"))
    assert await queue.look_up(("a", 1), ("b", 1), ("c", 1)) == [
        QueueState.WAITS,
        QueueState.DISPLACED,
        QueueState.WAITS,
    ]
    assert await queue.enqueue(make_job("e", "u")) == "jobs"
    assert not await queue.enqueue(make_job("e", "u", attempt=2))


async def test_a_worker_gets_jobs_of_routers_alone_that_it_has_a_link_to(queue: ClockedQueue) -> None:
    for router in ("one", "two", "one"):
        await queue.enqueue(make_job(f"{router}-{await queue.count_waiting()}", "a", router=router))
    without = await queue.claim("cut off", replace(ROOMY, routers=()))
    assert (without.jobs, without.waiting, without.unlinked) == ([], 3, ("one", "two"))
    assert (await queue.claim("cut off", replace(ROOMY, routers=("gone",)))).unlinked == ("one", "two")
    half = await queue.claim("half", replace(ROOMY, routers=("two", "gone")))
    assert ([job.job_id for job in half.jobs], half.unlinked) == (["two-1"], ("one",))
    # Its links are back.
    assert await claim(queue, replace(ROOMY, routers=("one", "two")), "cut off") == ["one-0", "one-2"]


async def test_a_link_that_is_missing_for_a_redispatched_job_is_named_too(queue: ClockedQueue) -> None:
    await queue.enqueue(make_job("j", "a", router="one", attempt=2))
    assert (await queue.claim("w", replace(ROOMY, routers=("two",)))).unlinked == ("one",)
    assert await claim(queue, replace(ROOMY, routers=None)) == ["j"]


async def test_the_load_is_what_waits_for_how_long_and_all_that_has_come(queue: ClockedQueue) -> None:
    assert await queue.load() == QueueLoad()
    await queue.enqueue(make_job("a0", "a", prompt=10, max_tokens=5))
    await queue.advance(3_000)
    await queue.enqueue(make_job("a1", "a", prompt=20, max_tokens=5))
    await queue.enqueue(make_job("b", "b", prompt=1, max_tokens=2, attempt=2))
    assert await queue.load() == QueueLoad(3, 55, 3.0, 55)
    await queue.enqueue(make_job("a0", "a", prompt=10, max_tokens=5, attempt=2))
    await queue.advance(1_000)
    assert await queue.load() == QueueLoad(3, 55, 1.0, 75), (
        "a later attempt takes the place of the former, and is new work"
    )
    await claim(queue)
    assert await queue.load() == QueueLoad(arrived_work=75, claimed_work=55)
    await queue.redis.set(KEYS.prefix + "arrived_work", "no number")
    await queue.enqueue(make_job("c", "a", prompt=3, max_tokens=1))
    assert (await queue.load()).arrived_work == 5
