"""`loraplex queues`: waiting and running jobs of each model."""

from __future__ import annotations

from clients.cli.cluster import ClusterReader
from clients.cli.options import ROUTER, TENANT, JsonOption, RouterOption, TenantOption
from clients.cli.terminal import print_json, print_rows


def queues(router: RouterOption = ROUTER, tenant: TenantOption = TENANT, as_json: JsonOption = False) -> None:
    """List the models' queues: jobs that wait for a worker, and running answers."""
    found = ClusterReader(router, tenant).queues()
    if as_json:
        print_json(found)
        return
    print_rows(("model", "waiting", "running"), [tuple(queue.values()) for queue in found])
