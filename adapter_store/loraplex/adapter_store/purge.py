"""Purges a tenant: removes everything that the store has of it, and looks whether something is left."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from loraplex.adapter_store import removals
from loraplex.adapter_store.api_keys import ApiKeys
from loraplex.adapter_store.convert import refusals
from loraplex.adapter_store.database import Database
from loraplex.adapter_store.plans import StoredPlans
from loraplex.adapter_store.records import Rows, marks
from loraplex.adapter_store.storage import DataDirectory
from loraplex.admin.v1 import tenants_pb2 as pb
from loraplex.admin.v1 import tenants_pb2_grpc
from loraplex.contracts.artifacts.names import SHARED, check_tenant
from loraplex.contracts.plans import plan_name
from loraplex.runtime.rpc.errors import InvalidField
from loraplex.runtime.rpc.interceptors import Context
from loraplex.runtime.rpc.principal import caller

# Queries for the names of a tenant's grants, deleted revisions, revisions and adapters.
_NAMES = (
    "SELECT 'tenants/' || tenant || '/adapters/' || adapter || '/grants/' || grantee FROM grants "
    "WHERE :tenant IN (tenant, grantee)",
    "SELECT 'tenants/' || tenant || '/adapters/' || adapter || '/revisions/' || digest "
    "FROM deleted_revisions WHERE tenant = :tenant",
    "SELECT 'tenants/' || tenant || '/adapters/' || adapter || '/revisions/' || digest "
    "FROM revisions JOIN adapters ON adapters.id = adapter_id WHERE tenant = :tenant",
    "SELECT 'tenants/' || tenant || '/adapters/' || adapter FROM adapters WHERE tenant = :tenant",
    "SELECT 'tenants/' || tenant || '/batches/' || batch FROM batches WHERE tenant = :tenant",
    "SELECT 'tenants/' || tenant || '/files/' || file FROM batch_files WHERE tenant = :tenant",
)
# Statements that remove them, in this order.
_REMOVALS = (
    "DELETE FROM grants WHERE :tenant IN (tenant, grantee)",
    "DELETE FROM deleted_revisions WHERE tenant = :tenant",
    "DELETE FROM adapters WHERE tenant = :tenant",  # and with them revisions, their keys, aliases and certificates
    *(f"DELETE FROM {table} WHERE tenant = :tenant" for table in ("batches", "batch_files", "batch_events")),
)
# All tenants of whom there is something. A plan's name is tenants/NAME, or keys/ID.
_TENANTS = (
    "SELECT tenant FROM adapters UNION SELECT tenant FROM deleted_revisions UNION SELECT tenant FROM grants UNION "
    "SELECT grantee FROM grants UNION SELECT tenant FROM api_keys UNION SELECT tenant FROM batch_files UNION "
    "SELECT substr(name, 9) FROM plans WHERE name LIKE 'tenants/%'"
)
# Digests of the files of a tenant's revisions.
_BLOBS = (
    "SELECT config_digest, weights_digest FROM revisions JOIN adapters ON adapters.id = adapter_id "
    "WHERE tenant = :tenant UNION "
    "SELECT config_digest, weights_digest FROM deleted_revisions WHERE tenant = :tenant UNION "
    "SELECT digest, digest FROM batch_files WHERE tenant = :tenant"
)

# The digests among `digests` that are of an existing revision, deleted ones included.
_EXISTING = (
    "SELECT digest FROM revisions WHERE digest IN ({0}) UNION "
    "SELECT digest FROM deleted_revisions WHERE digest IN ({0})"
)
log = logging.getLogger(__name__)

# Maximum number of names in an answer, and of digests in a request.
_MOST_NAMES = 10_000


@dataclass(frozen=True, slots=True)
class Purged:
    """The result of a purge: names of what was removed, of what is left, and of files that other tenants share."""

    removed: list[str]
    left: list[str]
    kept_for_others: list[str]


class TenantPurge:
    """Purges tenants from a store. Its calls block: make them in a thread.

    `keys_changed` is called when API keys are gone.
    """

    def __init__(
        self,
        database: Database,
        data: DataDirectory,
        keys: ApiKeys,
        plans: StoredPlans,
        keys_changed: Callable[[], None],
    ) -> None:
        self._database = database
        self._data = data
        self._keys = keys
        self._plans = plans
        self._keys_changed = keys_changed

    def purge(self, tenant: str) -> Purged:
        """Remove everything of a tenant. Doing it again is right."""
        keys = self._keys.purge(tenant)  # first, so that nothing new comes
        self._keys_changed()
        names = [plan_name(tenant), *(f"keys/{key_id}" for key_id in keys)]
        plans = self._plans.purge(names)
        removed, blobs = self._remove(tenant)
        self._database.forget_removed()
        gone = self._database.unreferenced(blobs)
        removed += [f"keys/{key_id}" for key_id in keys] + [f"plans/{name}" for name in plans]
        removed += [f"blobs/{digest}" for digest in sorted(gone)]
        return Purged(
            removed, self._remaining(tenant, gone), [f"blobs/{one}" for one in sorted(blobs.difference(gone))]
        )

    def purge_digest(self, digest: str) -> None:
        """Purge the tenant of that digest, if the catalog has it: a note of a purge does not have the name."""
        with self._database.reading() as rows:
            tenants = [name for (name,) in map(tuple, rows.execute(_TENANTS).fetchall())]
        for tenant in tenants:
            if _digest(tenant) == digest:
                self.purge(tenant)

    def _remove(self, tenant: str) -> tuple[list[str], set[str]]:
        """Remove what the catalog has of a tenant; returns its names, and the digests of its files."""
        blobs: set[str] = set()
        with self._database.swept(self._data, blobs), self._database.transaction() as rows:
            removed = list(_names(rows, tenant))
            blobs |= {digest for row in rows.execute(_BLOBS, {"tenant": tenant}) for digest in row}
            for statement in _REMOVALS:
                rows.execute(statement, {"tenant": tenant})
            removals.record(rows, removals.TENANT, _digest(tenant))
        return removed, blobs

    def gone(self, digests: Sequence[str]) -> list[str]:
        """Return the digests that no tenant has in the store, deleted revisions included."""
        with self._database.reading() as rows:
            existing = {digest for (digest,) in rows.execute(_EXISTING.format(marks(digests)), (*digests, *digests))}
        return [digest for digest in digests if digest not in existing]

    def _remaining(self, tenant: str, gone: list[str]) -> list[str]:
        with self._database.reading() as rows:
            remaining = list(_names(rows, tenant))
        remaining += [f"keys/{key.key_id}" for key in self._keys.page(tenant, "", 10)]
        remaining += [f"plans/{name}" for name in self._plans.existing([plan_name(tenant)])]
        return remaining + [f"blobs/{digest}" for digest in gone if self._data.has(digest)]


def _digest(tenant: str) -> str:
    return hashlib.sha256(tenant.encode()).hexdigest()


def _names(rows: Rows, tenant: str) -> Iterator[str]:
    for statement in _NAMES:
        yield from (name for (name,) in rows.execute(statement, {"tenant": tenant}).fetchall())


class TenantService(tenants_pb2_grpc.TenantServiceServicer):
    """Serves loraplex.admin.v1.TenantService."""

    def __init__(self, purge: TenantPurge) -> None:
        self._purge = purge

    async def PurgeTenant(self, request: pb.PurgeTenantRequest, context: Context) -> pb.PurgeTenantResponse:
        """Remove everything of a tenant."""
        with refusals("tenant"):
            tenant = check_tenant(request.tenant)
        if tenant == SHARED:
            raise InvalidField("tenant", f"{SHARED!r} is not a tenant: delete the shared adapters one by one")
        purged = await asyncio.to_thread(self._purge.purge, tenant)
        log.info("%s: purged tenant %s, %d things", caller().name, tenant, len(purged.removed))
        return pb.PurgeTenantResponse(
            removed=purged.removed[:_MOST_NAMES],
            removed_count=len(purged.removed),
            left=purged.left[:_MOST_NAMES],
            kept_for_others=purged.kept_for_others[:_MOST_NAMES],
        )

    async def ListGoneRevisions(
        self, request: pb.ListGoneRevisionsRequest, context: Context
    ) -> pb.ListGoneRevisionsResponse:
        """Return those of the revisions that a worker has which the store does not have any more."""
        if len(request.digests) > _MOST_NAMES:
            raise InvalidField("digests", f"at most {_MOST_NAMES} in a call")
        return pb.ListGoneRevisionsResponse(digests=await asyncio.to_thread(self._purge.gone, list(request.digests)))
