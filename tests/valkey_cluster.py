"""A Redis Cluster of two Valkeys, and both ways of moving a slot from one to the other: whole, and key by key."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from redis.asyncio import Redis
from redis.crc import key_slot

from tests.valkey_server import ValkeyServer

_FLAGS = ("--cluster-enabled", "yes", "--cluster-allow-replica-migration", "no")


def free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


class ValkeyCluster:
    """Two nodes, of which the first has all slots at the start; `nodes` are their clients."""

    def __init__(self, directory: Path) -> None:
        self._buses = [free_port(), free_port()]
        self._servers = [ValkeyServer(directory / str(bus), *_FLAGS, "--cluster-port", str(bus)) for bus in self._buses]
        self.nodes: list[Redis] = []

    @property
    def url(self) -> str:
        """Return the URL of the cluster, by the first node alone."""
        return f"redis+cluster://127.0.0.1:{self._servers[0].port}"

    async def __aenter__(self) -> Self:
        for server in self._servers:
            await server.start()
            self.nodes.append(await server.client())
        await self._run(0, "ADDSLOTSRANGE", 0, 16_383)
        await self._run(0, "MEET", "127.0.0.1", self._servers[1].port, self._buses[1])
        for node in range(2):
            while (await self._run(node, "INFO"))["cluster_state"] != "ok":  # noqa: ASYNC110 — it tells nobody
                await asyncio.sleep(0.02)
        self._ids = [(await self._run(node, "MYID")).decode() for node in range(2)]
        return self

    async def __aexit__(self, *error: object) -> None:
        for node in self.nodes:
            await node.aclose()
        for server in self._servers:
            await server.kill()

    async def move(self, key: str, source: int) -> None:
        """Move the slot of a key from a node to the other one, whole."""
        slot = key_slot(key.encode())
        await self._run(source, "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", self._ids[1 - source])
        while (state := (await self._run(source, "GETSLOTMIGRATIONS"))[0][b"state"]) != b"success":
            assert state != b"failed"
            await asyncio.sleep(0.01)

    @asynccontextmanager
    async def moving(self, key: str) -> AsyncIterator[None]:
        """Move the slot of a key from the first node to the second, key by key; the rest at the end of the context."""
        slot, (source, target) = key_slot(key.encode()), self._ids
        await self._run(1, "SETSLOT", slot, "IMPORTING", source)
        await self._run(0, "SETSLOT", slot, "MIGRATING", target)
        await self._migrate(key)
        yield
        for name in await self._run(0, "GETKEYSINSLOT", slot, 10_000):
            await self._migrate(name)
        for node in (1, 0):
            await self._run(node, "SETSLOT", slot, "NODE", target)

    async def _migrate(self, key: str | bytes) -> None:
        await self.nodes[0].migrate("127.0.0.1", self._servers[1].port, key, 0, 2000)

    async def _run(self, node: int, command: str, *arguments: Any) -> Any:
        return await self.nodes[node].execute_command(  # type: ignore[no-untyped-call]  # theirs
            f"CLUSTER {command}", *arguments
        )
