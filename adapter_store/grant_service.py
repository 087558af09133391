"""GrantService over gRPC: tenants' admins let other tenants use their adapters."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
from loraplex.admin.v1 import grants_pb2 as pb
from loraplex.admin.v1 import grants_pb2_grpc

from adapter_store.convert import refusals, seconds_of, timestamp
from adapter_store.grants import Grant, Grants
from adapter_store.pages import decode_token, encode_token, page_size
from adapter_store.tenants import own_adapter
from artifacts.names import SHARED, check_tenant
from rpc.errors import InvalidField
from rpc.identity.principal import caller, calling_tenant

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


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
        size = page_size(request.page_size)
        after = decode_token(request.page_token, first=("",))[0]
        found = await asyncio.to_thread(self._grants.page, name, after, size + 1)
        token = encode_token((found[size - 1].tenant,)) if len(found) > size else ""
        return pb.ListGrantsResponse(grants=map(_to_pb, found[:size]), next_page_token=token)

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
