"""The links that a worker keeps to all live routers, and what its claims are told of them: at real gRPC servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from loraplex.contracts.broker.messages import Job
from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc
from loraplex.runtime.rpc.server import Server, relay_options
from loraplex.runtime.rpc.tasks import every
from loraplex.runtime.tenancy.guard import open_guard
from loraplex.worker.io.local_jobs import LocalJobs
from loraplex.worker.io.relay.links import LinkSettings, RouterLinks
from tests.worker.io.relay.handlers import NoRequests


class Router(relay_pb2_grpc.RelayServiceServicer):
    """A router that has no jobs for anybody, and counts what it hears."""

    def __init__(self) -> None:
        self.streams = 0
        self.beats = 0
        self.heard = asyncio.Condition()

    async def Connect(self, request_iterator: AsyncIterator[pb.ConnectRequest], context: Any) -> Any:
        async for request in request_iterator:
            # Before the welcome, with which a link lives: the test may end the stream then.
            async with self.heard:
                self.streams += request.HasField("hello")
                self.beats += request.HasField("beat")
                self.heard.notify_all()
            if request.HasField("hello"):
                yield pb.ConnectResponse(welcome=pb.Welcome())


@asynccontextmanager
async def listening(router: Router, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    server = Server(open_guard(), options=relay_options())
    relay_pb2_grpc.add_RelayServiceServicer_to_server(router, server.services)
    host, _, port = address.rpartition(":")
    bound = server.bind(host, int(port))
    await server.start()
    try:
        yield f"{host}:{bound}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def linked(beat_s: float = 0.5) -> AsyncIterator[tuple[RouterLinks, LocalJobs]]:
    jobs = LocalJobs()
    links = RouterLinks(LinkSettings("w", "w-1", beat_s=beat_s), jobs, NoRequests())
    try:
        yield links, jobs
    finally:
        await links.close(1)


async def until(links: RouterLinks, condition: Callable[[], bool]) -> None:
    """Wait until a change of the links makes a condition true."""
    async with asyncio.timeout(30):
        while not condition():
            await links.next_change.wait()


async def test_links_to_all_live_routers_are_kept_and_the_live_ones_are_known() -> None:
    first, second = Router(), Router()
    async with linked() as (links, _), listening(first) as one:
        async with listening(second) as two:
            links.follow([one, two])
            await until(links, lambda: set(links.live) == {one, two})
            links.follow([one, two])
            # A router that Redis has forgotten, as a wiped Redis has: its link is open, so it lives.
            links.follow([one])
            assert set(links.live) == {one, two}
        await until(links, lambda: links.live == (one,))
        assert (first.streams, second.streams) == (1, 1)


async def test_a_router_that_is_out_of_reach_is_found_when_it_comes_back() -> None:
    async with linked() as (links, _):
        async with listening(Router()) as address:
            links.follow([address])
            await until(links, lambda: links.live == (address,))
        await until(links, lambda: not links.live)
        async with listening(Router(), address):
            links.dial([address])
            await until(links, lambda: links.live == (address,))


async def test_a_router_whose_jobs_wait_is_dialled_before_redis_names_it() -> None:
    async with linked() as (links, _), listening(Router()) as address:
        links.dial([address])
        await until(links, lambda: links.live == (address,))


async def test_routers_with_jobs_here_hear_that_the_worker_lives_and_others_do_not() -> None:
    busy, idle = Router(), Router()
    async with linked(beat_s=0.01) as (links, jobs), listening(busy) as one, listening(idle) as two:
        links.follow([one, two])
        await until(links, lambda: set(links.live) == {one, two})
        jobs.add(Job("a", "acme", "tiny", "sha256:0", one, (1,), StoppingParams(100), sampling=SamplingParams(seed=1)))
        beating = asyncio.create_task(every(0.01, links.keep_alive))
        async with asyncio.timeout(30), busy.heard:
            await busy.heard.wait_for(lambda: busy.beats >= 2)
        beating.cancel()
        jobs.remove("a", 1)
        assert (idle.streams, idle.beats) == (1, 0)
