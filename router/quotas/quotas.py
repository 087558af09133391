"""Reserves tokens for the calls of one router.

admitted ──reserve──▶ Grant ──settle──▶ the account keeps what was used
                        └── looks every second renew it, with what is used so far
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import replace
from typing import Any

from broker.connection import REDIS_DOWN
from broker.keys import is_key_account
from broker.ledger import BehindError, Ledger, LedgerFullError, QuotaReachedError, SendReserve
from broker.ledger_records import AccountCopy, Reservation, TokenLimits
from broker.messages import Job
from router.dispatch.refusals import queue_full
from router.metrics import RouterMetrics
from router.quotas.accounts import Account, Accounts
from router.quotas.grant import End, Grant
from router.quotas.plans import Owner, Plans
from router.quotas.refusals import plan_exceeded, quota_reached
from router.quotas.settling import RETRY_S, Settling
from router.quotas.usage import NO_FACTS, Facts, UsageLog, calling_key
from rpc.errors import Unavailable

log = logging.getLogger(__name__)

# Maximum looks that one reservation waits for.
_LOOKS_LIMIT = 3


class Quotas:
    """The quotas of tenants and keys, as one router keeps them."""

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
        """Return a new job within the plans of its tenant and the calling key. Raises Exhausted where it can't be."""
        for owner in self._plans.owners(job.tenant, calling_key()):
            for name, size, most in (
                ("context_tokens", job.tokens, owner.plan.context_tokens),
                ("answers_per_request", job.n, owner.plan.answers_per_request),
            ):
                if most is not None and size > most:
                    self._count_refusal(owner, name)
                    raise plan_exceeded(owner.name, name, most, f"the request has {size}")
            ceiling = owner.plan.priority_ceiling
            job = job if ceiling is None or job.priority <= ceiling else replace(job, priority=ceiling)
        return job

    def _count_refusal(self, owner: Owner, limit: str) -> None:
        label = f"key_{limit}" if is_key_account(owner.account) else limit
        self._metrics.quota_refusals.labels(self._metrics.tenants.bounded(owner.tenant), label).inc()

    async def reserve(
        self,
        tenant: str,
        given: int,
        made: int,
        *,
        facts: Facts = NO_FACTS,
        resumed: tuple[str, int] | None = None,
        send: SendReserve | None = None,
    ) -> Grant | None:
        """Reserve tokens of prompts and answers for a call; None for a call without limits.

        `facts`: those known by now, for the usage event. `resumed`: the reservation's id and the tokens that the client
        has. `send` sends the call for the tenant's account; see Ledger.reserve. Raises Exhausted or Unavailable.
        """
        reservation_id, received = resumed or ("", None)
        wanted = Reservation(reservation_id or secrets.token_hex(8), self._router, input=given, output=made)
        known = None if self._usage is None else facts.with_key(calling_key())
        grant = Grant({}, self._settle_grant, facts=known)
        try:
            for owner in self._plans.owners(tenant, calling_key()):
                limits, subject = self._plans.limits_of(owner.account), ""
                if known is not None and owner.account == tenant:
                    limits, subject = limits or TokenLimits(), known.encode()  # the ledger is where usage is counted
                if limits is not None:
                    sends = send if owner.account == tenant else None  # the tenant's account is the last one
                    await self._hold(owner, grant, replace(wanted, subject=subject), received, limits, sends)
        except BaseException:
            if grant.reservations:  # what the key had room for, its tenant had not
                grant.settle(End.LEFT if resumed else End.ENDED)
            raise
        return grant if grant.reservations else None

    async def _hold(
        self,
        owner: Owner,
        grant: Grant,
        wanted: Reservation,
        received: int | None,
        limits: TokenLimits,
        send: SendReserve | None,
    ) -> None:
        """Reserve what is wanted in the account of a tenant or key."""
        account = self._accounts.use(owner.account)
        try:
            await self._accounts.note_tenant(owner.account)
            with self._metrics.reserve_time.time():
                reservation, copy = await self._reserve(owner.account, account, wanted, received, limits, send)
        except QuotaReachedError as error:
            self._count_refusal(owner, error.limit)
            raise quota_reached(owner.name, error, limits) from error
        except LedgerFullError as error:
            raise queue_full("", str(error)) from error
        except BaseException as error:
            # The ledger may hold the reservation though its answer was lost or not awaited.
            self._settling.end(owner.account, wanted, End.ENDED if received is None else End.LEFT)
            if isinstance(error, REDIS_DOWN):
                log.warning("the ledger does not answer: %r", error)
                raise Unavailable("the ledger of quotas does not answer", reason="LEDGER_DOWN") from error
            raise
        account.note(copy)
        if received is not None:  # its prompt was computed, and these tokens were delivered, at an earlier router
            used_output = max(reservation.used_output, received)
            reservation = replace(reservation, used_input=reservation.input, used_output=used_output)
        grant.reservations[owner.account] = reservation
        account.grants[reservation.id] = grant

    async def _reserve(
        self,
        name: str,
        account: Account,
        wanted: Reservation,
        received: int | None,
        limits: TokenLimits,
        send: SendReserve | None,
    ) -> tuple[Reservation, AccountCopy]:
        for _ in range(_LOOKS_LIMIT):
            try:
                return await self._ledger.reserve(name, wanted, received, limits, account.copy, send)
            except BehindError:
                await self._accounts.look(name, account)
        raise Unavailable("the ledger of quotas lost data again and again", reason="LEDGER_BEHIND")

    def _settle_grant(self, grant: Grant, end: End) -> asyncio.Future[Any]:
        ended: list[asyncio.Future[None]] = []
        for name, reservation in grant.count_all().items():
            grants = self._accounts.use(name).grants
            if grants.get(grant.id) is grant:  # else a later call has taken the reservation over
                del grants[grant.id]
            ended.append(self._settling.end(name, reservation, end))
        return asyncio.gather(*ended)

    async def forget_tenant(self, tenant: str) -> None:
        """Write the usage events that wait, and take a tenant off the list of those whose charges are reported."""
        if self._usage is not None:
            await self._usage.write()
        self._accounts.forget_tenant(tenant)

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
            await self._usage.close(timeout_s)
