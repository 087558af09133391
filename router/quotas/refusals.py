"""The errors of calls that a plan refuses, their tenant's or their API key's; `owner` is the plan's name."""

from __future__ import annotations

import random

from broker.ledger import QuotaReachedError
from broker.ledger_records import TokenLimits
from rpc.errors import Exhausted


def quota_reached(owner: str, error: QuotaReachedError, limits: TokenLimits) -> Exhausted:
    """Return the error of a call for which a limit leaves no room now."""
    most = getattr(limits, error.limit)
    if error.wait_ms is None:
        return plan_exceeded(owner, error.limit, most, "the request alone is more")
    after_s = error.wait_ms / 1e3 + random.random()  # clients of a tenant must not all come at the same moment
    message = f"{_called(owner)} has used its quota: {error.limit} is {most}"
    return Exhausted(f"{owner}/quotas/{error.limit}", message, retry_after_s=after_s, reason="QUOTA_EXCEEDED")


def plan_exceeded(owner: str, limit: str, most: int, why: str) -> Exhausted:
    """Return the error of a call that is larger than a limit: waiting does not help."""
    message = f"the plan of {_called(owner)} has {limit} {most}: {why}"
    return Exhausted(f"{owner}/quotas/{limit}", message, retry_after_s=None, reason="QUOTA_EXCEEDED")


def _called(owner: str) -> str:
    kind, _, name = owner.partition("/")
    return f"API key {name}" if kind == "keys" else name
