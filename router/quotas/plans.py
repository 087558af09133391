"""The plans of tenants and API keys, as a router applies them; see docs/guides/quotas.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from loraplex.admin.v1 import plans_pb2 as pb

from broker.keys import is_key_account, key_account
from broker.ledger import COUNTS
from broker.terms import NO_KEY, KeyTerms
from router.catalog.store_client import StoreChanges, StoreClient
from rpc.errors import Unavailable
from tenancy.plans import DEFAULT, FIELDS, QUEUE_SHARE, UNLIMITED, Plan, plan_name


@dataclass(frozen=True, slots=True)
class Owner:
    """A tenant, or an API key of it, with its plan."""

    tenant: str
    key_id: str
    plan: Plan

    @property
    def name(self) -> str:
        """Return the plan's name."""
        return plan_name(self.tenant, self.key_id)

    @property
    def account(self) -> str:
        """Return the name of the account in the ledger."""
        return key_account(self.key_id) if self.key_id else self.tenant


class Plans:
    """The plans of all tenants and keys: a copy of the store's; without a store nobody has a limit."""

    def __init__(self, store: StoreClient | None = None) -> None:
        self._plans: Mapping[str, Plan] = {}
        self._default = UNLIMITED
        # The limits by account, since they are asked for with every request.
        self._default_limits: Mapping[str, int] = {}
        self._limits = dict[str, Mapping[str, int]]()
        self._changes = None if store is None else StoreChanges("plans", store.plan_changes)
        self._missing = self._changes is not None

    def put(self, plans: Mapping[str, Plan]) -> None:
        """Replace all plans, which are given by name."""
        self._missing = False
        self._plans, self._default = dict(plans), plans.get(DEFAULT, UNLIMITED)
        self._default_limits = _limits(self._default)
        self._limits = {account: _limits(plans[name]) for name, account in _accounts(plans)}

    @property
    def accounts(self) -> Iterable[str]:
        """Return the accounts that have a plan of their own."""
        return self._limits

    @property
    def has_limits(self) -> bool:
        """Return whether the ledger keeps limits of anybody."""
        return bool(self._default_limits) or any(self._limits.values())

    def of(self, tenant: str) -> Plan:
        """Return a tenant's plan."""
        return self._plans.get(plan_name(tenant), self._default)

    def owners(self, tenant: str, key_id: str) -> list[Owner]:
        """Return whose plans a call must fit: its key's, which is asked first, and its tenant's.

        Raises Unavailable where the store has never told them.
        """
        if self._missing:
            raise Unavailable("the adapter store does not answer, which knows the plans", reason="PLANS_MISSING")
        owners = [Owner(tenant, "", self.of(tenant))]
        if key_id and (plan := self._plans.get(plan_name(key_id=key_id))):
            owners.insert(0, Owner(tenant, key_id, plan))
        return owners

    def limits_of(self, account: str) -> Mapping[str, int]:
        """Return the limits that the ledger keeps in an account, by their fields of a plan."""
        return self._limits.get(account, {} if is_key_account(account) else self._default_limits)

    def weight_of(self, tenant: str) -> float:
        """Return a tenant's weight."""
        return self.of(tenant).weight or 1.0

    def queue_share_of(self, tenant: str) -> float:
        """Return the share of a queue that a tenant's waiting jobs may take."""
        return self.of(tenant).queue_share or QUEUE_SHARE

    def key_terms(self, key_id: str) -> KeyTerms:
        """Return what the plan of an API key says of the queue."""
        plan = self._plans.get(plan_name(key_id=key_id)) if key_id else None
        if plan is None or (plan.weight is None and plan.queue_share is None):
            return NO_KEY
        return KeyTerms(key_id, plan.weight or 0.0, plan.queue_share or 1.0)

    async def look(self) -> None:
        """Ask the store what has changed; one that does not answer changes nothing."""
        if self._changes is not None and (found := await self._changes.look()) is not None:
            pages, anew = found
            plans = {} if anew else dict(self._plans)
            for page in pages:
                plans |= {one.name: _plan(one) for one in page.plans}
                for name in page.deleted:
                    plans.pop(name, None)
            if anew or plans != self._plans:
                self.put(plans)


def _plan(message: pb.Plan) -> Plan:
    """Return a plan of the store."""
    return Plan(**{field.name: value for field, value in message.ListFields() if field.name in FIELDS})


def _accounts(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Return the names of plans with the accounts that they are of."""
    for name in names:
        kind, _, of = name.partition("/")
        if of:
            yield name, key_account(of) if kind == "keys" else of


def _limits(plan: Plan) -> Mapping[str, int]:
    return {limit: most for limit in COUNTS if (most := getattr(plan, limit)) is not None}
