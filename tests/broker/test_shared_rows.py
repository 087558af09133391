"""A full worker's claims for tenants below their share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loraplex.contracts.broker import terms
from loraplex.contracts.broker.messages import Capacity, RowToShare
from loraplex.contracts.broker.terms import Placement, UsageReport
from tests.broker.clocked_queue import ClockedQueue, make_job

FULL = Capacity(rows=0, rows_limit=8, tokens=0, max_tokens=4096, max_rank=64)
# Eight rows of a greedy tenant.
ALL_GREEDY = replace(FULL, row_to_share=RowToShare("greedy", 7, (("greedy", 8),)))


async def claim(queue: ClockedQueue, capacity: Capacity = ALL_GREEDY) -> list[str]:
    return [job.job_id for job in (await queue.claim("w", capacity)).jobs]


@pytest.fixture
async def busy(queue: ClockedQueue) -> ClockedQueue:
    """A queue whose greedy tenant has been served, and waits for more."""
    await queue.enqueue(make_job("g", "greedy"))
    assert await claim(queue, replace(FULL, rows=1, tokens=100)) == ["g"]
    for number in range(3):
        await queue.enqueue(make_job(f"greedy-{number}", "greedy"))
    await queue.enqueue(make_job("quiet", "quiet"))
    await queue.charge(UsageReport("g", 1, 50))
    return queue


async def test_a_full_worker_takes_a_job_of_a_tenant_below_its_share_once_that_has_waited(busy: ClockedQueue) -> None:
    assert await claim(busy) == []
    await busy.advance(terms.BELOW_SHARE_MS)
    assert await claim(busy, FULL) == []
    assert await claim(busy) == ["quiet"]
    # A tenant above its share gets no row this way.
    assert await claim(busy) == []


async def test_a_claim_that_shares_a_row_takes_one_job(busy: ClockedQueue) -> None:
    await busy.enqueue(make_job("another", "quiet"))
    await busy.advance(terms.BELOW_SHARE_MS)
    assert await claim(busy) == ["quiet"]
    assert await claim(busy) == ["another"]


@pytest.mark.parametrize(("weight", "rows_here", "gets"), [(1, 2, True), (1, 3, False), (2, 3, True), (0.5, 2, False)])
async def test_rows_count_for_their_tenants_weight(
    queue: ClockedQueue, weight: float, rows_here: int, gets: bool
) -> None:
    await queue.enqueue(make_job("g", "greedy"))
    await claim(queue, replace(FULL, rows=1, tokens=100))
    await queue.charge(UsageReport("g", 1, 5_000))
    await queue.enqueue(make_job("quiet", "quiet"), Placement(weight))
    await queue.advance(terms.BELOW_SHARE_MS)
    share = RowToShare("greedy", 3, (("greedy", 8 - rows_here), ("quiet", rows_here)))
    assert await claim(queue, replace(FULL, row_to_share=share)) == (["quiet"] if gets else [])


async def test_who_was_served_more_gets_no_row_of_who_was_served_less(busy: ClockedQueue) -> None:
    await busy.advance(terms.BELOW_SHARE_MS)
    assert await claim(busy) == ["quiet"]
    await busy.enqueue(make_job("more", "quiet"))
    await busy.charge(UsageReport("quiet", 1, 500))
    await busy.advance(terms.BELOW_SHARE_MS)
    assert await claim(busy) == []
    await busy.charge(UsageReport("g", 1, 1_000))
    assert await claim(busy) == ["more"]


async def test_a_job_that_needs_all_rows_shares_none(busy: ClockedQueue) -> None:
    await busy.finish("quiet", 1)
    await busy.enqueue(make_job("wide", "quiet", n=8))
    await busy.advance(terms.BELOW_SHARE_MS)
    assert await claim(busy) == []


async def test_redispatched_jobs_of_a_greedy_tenant_do_not_hide_a_quiet_one(busy: ClockedQueue) -> None:
    for number in range(2 * terms.LOOKAHEAD_LIMIT):
        await busy.enqueue(make_job(f"again-{number}", "greedy", attempt=2))
    await busy.advance(terms.BELOW_SHARE_MS)
    assert await claim(busy) == ["quiet"]
