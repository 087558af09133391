"""Redis Clusters of Valkeys: one moves slots between its nodes, whole or key by key; replicas of one take over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from redis.asyncio import Redis
from redis.crc import key_slot

from tests.free_ports import free_ports
from tests.valkey_server import ValkeyServer

_FLAGS = ("--cluster-enabled", "yes", "--cluster-allow-replica-migration", "no")
# Shards of a cluster with replicas, the fewest of which a majority can outlive one; time in milliseconds without an
# answer after which the others hold a node for lost.
_SHARDS, _LOST_MS = 3, 1000


def _servers(directory: Path, buses: list[int], *flags: str) -> list[ValkeyServer]:
    return [ValkeyServer(directory / str(bus), *_FLAGS, *flags, "--cluster-port", str(bus)) for bus in buses]


async def _run(node: Redis, command: str, *arguments: Any) -> Any:
    return await node.execute_command(f"CLUSTER {command}", *arguments)  # type: ignore[no-untyped-call]  # theirs


class ValkeyCluster:
    """Two nodes, of which the first has all slots at the start; `nodes` are their clients."""

    def __init__(self, directory: Path) -> None:
        self._buses = free_ports(2)
        self._servers = _servers(directory, self._buses)
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
        await _until(lambda: _all_know(self.nodes))
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
        return await _run(self.nodes[node], command, *arguments)


class ReplicatedCluster:
    """Three primaries that share the slots, and a replica of each, which takes over when its primary is lost."""

    def __init__(self, directory: Path) -> None:
        self._buses = free_ports(2 * _SHARDS)
        self._servers = _servers(directory, self._buses, "--cluster-node-timeout", str(_LOST_MS))

    @property
    def url(self) -> str:
        """Return the URL of the cluster, by one node of each shard."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self._servers[_SHARDS:])

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(server.start() for server in self._servers))
        nodes = [await server.client() for server in self._servers]
        bounds = [16_384 * shard // _SHARDS for shard in range(_SHARDS + 1)]
        for shard in range(_SHARDS):
            await _run(nodes[shard], "ADDSLOTSRANGE", bounds[shard], bounds[shard + 1] - 1)
        for server, bus in zip(self._servers[1:], self._buses[1:], strict=True):
            await _run(nodes[0], "MEET", "127.0.0.1", server.port, bus)
        await _until(lambda: _all_know(nodes))
        for shard, replica in enumerate(nodes[_SHARDS:]):
            await _run(replica, "REPLICATE", (await _run(nodes[shard], "MYID")).decode())
        await _until(lambda: _all_follow(nodes))
        for node in nodes:
            await node.aclose()
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.gather(*(server.kill() for server in self._servers))

    async def lose_primary(self, shard: int) -> None:
        """Kill a shard's primary; returns when its replica has taken over."""
        await self._servers[shard].kill()
        async with await self._servers[_SHARDS + shard].client() as replica:
            await _until(lambda: _leads(replica))


async def _until(reached: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await reached():  # noqa: ASYNC110 — nodes tell nobody
            await asyncio.sleep(0.02)


async def _all_know(nodes: list[Redis]) -> bool:
    states = [await _run(node, "INFO") for node in nodes]
    return all(one["cluster_state"] == "ok" and int(one["cluster_known_nodes"]) == len(nodes) for one in states)


async def _all_follow(nodes: list[Redis]) -> bool:
    links = [(await node.info("replication")).get("master_link_status") for node in nodes[_SHARDS:]]
    return links == ["up"] * _SHARDS


async def _leads(node: Redis) -> bool:
    return bool((await node.info("replication"))["role"] == "master")
