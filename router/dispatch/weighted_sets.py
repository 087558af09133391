"""A bound on the weighted sets of adapters that a tenant's running answers use: each set takes an adapter slot."""

from __future__ import annotations

from collections.abc import Iterable

from broker.messages import Job
from rpc.errors import Exhausted

# Maximum number of different sets of one tenant whose answers a router holds at a time.
WEIGHTED_SETS = 16
# Time in seconds after which a refused client is to call again.
_RETRY_S = 1.0


def check_weighted_sets(job: Job, others: Iterable[Job]) -> None:
    """Raise Exhausted where a new job's set is one too many; a set in use costs nothing, nor one that is resumed."""
    if job.adapter is None or not job.adapter.parts or job.resumed:
        return
    used = {
        other.adapter.digest
        for other in others
        if other.tenant == job.tenant and other.adapter is not None and other.adapter.parts
    }
    if job.adapter.digest not in used and len(used) >= WEIGHTED_SETS:
        raise Exhausted(
            f"tenants/{job.tenant}/weighted-sets",
            f"{job.tenant} uses {len(used)} weighted sets of adapters at this router, which is the most",
            retry_after_s=_RETRY_S,
            reason="WEIGHTED_SETS_FULL",
        )
