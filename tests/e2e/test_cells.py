"""A model in two cells on two Valkey servers: one is killed, one drained under load; each stream gets its own ids."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio
from loraplex.cluster.v1 import cluster_pb2 as pb
from loraplex.cluster.v1 import cluster_pb2_grpc
from loraplex_client import Generation

from deploy.local import ClusterSettings, LocalCluster
from tests.e2e.conftest import Cluster, jobs, running_cluster, write_hash_adapters
from tests.e2e.test_worker_loss import MODEL, ask
from tests.valkey_server import ValkeyServer

pytestmark = pytest.mark.asyncio(loop_scope="module")
Answers = asyncio.Future[list[Generation]]
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]

STREAMS = 48
# Fewer in all than the streams' answers, so that jobs wait in both cells.
ROWS = 8


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
        """Tell whether both cells are as at the start."""
        return await self.are(main=pb.CELL_STATE_OPEN, second=pb.CELL_STATE_OPEN)

    async def begin(self, salt: str, count: int = STREAMS) -> tuple[Answers, Counter[str]]:
        """Begin streams of adapters and the base model; return their answers, and how many jobs each cell has."""
        asks = [ask(self.cluster, number, salt) for number in range(count)]
        answers = asyncio.gather(*(one.whole() for one in asks))
        async with asyncio.timeout(30):
            while len(begun := await jobs(self.cluster)) < count:  # noqa: ASYNC110 — routers tell when they are asked
                await asyncio.sleep(0.02)
        return answers, Counter(job.cell for job in begun)


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
        yield Cells(cluster, main, second)
    await asyncio.gather(main.kill(), second.kill())


async def test_streams_of_both_cells_get_their_ids(cells: Cells, eventually: Eventually) -> None:
    await eventually(cells.both_serve)
    answers, places = await cells.begin("both")
    assert min(places["main"], places["second"]) >= STREAMS // 6, places
    assert not any(answer.continuations for answer in await answers)
    await eventually(cells.both_serve)


@pytest.mark.parametrize("name", ["second", "main"])
async def test_a_cell_whose_redis_is_killed_loses_nothing(cells: Cells, eventually: Eventually, name: str) -> None:
    """The main cell's server has the ledger and the drained cells as well."""
    await eventually(cells.both_serve)
    lost: ValkeyServer = getattr(cells, name)
    answers, places = await cells.begin(f"lost {name}")
    assert places[name]
    await lost.kill()
    try:
        assert sum(answer.continuations for answer in await answers), "no job waited in the lost cell"
        later, places = await cells.begin(f"without {name}", 12)
        assert set(places) == {"main", "second"} - {name}
        await later
    finally:
        await lost.start()
    await eventually(cells.both_serve)
    again, places = await cells.begin(f"with {name}", 24)
    assert set(places) == {"main", "second"}
    await again


async def test_a_cell_is_drained_under_load_and_opened_again(cells: Cells, eventually: Eventually) -> None:
    await eventually(cells.both_serve)
    answers, places = await cells.begin("drained")
    assert places["second"]
    async with grpc.aio.insecure_channel(cells.cluster.local.router) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        await stub.DrainCell(pb.DrainCellRequest(cell="second"))
        assert sum(answer.continuations for answer in await answers), "no job waited in the drained cell"
        later, places = await cells.begin("while drained", 12)
        assert set(places) == {"main"}
        await later
        assert await cells.are(main=pb.CELL_STATE_OPEN, second=pb.CELL_STATE_DRAINED)
        for name, code, message in (
            ("main", grpc.StatusCode.FAILED_PRECONDITION, "it is the last open cell; open another one first"),
            (
                "third",
                grpc.StatusCode.INVALID_ARGUMENT,
                "'third' is not a cell of --cells: this router serves main, second",
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=re.escape(message)) as refused:
                await stub.DrainCell(pb.DrainCellRequest(cell=name))
            assert refused.value.code() is code
        await stub.OpenCell(pb.OpenCellRequest(cell="second"))
    await eventually(cells.both_serve)
    again, places = await cells.begin("open again", 24)
    assert set(places) == {"main", "second"}
    await again
