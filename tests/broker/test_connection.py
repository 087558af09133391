"""Test which URLs lead to a server, and that an unusable server is reported in one line, without its password."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.commands import DRAIN, CommandQueue
from loraplex.contracts.broker.connection import CONNECTIONS, REDIS_DOWN, RedisUnreachableError, connect
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.liveness import Liveness
from loraplex.contracts.broker.messages import Capacity
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.startup import connect_once_up
from tests.broker.clocked_queue import BASE, make_job
from tests.valkey_cluster import ValkeyCluster
from tests.valkey_sentinel import WatchedValkeys
from tests.valkey_server import MovingAddress, ValkeyServer

KEYS = Keys("tiny", "main")
ROOMY = Capacity(rows=8, rows_limit=8, tokens=10_000, max_tokens=4096, max_rank=64)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:s3cret@127.0.0.1:1/0", "redis://user:***@127.0.0.1:1/0: no answer"),
        ("redis://:s3cret@127.0.0.1:1", "redis://:***@127.0.0.1:1: no answer"),
        ("rediss://user:s3cret@127.0.0.1:1", "rediss://user:***@127.0.0.1:1: no answer"),
        ("redis+cluster://user:s3cret@127.0.0.1:1", "redis+cluster://user:***@127.0.0.1:1: no answer"),
        ("redis+cluster://u:s3cret@127.0.0.1:1,127.0.0.1:2", "://u:***@127.0.0.1:1,127.0.0.1:2: no answer"),
        (
            "redis+sentinel://u:s3cret@127.0.0.1:1,127.0.0.1:2/main",
            "redis+sentinel://u:***@127.0.0.1:1,127.0.0.1:2/main",
        ),
        ("http://user:s3cret@127.0.0.1", "http:// is not one of redis://, rediss://, unix://, redis+sentinel://"),
        ("redis+other://user:s3cret@127.0.0.1", "redis+other:// is not one of redis://"),
        ("unix+cluster:///s3cret", "unix+cluster:// is not one of redis://"),
        ("redis+sentinel://user:s3cret@127.0.0.1:1", "name the service that the sentinels watch"),
        ("redis+sentinel://user:s3cret@a:b/main", "'a:b': write HOST:PORT"),
        ("redis+cluster://user:s3cret@127.0.0.1/3", "a cluster has database 0 alone"),
        ("redis://user:s3cret@127.0.0.1/?socket_timout=3", "unknown option socket_timout"),
        ("redis://user:pass@s3cret@127.0.0.1:1", "redis://user:***@127.0.0.1:1: no answer"),
        ("redis://user:s3cret/word@127.0.0.1:1", "redis://user:***@127.0.0.1:1: write /, ? and # of a password"),
        ("redis+sentinel://user:s3cret#word@127.0.0.1:1/main", "user:***@127.0.0.1:1/main: write /, ? and #"),
    ],
)
async def test_a_server_that_can_not_be_used_is_told_in_one_line(url: str, shown: str) -> None:
    with pytest.raises(RedisUnreachableError) as caught:
        await connect(url)
    assert str(caught.value).startswith("--redis-url ")
    assert shown in str(caught.value)
    assert "s3cret" not in str(caught.value).replace("///s3cret", "")
    assert "\n" not in str(caught.value)


async def use(url: str) -> None:
    """Everything that a router and a worker do with a server, more of it at once than there are connections."""
    async with await connect(url) as client:
        queue = JobQueue(client, KEYS, worker_id="w")
        await asyncio.gather(*(queue.enqueue(make_job(f"{number}", "a")) for number in range(4 * CONNECTIONS)))
        assert await queue.wait_for_work(30)
        assert (await queue.claim(BASE, ROOMY)).waiting == 4 * CONNECTIONS - 8
        assert await queue.count_waiting() == 4 * CONNECTIONS - 8
        commands = CommandQueue(client, KEYS)
        await commands.send("incarnation", DRAIN)
        assert await commands.next("incarnation", 30) is DRAIN
        assert await Liveness(client, KEYS).live_workers() == []
        assert await queue.dead.list() == []


async def test_a_user_with_a_password(redis: Redis, valkey_url: str) -> None:
    await redis.acl_setuser("loraplex", enabled=True, passwords=["+p@ss"], keys=["lp:*"], categories=["+@all"])
    try:
        await use(valkey_url.replace("unix://", "unix://loraplex:p%40ss@"))
        with pytest.raises(RedisUnreachableError, match=r"unix://loraplex:\*\*\*@.*invalid username-password"):
            await connect(valkey_url.replace("unix://", "unix://loraplex:other@"))
        with pytest.raises(RedisUnreachableError, match="invalid username-password"):
            await connect_once_up(valkey_url.replace("unix://", "unix://loraplex:other@"))
    finally:
        await redis.acl_deluser("loraplex")


@pytest.fixture
async def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("v")


async def test_a_cluster_that_moves_a_queue_key_by_key_is_an_outage_for_that_queue(directory: Path) -> None:
    """No call goes on at the node that gets the slot: it would begin the queue anew there, in the way of its keys."""
    async with ValkeyCluster(directory) as cluster, await connect(cluster.url) as client:
        await use(cluster.url)
        other = JobQueue(client, Keys("tiny", "other"), worker_id="w")
        queue, liveness = JobQueue(client, KEYS, worker_id="w"), Liveness(client, KEYS)
        waiting = await queue.count_waiting()
        async with cluster.moving(KEYS.waiting):
            for call in (
                queue.enqueue(make_job("late", "a")),
                queue.claim(BASE, ROOMY),
                queue.count_waiting(),
                queue.finish("8", 1),
            ):
                with pytest.raises(REDIS_DOWN):
                    await call
            assert await cluster.nodes[1].dbsize() == 1
            await other.enqueue(make_job("other", "a"))
        # The node that has joined has no functions yet.
        assert (await queue.claim(BASE, ROOMY)).waiting == waiting - 8
        assert await liveness.live_workers() == []


@pytest.fixture
async def pair(directory: Path) -> AsyncIterator[tuple[ValkeyServer, ValkeyServer]]:
    """A primary and its replica."""
    servers = ValkeyServer(directory / "1"), ValkeyServer(directory / "2")
    for server in servers:
        await server.start()
    await servers[1].follow(servers[0])
    yield servers
    for server in servers:
        await server.kill()


async def answers(client: Redis, key: str) -> None:
    """Wait until a write goes through."""
    async with asyncio.timeout(60):
        while True:
            try:
                await client.set(key, 1)
                return
            except REDIS_DOWN:
                await asyncio.sleep(0.05)


async def test_sentinels_tell_the_primary_before_and_after_a_failover(directory: Path) -> None:
    async with WatchedValkeys(directory) as valkeys:
        await use(valkeys.url)
        async with await connect(valkeys.url) as client:
            await valkeys.lose_primary()
            await answers(client, "after")
        async with await valkeys.replica.client() as client:
            assert await client.exists("after")


async def test_a_primary_that_became_a_replica_is_left(
    directory: Path, pair: tuple[ValkeyServer, ValkeyServer]
) -> None:
    primary, replica = pair
    address = MovingAddress(directory / "at")
    address.lead_to(primary)
    async with await connect(address.url) as client:
        await client.set("before", 1)
        await replica.lead()
        await primary.follow(replica)
        address.lead_to(replica)
        await client.set("after", 1)  # the connection stands; its server takes no writes any more
    async with await replica.client() as client:
        assert await client.exists("after")


async def test_a_call_to_a_server_that_hangs_ends(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.contracts.broker.connection.CALL_S", 0.3)
    server = ValkeyServer(directory)
    await server.start()
    try:
        async with await server.client() as client:
            server.hang()
            # With connections that stand, and with those that it never greets.
            for _ in range(2):
                with pytest.raises(REDIS_DOWN):
                    await client.ping()
            pipe = client.pipeline()
            pipe.ping()
            with pytest.raises(REDIS_DOWN):
                await pipe.execute()
            server.wake()
            await answers(client, "after")
    finally:
        await server.kill()
