"""Quotas of the store: how many adapters, bytes and uploads at once each tenant may have; docs/quotas.md."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from adapter_store.metrics import StoreMetrics
from adapter_store.plans import StoredPlans
from artifacts.plans import plan_name
from rpc.errors import Exhausted

# Time in seconds after which a tenant or key with all its uploads is to call again.
_UPLOAD_RETRY_S = 1.0


class StoreQuotas:
    """The quotas of all tenants. Raises Exhausted, which names the limit."""

    def __init__(self, plans: StoredPlans, metrics: StoreMetrics) -> None:
        self._plans = plans
        self._metrics = metrics
        self._uploads = Counter[str]()

    @contextmanager
    def uploading(self, tenant: str, key_id: str) -> Iterator[None]:
        """Count an upload of a tenant, and of the API key that it came with, while the context is open."""
        plans = {plan_name(tenant): self._plans.of(tenant)}
        if key_id:
            plans[plan_name(key_id=key_id)] = self._plans.of_key(key_id)
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

    def check_upload(self, rows: sqlite3.Connection, tenant: str, *, new_adapter: bool) -> None:
        """Check that a tenant has room for another revision, before its bytes come."""
        self._check_room(rows, tenant, new_adapter, coming=1)

    def check_stored(self, rows: sqlite3.Connection, tenant: str, *, new_adapter: bool) -> None:
        """Check what a tenant has with a revision that was inserted just now; the caller rolls back on an error."""
        self._check_room(rows, tenant, new_adapter, coming=0)

    def _check_room(self, rows: sqlite3.Connection, tenant: str, new_adapter: bool, coming: int) -> None:
        """Check that what a tenant has, and at least `coming` adapters and bytes more, are within its plan."""
        plan = self._plans.of(tenant)
        if new_adapter and plan.adapters is not None and _adapters(rows, tenant) + coming > plan.adapters:
            raise self._exceeded(plan_name(tenant), "adapters", plan.adapters)
        if plan.adapter_bytes is not None and _bytes(rows, tenant) + coming > plan.adapter_bytes:
            raise self._exceeded(plan_name(tenant), "adapter_bytes", plan.adapter_bytes)

    def _exceeded(
        self, name: str, limit: str, most: int, hint: str = "delete adapters first", retry_s: float | None = None
    ) -> Exhausted:
        """Return the error of a limit of a plan, by the plan's name."""
        self._metrics.quota_refusals.labels(limit).inc()
        message = f"the plan of {name.partition('/')[2]} has {limit} {most}: {hint}"
        return Exhausted(f"{name}/quotas/{limit}", message, retry_after_s=retry_s, reason="QUOTA_EXCEEDED")


def _adapters(rows: sqlite3.Connection, tenant: str) -> int:
    count: int = rows.execute("SELECT count(*) FROM adapters WHERE tenant = ?", (tenant,)).fetchone()[0]
    return count


def _bytes(rows: sqlite3.Connection, tenant: str) -> int:
    total: int = rows.execute(
        "SELECT coalesce(sum(config_bytes + weights_bytes), 0) FROM revisions "
        "JOIN adapters ON adapters.id = adapter_id WHERE tenant = ?",
        (tenant,),
    ).fetchone()[0]
    return total
