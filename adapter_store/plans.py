"""The plans of tenants and API keys: in the catalog, changed by operators, or in a file. Its calls block.

A store that is started with a file has the plans of the file alone; routers get either from the store.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path

from adapter_store.database import Database
from artifacts.names import SHARED
from artifacts.plans import DEFAULT, FIELDS, UNLIMITED, Plan, Plans, PlansFile, plan_name
from rpc.errors import Aborted, Mismatch, NotFound


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
    """All plans, kept in memory too. Changes are numbered within an epoch: with another one, readers begin anew."""

    def __init__(self, database: Database, path: Path | None = None) -> None:
        """Use the catalog, or the file if there is one. Raises PlansError."""
        self._database = database
        self._file = None if path is None else PlansFile(path)
        self._plans: dict[str, NamedPlan] = {}
        if self._file is not None:
            self._take_file(self._file.plans)
            return
        self.epoch = secrets.token_hex(8)
        with database.reading() as rows:
            self._plans = {row["name"]: _to_plan(row) for row in rows.execute("SELECT * FROM plans")}

    def look(self) -> list[str]:
        """Read the file again if it has changed; return the names of the plans that are others now."""
        if self._file is None or not self._file.look():
            return []
        self._take_file(self._file.plans)
        return self._file.changed

    def of(self, tenant: str) -> Plan:
        """Return a tenant's plan. The shared adapters are the operators': the default plan does not limit them."""
        for name in (plan_name(tenant), *(() if tenant == SHARED else (DEFAULT,))):
            if (found := self._plans.get(name)) and found.plan is not None:
                return found.plan
        return UNLIMITED

    def of_key(self, key_id: str) -> Plan:
        """Return an API key's plan."""
        found = self._plans.get(plan_name(key_id=key_id))
        return UNLIMITED if found is None or found.plan is None else found.plan

    def get(self, name: str) -> NamedPlan:
        """Return a plan. Raises NotFound."""
        found = self._plans.get(name)
        if found is None or found.plan is None:
            raise NotFound("plan", name)
        return found

    def page(self, after: str, limit: int) -> list[NamedPlan]:
        """Return plans in order of name, from the first after `after`."""
        later = (name for name, one in self._plans.items() if name > after and one.plan is not None)
        return [self._plans[name] for name in sorted(later)[:limit]]

    def changes(self, after: int, limit: int) -> list[NamedPlan]:
        """Return plans in order of their last change, from the first after that number, with deleted ones."""
        later = [one for one in self._plans.values() if one.change > after]
        return sorted(later, key=attrgetter("change"))[:limit]

    def set(self, name: str, plan: Plan, etag: str) -> NamedPlan:
        """Replace a plan or make it. Raises Aborted on a stale etag, and Mismatch where plans are in a file."""
        return self._write(name, plan, etag)

    def delete(self, name: str, etag: str) -> None:
        """Remove a plan. Raises as `set` does, and NotFound."""
        self._write(name, None, etag)

    def kept(self, names: Iterable[str]) -> list[str]:
        """Return those of the plans that are there, deleted ones too, which readers have yet to hear of."""
        return [name for name in names if name in self._plans]

    def purge(self, names: Iterable[str]) -> list[str]:
        """Forget plans, deleted ones too; returns their names. Readers begin anew. A file's plans stay."""
        if self._file is not None:
            return []
        with self._database.lock:
            gone = self.kept(names)
            with self._database.transaction() as rows:
                rows.executemany("DELETE FROM plans WHERE name = ?", [(name,) for name in gone])
            if gone:
                self._plans = {name: one for name, one in self._plans.items() if name not in gone}
                self.epoch = secrets.token_hex(8)
        return gone

    def _take_file(self, plans: Plans) -> None:
        self._plans = {name: NamedPlan(name, plan, at) for at, (name, plan) in enumerate(plans.items(), start=1)}
        self.epoch = secrets.token_hex(8)

    def _write(self, name: str, plan: Plan | None, etag: str) -> NamedPlan:
        if self._file is not None:
            raise Mismatch("plans", "they are in the file of the store's --plans; change it", reason="PLANS_IN_FILE")
        values = None if plan is None else json.dumps({k: v for k, v in asdict(plan).items() if v is not None})
        with self._database.lock:
            found = self._plans.get(name)
            if found is not None and found.plan is None:
                found = None
            if etag and (found is None or found.etag != etag):
                raise Aborted(f"plan {name} has changed since etag {etag} was read; read it again")
            if plan is None and found is None:
                raise NotFound("plan", name)
            written = NamedPlan(name, plan, max((one.change for one in self._plans.values()), default=0) + 1)
            with self._database.transaction() as rows:
                row = (name, values, written.change)
                rows.execute("INSERT OR REPLACE INTO plans (name, plan, change) VALUES (?, ?, ?)", row)
            self._plans = {**self._plans, name: written}
        return written


def _to_plan(row: sqlite3.Row) -> NamedPlan:
    if row["plan"] is None:
        return NamedPlan(row["name"], None, row["change"])
    # A store of a later version may have written fields that this one does not know.
    values = {field: value for field, value in json.loads(row["plan"]).items() if field in FIELDS}
    return NamedPlan(row["name"], Plan(**values), row["change"])
