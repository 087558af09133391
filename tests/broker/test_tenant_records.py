"""Nothing of a tenant stays in a cell of Redis after its purge: its name is in no key, member or value."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from loraplex.contracts.artifacts.names import sha256_bytes
from loraplex.contracts.broker.messages import AdapterRef, AdapterRequest, WeightedRef
from loraplex.contracts.broker.queue import DeadLetters, JobQueue, RemovedRecords
from loraplex.contracts.broker.terms import KeyTerms, Placement
from tests.broker.queued_jobs import KEYS, claim, job
from tests.broker.test_dead import dead_job

TENANT, OTHER = "purgedtenant", "globex"
MOST = 8


@pytest.fixture
def queue(redis: Redis) -> JobQueue:
    """A queue that one worker claims from."""
    return JobQueue(redis, KEYS, worker_id="w")


def adapter(tenant: str) -> AdapterRef:
    digest = sha256_bytes(tenant.encode())
    return AdapterRef(f"tenants/{tenant}/adapters/a/revisions/{digest}", digest, 4, 100)


async def names_in(redis: Redis) -> list[bytes]:
    """Return the keys with their contents that have the tenant's name."""
    found = []
    for key in await redis.keys("*"):
        assert isinstance(key, bytes)
        found.append(key + (await redis.dump(key) or b""))
    return [content for content in found if TENANT.encode() in content]


async def test_nothing_of_a_tenant_stays_and_everything_of_others(redis: Redis, queue: JobQueue) -> None:
    for tenant in (TENANT, OTHER):
        await queue.enqueue(job(f"{tenant}/new", tenant=tenant, adapter=adapter(tenant), strikes=1))
        key = Placement(2.0, key=KeyTerms("k", 2.0, 0.5))
        await queue.enqueue(job(f"{tenant}/heavy", tenant=tenant, weight=2.0, strikes=0), key)
        await queue.enqueue(job(f"{tenant}/begun", tenant=tenant, attempt=2, emitted={0: (1,)}))
        await queue.pins.pin(AdapterRequest(adapter(tenant), tenant))
        await DeadLetters(redis, KEYS).push(replace(dead_job(1), tenant=tenant, job_id=tenant))
        for number in range(2):  # of two adapters: then the tenant itself is in quarantine too
            await queue.record_death(tenant, f"sha256:{number}", f"{tenant}/{number}")
    both = AdapterRef(
        "sha256:set", "sha256:set", 8, 200, tuple(WeightedRef(adapter(one), 0.5) for one in (OTHER, TENANT))
    )
    await queue.pins.pin(AdapterRequest(both, OTHER))
    assert await names_in(redis)
    found = await queue.forget_tenant(TENANT)
    assert (found.jobs, found.pins) == (3, 2)
    assert found.others >= 6, "a dead letter, two deaths, three subjects in quarantine"
    assert await names_in(redis) == []
    assert await queue.forget_tenant(TENANT) == RemovedRecords()
    assert await queue.count_waiting() == 3
    assert [request.tenant for request in await queue.pins.list()] == [OTHER]
    assert [dead.tenant for dead in await DeadLetters(redis, KEYS).list()] == [OTHER]
    assert await redis.hget(KEYS.prefix + "deaths", f"{OTHER} sha256:0")


async def test_a_lifted_quarantine_is_forgotten_and_others_stay(queue: JobQueue) -> None:
    for tenant in (TENANT, OTHER):
        for number in range(2):
            await queue.record_death(tenant, f"sha256:{number}", f"{tenant}/{number}")
    refused = await queue.quarantined()
    assert set(refused) == {(tenant, digest) for tenant in (TENANT, OTHER) for digest in ("sha256:0", "sha256:1", "*")}
    assert all(0 < left_ms <= 60_000 for left_ms in refused.values())
    assert await queue.lift_quarantine(TENANT) == 5
    assert {tenant for tenant, _ in await queue.quarantined()} == {OTHER}
    await queue.enqueue(job(f"{TENANT}/new", tenant=TENANT, adapter=AdapterRef("r", "sha256:0", 4, 100)))
    assert await queue.record_death(TENANT, "sha256:0", f"{TENANT}/2") <= 60_000, "it counts as the first"
    assert await queue.lift_quarantine("nobody") == 0


async def test_more_jobs_than_one_script_looks_at(
    redis: Redis, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.contracts.broker.queue.LOOKS_AT_ONCE", MOST)
    for number in range(MOST + 3):
        for tenant in (TENANT, OTHER):
            begun = number % 2
            await queue.enqueue(
                job(f"{tenant}/{number}", tenant=tenant, attempt=1 + begun, emitted={0: (1,)} if begun else {})
            )
    assert (await queue.forget_tenant(TENANT)).jobs == MOST + 3
    assert await names_in(redis) == []
    assert await queue.count_waiting() == MOST + 3
    taken: list[str] = []
    while some := await claim(queue):
        taken += some
    assert len(set(taken)) == MOST + 3
    assert await redis.hkeys(KEYS.prefix + "totals") in ([], [b"/cell"])
