"""The plans of tenants and API keys: a router's copy of those of the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from loraplex.admin.v1 import plans_pb2
from loraplex.contracts.artifacts.names import parse_revision_name
from loraplex.contracts.broker.keys import is_key_account, key_account
from loraplex.contracts.broker.ledger import COUNTS
from loraplex.contracts.broker.messages import AdapterRef, Job
from loraplex.contracts.broker.terms import NO_KEY, KeyTerms
from loraplex.contracts.plans import (
    BUDGET_FIELDS,
    DEFAULT,
    FIELDS,
    FREE,
    PRICES,
    QUEUE_SHARE,
    UNLIMITED,
    Plan,
    Price,
    Prices,
    default_model,
    names_of,
    nano,
    plan_name,
    plan_of,
)
from loraplex.router.catalog.store_client import StoreChanges, StoreClient
from loraplex.runtime.rpc.errors import PermissionDenied, Unavailable
from loraplex.runtime.rpc.principal import known_caller


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
    def holder(self) -> str:
        """Return whose it is, in words."""
        return f"API key {self.key_id}" if self.key_id else self.tenant

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
            raise Unavailable("plans unknown: the adapter store does not answer", reason="PLANS_MISSING")
        owners = [Owner(tenant, "", self.of(tenant))]
        if key_id and (plan := self._plans.get(plan_name(key_id=key_id))):
            owners.insert(0, Owner(tenant, key_id, plan))
        return owners

    def default_model(self) -> str:
        """Return the base model that the current call means where it names none; empty: no plan says one.

        Raises as `owners` does.
        """
        return default_model(*(owner.plan for owner in self._caller()), self._default)

    def _caller(self) -> list[Owner]:
        """Return whose plans the current call must fit; nobody's where it concerns no tenant."""
        principal = known_caller()
        return self.owners(principal.tenant, principal.key_id) if principal and principal.tenant else []

    def refusal(self, model: str, adapter: AdapterRef | None = None) -> PermissionDenied | None:
        """Return the error of the current call where its plans do not allow the model or the adapter; None: they do."""
        refs = [] if adapter is None else [part.adapter for part in adapter.parts] or [adapter]
        for owner in self._caller():
            named = refs if owner.plan.allowed_adapters is not None else []
            adapters = [parse_revision_name(ref.revision).adapter_name for ref in named]
            used = [*(("allowed_adapters", names_of(name, owner.tenant)) for name in adapters)]
            used.append(("allowed_models", (model,)))
            for field, names in used:
                if not owner.plan.allows(field, *names):
                    allowed = ", ".join(getattr(owner.plan, field))
                    message = f"{names[0]} is not among {field} of the plan of {owner.holder}: {allowed}"
                    return PermissionDenied(message, "NOT_IN_PLAN")
        return None

    def limits_of(self, account: str) -> Mapping[str, int]:
        """Return the limits that the ledger keeps in an account, by their fields of a plan."""
        return self._limits.get(account, {} if is_key_account(account) else self._default_limits)

    def price_of(self, model: str, revision: str) -> tuple[str, Price]:
        """Return the currency, and the price of a call's tokens; an empty one where the store has no prices."""
        prices = self._plans.get(PRICES, UNLIMITED).prices
        return (prices.currency, prices.of(model, revision)) if prices else ("", FREE)

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
        if self._changes is not None and (news := await self._changes.look()) is not None:
            pages, anew = news
            plans = {} if anew else dict(self._plans)
            for page in pages:
                plans |= {one.name: _plan(one) for one in page.plans}
                for name in page.deleted:
                    plans.pop(name, None)
            if anew or plans != self._plans:
                self.put(plans)


def _plan(message: plans_pb2.Plan) -> Plan:
    """Return a plan of the store."""
    plan = plan_of({field.name: value for field, value in message.ListFields() if field.name in FIELDS})
    if not message.HasField("prices"):
        return plan
    prices = {name: Price(one.input, one.cached, one.output) for name, one in message.prices.of.items()}
    return replace(plan, prices=Prices(message.prices.currency, prices))


def _accounts(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Return the names of plans with the accounts that they are of."""
    for name in names:
        kind, _, of = name.partition("/")
        if of:
            yield name, key_account(of) if kind == "keys" else of


def _limits(plan: Plan) -> Mapping[str, int]:
    limits = {limit: most for limit in COUNTS if (most := getattr(plan, limit)) is not None}
    return {limit: nano(most) if limit in BUDGET_FIELDS else most for limit, most in limits.items()}


# Number of open-ended answers, and fewest tokens of one, that a limit of tokens has room for at once.
_OPEN_ENDED, _OPEN_ENDED_TOKENS = 16, 128


def bounded(job: Job, plans: Iterable[Plan], price: Price = FREE) -> Job:
    """Return a job whose answers fit the plans' limits, and leave room for others like it where these are large."""
    most, prompt = job.stopping.max_tokens, len(job.prompt_ids)
    for plan in plans:
        limits = [(plan.output_tokens_per_minute, 0), (plan.tokens_per_day, prompt), (plan.tokens_per_month, prompt)]
        if plan.budget_per_month is not None and price.output:  # in tokens of an answer
            limits.append((nano(plan.budget_per_month) // price.output, -(-prompt * price.input // price.output)))
        for limit, used in limits:
            if limit is not None:
                whole = (limit - used) // job.n
                most = min(most, max(min(_OPEN_ENDED_TOKENS, whole), limit // _OPEN_ENDED // job.n))
        if plan.context_tokens is not None:
            most = min(most, plan.context_tokens - prompt)
    most = max(1, most, min(job.stopping.min_tokens, job.stopping.max_tokens))
    return replace(job, stopping=replace(job.stopping, max_tokens=most))
