"""Tenants whose jobs kill engines are refused for a while; each test runs the scripts and their model."""

from __future__ import annotations

from dataclasses import replace

from broker.messages import Capacity
from broker.terms import DEATHS_MEMORY_MS, QUARANTINE_LIMIT_MS, QUARANTINE_MS
from tests.broker.both_queues import BothQueues, make_job

ROOMY = Capacity(rows=8, rows_limit=8, tokens=10_000, max_tokens=4096, max_rank=64)
MINUTE = 60_000


async def enqueue(both: BothQueues, name: str, tenant: str, adapter: str = "") -> str:
    """Return why a job is refused; empty: it is not."""
    return await both.enqueue(make_job(name, tenant, adapter=adapter))


async def test_a_tenant_s_jobs_with_an_adapter_that_killed_are_refused_for_a_minute(both: BothQueues) -> None:
    assert await both.record_death("mallory", "sha256:a", "j1") == QUARANTINE_MS == MINUTE
    assert await enqueue(both, "same", "mallory", "sha256:a") == "quarantined"
    # Its other adapters, and another tenant with the same adapter, are not.
    for name, tenant, adapter in (("1", "mallory", "sha256:b"), ("2", "mallory", ""), ("3", "acme", "sha256:a")):
        assert not await enqueue(both, name, tenant, adapter)
    await both.advance(MINUTE)
    assert not await enqueue(both, "later", "mallory", "sha256:a")


async def test_each_further_death_within_an_hour_is_refused_for_longer(both: BothQueues) -> None:
    refused = []
    for number in range(5):
        refused.append(await both.record_death("mallory", "", f"j{number}"))
        await both.advance(MINUTE)
    assert refused == [MINUTE, 5 * MINUTE, 25 * MINUTE, QUARANTINE_LIMIT_MS, QUARANTINE_LIMIT_MS]
    await both.advance(DEATHS_MEMORY_MS)
    assert await both.record_death("mallory", "", "j9") == MINUTE


async def test_a_tenant_that_kills_with_one_adapter_after_the_other_is_refused_as_a_whole(both: BothQueues) -> None:
    await both.record_death("mallory", "sha256:a", "j1")
    await both.record_death("mallory", "sha256:b", "j2")
    assert await enqueue(both, "1", "mallory", "sha256:c") == "quarantined"
    assert not await enqueue(both, "2", "mallory2")
    await both.advance(MINUTE)
    assert not await enqueue(both, "3", "mallory", "sha256:c")
    await both.record_death("mallory", "sha256:c", "j3")
    await both.advance(4 * MINUTE)
    assert await enqueue(both, "4", "mallory") == "quarantined"


async def test_a_refusal_that_ends_later_than_it_may_is_none(both: BothQueues) -> None:
    """The clock was ahead."""
    await both.record_death("a", "sha256:x", "j")
    await both.advance(-2 * QUARANTINE_LIMIT_MS)
    assert not await both.enqueue(make_job("k", "a", adapter="sha256:x"))
    assert await both.record_death("a", "sha256:x", "k") == QUARANTINE_MS


async def test_a_death_that_is_recorded_twice_counts_once(both: BothQueues) -> None:
    await both.record_death("mallory", "", "j1")
    await both.advance(1_000)
    assert await both.record_death("mallory", "", "j1") == MINUTE - 1_000


async def test_what_waits_is_dropped_at_a_claim_and_no_later_attempt_comes_in(both: BothQueues) -> None:
    await enqueue(both, "waits", "mallory")
    await both.enqueue(make_job("again", "mallory", attempt=2))
    await enqueue(both, "other", "acme")
    await both.record_death("mallory", "", "j1")
    assert [job.job_id for job in (await both.claim("w", ROOMY)).jobs] == ["other"]
    assert await both.enqueue(make_job("waits", "mallory", attempt=2)) == "quarantined"
    assert {name for name in await both.names() if name.startswith(("queue:", "again", "job:"))} == set()


async def test_an_answer_that_has_begun_goes_on_unless_it_is_a_suspect(both: BothQueues) -> None:
    await both.record_death("mallory", "", "j1")
    begun = replace(make_job("begun", "mallory", attempt=2), emitted={0: (7,)})
    assert not await both.enqueue(begun)
    assert [job.job_id for job in (await both.claim("w", ROOMY)).jobs] == ["begun"]
    assert await both.enqueue(replace(begun, attempt=3, strikes=1)) == "quarantined"
    resumed = replace(make_job("resumed", "mallory"), emitted={0: (7,)}, resumed=True)
    assert await both.enqueue(resumed) == "quarantined"


async def test_an_attempt_that_is_refused_leaves_nothing_of_the_one_before(both: BothQueues) -> None:
    await enqueue(both, "j", "mallory")
    await both.record_death("mallory", "", "j1")
    assert await both.enqueue(make_job("j", "mallory", attempt=2)) == "quarantined"
    assert not {name for name in await both.names() if name.startswith(("queue:", "again", "job:", "totals"))}


async def test_an_operator_lifts_a_quarantine(both: BothQueues) -> None:
    """Run the ZREM that docs/guides/faults.md gives: of the tenant, or of tenant, space and adapter."""
    await both.record_death("mallory", "sha256:a", "j1")
    assert await both.redis.zrem("lp:{tiny/main}:quarantine", "mallory sha256:a") == 1
    both.model.quarantine = type(both.model.quarantine)()
    assert not await enqueue(both, "j", "mallory", "sha256:a")
