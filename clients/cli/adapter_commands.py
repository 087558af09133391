"""`loraplex adapters warm`, `pin` and `unpin`: which adapters the workers keep on their devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.options import ROUTER, TENANT, RouterOption, TenantOption

if TYPE_CHECKING:
    from loraplex_client.calls import Script

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="NAME, or tenants/TENANT/adapters/NAME.")]
WorkerOption = Annotated[
    str,
    typer.Option(
        "--worker", metavar="WORKER", help="Only this worker. Without it: every worker of the adapter's base model."
    ),
]


def warm(
    name: NameArgument, worker: WorkerOption = "", router: RouterOption = ROUTER, tenant: TenantOption = TENANT
) -> None:
    """Load an adapter on the workers' devices before the first request for it. It may be evicted again."""
    _send("WarmAdapter", name, worker, router, tenant)
    typer.echo(f"{name} is loading on {_target(worker)}")


def pin(
    name: NameArgument, worker: WorkerOption = "", router: RouterOption = ROUTER, tenant: TenantOption = TENANT
) -> None:
    """Keep an adapter's current revision on the workers' devices; without --worker also on workers that start later."""
    _send("PinAdapter", name, worker, router, tenant)
    typer.echo(f"{name} is pinned on {_target(worker)}; `loraplex adapters top` counts pinned adapters")


def unpin(
    name: NameArgument, worker: WorkerOption = "", router: RouterOption = ROUTER, tenant: TenantOption = TENANT
) -> None:
    """Allow the workers to evict an adapter again, with all its revisions."""
    _send("UnpinAdapter", name, worker, router, tenant)
    typer.echo(f"{name} is no longer pinned on {_target(worker)}")


def _target(worker: str) -> str:
    return worker or "every worker"


def _send(method: str, name: str, worker: str, router: str, tenant: str) -> None:
    from loraplex.cluster.v1 import cluster_pb2_grpc
    from loraplex_client.connection import Connection

    from clients.cli.failures import explained

    with explained("router", router):
        Connection(router, cluster_pb2_grpc.ClusterServiceStub, tenant=tenant).run(_call(method, name, worker))


def _call(method: str, name: str, worker: str) -> Script[None]:
    from loraplex.cluster.v1 import cluster_pb2
    from loraplex_client.calls import Call

    requests = {
        "WarmAdapter": cluster_pb2.WarmAdapterRequest,
        "PinAdapter": cluster_pb2.PinAdapterRequest,
        "UnpinAdapter": cluster_pb2.UnpinAdapterRequest,
    }
    yield Call(method, requests[method](adapter=name, worker_id=worker))
