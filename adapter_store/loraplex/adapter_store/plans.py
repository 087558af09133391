"""The plans of tenants and API keys in the catalog, and the quotas of them that the store checks."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter

import msgspec

from loraplex.adapter_store.convert import check_key_id, list_page, refusals
from loraplex.adapter_store.database import Database
from loraplex.adapter_store.metrics import StoreMetrics
from loraplex.adapter_store.records import Row, Rows, marks
from loraplex.admin.v1 import plans_pb2 as pb
from loraplex.admin.v1 import plans_pb2_grpc
from loraplex.contracts.artifacts.names import SHARED, AdapterName, check_tenant
from loraplex.contracts.plans import (
    DEFAULT,
    FIELDS,
    PRICES,
    UNLIMITED,
    Plan,
    Price,
    Prices,
    check_prices,
    default_model,
    make_plan,
    names_of,
    plan_name,
)
from loraplex.runtime.rpc.errors import Aborted, Exhausted, InvalidField, NotFound
from loraplex.runtime.rpc.interceptors import Context
from loraplex.runtime.rpc.principal import caller, own_tenant

log = logging.getLogger(__name__)

# Number of plans in an answer to a router.
_CHANGES = 1_000
# Time in seconds after which a tenant or key with all its uploads is to call again.
_UPLOAD_RETRY_S = 1.0
# Queries for what a tenant has stored, by the limit of its plan.
_OF_TENANT = {
    "adapters": "SELECT count(*) FROM adapters WHERE tenant = ?",
    "adapter_bytes": "SELECT coalesce(sum(config_bytes + weights_bytes), 0) FROM revisions "
    "JOIN adapters ON adapters.id = adapter_id WHERE tenant = ?",
}
# Queries for what came with an API key. An adapter counts for the key of its oldest revision, which is the first one
# unless that had an end of its own.
_OF_KEY = {
    "adapters": "SELECT count(*) FROM revision_keys JOIN revisions USING (adapter_id, digest) WHERE key_id = ? "
    "AND NOT EXISTS (SELECT 1 FROM revisions AS older WHERE older.adapter_id = revisions.adapter_id "
    "AND older.number < revisions.number)",
    "adapter_bytes": "SELECT coalesce(sum(config_bytes + weights_bytes), 0) FROM revision_keys "
    "JOIN revisions USING (adapter_id, digest) WHERE key_id = ?",
}


@dataclass(frozen=True, slots=True)
class NamedPlan:
    """A plan as the store has it. `change` is the number of its last change; None as `plan`: it is deleted."""

    name: str
    plan: Plan | None
    change: int

    @property
    def etag(self) -> str:
        """Return the etag; a plan that is deleted and made again has another one."""
        return str(self.change)


class StoredPlans:
    """All plans, also in memory. Changes block: make them in a thread.

    Changes are numbered within an epoch: with another one, readers begin anew.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.reload()

    def reload(self) -> None:
        """Read the catalog's plans, which another store may have changed; readers begin anew."""
        # A plan that is set meanwhile would be forgotten.
        with self._database.lock, self._database.reading() as rows:
            self._plans = {row["name"]: _to_plan(row) for row in rows.execute("SELECT * FROM plans")}
            self.epoch = secrets.token_hex(8)

    def of(self, tenant: str) -> Plan:
        """Return a tenant's plan. The shared adapters are the operators': the default plan does not limit them."""
        for name in (plan_name(tenant), *(() if tenant == SHARED else (DEFAULT,))):
            if (stored := self._plans.get(name)) and stored.plan is not None:
                return stored.plan
        return UNLIMITED

    def of_key(self, key_id: str) -> Plan:
        """Return an API key's plan."""
        stored = self._plans.get(plan_name(key_id=key_id))
        return UNLIMITED if stored is None or stored.plan is None else stored.plan

    def default_model(self, tenant: str, key_id: str) -> str:
        """Return the base model of a call that names none: of the key, the tenant or everybody; empty: none."""
        everybody = self._plans.get(DEFAULT)
        plans = (self.of_key(key_id), self.of(tenant), everybody.plan if everybody else None)
        return default_model(*(plan or UNLIMITED for plan in plans))

    def allows_adapter(self, tenant: str, key_id: str, adapter: AdapterName) -> bool:
        """Tell whether the plans of a tenant and an API key allow calls to use an adapter."""
        names = names_of(adapter, tenant)
        return all(plan.allows("allowed_adapters", *names) for plan in (self.of(tenant), self.of_key(key_id)))

    def get(self, name: str) -> NamedPlan:
        """Return a plan. Raises NotFound."""
        stored = self._plans.get(name)
        if stored is None or stored.plan is None:
            raise NotFound("plan", name)
        return stored

    def page(self, after: str, limit: int, *, tenant: str = "") -> list[NamedPlan]:
        """Return plans in order of name, from the first after `after`; of a tenant, those that its calls must fit."""
        later = {name for name, one in self._plans.items() if name > after and one.plan is not None}
        if tenant:
            with self._database.reading() as rows:
                keys = rows.execute("SELECT key_id FROM api_keys WHERE tenant = ?", (tenant,)).fetchall()
            own = self._plans.get(plan_name(tenant))
            of_tenant = plan_name(tenant) if own and own.plan is not None else DEFAULT
            later &= {of_tenant, *(plan_name(key_id=row[0]) for row in keys)}
        return [self._plans[name] for name in sorted(later)[:limit]]

    def changes(self, after: int, limit: int) -> list[NamedPlan]:
        """Return plans in order of their last change, from the first after that number, with deleted ones."""
        later = [one for one in self._plans.values() if one.change > after]
        return sorted(later, key=attrgetter("change"))[:limit]

    def existing(self, names: Iterable[str]) -> list[str]:
        """Return the names among `names` that have a plan, deleted plans included until readers have heard of them."""
        return [name for name in names if name in self._plans]

    def purge(self, names: Iterable[str]) -> list[str]:
        """Forget plans, deleted ones too; returns their names. Readers begin anew."""
        names = list(names)
        with self._database.lock:
            with self._database.transaction() as rows:
                gone = [row[0] for row in rows.execute(f"SELECT name FROM plans WHERE name IN ({marks(names)})", names)]
                rows.executemany("DELETE FROM plans WHERE name = ?", [(name,) for name in gone])
            if gone:
                self._plans = {name: one for name, one in self._plans.items() if name not in gone}
                self.epoch = secrets.token_hex(8)
        return gone

    def set(self, name: str, plan: Plan | None, etag: str) -> NamedPlan:
        """Replace a plan or make it; None deletes it. Raises Aborted on a stale etag, NotFound for one to delete."""
        values = None if plan is None else msgspec.json.encode(plan).decode()
        with self._database.lock:
            with self._database.transaction() as rows:
                # Another store may just have changed it.
                found = rows.execute("SELECT * FROM plans WHERE name = ? AND plan IS NOT NULL", (name,)).fetchone()
                stored = None if found is None else _to_plan(found)
                if etag and (stored is None or stored.etag != etag):
                    raise Aborted(f"plan {name} has changed since etag {etag} was read; read it again")
                if plan is None and stored is None:
                    raise NotFound("plan", name)
                latest = rows.execute("SELECT coalesce(max(change), 0) FROM plans").fetchone()[0]
                written = NamedPlan(name, plan, latest + 1)
                row = (name, values, written.change)
                rows.execute(
                    "INSERT INTO plans (name, plan, change) VALUES (?, ?, ?) "
                    "ON CONFLICT (name) DO UPDATE SET plan = excluded.plan, change = excluded.change",
                    row,
                )
            self._plans = {**self._plans, name: written}
        return written


def _to_plan(row: Row) -> NamedPlan:
    # A store of a later version may have written fields that this one does not know.
    plan = None if row["plan"] is None else msgspec.json.decode(row["plan"], type=Plan)
    return NamedPlan(row["name"], plan, row["change"])


class PlanService(plans_pb2_grpc.PlanServiceServicer):
    """Serves loraplex.admin.v1.PlanService."""

    def __init__(self, plans: StoredPlans) -> None:
        self._plans = plans

    async def GetPlan(self, request: pb.GetPlanRequest, context: Context) -> pb.GetPlanResponse:
        """Return a plan."""
        return pb.GetPlanResponse(plan=_to_pb(self._plans.get(request.name)))

    async def SetPlan(self, request: pb.SetPlanRequest, context: Context) -> pb.SetPlanResponse:
        """Replace a plan, or make it."""
        name, plan = _named(request.plan.name), _from_pb(request.plan)
        stored = await asyncio.to_thread(self._plans.set, name, plan, request.plan.etag)
        log.info("%s: set the plan %s", caller().name, name)
        return pb.SetPlanResponse(plan=_to_pb(stored))

    async def ListPlans(self, request: pb.ListPlansRequest, context: Context) -> pb.ListPlansResponse:
        """Return a page of the plans that the caller sees, in order of name."""
        fetch = partial(self._plans.page, tenant=own_tenant())
        plans, token = await list_page(request, fetch, _to_pb, attrgetter("name"))
        return pb.ListPlansResponse(plans=plans, next_page_token=token)

    async def DeletePlan(self, request: pb.DeletePlanRequest, context: Context) -> pb.DeletePlanResponse:
        """Remove a plan."""
        await asyncio.to_thread(self._plans.set, request.name, None, request.etag)
        log.info("%s: deleted the plan %s", caller().name, request.name)
        return pb.DeletePlanResponse()

    async def ListPlanChanges(self, request: pb.ListPlanChangesRequest, context: Context) -> pb.ListPlanChangesResponse:
        """Return the plans that have changed since the last call."""
        epoch = self._plans.epoch  # a purge may begin another one meanwhile, of which this answer is not
        after = request.after if request.epoch == epoch else 0
        changes = self._plans.changes(after, _CHANGES + 1)
        plans = changes[:_CHANGES]
        return pb.ListPlanChangesResponse(
            epoch=epoch,
            latest=plans[-1].change if plans else after,
            more=len(changes) > _CHANGES,
            plans=[_to_pb(one) for one in plans if one.plan is not None],
            deleted=[one.name for one in plans if one.plan is None],
        )


def _named(name: str) -> str:
    """Return the name of a plan that may be set. Raises InvalidField."""
    kind, _, of = name.partition("/")
    if name not in {DEFAULT, PRICES} and kind not in {"tenants", "keys"}:
        raise InvalidField("plan.name", f"{name!r} is not default, tenants/TENANT, keys/KEYID or prices")
    if kind == "tenants":
        with refusals("plan.name"):
            check_tenant(of)
    if kind == "keys":
        check_key_id("plan.name", of)
    return name


def _from_pb(message: pb.Plan) -> Plan:
    limits = {field.name: value for field, value in message.ListFields() if field.name in FIELDS}
    if message.HasField("prices") != (message.name == PRICES) or (limits and message.name == PRICES):
        raise InvalidField("plan.prices", f"the plan {PRICES} has prices and nothing else, and others have none")
    plan = make_plan("plan", limits)
    if not message.HasField("prices"):
        return plan
    of = {name: Price(one.input, one.cached, one.output) for name, one in message.prices.of.items()}
    return replace(plan, prices=check_prices(Prices(message.prices.currency, of)))


def _to_pb(named: NamedPlan) -> pb.Plan:
    values = {field: value for field in FIELDS if (value := getattr(named.plan, field)) is not None}
    message = pb.Plan(name=named.name, etag=named.etag, **values)
    if named.plan is not None and (prices := named.plan.prices) is not None:
        of = {name: pb.Price(**asdict(price)) for name, price in prices.prices.items()}
        message.prices.CopyFrom(pb.Prices(currency=prices.currency, of=of))
    return message


class StoreQuotas:
    """Counts adapters, bytes and uploads at once of tenants and API keys by their `plans`; docs/guides/quotas.md.

    Raises Exhausted, which names the limit.
    """

    def __init__(self, plans: StoredPlans, metrics: StoreMetrics) -> None:
        self.plans = plans
        self._metrics = metrics
        self._uploads = Counter[str]()

    @contextmanager
    def uploading(self, tenant: str, key_id: str) -> Iterator[None]:
        """Count an upload of a tenant, and of the API key that it came with, while the context is open."""
        plans = self._plans_of(tenant, key_id)
        for name, plan in plans.items():
            most = plan.uploads_at_once
            if most is not None and self._uploads[name] >= most:
                retry_after_s = _UPLOAD_RETRY_S if most else None
                raise self._exceeded(name, "uploads_at_once", most, "wait for one of them", retry_after_s)
        self._uploads.update(plans.keys())
        try:
            yield
        finally:
            self._uploads.subtract(plans.keys())
            for name in plans:
                if not self._uploads[name]:
                    del self._uploads[name]

    def check_room(self, rows: Rows, tenant: str, key_id: str, *, new_adapter: bool, coming: int) -> None:
        """Check that a tenant, and a key of it, have room for a revision: 1 that is `coming`, or 0 more than is stored.

        The caller rolls back where one was stored just now.
        """
        for name, plan in self._plans_of(tenant, key_id).items():
            kind, _, owner = name.partition("/")
            for limit, counting in (_OF_KEY if kind == "keys" else _OF_TENANT).items():
                most = getattr(plan, limit)
                if most is None or (limit == "adapters" and not new_adapter):
                    continue
                if rows.execute(counting, (owner,)).fetchone()[0] + coming > most:
                    raise self._exceeded(name, limit, most)

    def _plans_of(self, tenant: str, key_id: str) -> dict[str, Plan]:
        """Return the plans that an upload must fit, by name: its tenant's, and that of the key that it came with."""
        plans = {plan_name(tenant): self.plans.of(tenant)}
        if key_id:
            plans[plan_name(key_id=key_id)] = self.plans.of_key(key_id)
        return plans

    def _exceeded(
        self, name: str, limit: str, most: int, hint: str = "delete adapters first", retry_after_s: float | None = None
    ) -> Exhausted:
        """Return the error of a limit of a plan, by the plan's name."""
        self._metrics.quota_refusals.labels(limit).inc()
        message = f"the plan of {name.partition('/')[2]} has {limit} {most}: {hint}"
        return Exhausted(f"{name}/quotas/{limit}", message, retry_after_s=retry_after_s, reason="QUOTA_EXCEEDED")
