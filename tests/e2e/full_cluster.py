"""Streams that hold every row of a cluster, jobs that wait behind them, and the Redis beneath, to be treated badly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loraplex.cluster.v1 import cluster_pb2, cluster_pb2_grpc
from loraplex.inference.v1 import inference_pb2 as pb
from redis.asyncio import Redis

from tests.e2e.conftest import TENANT, Cluster
from tests.valkey_server import MovingAddress, ValkeyServer
from worker.engine.hash_engine import expected_ids
from worker.engine_api import Stopping

SLOW = "hash:?vocab=32000&seed=1&step_ms=30"
ROWS = 8
ENDLESS = 20_000
SHORT = 15
PREFIX = "lp:{hash/main}:"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]


@dataclass
class Call:
    """A Generate call, read to its end or until it is cancelled."""

    prompt: str
    max_tokens: int
    ids: list[int] = field(default_factory=list)
    # Grows with every message.
    news: asyncio.Condition = field(default_factory=asyncio.Condition)
    reading: asyncio.Task[None] | None = None

    async def read(self, stub: Any) -> None:
        spec = pb.GenerateSpec(prompt=self.prompt, stopping=pb.Stopping(max_tokens=self.max_tokens))
        call = stub.Generate(pb.GenerateRequest(spec=spec), metadata=[("x-loraplex-tenant", TENANT)])
        async for response in call:
            if response.event.WhichOneof("kind") == "delta":
                async with self.news:
                    assert response.event.delta.offset == len(self.ids), "lost or repeated"
                    self.ids += response.event.delta.token_ids
                    self.news.notify_all()

    async def gets(self, more: int) -> None:
        """Wait for so many tokens more."""
        goal = len(self.ids) + more
        async with asyncio.timeout(60), self.news:
            while len(self.ids) < goal:
                assert self.reading is not None
                assert not self.reading.done(), "ended"
                await self.news.wait()

    async def answer(self) -> None:
        """Wait for its end; it must be whole."""
        assert self.reading is not None
        async with asyncio.timeout(60):
            await self.reading
        assert len(self.ids) == self.max_tokens
        self.check()

    def check(self) -> None:
        """Check that the ids that came are the engine's."""
        prompt, stopping = list(self.prompt.encode()), Stopping(max_tokens=len(self.ids))
        assert self.ids == list(expected_ids(SLOW, prompt, adapter_digest="", stopping=stopping))


@dataclass
class Load:
    """Streams that hold all rows, and how to put jobs behind them."""

    cluster: Cluster
    stubs: list[Any]
    holders: list[Call] = field(default_factory=list)
    count: int = 0

    def ask(self, max_tokens: int) -> Call:
        """Start a call; the routers take turns."""
        self.count += 1
        call = Call(f"prompt {self.count}", max_tokens)
        call.reading = asyncio.create_task(call.read(self.stubs[self.count % len(self.stubs)]))
        return call

    async def hold(self) -> None:
        """Fill the rows that are free."""
        fresh = [self.ask(ENDLESS) for _ in range(ROWS - len(self.holders))]
        self.holders += fresh
        for call in fresh:
            await call.gets(1)

    async def leave(self, index: int = 0) -> None:
        """End one holder, which frees its row."""
        call = self.holders.pop(index)
        await stop(call)
        assert call.ids
        call.check()

    async def go_on(self, attempts: int = 1) -> None:
        """Every holder gets tokens still, of the attempt that it had."""
        for call in self.holders:
            await call.gets(6)
            call.check()
        started = [job for job in await jobs(self.cluster) if job.completion_tokens]
        assert len(started) == len(self.holders), [(job.request_id, job.completion_tokens) for job in started]
        assert {job.attempt for job in started} == {attempts}


async def stop(call: Call) -> None:
    """Cancel a call, as a client that goes away does."""
    assert call.reading is not None
    call.reading.cancel()
    await asyncio.gather(call.reading, return_exceptions=True)


async def jobs(cluster: Cluster, routers: Sequence[str] = ()) -> list[cluster_pb2.Job]:
    """Return the jobs that these routers own; by default those of all."""
    found: list[cluster_pb2.Job] = []
    for address in routers or cluster.local.routers:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = cluster_pb2_grpc.ClusterServiceStub(channel)
            found += (await stub.ListJobs(cluster_pb2.ListJobsRequest())).jobs
    return found


async def health(cluster: Cluster, status: int) -> None:
    """Wait until every router says so."""
    for address in cluster.local.routers:
        async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(60):
            async for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                if answer.status == status:
                    break


@dataclass
class World:
    """The cluster, and the Redis that it stands on now."""

    load: Load
    address: MovingAddress
    directory: Path
    server: ValkeyServer

    @asynccontextmanager
    async def redis(self) -> AsyncIterator[Redis]:
        """A client of whoever serves."""
        async with await self.server.client() as client:
            yield client

    async def waiting(self) -> set[bytes]:
        """Ids of jobs that wait."""
        async with self.redis() as client:
            ids = await client.zrange(f"{PREFIX}waiting", 0, -1)
            return {job_id for job_id in ids if isinstance(job_id, bytes)}

    async def wait(self, count: int, eventually: Eventually) -> list[Call]:
        """Start `count` calls and wait until their jobs wait in the queue."""
        goal = count + len(await self.waiting())
        calls = [self.load.ask(SHORT) for _ in range(count)]

        async def all_wait() -> bool:
            return len(await self.waiting()) == goal

        await eventually(all_wait)
        return calls


def retry_after(error: grpc.aio.AioRpcError) -> float:
    """Return the delay of the error's RetryInfo, in seconds."""
    (packed,) = [value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"]
    info = error_details_pb2.RetryInfo()
    (found,) = [detail for detail in status_pb2.Status.FromString(packed).details if detail.Is(info.DESCRIPTOR)]
    found.Unpack(info)
    return float(info.retry_delay.ToNanoseconds() / 1e9)
