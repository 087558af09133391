"""Asks a router for the state of its cluster, as often as one likes, and what two answers say of the time between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clients.cli.workers import worker_json

if TYPE_CHECKING:
    from loraplex.cluster.v1 import cluster_pb2
    from loraplex_client.calls import Script


@dataclass(frozen=True)
class Snapshot:
    """One look. `traffic` is of the router that was asked, since its start; the rest is of the whole cluster."""

    workers: Sequence[Mapping[str, Any]]
    queues: Sequence[Mapping[str, Any]]
    traffic: cluster_pb2.GetTrafficResponse

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        from google.protobuf.json_format import MessageToDict

        traffic = MessageToDict(
            self.traffic, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        return {"workers": list(self.workers), "queues": list(self.queues), "traffic": _numbers(traffic)}


class ClusterReader:
    """A connection to one router's ClusterService."""

    def __init__(self, router: str, tenant: str) -> None:
        from loraplex.cluster.v1 import cluster_pb2_grpc
        from loraplex_client.connection import Connection

        from clients.cli.failures import explained

        self.router = router
        with explained("router", router):
            self._connection = Connection(router, cluster_pb2_grpc.ClusterServiceStub, tenant=tenant)

    def look(self) -> Snapshot:
        """Everything, now. Raises CommandError."""
        from clients.cli.failures import explained

        with explained("router", self.router):
            return self._connection.run(_look())

    def queues(self) -> list[dict[str, Any]]:
        """The models' queues. Raises CommandError."""
        from clients.cli.failures import explained

        with explained("router", self.router):
            return self._connection.run(_queues())


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
    return [{"model": one.model, "waiting": one.waiting, "running": one.running} for one in answer.queues]


def _numbers(value: Any) -> Any:
    """Protobuf's JSON has 64-bit integers as strings; no count of ours needs that."""
    if isinstance(value, dict):
        return {key: one if key in {"tenant", "adapter"} else _numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    return int(value) if isinstance(value, str) and value.isdigit() else value


@dataclass(frozen=True)
class Interval:
    """What happened between two looks; with one alone, since the router's start."""

    now: Snapshot
    before: Snapshot | None

    @property
    def seconds(self) -> float:
        """How long it was."""
        return max(1e-3, self.now.traffic.uptime - (self._last.uptime if self._last is not None else 0.0))

    @property
    def since_start(self) -> bool:
        """Whether there is nothing before; a router that was started again counts from 0."""
        return self._last is None

    def requests(self) -> dict[str, int]:
        """Requests that ended, by status."""
        last = dict(self._last.requests) if self._last is not None else {}
        return {code: count - last.get(code, 0) for code, count in self.now.traffic.requests.items()}

    def count(self, field: str) -> int:
        """What a counting field of the traffic gained."""
        last = getattr(self._last, field) if self._last is not None else 0
        return int(getattr(self.now.traffic, field) - last)

    def quantile(self, field: str, share: float) -> float | None:
        """Of a distribution, in seconds, as Prometheus's histogram_quantile reckons it; None: nothing was measured."""
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
        """Of one worker; None where it was not there before."""
        for one in self.before.workers if self.before is not None else ():
            if one["incarnation"] == worker["incarnation"] and not self.since_start:
                return float(worker["steps"] - one["steps"]) / self.seconds
        return None

    def adapters(self) -> list[dict[str, Any]]:
        """What each tenant's adapters gained, the busiest first."""
        last = {(one.tenant, one.adapter): one for one in self._last.adapters} if self._last is not None else {}
        found = []
        for one in self.now.traffic.adapters:
            before = last.get((one.tenant, one.adapter))
            requests = one.requests - (before.requests if before else 0)
            waited = one.time_to_first_token - (before.time_to_first_token if before else 0.0)
            found.append(
                {
                    "tenant": one.tenant,
                    "adapter": one.adapter,
                    "requests": requests,
                    "tokens": one.completion_tokens - (before.completion_tokens if before else 0),
                    "ttft_s": waited / requests if requests else None,
                    "all_requests": one.requests,
                }
            )
        return sorted(found, key=lambda one: (-one["tokens"], -one["all_requests"], one["tenant"], one["adapter"]))

    @property
    def _last(self) -> cluster_pb2.GetTrafficResponse | None:
        if self.before is None or self.before.traffic.uptime >= self.now.traffic.uptime:
            return None
        return self.before.traffic
