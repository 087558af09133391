"""The health service of a server, with a bound of the streams of it that anybody may open."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from rpc.errors import Exhausted
from rpc.shares import Shares

# Maximum number of open Watch calls, which need no credential: an address alone gets half of them.
WATCHES = 1_024
# Time in seconds after which a refused client is to call again; it may call Check at any time.
_RETRY_S = 10.0


class BoundedHealth(health.aio.HealthServicer):  # type: ignore[misc]  # its package has no types
    """grpc.health.v1.Health, as gRPC's own package serves it."""

    def __init__(self, watches: int = WATCHES) -> None:
        super().__init__()
        self._watches = Shares(watches)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Send the health whenever it changes. Raises Exhausted."""
        host = context.peer().rpartition(":")[0]
        if not self._watches.take(host):
            message = f"{host} watches the health of this process as often as it may; call Check instead"
            raise Exhausted("health/watches", message, retry_after_s=_RETRY_S, reason="HEALTH_WATCHED")
        try:
            await super().Watch(request, context)
        finally:
            self._watches.give(host)
