"""The accounts of bench.overload: how many calls a cluster's routers and their metrics have counted, and memory."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
from prometheus_client.parser import text_string_to_metric_families

from loraplex.cli.local import LocalCluster
from loraplex.cluster.v1 import cluster_pb2, cluster_pb2_grpc

# Series that count each call once, by tenant.
_BY_TENANT = {"loraplex_tenant_requests_total", "loraplex_tenant_request_failures_total"}
# Timeout in seconds for routers to notice that the last calls have ended, and the interval of looking.
_SETTLE_S, _LOOK_S = 10.0, 0.1
_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Count:
    """Calls that have ended: as routers tell over gRPC, by status, and as their metrics sum up over the tenants."""

    routers: Counter[str]
    metrics: int

    def since(self, before: Count) -> Count:
        """Return what was counted after `before`."""
        return Count(self.routers - before.routers, self.metrics - before.metrics)


class Accounts:
    """Asks the routers of a cluster."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    async def now(self) -> Count:
        """Return the counts of all routers together."""
        routers: Counter[str] = Counter()
        for address in self._cluster.routers:
            async with grpc.aio.insecure_channel(address) as channel:
                stub = cluster_pb2_grpc.ClusterServiceStub(channel)
                answer = await stub.GetTraffic(cluster_pb2.GetTrafficRequest(), timeout=_TIMEOUT_S)
            routers.update(dict(answer.requests))
        metrics = 0
        for name, process in self._cluster.processes.items():
            if name.startswith("router-"):
                address = (await process.wait_ready())["metrics"]
                metrics += await asyncio.to_thread(_calls_by_tenant, address)
        return Count(routers, metrics)

    async def after(self, before: Count, calls: int) -> Count:
        """Return the counts since `before` once they are `calls`, or what they are after a while."""
        until = time.monotonic() + _SETTLE_S
        while True:
            count = (await self.now()).since(before)
            if count.routers.total() == count.metrics == calls or time.monotonic() > until:
                return count
            await asyncio.sleep(_LOOK_S)

    def memory_mib(self) -> float:
        """Return the resident memory of all routers; nan on a system without /proc."""
        pids = [process.pid for name, process in self._cluster.processes.items() if name.startswith("router-")]
        return sum(_resident_mib(pid) for pid in pids)

    def pids(self) -> Mapping[str, int]:
        """Return the cluster's processes."""
        return {name: process.pid for name, process in self._cluster.processes.items()}


def _calls_by_tenant(address: str) -> int:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as answer:
        text = answer.read().decode()
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return int(sum(sample.value for sample in samples if sample.name in _BY_TENANT))


def _resident_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), float("nan"))
