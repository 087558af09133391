"""Grants: tenants that may use an adapter of another tenant, in the catalog and over gRPC.

A grant ends with its time, its deletion or the adapter. Names are the caller's to check.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from loraplex.adapter_store.convert import list_page, own_adapter, refusals, seconds_of, timestamp
from loraplex.adapter_store.database import Database
from loraplex.adapter_store.records import Rows, adapter_row
from loraplex.admin.v1 import grants_pb2 as pb
from loraplex.admin.v1 import grants_pb2_grpc
from loraplex.contracts.artifacts.names import SHARED, AdapterName, check_tenant
from loraplex.runtime.rpc.errors import Exhausted, InvalidField, NotFound
from loraplex.runtime.rpc.interceptors import Context
from loraplex.runtime.rpc.principal import caller, calling_tenant

# Maximum number of grants that a tenant has made, ended ones included, which are kept for answers that run.
GRANTS_LIMIT = 10_000
# A grant that has not ended at the time :now.
LIVE_GRANT = "coalesce(end_ns, :now + 1) > :now AND coalesce(expire_ns, :now + 1) > :now"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Grant:
    """A grant to `tenant`. Times are nanoseconds since 1970; None: no end yet."""

    adapter: AdapterName
    tenant: str
    create_ns: int
    expire_ns: int | None


class Grants:
    """The grants of all adapters. Its calls block, except `may_use`: make them in a thread.

    Jobs that run go on for `keep_s` after a grant's end, as after a deletion.
    """

    def __init__(
        self, database: Database, keep_s: float, *, clock: Callable[[], int] = time.time_ns, limit: int = GRANTS_LIMIT
    ) -> None:
        self._database = database
        self._keep_ns = round(keep_s * 1e9)
        self._clock = clock
        self._limit = limit
        self._looked_ns = clock()

    def note_expired(self) -> None:
        """Tell routers of the adapters whose grants have expired since the last call."""
        now = self._clock()
        with self._database.reading() as rows:
            between = (self._looked_ns, now)
            expired = rows.execute("SELECT adapter FROM grants WHERE expire_ns > ? AND expire_ns <= ?", between)
            self._database.adapter_changes.publish(row["adapter"] for row in expired)
        self._looked_ns = now

    async def may_use(self, name: AdapterName, tenant: str, *, running: bool = False) -> bool:
        """Return whether the tenant may use the adapter; with `running`, whether a job that runs on it may go on."""
        return name.tenant in {tenant, SHARED} or await asyncio.to_thread(self._is_granted, name, tenant, running)

    def _is_granted(self, name: AdapterName, tenant: str, running: bool) -> bool:
        now = self._clock() - (self._keep_ns if running else 0)
        with self._database.reading() as rows:
            selected = rows.execute(
                "SELECT 1 FROM grants WHERE tenant = :owner AND adapter = :adapter AND grantee = :tenant "
                f"AND {LIVE_GRANT}",
                {"owner": name.tenant, "adapter": name.adapter, "tenant": tenant, "now": now},
            )
            return selected.fetchone() is not None

    def create(self, name: AdapterName, tenant: str, ttl_s: float | None) -> Grant:
        """Grant the use of an adapter, in the place of an earlier grant to the tenant. Raises NotFound or Exhausted."""
        now = self._clock()
        expire_ns = None if ttl_s is None else now + round(ttl_s * 1e9)
        with self._database.transaction() as rows:
            adapter_row(rows, name)
            former = {"owner": name.tenant, "adapter": name.adapter, "tenant": tenant, "now": now - self._keep_ns}
            rows.execute(
                "DELETE FROM grants WHERE tenant = :owner "
                f"AND ((adapter = :adapter AND grantee = :tenant) OR NOT ({LIVE_GRANT}))",
                former,
            )
            count = rows.execute("SELECT count(*) FROM grants WHERE tenant = ?", (name.tenant,)).fetchone()[0]
            if count >= self._limit:
                message = f"{name.tenant} has {count} grants: end some, or delete adapters that others may use"
                raise Exhausted(f"tenants/{name.tenant}/grants", message, retry_after_s=None, reason="GRANTS_FULL")
            rows.execute(
                "INSERT INTO grants (tenant, adapter, grantee, create_ns, expire_ns) VALUES (?, ?, ?, ?, ?)",
                (name.tenant, name.adapter, tenant, now, expire_ns),
            )
        return Grant(name, tenant, now, expire_ns)

    def end(self, name: AdapterName, tenant: str) -> None:
        """End a grant. Raises NotFound."""
        now = self._clock()
        values = {"owner": name.tenant, "adapter": name.adapter, "tenant": tenant, "now": now}
        with self._database.transaction() as rows:
            ended = rows.execute(
                "UPDATE grants SET end_ns = :now WHERE tenant = :owner AND adapter = :adapter AND grantee = :tenant "
                f"AND {LIVE_GRANT}",
                values,
            )
            if not ended.rowcount:
                raise NotFound("grant", f"{name} to {tenant}")

    def page(self, name: AdapterName, after: str, limit: int) -> list[Grant]:
        """Return grants that have not ended, in order of tenant, from the first after `after`. Raises NotFound."""
        values = {"owner": name.tenant, "adapter": name.adapter, "after": after, "now": self._clock(), "limit": limit}
        with self._database.reading() as rows:
            adapter_row(rows, name)
            selected = rows.execute(
                "SELECT * FROM grants WHERE tenant = :owner AND adapter = :adapter AND grantee > :after "
                f"AND {LIVE_GRANT} ORDER BY grantee LIMIT :limit",
                values,
            )
            return [Grant(name, row["grantee"], row["create_ns"], row["expire_ns"]) for row in selected]


def end_grants(rows: Rows, name: AdapterName, now: int) -> None:
    """End all grants of an adapter that is being deleted."""
    rows.execute(
        "UPDATE grants SET end_ns = ? WHERE tenant = ? AND adapter = ? AND end_ns IS NULL",
        (now, name.tenant, name.adapter),
    )


class GrantService(grants_pb2_grpc.GrantServiceServicer):
    """Serves loraplex.admin.v1.GrantService."""

    def __init__(self, grants: Grants) -> None:
        self._grants = grants

    async def CreateGrant(self, request: pb.CreateGrantRequest, context: Context) -> pb.CreateGrantResponse:
        """Let a tenant use one of the caller's adapters."""
        name = own_adapter("adapter", request.adapter, calling_tenant())
        with refusals("tenant"):
            tenant = check_tenant(request.tenant)
        if tenant in {name.tenant, SHARED}:
            raise InvalidField("tenant", f"{tenant!r}: grant it to another tenant")
        ttl_s = seconds_of("ttl", request.ttl, least=0.001) if request.HasField("ttl") else None
        grant = await asyncio.to_thread(self._grants.create, name, tenant, ttl_s)
        log.info("%s: granted %s to %s", caller().name, name, tenant)
        return pb.CreateGrantResponse(grant=_to_pb(grant))

    async def ListGrants(self, request: pb.ListGrantsRequest, context: Context) -> pb.ListGrantsResponse:
        """Return a page of an adapter's grants, in order of tenant."""
        name = own_adapter("adapter", request.adapter, calling_tenant())
        fetch = partial(self._grants.page, name)
        grants, token = await list_page(request, fetch, _to_pb, attrgetter("tenant"))
        return pb.ListGrantsResponse(grants=grants, next_page_token=token)

    async def DeleteGrant(self, request: pb.DeleteGrantRequest, context: Context) -> pb.DeleteGrantResponse:
        """End a grant."""
        name = own_adapter("adapter", request.adapter, calling_tenant())
        await asyncio.to_thread(self._grants.end, name, request.tenant)
        log.info("%s: ended the grant of %s to %s", caller().name, name, request.tenant)
        return pb.DeleteGrantResponse()


def _to_pb(grant: Grant) -> pb.Grant:
    return pb.Grant(
        adapter=str(grant.adapter),
        tenant=grant.tenant,
        create_time=timestamp(grant.create_ns),
        expire_time=timestamp(grant.expire_ns),
    )
