"""`loraplex workers`: what the workers are doing, as the router sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clients.cli.options import ROUTER, TENANT, JsonOption, RouterOption, TenantOption
from clients.cli.terminal import print_json, print_rows

if TYPE_CHECKING:
    from loraplex.cluster.v1 import cluster_pb2
    from loraplex_client.calls import Script


def workers(router: RouterOption = ROUTER, tenant: TenantOption = TENANT, as_json: JsonOption = False) -> None:
    """The live workers: rows running, KV blocks, adapters on the device."""
    from loraplex.cluster.v1 import cluster_pb2_grpc
    from loraplex_client.connection import Connection

    from clients.cli.failures import explained

    connection = Connection(router, cluster_pb2_grpc.ClusterServiceStub, tenant=tenant)
    with explained("router", router):
        found = [_worker_json(worker) for worker in connection.run(_list_workers())]
    if as_json:
        print_json(found)
        return
    print_rows(
        ("worker", "phase", "model", "rows", "waiting", "blocks free", "in use", "adapters", "pinned", "steps"),
        (
            (
                worker["worker_id"],
                worker["phase"],
                worker["model"],
                f"{worker['rows_running']}/{worker['rows_limit']}",
                worker["rows_waiting"],
                f"{worker['blocks']['free'] + worker['blocks']['cached']}/{worker['blocks']['total']}",
                worker["blocks"]["referenced"],
                f"{worker['adapter_slots']['used']}/{worker['adapter_slots']['total']}",
                worker["adapter_slots"]["pinned"],
                worker["steps"],
            )
            for worker in found
        ),
    )


def _list_workers() -> Script[list[cluster_pb2.Worker]]:
    from loraplex.cluster.v1 import cluster_pb2
    from loraplex_client.calls import Call

    response = yield Call("ListWorkers", cluster_pb2.ListWorkersRequest())
    return list(response.workers)


def _worker_json(worker: cluster_pb2.Worker) -> dict[str, Any]:
    """Every field under its own name; the phase as a word."""
    from loraplex.cluster.v1 import cluster_pb2

    fields = {field.name: getattr(worker, field.name) for field in worker.DESCRIPTOR.fields}
    return fields | {
        "phase": cluster_pb2.WorkerPhase.Name(worker.phase).removeprefix("WORKER_PHASE_").lower(),
        "blocks": {field.name: getattr(worker.blocks, field.name) for field in worker.blocks.DESCRIPTOR.fields},
        "adapter_slots": {
            field.name: getattr(worker.adapter_slots, field.name) for field in worker.adapter_slots.DESCRIPTOR.fields
        },
        "adapters": list(worker.adapters),
    }
