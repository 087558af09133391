"""A Valkey and its replica, watched by a sentinel, which makes the replica the primary when that is lost."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Self

from redis.asyncio import Redis

from loraplex.cli import valkey
from loraplex.runtime.rpc.children.process import Process
from tests.free_ports import free_port
from tests.valkey_server import ValkeyServer

_READY = re.compile(r"\+monitor master")
_SERVICE = "main"


class WatchedValkeys:
    """The three processes; `directory` must be short enough for a socket's path."""

    def __init__(self, directory: Path) -> None:
        self.primary, self.replica = ValkeyServer(directory / "1"), ValkeyServer(directory / "2")
        self._directory = directory
        self._port = free_port()
        # The first of its sentinels does not answer.
        self.url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{self._port}/{_SERVICE}"

    async def __aenter__(self) -> Self:
        for server in (self.primary, self.replica):
            await server.start()
        await self.replica.follow(self.primary)
        config = self._directory / "sentinel.conf"
        config.write_text(
            f"port {self._port}\nbind 127.0.0.1\nsentinel monitor {_SERVICE} 127.0.0.1 {self.primary.port} 1\n"
            f"sentinel down-after-milliseconds {_SERVICE} 300\nsentinel failover-timeout {_SERVICE} 1000\n"
        )
        command = [valkey.command(self._directory)[0], str(config), "--sentinel"]
        self._sentinel = await Process.start("sentinel", command, log_path=self._directory / "log", ready=_READY)
        await self._sentinel.wait_ready()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._sentinel.kill()
        for server in (self.primary, self.replica):
            await server.kill()

    async def lose_primary(self) -> None:
        """Kill the primary, once the sentinel knows of the replica."""
        async with asyncio.timeout(60), Redis(port=self._port) as sentinel:
            # It asks the primary for its replicas every 10 s, and publishes no event.
            while not await sentinel.sentinel_slaves(_SERVICE):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await self.primary.kill()
