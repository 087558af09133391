"""The share of this worker's rows that each tenant has, and the row that a tenant below its share may take.

The engine takes it from the tenant that has most rows for its weight (worker.engine.scheduling.admission).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from broker.messages import Job, RowToShare


def row_to_share(running: Iterable[Job], rows: int) -> RowToShare | None:
    """Return which of a worker's rows a tenant below its share may take; None where no tenant has two.

    `running` has the job of every answer that takes a row, or waits for one.
    """
    wanted, weights = Counter[str](), dict[str, float]()
    for job in running:
        wanted[job.tenant] += 1
        weights[job.tenant] = job.weight
    shares = divide(rows, wanted, weights)
    left = {tenant: (math.floor(share) - 1) / weights[tenant] for tenant, share in shares.items()}
    largest = max(left, key=lambda tenant: left[tenant], default=None)
    if largest is None or left[largest] <= 0:
        return None
    return RowToShare(largest, left[largest], tuple(sorted(wanted.items())))


def divide(rows: int, wanted: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, float]:
    """Divide rows among tenants by their weights; what one does not want goes to the others."""
    shares: dict[str, float] = {}
    rows_left, weight_left = float(rows), sum(weights.values())
    for tenant in sorted(wanted, key=lambda tenant: wanted[tenant] / weights[tenant]):
        shares[tenant] = min(float(wanted[tenant]), rows_left * weights[tenant] / weight_left)
        rows_left -= shares[tenant]
        weight_left -= weights[tenant]
    return shares
