"""Tenants whose jobs kill engines are refused for a while."""

from __future__ import annotations

from dataclasses import replace

from loraplex.contracts.broker.messages import Capacity
from loraplex.contracts.broker.terms import DEATHS_MEMORY_MS, QUARANTINE_LIMIT_MS, QUARANTINE_MS
from tests.broker.clocked_queue import ClockedQueue, make_job

ROOMY = Capacity(rows=8, rows_limit=8, tokens=10_000, max_tokens=4096, max_rank=64)
MINUTE = 60_000


async def enqueue(queue: ClockedQueue, name: str, tenant: str, adapter: str = "") -> str:
    """Return why a job is refused; empty: it is not."""
    return await queue.enqueue(make_job(name, tenant, adapter=adapter))


async def test_a_tenant_s_jobs_with_an_adapter_that_killed_are_refused_for_a_minute(queue: ClockedQueue) -> None:
    assert await queue.record_death("mallory", "sha256:a", "j1") == QUARANTINE_MS == MINUTE
    assert await enqueue(queue, "same", "mallory", "sha256:a") == "quarantined"
    # Its other adapters, and another tenant with the same adapter, are not.
    for name, tenant, adapter in (("1", "mallory", "sha256:b"), ("2", "mallory", ""), ("3", "acme", "sha256:a")):
        assert not await enqueue(queue, name, tenant, adapter)
    await queue.advance(MINUTE)
    assert not await enqueue(queue, "later", "mallory", "sha256:a")


async def test_each_further_death_within_an_hour_is_refused_for_longer(queue: ClockedQueue) -> None:
    refused = []
    for number in range(5):
        refused.append(await queue.record_death("mallory", "", f"j{number}"))
        await queue.advance(MINUTE)
    assert refused == [MINUTE, 5 * MINUTE, 25 * MINUTE, QUARANTINE_LIMIT_MS, QUARANTINE_LIMIT_MS]
    await queue.advance(DEATHS_MEMORY_MS)
    assert await queue.record_death("mallory", "", "j9") == MINUTE


async def test_a_tenant_that_kills_with_one_adapter_after_the_other_is_refused_as_a_whole(queue: ClockedQueue) -> None:
    await queue.record_death("mallory", "sha256:a", "j1")
    await queue.record_death("mallory", "sha256:b", "j2")
    assert await enqueue(queue, "1", "mallory", "sha256:c") == "quarantined"
    assert not await enqueue(queue, "2", "mallory2")
    await queue.advance(MINUTE)
    assert not await enqueue(queue, "3", "mallory", "sha256:c")
    await queue.record_death("mallory", "sha256:c", "j3")
    await queue.advance(4 * MINUTE)
    assert await enqueue(queue, "4", "mallory") == "quarantined"


async def test_a_refusal_that_ends_later_than_it_may_is_none(queue: ClockedQueue) -> None:
    """The clock was ahead."""
    await queue.record_death("a", "sha256:x", "j")
    await queue.advance(-2 * QUARANTINE_LIMIT_MS)
    assert not await queue.enqueue(make_job("k", "a", adapter="sha256:x"))
    assert await queue.record_death("a", "sha256:x", "k") == QUARANTINE_MS


async def test_a_death_that_is_recorded_twice_counts_once(queue: ClockedQueue) -> None:
    await queue.record_death("mallory", "", "j1")
    await queue.advance(1_000)
    assert await queue.record_death("mallory", "", "j1") == MINUTE - 1_000


async def test_a_death_that_is_recorded_late_is_refused_for_what_is_left(queue: ClockedQueue) -> None:
    assert await queue.record_death("mallory", "", "j1", MINUTE - 1_000) == 1_000
    assert await queue.record_death("mallory", "", "j2", 10 * MINUTE) == 1_000
    assert await queue.record_death("mallory", "", "j3") == 25 * MINUTE


async def test_what_waits_is_dropped_at_a_claim_and_no_later_attempt_comes_in(queue: ClockedQueue) -> None:
    await enqueue(queue, "waits", "mallory")
    await queue.enqueue(make_job("again", "mallory", attempt=2))
    await enqueue(queue, "other", "acme")
    await queue.record_death("mallory", "", "j1")
    assert [job.job_id for job in (await queue.claim("w", ROOMY)).jobs] == ["other"]
    assert await queue.enqueue(make_job("waits", "mallory", attempt=2)) == "quarantined"
    assert {name for name in await queue.names() if name.startswith(("queue:", "again", "job:"))} == set()


async def test_an_answer_that_has_begun_goes_on_unless_it_is_a_suspect(queue: ClockedQueue) -> None:
    await queue.record_death("mallory", "", "j1")
    begun = replace(make_job("begun", "mallory", attempt=2), emitted={0: (7,)})
    assert not await queue.enqueue(begun)
    assert [job.job_id for job in (await queue.claim("w", ROOMY)).jobs] == ["begun"]
    assert await queue.enqueue(replace(begun, attempt=3, strikes=1)) == "quarantined"
    resumed = replace(make_job("resumed", "mallory"), emitted={0: (7,)}, resumed=True)
    assert await queue.enqueue(resumed) == "quarantined"


async def test_an_attempt_that_is_refused_leaves_nothing_of_the_one_before(queue: ClockedQueue) -> None:
    await enqueue(queue, "j", "mallory")
    await queue.record_death("mallory", "", "j1")
    assert await queue.enqueue(make_job("j", "mallory", attempt=2)) == "quarantined"
    assert not {name for name in await queue.names() if name.startswith(("queue:", "again", "job:", "totals"))}


async def test_an_operator_lifts_a_quarantine(queue: ClockedQueue) -> None:
    """Run the ZREM that docs/guides/faults.md gives: of the tenant, or of tenant, space and adapter."""
    await queue.record_death("mallory", "sha256:a", "j1")
    assert await queue.redis.zrem("lp:{tiny/main}:quarantine", "mallory sha256:a") == 1
    assert not await enqueue(queue, "j", "mallory", "sha256:a")
