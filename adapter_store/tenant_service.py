"""TenantService over gRPC: operators purge tenants, and workers ask which of their revisions are gone."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
from loraplex.admin.v1 import tenants_pb2 as pb
from loraplex.admin.v1 import tenants_pb2_grpc

from adapter_store.convert import refusals
from adapter_store.purge import TenantPurge
from artifacts.names import SHARED, check_tenant
from rpc.errors import InvalidField
from rpc.identity.principal import caller

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
# Maximum number of names in an answer, and of digests in a request.
_NAMES = 10_000


class TenantService(tenants_pb2_grpc.TenantServiceServicer):
    """Serves loraplex.admin.v1.TenantService."""

    def __init__(self, purge: TenantPurge) -> None:
        self._purge = purge

    async def PurgeTenant(self, request: pb.PurgeTenantRequest, context: Context) -> pb.PurgeTenantResponse:
        """Remove everything of a tenant."""
        with refusals("tenant"):
            tenant = check_tenant(request.tenant)
        if tenant == SHARED:
            raise InvalidField("tenant", f"{SHARED!r} is no tenant: delete the shared adapters one by one")
        purged = await asyncio.to_thread(self._purge.purge, tenant)
        log.info("%s: purged tenant %s, %d things", caller().name, tenant, len(purged.removed))
        return pb.PurgeTenantResponse(
            removed=purged.removed[:_NAMES],
            removed_count=len(purged.removed),
            left=purged.left[:_NAMES],
            kept_for_others=purged.kept_for_others[:_NAMES],
        )

    async def ListGoneRevisions(
        self, request: pb.ListGoneRevisionsRequest, context: Context
    ) -> pb.ListGoneRevisionsResponse:
        """Return those of the revisions that a worker has which the store does not have any more."""
        if len(request.digests) > _NAMES:
            raise InvalidField("digests", f"at most {_NAMES} in a call")
        return pb.ListGoneRevisionsResponse(digests=await asyncio.to_thread(self._purge.gone, list(request.digests)))
