"""Quotas of the store: adapters, bytes and uploads at once of each tenant and each API key; docs/quotas.md."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from adapter_store.metrics import StoreMetrics
from adapter_store.plans import StoredPlans
from artifacts.plans import Plan, plan_name
from rpc.errors import Exhausted

# Time in seconds after which a tenant or key with all its uploads is to call again.
_UPLOAD_RETRY_S = 1.0
# Queries for what a tenant has stored, by the limit of its plan.
_OF_TENANT = {
    "adapters": "SELECT count(*) FROM adapters WHERE tenant = ?",
    "adapter_bytes": "SELECT coalesce(sum(config_bytes + weights_bytes), 0) FROM revisions "
    "JOIN adapters ON adapters.id = adapter_id WHERE tenant = ?",
}
# Queries for what came with an API key. An adapter counts for the key of its first revision: revisions are deleted
# with their adapter alone, so that one stays the oldest.
_OF_KEY = {
    "adapters": "SELECT count(*) FROM revision_keys JOIN revisions USING (adapter_id, digest) WHERE key_id = ? "
    "AND NOT EXISTS (SELECT 1 FROM revisions AS older WHERE older.adapter_id = revisions.adapter_id "
    "AND older.number < revisions.number)",
    "adapter_bytes": "SELECT coalesce(sum(config_bytes + weights_bytes), 0) FROM revision_keys "
    "JOIN revisions USING (adapter_id, digest) WHERE key_id = ?",
}


class StoreQuotas:
    """The quotas of all tenants and API keys. Raises Exhausted, which names the limit."""

    def __init__(self, plans: StoredPlans, metrics: StoreMetrics) -> None:
        self._plans = plans
        self._metrics = metrics
        self._uploads = Counter[str]()

    @contextmanager
    def uploading(self, tenant: str, key_id: str) -> Iterator[None]:
        """Count an upload of a tenant, and of the API key that it came with, while the context is open."""
        plans = self._plans_of(tenant, key_id)
        for name, plan in plans.items():
            most = plan.uploads_at_once
            if most is not None and self._uploads[name] >= most:
                retry_s = _UPLOAD_RETRY_S if most else None
                raise self._exceeded(name, "uploads_at_once", most, "wait for one of them", retry_s)
        self._uploads.update(plans.keys())
        try:
            yield
        finally:
            self._uploads.subtract(plans.keys())
            for name in plans:
                if not self._uploads[name]:
                    del self._uploads[name]

    def bytes_of(self, tenant: str) -> int | None:
        """Return the maximum bytes of a tenant's adapters, which is also that of its deleted ones that are kept."""
        return self._plans.of(tenant).adapter_bytes

    def check_upload(self, rows: sqlite3.Connection, tenant: str, key_id: str, *, new_adapter: bool) -> None:
        """Check that a tenant and a key of it have room for another revision, before its bytes come."""
        self._check_room(rows, tenant, key_id, new_adapter, coming=1)

    def check_stored(self, rows: sqlite3.Connection, tenant: str, key_id: str, *, new_adapter: bool) -> None:
        """Check what both have with a revision that was inserted just now; the caller rolls back on an error."""
        self._check_room(rows, tenant, key_id, new_adapter, coming=0)

    def _check_room(self, rows: sqlite3.Connection, tenant: str, key_id: str, new_adapter: bool, coming: int) -> None:
        """Check that what each has, and at least `coming` adapters and bytes more, are within its plan."""
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
        plans = {plan_name(tenant): self._plans.of(tenant)}
        if key_id:
            plans[plan_name(key_id=key_id)] = self._plans.of_key(key_id)
        return plans

    def _exceeded(
        self, name: str, limit: str, most: int, hint: str = "delete adapters first", retry_s: float | None = None
    ) -> Exhausted:
        """Return the error of a limit of a plan, by the plan's name."""
        self._metrics.quota_refusals.labels(limit).inc()
        message = f"the plan of {name.partition('/')[2]} has {limit} {most}: {hint}"
        return Exhausted(f"{name}/quotas/{limit}", message, retry_after_s=retry_s, reason="QUOTA_EXCEEDED")
