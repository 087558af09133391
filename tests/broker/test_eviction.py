"""A Redis that evicts keys is refused at start where that can be changed, and told while routers run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.connection import RedisUnreachableError
from loraplex.contracts.broker.startup import EvictionWatch, connect_once_up
from tests.valkey_server import ValkeyServer


@pytest.fixture
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ValkeyServer]:
    """A server of the test's own, whose settings it changes."""
    server = ValkeyServer(Path(tmp_path_factory.mktemp("v")))
    await server.start()
    yield server
    await server.kill()


async def evict(redis: Redis, policy: str = "allkeys-lru") -> None:
    """Give the server little memory, and a policy that evicts."""
    await redis.config_set("maxmemory-policy", policy)
    await redis.config_set("maxmemory", str(int((await redis.info("memory"))["used_memory"]) + 300_000))


async def test_a_policy_that_evicts_is_refused_at_start(server: ValkeyServer) -> None:
    async with await server.client() as redis:
        await evict(redis, "volatile-ttl")
        with pytest.raises(
            RedisUnreachableError, match=r"--redis-url .*maxmemory-policy is volatile-ttl; set it to no"
        ):
            await connect_once_up(server.url)
        await redis.config_set("maxmemory-policy", "noeviction")
        await (await connect_once_up(server.url)).aclose()


async def test_where_settings_are_forbidden_the_policy_is_only_logged(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with await server.client() as redis:
        await evict(redis)
        await redis.acl_setuser(
            "managed", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all", "-config"]
        )
        managed = await connect_once_up(f"redis://managed:secret@127.0.0.1:{server.port}/0")
        await managed.aclose()
        assert "maxmemory-policy is allkeys-lru; set it to noeviction" in caplog.text
        assert "secret" not in caplog.text
        # Without a limit of the memory nothing is evicted.
        caplog.clear()
        await redis.config_set("maxmemory", "0")
        await (await connect_once_up(server.url)).aclose()
        assert "maxmemory-policy is allkeys-lru" in caplog.text


async def test_evictions_while_a_router_runs_are_counted_and_logged(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with await server.client() as redis:
        evicted: list[int] = []
        watch = EvictionWatch(redis, evicted.append)
        await watch.look()
        await evict(redis)
        await watch.look()
        await watch.look()
        assert caplog.text.count("maxmemory-policy is allkeys-lru now") == 1
        assert evicted == []
        for number in range(50):
            await redis.set(f"key-{number}", bytes(20_000))
        await watch.look()
        await watch.look()
        count = int((await redis.info("stats"))["evicted_keys"])
        assert (sum(evicted), len(evicted)) == (count, 1)
        assert count > 0
        assert f"has evicted {count} keys" in caplog.text
