"""The free rows and tokens of this worker, which a claim carries, and the row that a tenant below its share may take.

The engine takes that row from the tenant that has most rows for its weight (worker.engine.scheduling.admission).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from broker.messages import Capacity, Job, RowToShare
from worker.engine_api import EngineLimits, EngineStats
from worker.io.local_jobs import LocalJob, LocalJobs
from worker.io.relay.links import RouterLinks

# Seconds after which a job that still waits for its adapter lends its row to another job. A fetch from a healthy store
# is faster.
LATE_S = 0.5


def is_crowded(jobs: LocalJobs, limits: EngineLimits) -> bool:
    """Return whether no row is lent any more: jobs whose rows others got wait here for one."""
    return len(jobs.running) >= 2 * limits.rows


def free_capacity(
    jobs: LocalJobs, limits: EngineLimits, stats: EngineStats, links: RouterLinks, *, stalled: bool
) -> Capacity:
    """Return what this worker can take now, beside its local jobs.

    No rows: the engine is `stalled`, or has a job that nothing may begin beside. Rows of jobs whose adapter is late are
    lent once each, up to twice the engine's rows in all. Rows of jobs whose router is lost count as free (see
    `jobs_to_drop`).
    """
    running = jobs.running
    preparing = [local for local in jobs.all() if local.preparing_for_engine]
    late_at = time.monotonic() - LATE_S
    lost = links.lost
    late = sum(
        len(local.running) for local in preparing if local.claimed_at < late_at and local.job.reply_to not in lost
    )
    spare = sum(choice.job.reply_to in lost for choice in running) if lost else 0
    rows = min(limits.rows + late, 2 * limits.rows) - len(running) + spare
    if running:  # a job that is to run alone takes all rows: these are not all
        rows = min(rows, max(1, limits.rows - 1))
    tokens = limits.max_tokens  # a long prompt may always come in when nothing else is here
    if running:
        free = (stats.blocks_free + stats.blocks_cached) * limits.block_size
        tokens = max(0, free - sum(local.job.prefill_tokens for local in preparing))
    # Suspects that have been cleared go on beside the next one, for which all rows that are left are all.
    apart = bool(running) and all(choice.job.suspect for choice in running)
    tenants = {choice.job.tenant for choice in running}
    closed = stalled or any(local.needs_all for local in jobs.all())
    shares = not closed and not is_crowded(jobs, limits)
    return Capacity(
        rows=0 if closed else rows,
        rows_limit=max(1, rows) if apart else limits.rows,
        tokens=tokens,
        max_tokens=limits.max_tokens,
        max_rank=limits.max_rank,
        adapters=stats.adapters,
        routers=links.live,
        row_to_share=row_to_share((choice.job for choice in running), limits.rows) if shares else None,
        only_tenant=tenants.pop() if len(tenants) == 1 else "",
    )


def jobs_to_drop(
    jobs: LocalJobs, limits: EngineLimits, claimed: Sequence[Job], lost: Collection[str]
) -> list[LocalJob]:
    """Return the jobs of lost routers whose rows the claimed jobs need, those that were claimed first.

    A lost router is dead, stands still, or has dispatched these jobs again; they are kept while their rows are of no
    use to others.
    """
    dropped: list[LocalJob] = []
    if lost:
        lacking = len(jobs.running) + sum(min(job.rows, limits.rows) for job in claimed) - limits.rows
        for local in jobs.all():
            if lacking > 0 and local.job.reply_to in lost and local.running:
                dropped.append(local)
                lacking -= len(local.running)
    return dropped


def row_to_share(running: Iterable[Job], rows: int) -> RowToShare | None:
    """Return which of a worker's rows a tenant below its share may take; None where no tenant has two.

    `running` has the job of every answer that takes a row, or waits for one.
    """
    rows_of, weights = Counter[str](), dict[str, float]()
    for job in running:
        rows_of[job.tenant] += 1
        weights[job.tenant] = job.weight
    shares = divide(rows, rows_of, weights)
    rows_left = {tenant: (math.floor(share) - 1) / weights[tenant] for tenant, share in shares.items()}
    largest = max(rows_left, key=lambda tenant: rows_left[tenant], default=None)
    if largest is None or rows_left[largest] <= 0:
        return None
    return RowToShare(largest, rows_left[largest], tuple(sorted(rows_of.items())))


def divide(rows: int, demand: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, float]:
    """Divide rows among tenants by their weights; what one does not want goes to the others."""
    shares: dict[str, float] = {}
    rows_left, weight_left = float(rows), sum(weights.values())
    for tenant in sorted(demand, key=lambda tenant: demand[tenant] / weights[tenant]):
        shares[tenant] = min(float(demand[tenant]), rows_left * weights[tenant] / weight_left)
        rows_left -= shares[tenant]
        weight_left -= weights[tenant]
    return shares
