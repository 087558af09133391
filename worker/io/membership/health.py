"""Whether this worker serves: grpc.health.v1 at a port of its own; the log says what it waits for."""

from __future__ import annotations

import logging

from rpc.server import Server

log = logging.getLogger(__name__)


class WorkerHealth:
    """NOT_SERVING from its start until `serves`."""

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

    async def serves(self) -> None:
        """It takes work from now on."""
        await self._server.set_serving(True)

    async def serves_not(self) -> None:
        """It takes none."""
        await self._server.set_serving(False)

    async def close(self) -> None:
        """Answer no more."""
        await self._server.stop(0)
