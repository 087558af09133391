"""Jobs of tenants and adapters that engines may have died of begin one at a time, apart from other tenants' jobs."""

from __future__ import annotations

from dataclasses import replace

from loraplex.contracts.broker.messages import STRIKES_LIMIT, Capacity, Job
from loraplex.contracts.broker.terms import SUSPECT_MS, TRIED_MS, UsageReport
from tests.broker.clocked_queue import ClockedQueue, make_job

EMPTY = Capacity(rows=8, rows_limit=8, tokens=10_000, max_tokens=4096, max_rank=64)
# A worker that has jobs of several tenants, and one that has jobs of mallory alone.
BUSY = replace(EMPTY, rows=4)
MALLORYS = replace(BUSY, only_tenant="mallory")


def struck(job: Job, strikes: int = 1) -> Job:
    """Return the attempt of a job after so many strikes."""
    return replace(job, attempt=1 + strikes, strikes=strikes)


async def claimed(queue: ClockedQueue, worker: str, capacity: Capacity, *reports: UsageReport) -> dict[str, bool]:
    """Return the jobs that a worker gets, and whether they are suspects there."""
    return {job.job_id: job.suspect for job in (await queue.claim(worker, capacity, *reports)).jobs}


async def test_a_strike_keeps_other_jobs_of_its_pair_off_workers_with_other_tenants_jobs(queue: ClockedQueue) -> None:
    """Poison that is sent many times must not kill one engine after the other before there is proof."""
    await queue.enqueue(struck(make_job("first", "mallory", adapter="sha256:a")))
    for name in ("m1", "m2"):
        await queue.enqueue(make_job(name, "mallory", adapter="sha256:a"))
    await queue.enqueue(make_job("other adapter", "mallory"))
    await queue.enqueue(make_job("same adapter", "acme", adapter="sha256:a"))
    assert await claimed(queue, "busy", BUSY) == {"other adapter": False, "same adapter": False}
    assert await claimed(queue, "w1", EMPTY) == {"first": True}
    # While it runs, an empty worker gets no other job of the pair.
    assert await claimed(queue, "w2", EMPTY) == {}
    # Its worker reports that the engine died, and its router that the next attempt waits.
    await queue.charge(UsageReport("first", 2, 0, ended=True))
    await queue.enqueue(struck(make_job("first", "mallory", adapter="sha256:a"), 2))
    assert await claimed(queue, "w1", EMPTY) == {"first": True}
    assert await claimed(queue, "w2", EMPTY) == {}
    await queue.charge(UsageReport("first", 3, 5, ended=True))
    assert await claimed(queue, "busy", BUSY) == {}
    assert await claimed(queue, "w2", EMPTY) == {"m1": True}
    await queue.record_death("mallory", "sha256:a", "first")
    assert await claimed(queue, "w1", EMPTY) == {}
    assert not await queue.names() & {"job:m2", "suspects"} - {"suspects"}


async def test_a_token_clears_the_pair_of_an_innocent_job(queue: ClockedQueue) -> None:
    await queue.enqueue(struck(make_job("j", "acme")))
    for name in ("next", "last"):
        await queue.enqueue(make_job(name, "acme"))
    assert await claimed(queue, "w1", EMPTY) == {"j": True}
    assert await claimed(queue, "busy", BUSY, UsageReport("j", 2, 0)) == {}
    assert await claimed(queue, "busy", BUSY, UsageReport("j", 1, 3)) == {}  # an older attempt says nothing
    assert await claimed(queue, "busy", BUSY, UsageReport("j", 2, 1)) == {"next": False, "last": False}
    assert "suspects" not in await queue.names()


async def test_one_job_of_a_pair_after_the_other_is_tried_until_all_with_strikes_are_cleared(
    queue: ClockedQueue,
) -> None:
    for name in ("one", "two"):
        await queue.enqueue(struck(make_job(name, "acme")))
    await queue.enqueue(make_job("new", "acme"))
    assert await claimed(queue, "w1", EMPTY) == {"one": True}
    assert await claimed(queue, "w2", EMPTY) == {}
    assert await claimed(queue, "w2", EMPTY, UsageReport("one", 2, 1)) == {"two": True}
    assert await claimed(queue, "w3", EMPTY) == {}
    await queue.enqueue(struck(make_job("two", "acme"), 2))  # it struck again
    assert await claimed(queue, "w2", EMPTY) == {"two": True}
    # On trial no token clears it.
    assert await claimed(queue, "busy", BUSY, UsageReport("two", 3, 9)) == {}
    await queue.charge(UsageReport("two", 3, 9, ended=True))
    assert await claimed(queue, "busy", BUSY) == {}
    assert await claimed(queue, "w2", EMPTY) == {"new": True}


async def test_suspicion_ends_with_its_time_and_a_worker_that_reports_no_more_tries_nothing(
    queue: ClockedQueue,
) -> None:
    await queue.enqueue(struck(make_job("gone", "acme")))
    for name in ("a", "b", "c"):
        await queue.enqueue(make_job(name, "acme"))
    await queue.finish("gone", 2)  # its client has left: the suspicion stays
    assert await claimed(queue, "w1", EMPTY) == {"a": True}
    await queue.advance(TRIED_MS - 1)
    assert await claimed(queue, "w2", EMPTY) == {}
    await queue.charge(UsageReport("a", 1, 0))
    await queue.advance(TRIED_MS - 1)
    assert await claimed(queue, "w2", EMPTY) == {}
    await queue.advance(1)
    assert await claimed(queue, "w2", EMPTY) == {"b": True}
    await queue.advance(SUSPECT_MS)
    assert await claimed(queue, "busy", BUSY) == {"c": False}


async def test_suspicion_of_before_the_clock_went_back_is_forgotten(queue: ClockedQueue) -> None:
    await queue.enqueue(struck(make_job("first", "mallory")))
    assert await claimed(queue, "w1", EMPTY) == {"first": True}
    await queue.advance(-600_000)
    await queue.enqueue(make_job("m", "mallory"))
    assert await claimed(queue, "w2", BUSY) == {"m": False}


async def test_jobs_of_a_suspect_pair_run_beside_jobs_of_their_own_tenant(queue: ClockedQueue) -> None:
    """Else one death of an engine would hold all of a cluster that has one tenant."""
    await queue.enqueue(struck(make_job("first", "mallory")))
    await queue.enqueue(make_job("innocent", "acme"))
    for name in ("m1", "m2"):
        await queue.enqueue(make_job(name, "mallory"))
    assert await claimed(queue, "w1", EMPTY) == {"first": True}
    # Beside the first of them begins nothing else.
    assert await claimed(queue, "w2", replace(MALLORYS, rows=1)) in ({"innocent": False}, {"m1": True})
    assert await claimed(queue, "w3", MALLORYS) in ({"m1": True}, {"m2": True})


async def test_two_adapters_of_a_tenant_or_two_tenants_of_an_adapter_are_suspect_as_a_whole(
    queue: ClockedQueue,
) -> None:
    await queue.enqueue(struck(make_job("1", "mallory", adapter="sha256:a")))
    await queue.enqueue(struck(make_job("2", "mallory", adapter="sha256:b")))
    await queue.enqueue(struck(make_job("3", "acme", adapter="sha256:b")))
    await queue.enqueue(struck(make_job("4", "globex")))
    await queue.enqueue(struck(make_job("5", "initech")))
    for name, tenant, adapter in (
        ("tenant", "mallory", "sha256:c"),
        ("adapter", "umbrella", "sha256:b"),
        ("neither", "umbrella", "sha256:a"),
        ("base", "umbrella", ""),
        ("other", "acme", "sha256:c"),
    ):
        await queue.enqueue(make_job(name, tenant, adapter=adapter))
    assert await claimed(queue, "busy", BUSY) == dict.fromkeys(("neither", "base", "other"), False)


async def test_an_answer_that_has_begun_goes_on_beside_others(queue: ClockedQueue) -> None:
    await queue.enqueue(struck(make_job("struck", "acme")))
    await queue.enqueue(replace(make_job("begun", "acme", attempt=2), emitted={0: (7,)}))
    await queue.enqueue(make_job("not begun", "acme", attempt=2))
    assert await claimed(queue, "busy", BUSY) == {"begun": False}


async def test_no_worker_is_emptied_for_a_job_without_a_strike(queue: ClockedQueue) -> None:
    await queue.enqueue(struck(make_job("struck", "acme"), STRIKES_LIMIT))
    await queue.finish("struck", 3)
    await queue.enqueue(make_job("waits", "acme"))
    await queue.advance(5_000)
    assert await claimed(queue, "busy", BUSY) == {}
    await queue.enqueue(make_job("other", "globex"))
    assert await claimed(queue, "busy", BUSY) == {"other": False}


async def test_a_claimed_attempt_without_a_strike_clears_its_pair_for_the_jobs_behind_it(queue: ClockedQueue) -> None:
    await queue.enqueue(struck(make_job("j", "mallory", adapter="sha256:a")))
    await queue.enqueue(make_job("j", "mallory", adapter="sha256:a", attempt=3))
    await queue.enqueue(make_job("next", "mallory", adapter="sha256:a", prompt=40))
    claimed = await queue.claim("w1", replace(MALLORYS, tokens=10))
    assert [job.job_id for job in claimed.jobs] == ["j"]
    claimed = await queue.claim("w1", replace(MALLORYS, tokens=10))
    assert [request.tenant for request in claimed.adapter_requests] == ["mallory"], "the next one only does not fit"
