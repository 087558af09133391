"""A router's copies of accounts; looks every second renew them, and the reservations of calls that run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from broker.connection import REDIS_DOWN
from broker.keys import is_key_account
from broker.ledger import Ledger
from broker.ledger_records import AccountCopy
from router.metrics import RouterMetrics
from router.quotas.grant import Grant
from router.quotas.plans import Plans
from router.quotas.usage import UsageLog
from rpc.errors import Aborted

log = logging.getLogger(__name__)

# Interval in seconds between looks at the accounts that this router uses.
LOOK_S = 1.0
# Time in seconds after a tenant's last request for which its account is looked at.
ACTIVE_S = 60.0
# Maximum copies of accounts that are kept: those of idle tenants may be needed when Redis loses its data.
COPIES_LIMIT = 20_000
# Maximum accounts that are looked at, at once.
LOOKS_AT_ONCE = 64
# Maximum tenants of other routers that each look includes where usage events are written.
DRAWN_PER_LOOK = 32
# No tenant: an account that tells whether Redis has lost its data, whoever is idle.
CANARY = "~"


@dataclass(slots=True)
class Account:
    """A copy of an account, and the reservations in it of calls at this router."""

    copy: AccountCopy = field(default_factory=AccountCopy)
    used_at: float = 0.0
    grants: dict[str, Grant] = field(default_factory=dict)
    looking: asyncio.Task[None] | None = None

    def note(self, copy: AccountCopy) -> None:
        """Keep the later state; the epoch of an account is the time at which it was made."""
        if (copy.epoch, copy.version) > (self.copy.epoch, self.copy.version):
            self.copy = copy


class Accounts:
    """The copies of one router; with a usage log it also takes over charges that other routers left unreported."""

    def __init__(self, ledger: Ledger, plans: Plans, metrics: RouterMetrics, usage: UsageLog | None) -> None:
        self._ledger = ledger
        self._plans = plans
        self._metrics = metrics
        self._usage = usage
        self._accounts: dict[str, Account] = {CANARY: Account()}
        # Tenants that Redis lists as those whose charges are reported.
        self._noted: set[str] = set()
        # Number of accounts that took over a copy of this router.
        self._refills = 0

    def use(self, name: str) -> Account:
        """Return an account in which a call is reserved or ended now."""
        account = self._accounts.pop(name, None) or Account()
        account.used_at = time.monotonic()
        self._accounts[name] = account  # the last one used is last
        if len(self._accounts) > COPIES_LIMIT:
            idle = next((other for other, one in self._accounts.items() if not one.grants and other != CANARY), None)
            if idle is not None and idle != name:
                del self._accounts[idle]
        return account

    def find(self, name: str) -> Account:
        """Return an account, an empty one where no copy is kept."""
        return self._accounts.get(name) or Account()

    def forget_tenant(self, tenant: str) -> None:
        """Let a tenant be new again to the list of those whose charges are reported; the copy of its account stays."""
        self._noted.discard(tenant)
        account = self.find(tenant)
        if not account.grants:
            account.used_at = 0.0

    async def follow(self) -> None:
        """Look at the accounts that are used, as long as any has limits or is reported; never returns."""
        listed: set[str] = set()
        while True:
            if self._plans.has_limits or self._usage is not None:
                new = [account for account in self._plans.accounts if account not in listed]
                listed.update(new)
                await self.look_at_used([*new, *await self.reported_tenants()])
            await asyncio.sleep(LOOK_S)

    async def look_at_used(self, new: Sequence[str]) -> None:
        """Look at `new` accounts and at those with calls; at all of them if Redis has lost data."""
        refills, since = self._refills, time.monotonic() - ACTIVE_S
        for name in new:  # so that an account is not new when its first request comes
            self._accounts.setdefault(name, Account())
        active = [name for name, one in self._accounts.items() if one.grants or one.used_at > since]
        await self._look_at({CANARY: None, **dict.fromkeys([*new, *active])})
        if self._refills > refills:  # Redis has lost data: perhaps those of idle tenants too
            await self._look_at(self._accounts)

    async def reported_tenants(self) -> list[str]:
        """Return some tenants to look at, whoever used them, so that no charge of a dead router stays unreported."""
        if self._usage is None:
            return []
        try:
            for tenant in [name for name, one in self._accounts.items() if one.used_at and self._is_new(name)]:
                await self.note_tenant(tenant)
            return await self._ledger.some_tenants(DRAWN_PER_LOOK)
        except REDIS_DOWN:
            return []

    async def note_tenant(self, tenant: str) -> None:
        """Let Redis list a tenant as one whose charges are reported, if they are."""
        if self._usage is not None and self._is_new(tenant):
            await self._ledger.add_tenant(tenant)
            self._noted.add(tenant)

    def _is_new(self, account: str) -> bool:
        return account not in self._noted and not is_key_account(account)

    async def _look_at(self, accounts: Iterable[str]) -> None:
        names = list(accounts)
        for at in range(0, len(names), LOOKS_AT_ONCE):
            found = [(name, self._accounts[name]) for name in names[at : at + LOOKS_AT_ONCE] if name in self._accounts]
            await asyncio.gather(*(self.look(name, account) for name, account in found))

    async def look(self, name: str, account: Account) -> None:
        """Look at an account; calls at the same time share a look."""
        if account.looking is None:
            account.looking = asyncio.get_running_loop().create_task(self._look_once(name, account))
        await asyncio.shield(account.looking)

    async def _look_once(self, name: str, account: Account) -> None:
        try:
            grants = dict(account.grants)
            look = await self._ledger.look(name, account.copy, [grant.count(name) for grant in grants.values()])
        except REDIS_DOWN:
            return
        finally:
            account.looking = None
        account.note(look.account)
        for moved in look.moved:
            if (grant := grants.get(moved)) is not None and account.grants.get(moved) is grant:
                grant.end_calls(Aborted("another router goes on with the request", reason="TAKEN_OVER"))
        if self._usage is not None:
            for charge in look.charges:
                self._usage.add(name, charge)
        self._metrics.reservations_expired.inc(look.expired)
        if look.refilled:
            self._refills += 1
            self._noted.clear()
            self._metrics.ledger_refills.inc()
            if name != CANARY:
                log.warning("Redis lost data of the account %s; this router's copy was taken over", name)
