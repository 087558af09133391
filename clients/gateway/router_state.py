"""A router's view of the cluster as JSON values: calls of ClusterService, which the SDK has no client of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loraplex.cluster.v1 import cluster_pb2 as pb
from loraplex.cluster.v1 import cluster_pb2_grpc
from loraplex_client.calls import Call, Script
from loraplex_client.connection import AsyncConnection
from loraplex_client.credentials import Credentials

_WORKER_FIELDS = ("worker_id", "incarnation", "model", "rows_running", "rows_waiting", "rows_limit", "steps")


@dataclass(frozen=True)
class SharedState:
    """The workers and queues of the cluster, which every router tells alike."""

    workers: Sequence[dict[str, Any]]
    queues: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class RouterState:
    """A router's own traffic and jobs; `jobs` counts them by tenant, model, and whether a worker has them."""

    traffic: dict[str, Any]
    jobs: Counter[tuple[str, str, bool]]


def cluster_connection(address: str, credentials: Credentials) -> AsyncConnection:
    """Return a connection to a router's ClusterService."""
    return AsyncConnection(address, cluster_pb2_grpc.ClusterServiceStub, credentials=credentials)


class _Once(Call):
    """A call that is not repeated: the page asks again every second."""

    @property
    def may_repeat(self) -> bool:
        """See Call."""
        return False


def read_router() -> Script[RouterState]:
    """Return what a router itself does now."""
    traffic = yield _Once("GetTraffic", pb.GetTrafficRequest())
    jobs = yield _Once("ListJobs", pb.ListJobsRequest())
    counts = Counter((job.tenant, job.model, bool(job.worker_id)) for job in jobs.jobs)
    return RouterState(_traffic(traffic), counts)


def read_shared() -> Script[SharedState]:
    """Return what a router sees of the cluster now."""
    workers = yield _Once("ListWorkers", pb.ListWorkersRequest())
    queues = yield _Once("ListQueues", pb.ListQueuesRequest())
    return SharedState([_worker(worker) for worker in workers.workers], [_fields(queue) for queue in queues.queues])


def _worker(worker: pb.Worker) -> dict[str, Any]:
    """Return a worker without its host and process ids, which nobody needs beyond the cluster's network."""
    return {
        **{name: getattr(worker, name) for name in _WORKER_FIELDS},
        "phase": pb.WorkerPhase.Name(worker.phase).removeprefix("WORKER_PHASE_").lower(),
        "blocks": _fields(worker.blocks),
        "adapter_slots": _fields(worker.adapter_slots),
        "adapter_tiers": _fields(worker.adapter_tiers),
        "adapters": list(worker.adapters),
    }


def _traffic(traffic: pb.GetTrafficResponse) -> dict[str, Any]:
    numbers = ("uptime", "open", "prompt_tokens", "completion_tokens", "redispatches", "workers_lost")
    times = ("time_to_first_token", "inter_token_latency", "queue_time")
    return {
        **{name: getattr(traffic, name) for name in numbers},
        **{name: _distribution(getattr(traffic, name)) for name in times},
        "requests": dict(traffic.requests),
        "adapters": [_fields(adapter) for adapter in traffic.adapters],
    }


def _distribution(found: pb.Distribution) -> dict[str, Any]:
    return {"bounds": list(found.bounds), "counts": list(found.counts)}


def _fields(message: Any) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
