"""What the policy promises, each time of both the scripts and their model."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from broker import terms
from broker.messages import Capacity
from broker.queue import CHARGES_AT_ONCE
from broker.terms import OUTPUT_WEIGHT, Placement, QueueLimits, UsageReport
from tests.broker.both_queues import BothQueues, make_job
from tests.broker.scripts_clock import Clock

ROOMY = Capacity(rows=8, rows_limit=8, tokens=10_000, max_tokens=4096, max_rank=64)
ONE = replace(ROOMY, rows=1)


@pytest.fixture
async def both(redis: Redis, clock: Clock) -> BothQueues:
    both = BothQueues(redis)
    await both.start()
    return both


async def claim(both: BothQueues, capacity: Capacity = ROOMY, worker: str = "w") -> list[str]:
    return [job.job_id for job in (await both.claim(worker, capacity)).jobs]


async def test_inside_a_tenant_priority_goes_before_deadline_before_arrival(both: BothQueues) -> None:
    await both.enqueue(make_job("plain", "a"))
    await both.enqueue(make_job("later", "a", deadline_ms=9_000))
    await both.enqueue(make_job("soon", "a", deadline_ms=4_000))
    await both.enqueue(make_job("low", "a", priority=-1, deadline_ms=1_000))
    await both.enqueue(make_job("high", "a", priority=100))
    await both.enqueue(make_job("again", "a", attempt=2, priority=-100))
    assert await claim(both) == ["again", "high", "soon", "later", "plain", "low"]


async def test_priority_takes_nothing_from_other_tenants(both: BothQueues) -> None:
    for number in range(4):
        await both.enqueue(make_job(f"a{number}", "a", priority=100))
        await both.enqueue(make_job(f"b{number}", "b", priority=-100))
    assert await claim(both) == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]


async def test_service_goes_by_weight(both: BothQueues) -> None:
    for number in range(60):
        for tenant, weight in (("heavy", 3.0), ("light", 1.0)):
            await both.enqueue(make_job(f"{tenant}/{number}", tenant), Placement(weight))
    got = [await claim(both, ONE) for _ in range(60)]
    assert sum(ids[0].startswith("heavy") for ids in got) == 45


async def test_a_tenant_back_from_idle_gets_no_credit_for_it(both: BothQueues) -> None:
    for number in range(40):
        await both.enqueue(make_job(f"busy/{number}", "busy", prompt=10))
    await both.enqueue(make_job("back/first", "back", prompt=10))
    for _ in range(21):
        await claim(both, ONE)
    for number in range(10):
        await both.enqueue(make_job(f"back/{number}", "back", prompt=10))
    assert await both.counter("back") == await both.counter("busy") == 200
    got = [(await claim(both, ONE))[0].partition("/")[0] for _ in range(10)]
    assert got == ["back", "busy"] * 5


async def test_charges_count_once_whatever_is_repeated(both: BothQueues) -> None:
    adapter = make_job("j", "a", prompt=10, adapter="sha256:x")
    await both.enqueue(adapter, Placement(2.0, (), 30.0))
    await both.enqueue(make_job("other", "a"))
    assert await claim(both, ONE) == ["j"]
    assert await both.counter("a") == (10 + 30) / 2
    for _ in range(2):
        await both.charge(UsageReport("j", 1, 6))
        assert await both.counter("a") == 20 + 2 * 6 / 2
    await both.charge(UsageReport("j", 1, 4))
    # Its worker is lost: the next attempt pays neither the prompt nor the adapter again.
    await both.enqueue(replace(adapter, attempt=2, emitted={0: tuple(range(6))}), Placement(2.0, (), 30.0))
    assert await claim(both, ONE) == ["j"]
    await both.charge(UsageReport("j", 1, 50), UsageReport("j", 1, 50, ended=True))
    assert await both.counter("a") == 26
    for _ in range(2):
        await both.charge(UsageReport("j", 2, 3, ended=True))
        assert await both.counter("a") == 29


async def test_what_ended_counts_for_whose_turn_the_next_claim_is(both: BothQueues) -> None:
    names = [f"a{index}" for index in range(CHARGES_AT_ONCE + 6)]
    for name in (*names, "a-next"):
        await both.enqueue(make_job(name, "a", prompt=1))
    for name in ("b0", "b-next"):
        await both.enqueue(make_job(name, "b", prompt=1_000))
    assert set(await claim(both, replace(ROOMY, rows=len(names) + 1))) == {*names, "b0"}
    assert await both.counter("a") < await both.counter("b")
    # More than one script takes; without them it were a's turn.
    reports = [UsageReport(name, 1, 1_000 if name == "a0" else 1, ended=True) for name in names]
    assert [job.job_id for job in (await both.claim("w", ONE, *reports)).jobs] == ["b-next"]
    assert await both.counter("a") == len(names) + OUTPUT_WEIGHT * (1_000 + len(names) - 1)


async def test_a_worker_that_holds_the_adapter_costs_nothing_for_it(both: BothQueues) -> None:
    for name in ("first", "second"):
        await both.enqueue(make_job(name, "a", prompt=10, adapter="sha256:x"), Placement(load_tokens=30))
    await claim(both, replace(ONE, adapters=("sha256:x",)))
    assert await both.counter("a") == 10


async def test_what_never_ran_is_refunded_once(both: BothQueues) -> None:
    await both.enqueue(make_job("j", "a", prompt=10))
    await both.enqueue(make_job("waits", "a"))
    await claim(both, ONE)
    for _ in range(2):
        await both.charge(UsageReport("j", 1, 0, ended=True, ran=False))
        assert await both.counter("a") == 0


async def test_a_job_waits_a_moment_for_the_worker_that_its_adapter_prefers(both: BothQueues) -> None:
    for worker in ("best", "next", "w"):
        await claim(both, worker=worker)
    await both.enqueue(make_job("j", "a", adapter="sha256:x"), Placement(1, ("best", "next")))
    other = await both.claim("w", ROOMY)
    assert (other.jobs, other.hold_ms) == ([], terms.HOLD_MS)
    assert await claim(both, worker="next") == []
    assert await claim(both, worker="best") == ["j"]


async def test_a_preferred_worker_without_room_or_life_passes_to_the_next(both: BothQueues) -> None:
    for worker in ("best", "next"):
        await claim(both, replace(ROOMY, rows=0 if worker == "best" else 8), worker)
    placement = Placement(1, ("best", "next"))
    await both.enqueue(make_job("j", "a", adapter="sha256:x"), placement)
    assert await claim(both) == []
    assert await claim(both, worker="next") == ["j"]
    await both.clear_free_rows("next")
    await both.enqueue(make_job("k", "a", adapter="sha256:x"), placement)
    assert await claim(both) == ["k"]


async def test_held_jobs_go_to_whoever_holds_the_adapter_or_comes_after_the_hold(both: BothQueues) -> None:
    await claim(both, worker="best")
    for name in ("j", "k"):
        await both.enqueue(make_job(name, "a", adapter="sha256:x"), Placement(1, ("best",)))
    assert await claim(both, replace(ONE, adapters=("sha256:x",))) == ["j"]
    assert await claim(both) == []
    await both.advance(terms.HOLD_MS)
    assert await claim(both) == ["k"]


async def test_an_enqueue_wakes_the_preferred_worker(both: BothQueues) -> None:
    await claim(both, worker="best")
    await both.enqueue(make_job("j", "a", adapter="sha256:x"), Placement(1, ("best",)))
    assert {"wake:best"} == {name for name in await both.names() if name.startswith("wake")}


async def test_a_job_past_its_deadline_is_never_handed_out(both: BothQueues) -> None:
    await both.enqueue(make_job("late", "a", deadline_ms=1_000))
    await both.enqueue(make_job("again", "a", attempt=2, deadline_ms=1_000))
    await both.enqueue(make_job("in time", "a", deadline_ms=1_001))
    await both.advance(1_000)
    assert await claim(both) == ["in time"]
    assert {"job:late", "job:again", "bytes", "again", "queue:a"} & await both.names() == set()


async def test_a_deadline_that_the_tenant_s_own_queue_outlasts_is_refused(both: BothQueues) -> None:
    for number in range(40):
        assert not await both.enqueue(make_job(f"{number}", "a", deadline_ms=9_000))
    await claim(both, replace(ROOMY, rows=2, rows_limit=2))
    for _ in range(5):  # one job a second
        await both.advance(1_000)
        await claim(both, ONE)
    # About 33 s, which is beyond twice of ten. Who goes before the others, or another tenant, does not wait so long.
    assert await both.enqueue(make_job("short", "a", deadline_ms=10_000)) == "late"
    assert not await both.enqueue(make_job("long", "a", deadline_ms=20_000))
    assert not await both.enqueue(make_job("urgent", "a", deadline_ms=10_000, priority=1))
    assert not await both.enqueue(make_job("other", "b", deadline_ms=10_000))


async def test_without_a_full_cluster_no_deadline_is_refused(both: BothQueues) -> None:
    for number in range(40):
        await both.enqueue(make_job(f"{number}", "a", rank=128, adapter="sha256:wide"))
    for _ in range(5):
        await both.advance(1_000)
        await both.enqueue(make_job(f"b{both.now_ms}", "b"))
        assert len(await claim(both)) == 1
    assert not await both.enqueue(make_job("j", "a", deadline_ms=1))


async def test_what_nobody_takes_is_never_in_front_of_others(both: BothQueues) -> None:
    for tenant in range(100):
        for number in range(3):
            await both.enqueue(make_job(f"{tenant}/{number}", f"unfit{tenant:03}", base="sha256:old"))
    await both.enqueue(make_job("fits", "zoe"))
    assert await claim(both) == ["fits"]
    for number in range(100):
        await both.enqueue(make_job(f"again/{number}", "a", attempt=2, base="sha256:old"))
    await both.enqueue(make_job("fits too", "zoe"))
    assert await claim(both) == ["fits too"]


async def test_a_wide_job_gets_a_worker_that_makes_room_for_it(both: BothQueues) -> None:
    await both.enqueue(make_job("wide", "a", n=6))
    for number in range(20):
        await both.enqueue(make_job(f"{number}", "b"))
    assert await claim(both, replace(ROOMY, rows=2)) == ["0", "1"]
    await both.advance(terms.PATIENCE_MS)
    assert await claim(both, replace(ROOMY, rows=2)) == []
    # The others go on meanwhile, and don't take it.
    assert await claim(both, replace(ROOMY, rows=2), "other") == ["2", "3"]
    assert await claim(both, replace(ROOMY, rows=7)) == ["wide", "4"]


async def test_nobody_passes_a_long_prompt_for_ever(both: BothQueues) -> None:
    await both.enqueue(make_job("long", "a", prompt=50))
    await both.enqueue(make_job("short", "a"))
    few = replace(ROOMY, tokens=20)
    assert await claim(both, few) == ["short"]
    await both.advance(terms.PATIENCE_MS)
    assert await claim(both, few) == ["long"]


async def test_two_backlogged_tenants_differ_by_a_bounded_service_and_nobody_starves(both: BothQueues) -> None:
    """VTC's bound, 2 * max(w_p * longest input, w_q * tokens in flight), over random lengths and a random worker."""
    seed, rows, longest, most = 3, 6, 40, 30
    print(f"seed {seed}")
    chance = random.Random(seed)
    served = dict.fromkeys("abc", 0)
    count, running = 0, dict[str, tuple[int, int]]()
    gaps = []
    for _ in range(500):
        for tenant in served:
            # The tenants send different work; c as much as it may.
            while len(both.model.waiting.queue(tenant)) < (20 if tenant == "c" else 3):
                prompt = {"a": 1, "b": longest, "c": chance.randint(1, longest)}[tenant]
                await both.enqueue(make_job(f"{tenant}/{count}", tenant, prompt=prompt, max_tokens=most))
                count += 1
        for job in (await both.claim("w", Capacity(rows - len(running), rows, 10_000, 4096, 64))).jobs:
            running[job.job_id] = (0, chance.randint(1, most))
            served[job.tenant] += len(job.prompt_ids)
        reports = []
        for job_id, (made, length) in list(running.items()):
            served[job_id[0]] += terms.OUTPUT_WEIGHT
            running[job_id] = (made + 1, length)
            reports.append(UsageReport(job_id, 1, made + 1, ended=made + 1 == length))
            if made + 1 == length:
                del running[job_id]
        await both.charge(*reports)
        gaps.append(max(served.values()) - min(served.values()))
    bound = 2 * max(longest, terms.OUTPUT_WEIGHT * rows * most)
    assert 0 < max(gaps) <= bound
    assert min(served.values()) > 3 * bound


async def test_bounds_are_of_all_and_of_a_tenant(redis: Redis, clock: Clock) -> None:
    both = BothQueues(redis, QueueLimits(jobs=3, tenant_jobs=2))
    await both.start()
    for name in ("a", "b"):
        assert not await both.enqueue(make_job(name, "x"))
    assert await both.enqueue(make_job("c", "x")) == "tenant_jobs"
    assert not await both.enqueue(make_job("c", "y"))
    assert await both.enqueue(make_job("d", "z")) == "jobs"
    assert not await both.enqueue(make_job("e", "z", attempt=2))
