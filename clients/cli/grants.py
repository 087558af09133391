"""`loraplex adapters grant`, `ungrant` and `grants`: which other tenants may use a tenant's adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.adapter_commands import NameArgument
from clients.cli.options import STORE, TENANT, JsonOption, StoreOption, TenantOption, read_seconds
from clients.cli.terminal import out, print_json, print_rows

if TYPE_CHECKING:
    from loraplex.admin.v1 import grants_pb2
    from loraplex_client.calls import Script

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
        request.ttl.FromNanoseconds(int(read_seconds("--ttl", ttl) * 1e9))
    made = _run(store, tenant, _call("CreateGrant", request)).grant
    out().print(f"{to} may use {made.adapter}{f' for {ttl}' if ttl else ''}", markup=False, soft_wrap=True)


def ungrant(name: NameArgument, to: ToOption, tenant: TenantOption = TENANT, store: StoreOption = STORE) -> None:
    """End a grant. New requests are refused within a second; answers that run go on."""
    from loraplex.admin.v1 import grants_pb2

    _run(store, tenant, _call("DeleteGrant", grants_pb2.DeleteGrantRequest(adapter=name, tenant=to)))
    out().print(f"{to} may no longer use {name}", markup=False, soft_wrap=True)


def grants(
    name: NameArgument, tenant: TenantOption = TENANT, store: StoreOption = STORE, as_json: JsonOption = False
) -> None:
    """List the tenants that may use an adapter beside its own."""
    found = _run(store, tenant, _list(name))
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
        (
            (
                one.tenant,
                f"{one.create_time.ToDatetime():%Y-%m-%d %H:%M}",
                f"{one.expire_time.ToDatetime():%Y-%m-%d %H:%M}" if one.HasField("expire_time") else "-",
            )
            for one in found
        ),
    )


def _run(store: str, tenant: str, script: Script[Any]) -> Any:
    from loraplex.admin.v1 import grants_pb2_grpc
    from loraplex_client.connection import Connection

    from clients.cli.failures import explained

    with explained("store", store):
        return Connection(store, grants_pb2_grpc.GrantServiceStub, tenant=tenant).run(script)


def _call(method: str, request: Any) -> Script[Any]:
    from loraplex_client.calls import Call

    return (yield Call(method, request))


def _list(name: str) -> Script[list[grants_pb2.Grant]]:
    from loraplex.admin.v1 import grants_pb2
    from loraplex_client.calls import Call

    request, found = grants_pb2.ListGrantsRequest(adapter=name, page_size=1000), []
    while True:
        page = yield Call("ListGrants", request)
        found += page.grants
        if not page.next_page_token:
            return found
        request.page_token = page.next_page_token
