"""Reserves tokens for the calls of one router.

admitted ──reserve──▶ Grant ──settle──▶ the account keeps what was used
                        └── looks every second renew it, with what is used so far
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import replace

from broker.connection import REDIS_DOWN
from broker.ledger import (
    AccountCopy,
    BehindError,
    Ledger,
    LedgerFullError,
    QuotaReachedError,
    Reservation,
    TokenLimits,
)
from broker.messages import Job
from router.dispatch.refusals import queue_full
from router.metrics import RouterMetrics
from router.quotas.accounts import Account, Accounts
from router.quotas.grant import End, Grant
from router.quotas.plans import Plans
from router.quotas.refusals import plan_exceeded, quota_reached
from router.quotas.settling import RETRY_S, Settling
from router.quotas.usage import Facts, UsageLog, calling_key
from rpc.errors import Unavailable

log = logging.getLogger(__name__)

# Maximum looks that one reservation waits for.
_LOOKS_LIMIT = 3


class Quotas:
    """The quotas of tenants, as one router keeps them."""

    def __init__(
        self,
        ledger: Ledger,
        plans: Plans,
        metrics: RouterMetrics | None = None,
        usage: UsageLog | None = None,
        *,
        retry_s: float = RETRY_S,
    ) -> None:
        self._ledger = ledger
        self._plans = plans
        self._metrics = metrics or RouterMetrics()
        self._usage = usage
        self._router = secrets.token_hex(6)
        self._accounts = Accounts(ledger, plans, self._metrics, usage)
        self._settling = Settling(ledger, self._accounts, usage, retry_s)

    def apply_plan(self, job: Job) -> Job:
        """Return a new job within its tenant's plan. Raises Exhausted where it can't be."""
        plan = self._plans.of(job.tenant)
        for name, size, most in (
            ("context_tokens", job.tokens, plan.context_tokens),
            ("answers_per_request", job.n, plan.answers_per_request),
        ):
            if most is not None and size > most:
                self._metrics.quota_refusals.labels(self._metrics.tenants.bounded(job.tenant), name).inc()
                raise plan_exceeded(job.tenant, name, most, f"the request has {size}")
        ceiling = plan.priority_ceiling
        return job if ceiling is None or job.priority <= ceiling else replace(job, priority=ceiling)

    async def reserve(
        self, tenant: str, given: int, made: int, *, resumed: tuple[str, int] | None = None
    ) -> Grant | None:
        """Reserve tokens of prompts and answers for a call; None for a tenant without limits.

        `resumed`: the reservation's id and the tokens that the client has. Raises Exhausted or Unavailable.
        """
        limits = self._plans.limits_of(tenant)
        if limits is None:
            if self._usage is None:
                return None
            limits = TokenLimits()  # the ledger is where usage is counted
        facts = None if self._usage is None else Facts(key=calling_key())
        reservation_id, received = resumed or ("", None)
        subject = facts.encode() if facts else ""
        wanted = Reservation(reservation_id or secrets.token_hex(8), self._router, subject, input=given, output=made)
        account = self._accounts.use(tenant)
        try:
            await self._accounts.note_tenant(tenant)
            with self._metrics.reserve_time.time():
                reservation, copy = await self._reserve(tenant, account, wanted, received, limits)
        except QuotaReachedError as error:
            self._metrics.quota_refusals.labels(self._metrics.tenants.bounded(tenant), error.limit).inc()
            raise quota_reached(tenant, error, limits) from error
        except LedgerFullError as error:
            raise queue_full("", str(error)) from error
        except BaseException as error:
            self._settling.end(tenant, wanted, End.LEFT if resumed else End.ENDED)  # it may have been made
            if isinstance(error, REDIS_DOWN):
                log.warning("the ledger does not answer: %r", error)
                raise Unavailable("the ledger of quotas does not answer", reason="LEDGER_DOWN") from error
            raise
        account.note(copy)
        if received is not None:  # its prompt was computed, and these tokens were delivered, at an earlier router
            used_output = max(reservation.used_output, received)
            reservation = replace(reservation, used_input=reservation.input, used_output=used_output)
        grant = account.grants[reservation.id] = Grant(tenant, reservation, self._settle_grant, facts=facts)
        return grant

    async def _reserve(
        self, tenant: str, account: Account, wanted: Reservation, received: int | None, limits: TokenLimits
    ) -> tuple[Reservation, AccountCopy]:
        for _ in range(_LOOKS_LIMIT):
            try:
                return await self._ledger.reserve(tenant, wanted, received, limits, account.copy)
            except BehindError:
                await self._accounts.look(tenant, account)
        raise Unavailable("the ledger of quotas lost data again and again", reason="LEDGER_BEHIND")

    def _settle_grant(self, grant: Grant, end: End) -> asyncio.Future[None]:
        grants = self._accounts.use(grant.tenant).grants
        if grants.get(grant.id) is grant:  # else a later call has taken the reservation over
            del grants[grant.id]
        return self._settling.end(grant.tenant, grant.count_all(), end)

    async def follow(self) -> None:
        """Renew the grants and the copies every second, and follow plans and usage; never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._plans.follow())
            tasks.create_task(self._accounts.follow())
            if self._usage is not None:
                tasks.create_task(self._usage.follow())

    async def drain(self, timeout_s: float) -> None:
        """Settle what has ended, up to a timeout, and write the usage events that wait."""
        await self._settling.drain(timeout_s)
        if self._usage is not None:
            await self._usage.write()
