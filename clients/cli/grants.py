"""`loraplex adapters grant`, `ungrant` and `grants`: which other tenants may use a tenant's adapter."""

from __future__ import annotations

from typing import Annotated

import typer

from clients.cli.adapter_commands import NameArgument
from clients.cli.options import STORE, TENANT, JsonOption, StoreOption, TenantOption, read_duration
from clients.cli.service import Service
from clients.cli.terminal import format_timestamp, out, print_json, print_rows

ToOption = Annotated[str, typer.Option("--to", metavar="TENANT", help="The other tenant.")]


def grant(
    name: NameArgument,
    to: ToOption,
    ttl: Annotated[str, typer.Option(metavar="TIME", help="For how long, such as 30d; without it until ungrant.")] = "",
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
) -> None:
    """Let another tenant use an adapter, by its full name: tenants/TENANT/adapters/NAME."""
    from loraplex.admin.v1 import grants_pb2

    request = grants_pb2.CreateGrantRequest(adapter=name, tenant=to)
    if ttl:
        request.ttl.CopyFrom(read_duration("--ttl", ttl))
    made = _service(store, tenant).ask("CreateGrant", request).grant
    out().print(f"{to} may use {made.adapter}{f' for {ttl}' if ttl else ''}", markup=False, soft_wrap=True)


def ungrant(name: NameArgument, to: ToOption, tenant: TenantOption = TENANT, store: StoreOption = STORE) -> None:
    """End a grant. New requests are refused within a second; answers that run go on."""
    from loraplex.admin.v1 import grants_pb2

    _service(store, tenant).ask("DeleteGrant", grants_pb2.DeleteGrantRequest(adapter=name, tenant=to))
    out().print(f"{to} may no longer use {name}", markup=False, soft_wrap=True)


def grants(
    name: NameArgument, tenant: TenantOption = TENANT, store: StoreOption = STORE, as_json: JsonOption = False
) -> None:
    """List the tenants that may use an adapter beside its own."""
    from loraplex.admin.v1 import grants_pb2

    request = grants_pb2.ListGrantsRequest(adapter=name, page_size=1000)
    found = _service(store, tenant).list("ListGrants", request, lambda page: page.grants)
    if as_json:
        print_json(
            [
                {
                    "adapter": one.adapter,
                    "tenant": one.tenant,
                    "create_time": one.create_time.ToJsonString(),
                    "expire_time": one.expire_time.ToJsonString() if one.HasField("expire_time") else None,
                }
                for one in found
            ]
        )
        return
    print_rows(
        ("tenant", "since", "until"),
        ((one.tenant, format_timestamp(one.create_time), format_timestamp(one.expire_time)) for one in found),
    )


def _service(store: str, tenant: str) -> Service:
    from loraplex.admin.v1 import grants_pb2_grpc

    return Service("store", store, grants_pb2_grpc.GrantServiceStub, tenant)
