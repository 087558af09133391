"""The errors of calls whose jobs the queue refuses."""

from __future__ import annotations

import random

from broker.quarantine import QuarantinedError
from broker.queue import DeadlineUnattainableError, QueueFullError
from rpc.errors import CallError, Exhausted

# Reason that the client gets while jobs of its tenant and adapter are refused because they killed engines.
QUARANTINED = "QUARANTINED"
# Mean time in seconds after which a refused client is to call again; each gets its own, so that they do not all come
# at once.
FULL_RETRY_S = 1.0

REFUSALS = (QueueFullError, DeadlineUnattainableError, QuarantinedError)


def refusal(error: QueueFullError | DeadlineUnattainableError | QuarantinedError, tenant: str) -> CallError:
    """Return the error of a call of this tenant whose job was refused."""
    if isinstance(error, QueueFullError):
        return queue_full(error.tenant, str(error), error.key)
    if isinstance(error, QuarantinedError):
        subject, after_s = f"tenants/{tenant}/quarantine", error.left_ms / 1e3
        return Exhausted(subject, str(error), retry_after_s=after_s, reason=QUARANTINED)
    after_s = random.uniform(0.5, 1.0) * error.wait_ms / 1e3
    message = f"the deadline can't be met: {error}"
    return Exhausted("deadline", message, retry_after_s=after_s, reason="DEADLINE_UNATTAINABLE")


def queue_full(tenant: str, why: str, key: str = "") -> Exhausted:
    """Return the error of a job that has no place in the queue; without tenant and key: it is not a limit of theirs."""
    subject = f"tenants/{tenant}/queue" if tenant else f"keys/{key}/quotas/queue_share" if key else "queue"
    after_s = random.uniform(0.5, 1.5) * FULL_RETRY_S
    return Exhausted(subject, f"the queue is full: {why}", retry_after_s=after_s, reason="QUEUE_FULL")
