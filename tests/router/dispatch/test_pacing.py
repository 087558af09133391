"""The interval that a router gives to its workers: by their number, and to all of them when it changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc

from router.dispatch.dispatcher import Dispatcher
from router.dispatch.relay import PaceLimits, RelayService
from rpc.server import Server
from tenancy.guard import open_guard


def test_the_interval_grows_with_the_links_between_its_bounds() -> None:
    limits = PaceLimits(messages_per_s=4000, shortest_ms=10, longest_ms=50)
    assert [limits.interval_ms(links) for links in (0, 1, 40, 41, 80, 81, 200, 201, 5000)] == [
        *(10, 10, 10),
        *(20, 20, 30),
        *(50, 50, 50),
    ]
    for links in range(1, 201):
        assert links * 1000 / limits.interval_ms(links) <= limits.messages_per_s


class Worker:
    """A worker's end of a stream, which collects the intervals."""

    def __init__(self, stub: relay_pb2_grpc.RelayServiceAsyncStub, name: str) -> None:
        self._gone = asyncio.Event()
        self._call = stub.Connect(self._requests(name))

    async def _requests(self, name: str) -> AsyncIterator[pb.ConnectRequest]:
        yield pb.ConnectRequest(hello=pb.Hello(worker_id=name, incarnation=name))
        await self._gone.wait()

    async def interval_ms(self) -> int:
        """Return the next interval."""
        async with asyncio.timeout(20):
            async for response in self._call:
                if response.HasField("pace"):
                    return response.pace.interval_ms
        raise AssertionError("the stream has ended")

    async def leave(self) -> None:
        self._gone.set()
        async for _ in self._call:
            pass


@asynccontextmanager
async def served(dispatcher: Dispatcher, limits: PaceLimits) -> AsyncIterator[relay_pb2_grpc.RelayServiceAsyncStub]:
    server, service = Server(open_guard()), RelayService(dispatcher, pace_limits=limits)
    service.add_to(server)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield relay_pb2_grpc.RelayServiceStub(channel)
    finally:
        service.close()
        await server.stop(0)


async def test_every_worker_learns_of_another_interval(dispatcher: Dispatcher) -> None:
    async with served(dispatcher, PaceLimits(messages_per_s=100, shortest_ms=10, longest_ms=20)) as stub:
        first = Worker(stub, "a")
        assert await first.interval_ms() == 10
        second = Worker(stub, "b")
        assert [await second.interval_ms(), await first.interval_ms()] == [20, 20]
        third = Worker(stub, "c")
        assert await third.interval_ms() == 20
        for worker in (third, second):
            await worker.leave()
        assert await first.interval_ms() == 10
        await first.leave()
