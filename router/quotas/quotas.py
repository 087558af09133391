"""Reserves tokens for the calls of one router, and keeps its copies of the tenants' accounts.

admitted ──reserve──▶ Grant ──settle──▶ the account keeps what was used
                        └── looks every second renew it, with what is used so far
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from broker.connection import REDIS_DOWN
from broker.ledger import (
    AccountCopy,
    BehindError,
    Charge,
    Ledger,
    LedgerFullError,
    QuotaReachedError,
    Reservation,
    TokenLimits,
)
from broker.messages import Job
from router.dispatch.refusals import queue_full
from router.metrics import RouterMetrics
from router.quotas.grant import End, Grant
from router.quotas.plans import Plans
from router.quotas.refusals import plan_exceeded, quota_reached
from router.quotas.usage import Facts, UsageLog, calling_key
from rpc.errors import Unavailable

log = logging.getLogger(__name__)

# Interval in seconds between looks at the accounts that this router uses.
LOOK_S = 1.0
# Time in seconds after a tenant's last request for which its account is looked at.
ACTIVE_S = 60.0
# Maximum copies of accounts that are kept: those of idle tenants may be needed when Redis loses its data.
COPIES_LIMIT = 20_000
# Maximum accounts that are looked at, or reservations that are settled, at once.
AT_ONCE = 64
# Maximum tenants of other routers that each look includes where usage events are written.
DRAWN_PER_LOOK = 32
# Interval in seconds between tries to settle while Redis does not answer.
RETRY_S = 0.25
# Maximum looks that one reservation waits for.
_LOOKS_LIMIT = 3
# No tenant: an account that tells whether Redis has lost its data, whoever is idle.
CANARY = "~"


@dataclass(slots=True)
class _Account:
    copy: AccountCopy = field(default_factory=AccountCopy)
    used_at: float = 0.0
    grants: dict[str, Grant] = field(default_factory=dict)
    looking: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class _Ended:
    tenant: str
    reservation: Reservation
    end: End
    known: asyncio.Future[None]


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
        self.plans = plans
        self._ledger = ledger
        self._metrics = metrics or RouterMetrics()
        self._usage = usage
        self._retry_s = retry_s
        self._router = secrets.token_hex(6)
        self._accounts: dict[str, _Account] = {CANARY: _Account()}
        self._ended: deque[_Ended] = deque()
        self._settling: asyncio.Task[None] | None = None
        # Tenants that Redis lists as those whose charges are reported.
        self._noted: set[str] = set()
        # Number of accounts that took over a copy of this router.
        self._refills = 0

    def apply_plan(self, job: Job) -> Job:
        """Return a new job within its tenant's plan. Raises Exhausted where it can't be."""
        plan = self.plans.of(job.tenant)
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
        limits = self.plans.limits_of(tenant)
        if limits is None:
            if self._usage is None:
                return None
            limits = TokenLimits()  # the ledger is where usage is counted
        facts = None if self._usage is None else Facts(key=calling_key())
        reservation_id, received = resumed or ("", None)
        subject = facts.encode() if facts else ""
        wanted = Reservation(reservation_id or secrets.token_hex(8), self._router, subject, input=given, output=made)
        account = self._account(tenant)
        try:
            await self._note_tenant(tenant)
            with self._metrics.reserve_time.time():
                reservation, copy = await self._reserve(tenant, account, wanted, received, limits)
        except QuotaReachedError as error:
            self._metrics.quota_refusals.labels(self._metrics.tenants.bounded(tenant), error.limit).inc()
            raise quota_reached(tenant, error, limits) from error
        except LedgerFullError as error:
            raise queue_full("", str(error)) from error
        except BaseException as error:
            self._end(tenant, wanted, End.LEFT if resumed else End.ENDED)  # it may have been made
            if isinstance(error, REDIS_DOWN):
                log.warning("the ledger does not answer: %r", error)
                raise Unavailable("the ledger of quotas does not answer", reason="LEDGER_DOWN") from error
            raise
        _note(account, copy)
        if received is not None:  # its prompt was computed, and these tokens were delivered, at an earlier router
            used_output = max(reservation.used_output, received)
            reservation = replace(reservation, used_input=reservation.input, used_output=used_output)
        grant = account.grants[reservation.id] = Grant(tenant, reservation, self._settle_grant, facts=facts)
        return grant

    async def _reserve(
        self, tenant: str, account: _Account, wanted: Reservation, received: int | None, limits: TokenLimits
    ) -> tuple[Reservation, AccountCopy]:
        for _ in range(_LOOKS_LIMIT):
            try:
                return await self._ledger.reserve(tenant, wanted, received, limits, account.copy)
            except BehindError:
                await self._look(tenant, account)
        raise Unavailable("the ledger of quotas lost data again and again", reason="LEDGER_BEHIND")

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.pop(tenant, None) or _Account()
        account.used_at = time.monotonic()
        self._accounts[tenant] = account  # the last one used is last
        if len(self._accounts) > COPIES_LIMIT:
            idle = next((name for name, one in self._accounts.items() if not one.grants and name != CANARY), None)
            if idle is not None and idle != tenant:
                del self._accounts[idle]
        return account

    # Ends

    def _settle_grant(self, grant: Grant, end: End) -> asyncio.Future[None]:
        grants = self._account(grant.tenant).grants
        if grants.get(grant.id) is grant:  # else a later call has taken the reservation over
            del grants[grant.id]
        return self._end(grant.tenant, grant.count_all(), end)

    def _end(self, tenant: str, reservation: Reservation, end: End) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        ended = _Ended(tenant, reservation, end, loop.create_future())
        self._ended.append(ended)
        if self._settling is None:
            self._settling = loop.create_task(self._settle_ended())
        return ended.known

    async def _settle_ended(self) -> None:
        """Settle what has ended, in its order, again and again while Redis does not answer."""
        try:
            while self._ended:
                some = [self._ended.popleft() for _ in range(min(AT_ONCE, len(self._ended)))]
                await asyncio.gather(*map(self._settle, some))
                if left := [one for one in some if not one.known.done()]:
                    self._ended.extendleft(reversed(left))
                    await asyncio.sleep(self._retry_s)
        finally:
            self._settling = None

    async def _settle(self, ended: _Ended) -> None:
        """Tell the ledger of an end; `known` is done afterwards unless it is to be told again."""
        account, reservation = self._accounts.get(ended.tenant) or _Account(), ended.reservation
        try:
            copy, charge = await self._ledger.settle(ended.tenant, reservation, ended.end.value, account.copy)
            _note(account, copy)
            self._report(ended.tenant, charge)
        except BehindError:
            await self._look(ended.tenant, account)
            return
        except REDIS_DOWN:
            return
        except Exception:
            log.exception("settling reservation %s failed", reservation.id)
        if not ended.known.done():
            ended.known.set_result(None)

    def _report(self, tenant: str, charge: Charge | None) -> None:
        if charge is not None and self._usage is not None:
            self._usage.add(tenant, charge)

    async def drain(self, timeout_s: float) -> None:
        """Settle what has ended, up to a timeout; what is not settled by then expires in the ledger."""
        if (settling := self._settling) is not None:
            await asyncio.wait({settling}, timeout=timeout_s)
            settling.cancel()
        if self._usage is not None:
            await self._usage.write()

    # Looks

    async def follow(self) -> None:
        """Renew the grants and the copies every second, and follow plans and usage; never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.plans.follow())
            tasks.create_task(self._follow_all_accounts())
            if self._usage is not None:
                tasks.create_task(self._usage.follow())

    async def _follow_all_accounts(self) -> None:
        listed: set[str] = set()
        while True:
            if self.plans.has_limits or self._usage is not None:
                new = [tenant for tenant in self.plans.tenants if tenant not in listed]
                listed.update(new)
                await self._follow_accounts([*new, *await self._reported_tenants()])
            await asyncio.sleep(LOOK_S)

    async def _follow_accounts(self, new: Sequence[str]) -> None:
        refills, since = self._refills, time.monotonic() - ACTIVE_S
        for tenant in new:  # so that an account is not new when its first request comes
            self._accounts.setdefault(tenant, _Account())
        active = [name for name, one in self._accounts.items() if one.grants or one.used_at > since]
        await self._look_at({CANARY: None, **dict.fromkeys([*new, *active])})
        if self._refills > refills:  # Redis has lost data: perhaps those of idle tenants too
            await self._look_at(self._accounts)

    async def _reported_tenants(self) -> list[str]:
        """Return some tenants to look at, whoever used them, so that no charge of a dead router stays unreported."""
        if self._usage is None:
            return []
        try:
            for tenant in [name for name, one in self._accounts.items() if one.used_at and name not in self._noted]:
                await self._note_tenant(tenant)
            return await self._ledger.some_tenants(DRAWN_PER_LOOK)
        except REDIS_DOWN:
            return []

    async def _note_tenant(self, tenant: str) -> None:
        if self._usage is not None and tenant not in self._noted:
            await self._ledger.add_tenant(tenant)
            self._noted.add(tenant)

    async def _look_at(self, tenants: Iterable[str]) -> None:
        names = list(tenants)
        for at in range(0, len(names), AT_ONCE):
            found = [(name, self._accounts[name]) for name in names[at : at + AT_ONCE] if name in self._accounts]
            await asyncio.gather(*(self._look(name, account) for name, account in found))

    async def _look(self, tenant: str, account: _Account) -> None:
        """Look at an account; calls at the same time share a look."""
        if account.looking is None:
            account.looking = asyncio.get_running_loop().create_task(self._look_once(tenant, account))
        await asyncio.shield(account.looking)

    async def _look_once(self, tenant: str, account: _Account) -> None:
        try:
            renewed: Sequence[tuple[Reservation, bool]] = [(grant.count(), True) for grant in account.grants.values()]
            look = await self._ledger.look(tenant, account.copy, renewed)
        except REDIS_DOWN:
            return
        finally:
            account.looking = None
        _note(account, look.account)
        for charge in look.charges:
            self._report(tenant, charge)
        self._metrics.reservations_expired.inc(look.expired)
        if look.refilled:
            self._refills += 1
            self._noted.clear()
            self._metrics.ledger_refills.inc()
            if tenant != CANARY:
                log.warning("Redis lost data of the account of tenant %s; this router's copy was taken over", tenant)


def _note(account: _Account, copy: AccountCopy) -> None:
    """Keep the later state; the epoch of an account is the time at which it was made."""
    if (copy.epoch, copy.version) > (account.copy.epoch, account.copy.version):
        account.copy = copy
