"""A model in two cells on two Valkey servers: one is killed, one drained under load; each stream gets its own ids."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio

from loraplex.cli.local import ClusterSettings, LocalCluster
from loraplex.cluster.v1 import cluster_pb2 as pb
from loraplex.cluster.v1 import cluster_pb2_grpc
from loraplex.contracts.broker.keys import Keys
from loraplex_client import AsyncClient, Generation, ResourceExhaustedError
from tests.e2e.conftest import TENANT, Cluster, jobs, running_cluster, write_hash_adapters
from tests.e2e.test_worker_loss import MODEL, ask
from tests.plans_file import set_plans
from tests.valkey_server import ValkeyServer

pytestmark = pytest.mark.asyncio(loop_scope="module")
Answers = asyncio.Future[list[Generation]]
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]

STREAMS, TOKENS = 44, 80
# Calls of one prompt token that the quota of a tenant allows.
QUOTA = 12
# Rows of a worker: fewer in all than a fourth of the streams' answers, so that jobs wait in both cells.
ROWS = 4


class TwoCells(LocalCluster):
    """A LocalCluster whose workers with an even number are in the second cell."""

    def __init__(self, settings: ClusterSettings, second: ValkeyServer) -> None:
        super().__init__(settings)
        self._second = second

    async def _spawn(self, name: str, argv: list[str], environ: dict[str, str] | None = None) -> None:
        room, _, number = name.partition("-")
        if room == "worker" and environ is not None and int(number) % 2 == 0:
            argv = [*argv, "--cell", "second"]
            environ = {**environ, "LORAPLEX_WORKER_REDIS_URL": self._second.url}
        await super()._spawn(name, argv, environ)


@dataclass(frozen=True)
class Cells:
    """A cluster of two cells, each with two workers, and the servers of both."""

    cluster: Cluster
    main: ValkeyServer
    second: ValkeyServer

    async def queues(self) -> dict[str, pb.Queue]:
        """Return the queue of each cell."""
        async with grpc.aio.insecure_channel(self.cluster.local.router) as channel:
            answer = await cluster_pb2_grpc.ClusterServiceStub(channel).ListQueues(pb.ListQueuesRequest())
        return {queue.cell: queue for queue in answer.queues}

    async def are(self, **states: pb.CellState.ValueType) -> bool:
        """Tell whether the cells have these states, those that are open their two workers, and nothing waits."""
        queues = await self.queues()
        workers = {name: 2 if state == pb.CELL_STATE_OPEN else queues[name].workers for name, state in states.items()}
        return all(
            (queues[name].state, queues[name].workers, queues[name].waiting) == (state, workers[name], 0)
            for name, state in states.items()
        )

    async def both_serve(self) -> bool:
        """Tell whether both cells have their workers, and get jobs of the router, which needs links to these."""
        if not await self.are(main=pb.CELL_STATE_OPEN, second=pb.CELL_STATE_OPEN):
            return False
        answers, places = await self.begin("both serve", 8)
        await answers
        return set(places) == {"main", "second"}

    async def begin(self, salt: str, count: int = STREAMS) -> tuple[Answers, Counter[str]]:
        """Begin streams of adapters and the base model; return their answers, and how many jobs each cell has."""
        asks = [asyncio.create_task(ask(self.cluster, at, salt, TOKENS).whole()) for at in range(count)]
        async with asyncio.timeout(100):
            while True:  # routers tell when they are asked
                begun = await jobs(self.cluster)
                if len(begun) + sum(one.done() for one in asks) >= count:
                    return asyncio.gather(*asks), Counter(job.cell for job in begun)
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cells(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cells]:
    directory = tmp_path_factory.mktemp("cells")
    main, second = ValkeyServer(tmp_path_factory.mktemp("m")), ValkeyServer(tmp_path_factory.mktemp("s"))
    await asyncio.gather(main.start(), second.start())
    async with running_cluster(
        directory / "cluster",
        MODEL,
        write_hash_adapters(directory / "adapters"),
        workers=4,
        worker_flags=("--rows", str(ROWS)),
        router_flags=("--cells", f"main second={second.url}"),
        redis_url=main.url,
        launch=lambda settings: TwoCells(settings, second),
    ) as cluster:
        await set_plans(cluster.local.store, f"[tenants.limited]\ntokens_per_day = {QUOTA * (1 + TOKENS)}\n")
        yield Cells(cluster, main, second)
    await asyncio.gather(main.kill(), second.kill())


async def test_streams_of_both_cells_get_their_ids(cells: Cells, eventually: Eventually) -> None:
    await eventually(cells.both_serve)
    answers, places = await cells.begin("both")
    assert min(places["main"], places["second"]) >= STREAMS // 6, places
    assert not any(answer.continuations for answer in await answers)


async def test_a_quota_is_of_both_cells(cells: Cells, eventually: Eventually) -> None:
    """Tokens are reserved on the main cell's server, together with the jobs of that cell alone."""
    await eventually(cells.both_serve)
    async with AsyncClient(cells.cluster.local.router, "limited") as client:

        async def is_limited() -> bool:
            try:
                await client.generate("x", max_tokens=QUOTA * (1 + TOKENS))
            except ResourceExhaustedError:
                return True
            return False

        await eventually(is_limited)
        calls = (client.generate("x", max_tokens=TOKENS, seed=number) for number in range(QUOTA + 4))
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in ended if isinstance(one, Exception)] == [ResourceExhaustedError] * 4
        assert Counter(len(one.choices[0].token_ids) for one in ended if isinstance(one, Generation)) == {TOKENS: QUOTA}


@pytest.mark.parametrize(
    ("name", "what"), [pytest.param("second", "dies", marks=pytest.mark.nightly), ("second", "hangs"), ("main", "dies")]
)
async def test_a_cell_whose_redis_is_lost_loses_nothing(
    cells: Cells, eventually: Eventually, name: str, what: str
) -> None:
    """The main cell's server has the ledger and the drained cells as well."""
    await eventually(cells.both_serve)
    lost: ValkeyServer = getattr(cells, name)
    answers, _ = await cells.begin(f"{name} {what}")
    assert (await cells.queues())[name].waiting
    if what == "hangs":
        lost.hang()
    else:
        await lost.kill()
    try:
        meanwhile, _ = await cells.begin(f"just after {name} {what}", 8)
        assert sum(answer.continuations for answer in await answers), "no job waited in the lost cell"
        await meanwhile
        later, places = await cells.begin(f"without {name} which {what}", 12)
        assert set(places) == {"main", "second"} - {name}
        assert (await cells.queues())[name].state == pb.CELL_STATE_AWAY
        await later
    finally:
        if what == "hangs":
            lost.wake()
        else:
            await lost.start()
    await eventually(cells.both_serve)


async def loraplex(cells: Cells, *words: str) -> str:
    """Run `loraplex cells` against the first router; return what it prints, on either stream."""
    command = (sys.executable, "-m", "loraplex.cli", "cells", *words, "--router", cells.cluster.local.router)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    printed, _ = await process.communicate()
    return printed.decode()


async def test_a_cell_is_drained_under_load_and_opened_again(cells: Cells, eventually: Eventually) -> None:
    await eventually(cells.both_serve)
    answers, _ = await cells.begin("drained")
    assert (await cells.queues())["second"].waiting
    async with grpc.aio.insecure_channel(cells.cluster.local.router) as channel:  # a command takes a second to start
        await cluster_pb2_grpc.ClusterServiceStub(channel).DrainCell(pb.DrainCellRequest(cell="second"))
    again = asyncio.create_task(loraplex(cells, "drain", "second"))
    assert sum(answer.continuations for answer in await answers), "no job waited in the drained cell"
    assert "second gets no more jobs" in await again
    later, places = await cells.begin("while drained", 12)
    assert set(places) == {"main"}
    await later
    assert await cells.are(main=pb.CELL_STATE_OPEN, second=pb.CELL_STATE_DRAINED)
    table, last, unknown = await asyncio.gather(
        loraplex(cells, "list"), loraplex(cells, "drain", "main"), loraplex(cells, "open", "third")
    )
    listed = [line.split("\t")[:4] for line in table.splitlines()]
    assert listed[1:] == [["main", "hash", "open", "2"], ["second", "hash", "drained", "2"]]
    assert "it is the last open cell; open another one first" in last
    assert "'third' is not a cell of --cells: this router serves main, second" in unknown
    pins = Keys("hash", "second").pins
    async with grpc.aio.insecure_channel(cells.cluster.local.router) as channel, await cells.second.client() as redis:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        await stub.PinAdapter(pb.PinAdapterRequest(adapter="a"), metadata=[("x-loraplex-tenant", TENANT)])
        assert await redis.hlen(pins) == 1
        await redis.delete(pins)  # as a new cell has none
    assert "second is open; 1 pins were copied to it" in await loraplex(cells, "open", "second")
    await eventually(cells.both_serve)
