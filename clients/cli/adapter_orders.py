"""`loraplex adapters warm, pin, unpin`: what the workers are to have on their devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.options import ROUTER, TENANT, RouterOption, TenantOption

if TYPE_CHECKING:
    from loraplex_client.calls import Script

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="NAME, or tenants/TENANT/adapters/NAME.")]
WorkerOption = Annotated[
    str, typer.Option("--worker", metavar="WORKER", help="This worker alone; if not given, all of the adapter's base.")
]


def warm(
    name: NameArgument, worker: WorkerOption = "", router: RouterOption = ROUTER, tenant: TenantOption = TENANT
) -> None:
    """Bring an adapter to the workers' devices before anybody asks for it; it may leave again."""
    _send("WarmAdapter", name, worker, router, tenant)
    typer.echo(f"{name} comes to {_whom(worker)}")


def pin(
    name: NameArgument, worker: WorkerOption = "", router: RouterOption = ROUTER, tenant: TenantOption = TENANT
) -> None:
    """Keep an adapter's present revision on the workers' devices; without --worker also on those that start later."""
    _send("PinAdapter", name, worker, router, tenant)
    typer.echo(f"{name} stays on {_whom(worker)}; `loraplex adapters top` shows how many do")


def unpin(
    name: NameArgument, worker: WorkerOption = "", router: RouterOption = ROUTER, tenant: TenantOption = TENANT
) -> None:
    """Let an adapter leave the workers' devices again, all its revisions."""
    _send("UnpinAdapter", name, worker, router, tenant)
    typer.echo(f"{name} may leave {_whom(worker)}")


def _whom(worker: str) -> str:
    return worker or "every worker"


def _send(method: str, name: str, worker: str, router: str, tenant: str) -> None:
    from loraplex.cluster.v1 import cluster_pb2_grpc
    from loraplex_client.connection import Connection

    from clients.cli.failures import explained

    with explained("router", router):
        Connection(router, cluster_pb2_grpc.ClusterServiceStub, tenant=tenant).run(_order(method, name, worker))


def _order(method: str, name: str, worker: str) -> Script[None]:
    from loraplex.cluster.v1 import cluster_pb2
    from loraplex_client.calls import Call

    requests = {
        "WarmAdapter": cluster_pb2.WarmAdapterRequest,
        "PinAdapter": cluster_pb2.PinAdapterRequest,
        "UnpinAdapter": cluster_pb2.UnpinAdapterRequest,
    }
    yield Call(method, requests[method](adapter=name, worker_id=worker))
