"""Reserves tokens for the calls of one router.

admitted ──reserve──▶ Grant ──settle──▶ the account keeps what was used
                        └── renewed every second, with what is used so far
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from dataclasses import replace

from broker.connection import REDIS_DOWN
from broker.keys import is_key_account
from broker.ledger import (
    Ledger,
    LedgerCalls,
    LedgerFullError,
    QuotaReachedError,
    Reservation,
    SendReserve,
    TokenLimits,
)
from broker.messages import Job
from router.catalog.store_client import StoreClient
from router.dispatch.outbox import queue_full
from router.metrics import RouterMetrics
from router.quotas.plans import Owner, Plans
from router.quotas.session import Grant, LedgerSession
from router.quotas.usage import NO_FACTS, Facts, UsageLog, calling_key
from rpc.errors import Exhausted, Unavailable

log = logging.getLogger(__name__)


class Quotas:
    """The quotas of tenants and keys, as one router keeps them. `store` keeps the accounts when Redis loses them."""

    def __init__(
        self,
        calls: LedgerCalls,
        plans: Plans,
        metrics: RouterMetrics | None = None,
        usage: UsageLog | None = None,
        store: StoreClient | None = None,
    ) -> None:
        self._plans = plans
        self._metrics = metrics or RouterMetrics()
        self._usage = usage
        self.session = LedgerSession(Ledger(calls, secrets.token_hex(6)), self._metrics, store)

    def apply_plan(self, job: Job) -> Job:
        """Return a new job within the plans of its tenant and the calling key. Raises Exhausted where it can't be."""
        for owner in self._plans.owners(job.tenant, calling_key()):
            for name, size, most in (
                ("context_tokens", job.tokens, owner.plan.context_tokens),
                ("answers_per_request", job.n, owner.plan.answers_per_request),
            ):
                if most is not None and size > most:
                    self._count_refusal(owner, name)
                    raise _plan_exceeded(owner.name, name, most, f"the request has {size}")
            ceiling = owner.plan.priority_ceiling
            job = job if ceiling is None or job.priority <= ceiling else replace(job, priority=ceiling)
        return job

    def _count_refusal(self, owner: Owner, limit: str) -> None:
        label = f"key_{limit}" if is_key_account(owner.account) else limit
        self._metrics.quota_refusals.labels(self._metrics.tenants.bounded(owner.tenant), label).inc()

    async def reserve(
        self,
        tenant: str,
        prompt_tokens: int,
        output_tokens: int,
        *,
        facts: Facts = NO_FACTS,
        resumed: tuple[str, int] | None = None,
        send: SendReserve | None = None,
    ) -> Grant | None:
        """Reserve tokens of prompts and answers for a call; None for a call without limits.

        `facts`: those known by now, for the usage event. `resumed`: the reservation's id and the tokens that the client
        has. `send` sends the call with another; see LedgerCalls. Raises Exhausted or Unavailable.
        """
        owners = {owner.account: owner for owner in reversed(self._plans.owners(tenant, calling_key()))}
        limits = {name: one for name in owners if (one := self._plans.limits_of(name)) is not None}
        known = None if self._usage is None else facts.of_caller(tenant, calling_key())
        if known is not None:
            limits = {tenant: TokenLimits(), **limits}  # the ledger is where usage is counted
        if not limits:
            return None
        reservation_id, received = resumed or ("", None)
        encoded = known.encode() if known is not None else ""
        wanted = Reservation(
            reservation_id or secrets.token_hex(8), tuple(limits), prompt_tokens, output_tokens, encoded
        )
        grant = Grant(wanted, self.session, received or 0, facts=known)
        try:
            with self._metrics.reserve_time.time():
                await self.session.reserve(grant, received, limits, send)
        except QuotaReachedError as error:
            self._count_refusal(owners[error.account], error.limit)
            raise _quota_reached(owners[error.account].name, error, limits[error.account]) from error
        except LedgerFullError as error:
            raise queue_full("", str(error)) from error
        except BaseException as error:
            # The ledger may hold the reservation though its answer was lost or not awaited.
            grant.settle() if received is None else grant.leave()
            if isinstance(error, REDIS_DOWN):
                log.warning("the ledger does not answer: %r", error)
                raise Unavailable("the ledger of quotas does not answer", reason="LEDGER_DOWN") from error
            raise
        return grant

    async def forget_tenant(self) -> None:
        """Write the usage events that wait."""
        if self._usage is not None:
            await self._usage.write()

    async def follow(self) -> None:
        """Renew the reservations every second, and follow plans and usage; never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._plans.follow())
            tasks.create_task(self.session.follow(lambda: self._plans.has_limits or self._usage is not None))
            if self._usage is not None:
                tasks.create_task(self._usage.follow())

    async def drain(self, timeout_s: float) -> None:
        """Settle what has ended, up to a timeout, and write the usage events that wait."""
        await self.session.drain(timeout_s)
        if self._usage is not None:
            await self._usage.close(timeout_s)


def _quota_reached(owner: str, error: QuotaReachedError, limits: TokenLimits) -> Exhausted:
    """Return the error of a call for which a limit leaves no room now."""
    most = getattr(limits, error.limit)
    if error.wait_ms is None:
        return _plan_exceeded(owner, error.limit, most, "the request alone is more")
    after_s = error.wait_ms / 1e3 + random.random()  # clients of a tenant must not all come at the same moment
    message = f"{_called(owner)} has used its quota: {error.limit} is {most}"
    return Exhausted(f"{owner}/quotas/{error.limit}", message, retry_after_s=after_s, reason="QUOTA_EXCEEDED")


def _plan_exceeded(owner: str, limit: str, most: int, why: str) -> Exhausted:
    """Return the error of a call that is larger than a limit: waiting does not help."""
    message = f"the plan of {_called(owner)} has {limit} {most}: {why}"
    return Exhausted(f"{owner}/quotas/{limit}", message, retry_after_s=None, reason="QUOTA_EXCEEDED")


def _called(owner: str) -> str:
    kind, _, name = owner.partition("/")
    return f"API key {name}" if kind == "keys" else name
