"""`loraplex adapters warm`, `pin` and `unpin`: which adapters the workers keep on their devices."""

from __future__ import annotations

from typing import Annotated

import typer

from clients.cli.completions import adapter_names, worker_ids
from clients.cli.options import ROUTER, TENANT, RouterOption, TenantOption
from clients.cli.service import cluster_service

NameArgument = Annotated[
    str,
    typer.Argument(metavar="NAME", help="NAME, or tenants/TENANT/adapters/NAME.", autocompletion=adapter_names),
]
WorkerOption = Annotated[
    str,
    typer.Option(
        "--worker",
        metavar="WORKER",
        help="Only this worker. Without it: every worker of the adapter's base model.",
        autocompletion=worker_ids,
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
    from loraplex.cluster.v1 import cluster_pb2

    requests = {
        "WarmAdapter": cluster_pb2.WarmAdapterRequest,
        "PinAdapter": cluster_pb2.PinAdapterRequest,
        "UnpinAdapter": cluster_pb2.UnpinAdapterRequest,
    }
    cluster_service(router, tenant).ask(method, requests[method](adapter=name, worker_id=worker))
