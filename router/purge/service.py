"""TenantDataService at the relay's port: other routers of the cell ask this one to forget a tenant."""

from __future__ import annotations

from collections.abc import Callable

from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc

from router.purge.router_data import RouterData
from router.purge.tenant_field import purged_tenant


class TenantDataService(relay_pb2_grpc.TenantDataServiceServicer):
    """Serves loraplex.relay.v1.TenantDataService; `record` keeps an event of the audit log."""

    def __init__(self, data: RouterData, record: Callable[..., None]) -> None:
        self._data = data
        self._record = record

    async def ForgetTenant(self, request: pb.ForgetTenantRequest, context: object) -> pb.ForgetTenantResponse:
        """End a tenant's calls at this router, and remove what it has of the tenant."""
        tenant = purged_tenant(request.tenant)
        removals = await self._data.forget(tenant)
        if removed := sum(one.removed for one in removals if not one.of_all_tenants):
            self._record("tenant forgotten", tenant=tenant, removed=removed)
        return pb.ForgetTenantResponse(removals=removals)
