"""A full worker and a tenant below its share: real Valkey, engine and relay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.messages import Job, RowToShare
from loraplex.contracts.broker.terms import UsageReport
from loraplex.worker.io.intake import divide, row_to_share
from tests.worker.io.relayed_worker import ROWS, Router, job, running


def of(tenant: str, job_id: str, address: str = "here", **options: int) -> Job:
    return replace(job(job_id, address, **options), tenant=tenant)


@pytest.mark.parametrize(
    ("wanted", "shares"),
    [
        ({"a": 8}, {"a": 8}),
        ({"a": 8, "b": 1}, {"a": 7, "b": 1}),
        ({"a": 8, "b": 5}, {"a": 4, "b": 4}),
        ({"a": 2, "b": 3}, {"a": 2, "b": 3}),
        ({"a": 6, "twice": 6}, {"a": 8 / 3, "twice": 16 / 3}),
    ],
)
def test_rows_are_divided_by_weight_and_need(wanted: dict[str, int], shares: dict[str, float]) -> None:
    weights = {tenant: 2.0 if tenant == "twice" else 1.0 for tenant in wanted}
    assert divide(8, wanted, weights) == pytest.approx(shares)


def test_the_tenant_with_most_rows_shares_them_and_none_that_has_one() -> None:
    running = [of("a", "a1")]
    assert row_to_share(running, 4) is None
    running += [of("b", f"b{number}") for number in range(3)]
    assert row_to_share(running, 4) == RowToShare("b", 2.0, (("a", 1), ("b", 3)))
    # Of eight rows that five tenants want two each, none has two to keep.
    assert row_to_share([of(tenant, "j") for tenant in "abcde"] * 2, 8) is None


async def test_a_quiet_tenant_is_answered_beside_endless_answers_of_another_which_go_on(
    redis: Redis, tmp_path: Path
) -> None:
    router, greedy = Router(), [f"greedy-{number}" for number in range(ROWS)]
    async with running(router, redis, tmp_path) as worker:
        for name in (*greedy, "greedy-waits"):
            await worker.queue.enqueue(of("greedy", name, worker.address))
        await router.until(lambda: all(router.ids[name] for name in greedy))
        for name in ("quiet-1", "quiet-2"):
            await worker.queue.enqueue(of("quiet", name, worker.address, max_tokens=20))
        await worker.queue.charge([UsageReport(name, 1, 1_000) for name in greedy])
        await router.until(lambda: {("ended", "quiet-1"), ("ended", "quiet-2")} <= set(router.events))
        assert not router.returned
        assert not router.ids["greedy-waits"]
        assert worker.results.stats.preemptions >= 1
        made = {name: len(router.ids[name]) for name in greedy}
        await router.until(lambda: all(len(router.ids[name]) > made[name] for name in greedy))
