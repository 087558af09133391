"""Metrics of the adapter store. docs/reference/metrics.md explains them; a test compares it with this file."""

from __future__ import annotations

from loraplex.runtime.telemetry.metrics import Meters
from loraplex.runtime.tenancy.audit_log import AuditCounts


class StoreMetrics(Meters):
    """Metrics of one store process."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.rpc_calls()
        self.refused = self.refused_callers()
        self.audit = AuditCounts(self)
        self.disk_usage = self.gauge("store_disk_usage_perc", "Share of the store's disk in use.")
        self.catalog_age = self.gauge(
            "store_catalog_age_seconds", "Time since this store surely heard of all changes in the database."
        )
        self.bucket_failures = self.counter("store_bucket_failures", "Requests that the bucket did not carry out.")
        self.sent = self.counter("store_sent_bytes", "Bytes of files that were sent.")
        self.received = self.counter("store_received_bytes", "Bytes of files that came.")
        self.quota_refusals = self.counter(
            "store_quota_refusals", "Uploads that a limit of their tenant's plan refused.", ("limit",)
        )
        self.published = self.counter("store_revisions_published", "Revisions that were uploaded and kept.")
        self.releases = self.counter(
            "store_releases", "Changes of releases, by the state that they led to.", ("state",)
        )
