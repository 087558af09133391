"""`loraplex drain WORKER`: takes a worker out of the cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from clients.cli.completions import worker_ids
from clients.cli.options import ROUTER, TENANT, RouterOption, TenantOption
from clients.cli.service import cluster_service

WorkerArgument = Annotated[
    str,
    typer.Argument(metavar="WORKER", help="The worker's id from `loraplex workers`.", autocompletion=worker_ids),
]


def drain(worker: WorkerArgument, router: RouterOption = ROUTER, tenant: TenantOption = TENANT) -> None:
    """Drain a worker: it claims no more jobs, its running answers end or continue on other workers, and it exits."""
    from loraplex.cluster.v1 import cluster_pb2

    cluster_service(router, tenant).ask("DrainWorker", cluster_pb2.DrainWorkerRequest(worker_id=worker))
    typer.echo(f"{worker} is draining; it has ended when `loraplex workers` no longer shows it")
