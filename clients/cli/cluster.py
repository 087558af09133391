"""Reads a cluster's state from a router, and compares two snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clients.cli.service import cluster_service
from clients.cli.workers import worker_json

if TYPE_CHECKING:
    from loraplex.cluster.v1 import cluster_pb2
    from loraplex_client.calls import Script


@dataclass(frozen=True)
class Snapshot:
    """The cluster's state at one moment. `traffic` is the asked router's own, since its start."""

    workers: Sequence[Mapping[str, Any]]
    queues: Sequence[Mapping[str, Any]]
    traffic: cluster_pb2.GetTrafficResponse

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot as JSON values."""
        from google.protobuf.json_format import MessageToDict

        traffic = MessageToDict(
            self.traffic, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        return {"workers": list(self.workers), "queues": list(self.queues), "traffic": _numbers(traffic)}


class ClusterReader:
    """A connection to one router's ClusterService."""

    def __init__(self, router: str, tenant: str) -> None:
        self.router = router
        self._cluster = cluster_service(router, tenant)

    def look(self) -> Snapshot:
        """Take a snapshot. Raises CommandError."""
        return self._cluster.run(_look())

    def queues(self) -> list[dict[str, Any]]:
        """Return the models' queues. Raises CommandError."""
        return self._cluster.run(_queues())


def _look() -> Script[Snapshot]:
    from loraplex.cluster.v1 import cluster_pb2
    from loraplex_client.calls import Call

    workers = yield Call("ListWorkers", cluster_pb2.ListWorkersRequest())
    queues = yield from _queues()
    traffic = yield Call("GetTraffic", cluster_pb2.GetTrafficRequest())
    return Snapshot([worker_json(worker) for worker in workers.workers], queues, traffic)


def _queues() -> Script[list[dict[str, Any]]]:
    from loraplex.cluster.v1 import cluster_pb2
    from loraplex_client.calls import Call

    answer = yield Call("ListQueues", cluster_pb2.ListQueuesRequest())
    return [{"model": queue.model, "waiting": queue.waiting, "running": queue.running} for queue in answer.queues]


def _numbers(value: Any) -> Any:
    """Convert 64-bit integers, which Protobuf's JSON writes as strings, to numbers."""
    if isinstance(value, dict):
        return {key: item if key in {"tenant", "adapter"} else _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return int(value) if isinstance(value, str) and value.isdigit() else value


@dataclass(frozen=True)
class Interval:
    """The change between two snapshots, or from the router's start to a single one."""

    now: Snapshot
    before: Snapshot | None

    @property
    def seconds(self) -> float:
        """Return the interval's length."""
        return max(1e-3, self.now.traffic.uptime - (self._last.uptime if self._last is not None else 0.0))

    @property
    def since_start(self) -> bool:
        """Tell whether the interval begins at the router's start: no earlier snapshot, or one of before a restart."""
        return self._last is None

    def requests(self) -> dict[str, int]:
        """Return the number of requests that ended, by status."""
        last = dict(self._last.requests) if self._last is not None else {}
        return {code: count - last.get(code, 0) for code, count in self.now.traffic.requests.items()}

    def count(self, field: str) -> int:
        """Return the increase of a counter of the traffic."""
        last = getattr(self._last, field) if self._last is not None else 0
        return int(getattr(self.now.traffic, field) - last)

    def quantile(self, field: str, share: float) -> float | None:
        """Return a quantile in seconds, interpolated like Prometheus's histogram_quantile; None without samples."""
        now = getattr(self.now.traffic, field)
        counts = list(now.counts)
        if self._last is not None:
            last = getattr(self._last, field)
            counts = [count - before for count, before in zip(counts, last.counts, strict=False)] or counts
        total, below = sum(counts), 0
        if not total:
            return None
        for place, count in enumerate(counts):
            if count and below + count >= share * total:
                low = now.bounds[place - 1] if place else 0.0
                high = now.bounds[place] if place < len(now.bounds) else low
                return float(low + (high - low) * (share * total - below) / count)
            below += count
        return None

    def steps_per_s(self, worker: Mapping[str, Any]) -> float | None:
        """Return a worker's steps per second; None if the earlier snapshot lacks it."""
        for earlier in self.before.workers if self.before is not None else ():
            if earlier["incarnation"] == worker["incarnation"] and not self.since_start:
                return float(worker["steps"] - earlier["steps"]) / self.seconds
        return None

    def adapters(self) -> list[dict[str, Any]]:
        """Return the increase of each tenant's adapters, the busiest first."""
        last = {(row.tenant, row.adapter): row for row in self._last.adapters} if self._last is not None else {}
        found = []
        for row in self.now.traffic.adapters:
            before = last.get((row.tenant, row.adapter))
            requests = row.requests - (before.requests if before else 0)
            waited = row.time_to_first_token - (before.time_to_first_token if before else 0.0)
            found.append(
                {
                    "tenant": row.tenant,
                    "adapter": row.adapter,
                    "requests": requests,
                    "tokens": row.completion_tokens - (before.completion_tokens if before else 0),
                    "ttft_s": waited / requests if requests else None,
                    "all_requests": row.requests,
                }
            )
        return sorted(found, key=lambda row: (-row["tokens"], -row["all_requests"], row["tenant"], row["adapter"]))

    @property
    def _last(self) -> cluster_pb2.GetTrafficResponse | None:
        if self.before is None or self.before.traffic.uptime >= self.now.traffic.uptime:
            return None
        return self.before.traffic
