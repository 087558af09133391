"""The worker's health: grpc.health.v1 at a port of its own."""

from __future__ import annotations

import logging

from rpc.server import Server

log = logging.getLogger(__name__)


class WorkerHealth:
    """The health server, NOT_SERVING from its start until `set_serving`."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._server = Server()
        # HOST:PORT, once it listens.
        self.address = ""

    async def start(self, port: int) -> None:
        """Listen; 0: the system chooses the port. Raises PortInUse."""
        self.address = f"{self._host}:{self._server.bind(self._host, port)}"
        await self._server.start()
        log.info("health at %s", self.address)

    async def set_serving(self, serving: bool) -> None:
        """Answer SERVING or NOT_SERVING from now on."""
        await self._server.set_serving(serving)

    async def close(self) -> None:
        """Stop listening."""
        await self._server.stop(0)
