"""`loraplex drain WORKER`: takes a worker out of the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.options import ROUTER, TENANT, RouterOption, TenantOption

if TYPE_CHECKING:
    from loraplex_client.calls import Script

WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER", help="The worker's id from `loraplex workers`.")]


def drain(worker: WorkerArgument, router: RouterOption = ROUTER, tenant: TenantOption = TENANT) -> None:
    """Drain a worker: it claims no more jobs, its running answers end or continue on other workers, and it exits."""
    from loraplex.cluster.v1 import cluster_pb2_grpc
    from loraplex_client.connection import Connection

    from clients.cli.failures import explained

    with explained("router", router):
        Connection(router, cluster_pb2_grpc.ClusterServiceStub, tenant=tenant).run(_drain(worker))
    typer.echo(f"{worker} is draining; it has ended when `loraplex workers` no longer shows it")


def _drain(worker: str) -> Script[None]:
    from loraplex.cluster.v1 import cluster_pb2
    from loraplex_client.calls import Call

    yield Call("DrainWorker", cluster_pb2.DrainWorkerRequest(worker_id=worker))
