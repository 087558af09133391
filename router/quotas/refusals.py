"""The errors of calls that their tenant's plan refuses."""

from __future__ import annotations

import random

from broker.ledger import QuotaReachedError, TokenLimits
from rpc.errors import Exhausted


def quota_reached(tenant: str, error: QuotaReachedError, limits: TokenLimits) -> Exhausted:
    """Return the error of a call for which a limit leaves no room now."""
    most = getattr(limits, error.limit)
    if error.wait_ms is None:
        return plan_exceeded(tenant, error.limit, most, "the request alone is more")
    after_s = error.wait_ms / 1e3 + random.random()  # clients of a tenant must not all come at the same moment
    message = f"{tenant} has used its quota: {error.limit} is {most}"
    return Exhausted(f"tenants/{tenant}/quotas/{error.limit}", message, retry_after_s=after_s, reason="QUOTA_EXCEEDED")


def plan_exceeded(tenant: str, name: str, most: int, why: str) -> Exhausted:
    """Return the error of a call that is larger than a limit: waiting does not help."""
    message = f"the plan of {tenant} has {name} {most}: {why}"
    return Exhausted(f"tenants/{tenant}/quotas/{name}", message, retry_after_s=None, reason="QUOTA_EXCEEDED")
