"""The health service of a server, with a bound of the streams of it that anybody may open.

gRPC's own package has one too. There a change of the health waits for each client that watches it, and one that reads
nothing holds up the start, the drain and the end of the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.errors import Exhausted
from rpc.shares import Shares

# Maximum number of open Watch calls, which need no credential: an address alone gets half of them.
WATCHES = 1_024
# Time in seconds after which a refused client is to call again; it may call Check at any time.
_RETRY_S = 10.0

Context = grpc.aio.ServicerContext[Any, Any]


class BoundedHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # its package has no types
    """grpc.health.v1.Health."""

    def __init__(self, watches: int = WATCHES) -> None:
        self._watches = Shares(watches)
        self._serving: dict[str, bool] = {}
        # Set at the next change, and then replaced.
        self._changed = asyncio.Event()
        self._stopping = False

    def set(self, service: str, *, serving: bool) -> None:
        """Set the health of a service; after `stop` it stays as it is."""
        if not self._stopping:
            self._serving[service] = serving
            self._tell()

    def stop(self) -> None:
        """Say of all services from now on that they do not serve."""
        self._stopping = True
        self._serving = dict.fromkeys(self._serving, False)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """Return the health of a service."""
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Yield the health of a service whenever it changes. Raises Exhausted."""
        host = context.peer().rpartition(":")[0]
        if not self._watches.take(host):
            message = f"{host} watches the health of this process as often as it may; call Check instead"
            raise Exhausted("health/watches", message, retry_after_s=_RETRY_S, reason="HEALTH_WATCHED")
        try:
            sent = None
            while True:
                status = self._status(request.service)
                if status == sent:
                    await self._changed.wait()
                else:
                    yield health_pb2.HealthCheckResponse(status=status)
                    sent = status
        finally:
            self._watches.give(host)

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        statuses = health_pb2.HealthCheckResponse
        if service not in self._serving:
            return statuses.SERVICE_UNKNOWN
        return statuses.SERVING if self._serving[service] else statuses.NOT_SERVING
