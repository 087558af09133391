"""Redis restarts empty, fails over, hangs: running streams don't notice, what waits comes back.

Two routers, two workers of four rows, the hash model. Streams that never end hold all rows; the jobs behind them wait.
After each fault one holder leaves, and what waited must be answered with its exact ids.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from loraplex.inference.v1 import inference_pb2_grpc

from tests.e2e.conftest import running_cluster
from tests.e2e.full_cluster import (
    NOT_SERVING,
    ROWS,
    SERVING,
    SHORT,
    SLOW,
    Eventually,
    Load,
    World,
    health,
    jobs,
    stop,
)
from tests.valkey_server import MovingAddress, ValkeyServer

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lp-")))
        server = ValkeyServer(directory / "1")
        await server.start()
        address = MovingAddress(directory / "at")
        address.lead_to(server)
        cluster = await stack.enter_async_context(
            running_cluster(
                tmp_path_factory.mktemp("loss"),
                SLOW,
                {},
                workers=2,
                routers=2,
                worker_flags=("--rows", str(ROWS // 2)),
                redis_url=address.url,
            )
        )
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(at)) for at in cluster.local.routers]
        world = World(
            Load(cluster, list(map(inference_pb2_grpc.InferenceServiceStub, channels))), address, directory, server
        )
        try:
            yield world
        finally:
            await stack.aclose()
            await world.server.kill()


@pytest_asyncio.fixture(loop_scope="module")
async def load(world: World, eventually: Eventually) -> AsyncIterator[Load]:
    """Holders on every row; afterwards nothing of the test is left anywhere."""
    await world.load.hold()
    yield world.load
    for call in world.load.holders:
        await stop(call)
        call.check()
    world.load.holders.clear()

    async def idle() -> bool:
        async with world.redis() as client:
            keys = [key for pattern in ("*:job:*", "*:waiting", "*:queue:*", "*:again")
                    async for key in client.scan_iter(pattern)]  # fmt: skip
        states = await world.load.cluster.workers()
        held = [w.blocks.referenced + w.rows_running + w.rows_waiting for w in states]
        return len(states) == 2 and not any(held) and not keys and not await jobs(world.load.cluster)

    await eventually(idle)


async def test_what_waited_is_put_back_though_redis_restarts_empty(
    world: World, load: Load, eventually: Eventually
) -> None:
    calls = await world.wait(6, eventually)
    await world.server.restart(keeps=False)
    await load.go_on()
    await load.leave()
    await asyncio.gather(*(call.answer() for call in calls))
    await load.go_on()


async def test_a_failover_to_a_replica_that_lags(world: World, load: Load, eventually: Eventually) -> None:
    replica = ValkeyServer(world.directory / "2")
    await replica.start()
    waits = await world.wait(2, eventually)
    done, left = (await world.wait(1, eventually))[0], (await world.wait(1, eventually))[0]
    replicated = await world.waiting()
    await replica.follow(world.server)
    await replica.lead()
    # From here on the replica knows nothing: one leaves, one comes, the first in line are claimed and done.
    await stop(left)
    await load.leave()
    await asyncio.gather(*(call.answer() for call in (*waits, done)))
    await load.hold()
    late = await world.wait(2, eventually)
    missed = await world.waiting()
    assert not replicated & missed
    world.address.lead_to(replica)
    older, world.server = world.server, replica
    assert replicated <= await world.waiting()
    await older.kill()
    await load.go_on()
    await load.leave()
    await asyncio.gather(*(call.answer() for call in late))
    await load.go_on()


async def test_a_redis_that_hangs(world: World, load: Load, eventually: Eventually) -> None:
    calls = await world.wait(4, eventually)
    world.server.hang()
    try:
        # A worker with room claims meanwhile, and is not there any more when it is answered.
        await load.leave()
        refused = load.ask(SHORT)
        # The routers say so once every worker's key would have lapsed; nobody is taken for dead.
        await health(load.cluster, NOT_SERVING)
        await load.go_on()
        assert refused.reading is not None
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await refused.reading
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        world.server.wake()
    await health(load.cluster, SERVING)
    # First, or one of them may be counted among the started jobs.
    await asyncio.gather(*(call.answer() for call in calls))
    await load.go_on()


async def test_routers_without_a_worker_say_so(world: World) -> None:
    local = world.load.cluster.local
    await health(world.load.cluster, SERVING)
    killed = [name for name in local.processes if name.startswith("worker-")]
    for name in killed:
        local.kill(name)
    await health(world.load.cluster, NOT_SERVING)
    name = await local.start_worker()
    await local.processes[name].wait_ready()
    await health(world.load.cluster, SERVING)
    call = world.load.ask(SHORT)
    await call.answer()
    local.kill(name, signal.SIGTERM)  # a worker that leaves says so itself
    await health(world.load.cluster, NOT_SERVING)
