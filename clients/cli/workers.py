"""`loraplex workers`: the live workers, as the router sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clients.cli.options import ROUTER, TENANT, JsonOption, RouterOption, TenantOption
from clients.cli.service import cluster_service
from clients.cli.terminal import print_json, print_rows

if TYPE_CHECKING:
    from loraplex.cluster.v1 import cluster_pb2


def workers(router: RouterOption = ROUTER, tenant: TenantOption = TENANT, as_json: JsonOption = False) -> None:
    """List the live workers: running rows, KV blocks, adapters on the device."""
    found = WorkerList(router, tenant).fetch()
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


class WorkerList:
    """A connection to a router that lists its live workers."""

    def __init__(self, router: str, tenant: str) -> None:
        self._cluster = cluster_service(router, tenant)

    def fetch(self) -> list[dict[str, Any]]:
        """Return the workers as JSON values. Raises CommandError."""
        from loraplex.cluster.v1 import cluster_pb2

        answer = self._cluster.ask("ListWorkers", cluster_pb2.ListWorkersRequest())
        return [worker_json(worker) for worker in answer.workers]


def worker_json(worker: cluster_pb2.Worker) -> dict[str, Any]:
    """Convert a worker's message to JSON values, with the phase as a word."""
    from loraplex.cluster.v1 import cluster_pb2

    fields = {field.name: getattr(worker, field.name) for field in worker.DESCRIPTOR.fields}
    return fields | {
        "phase": cluster_pb2.WorkerPhase.Name(worker.phase).removeprefix("WORKER_PHASE_").lower(),
        "blocks": _plain(worker.blocks),
        "adapter_slots": _plain(worker.adapter_slots),
        "adapter_tiers": _plain(worker.adapter_tiers),
        "adapters": list(worker.adapters),
    }


def _plain(message: cluster_pb2.Blocks | cluster_pb2.AdapterSlots | cluster_pb2.AdapterTiers) -> dict[str, int]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
