"""The capacity that a worker claims with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.worker.engine_api import EngineLimits
from loraplex.worker.io.intake import LATE_S, free_capacity
from loraplex.worker.io.local_jobs import LocalJobs
from tests.worker.io.relayed_worker import job

LIMITS = EngineLimits(rows=4, max_tokens=100, max_rank=8, vocab_size=100, block_size=4, blocks=100, adapter_slots=2)


@pytest.mark.parametrize(("late", "lost", "rows"), [(0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1)])
async def test_a_row_whose_job_is_late_and_of_a_lost_router_is_free_once(late: int, lost: int, rows: int) -> None:
    jobs = LocalJobs()
    for number in range(LIMITS.rows):
        local = jobs.add(job(f"j{number}", "lost" if number < lost else "here"))
        if number < late:
            local.claimed_at -= LATE_S + 1
    links: Any = SimpleNamespace(lost={"lost"} if lost else set(), live=())
    stats: Any = SimpleNamespace(blocks_free=100, blocks_cached=0, adapters=())
    assert free_capacity(jobs, LIMITS, stats, links, stalled=False).rows == rows
