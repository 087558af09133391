"""Clients that read nothing: what their calls hold is freed, and the calls stay open until the clients read them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex.router.api.service import OpenCalls
from loraplex.runtime.rpc.interceptors import end_call
from loraplex.runtime.rpc.principal import Unauthenticated
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.tenancy.guard import open_guard
from tests.rpc.raw_http2 import DATA, HEADERS, UnreadingClient

SERVICE = "/loraplex.inference.v1.InferenceService/"


class Answers(inference_pb2_grpc.InferenceServiceServicer):
    """Answers that are counted; a stream goes on for ever."""

    def __init__(self) -> None:
        self.streams: list[asyncio.Task[Any]] = []
        self.left = asyncio.Event()
        self.served = 0

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        task = asyncio.current_task()
        assert task is not None
        self.streams.append(task)
        try:
            while True:
                yield pb.GenerateResponse()
        finally:
            self.left.set()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self.served += 1
        return pb.TokenizeResponse(token_ids=range(10))


class Served:
    """A server whose tenants may have two open calls together, which is one for each."""

    def __init__(self) -> None:
        self.answers, self.refused = Answers(), list[str]()  # type: ignore[abstract]  # grpc has its own methods for those left out
        bounds = OpenCalls(2, 1 << 20, lambda method, tenant, error: self.refused.append(error.reason))
        self.server = Server(open_guard(), interceptors=[bounds])
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.answers, self.server.services)
        self.port = self.server.bind("127.0.0.1", 0)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    await served.server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        # The first call of a server, and its last one, stay with the loop that accepts calls.
        await inference_pb2_grpc.InferenceServiceStub(channel).Tokenize(
            pb.TokenizeRequest(), metadata=(("x-loraplex-tenant", "first"),)
        )
    async with asyncio.timeout(60):
        yield served
        await served.server.stop(0)


async def test_a_stream_that_ends_while_nothing_of_it_is_read_is_freed_and_its_client_may_read_why(
    served: Served,
) -> None:
    async with UnreadingClient(served.port) as client:
        client.call(1, SERVICE + "Generate")
        await client.frame_of(1, HEADERS)
        end_call(served.answers.streams[0], Unauthenticated("revoked"))
        await served.answers.left.wait()
        client.read()
        async with client.arrived:
            await client.arrived.wait_for(lambda: client.kinds[1][-2:] == [DATA, HEADERS])


async def test_a_call_whose_answer_is_not_read_is_open_for_its_tenant_until_it_is_read(served: Served) -> None:
    async with UnreadingClient(served.port) as client:
        client.call(1, SERVICE + "Tokenize")
        await client.frame_of(1, HEADERS)
        client.call(3, SERVICE + "Tokenize")
        await client.frame_of(3, HEADERS)
        assert served.refused == ["ROUTER_FULL"]
        client.read()
        async with client.arrived:
            await client.arrived.wait_for(lambda: client.kinds[1] == [HEADERS, DATA, HEADERS])
        client.call(5, SERVICE + "Tokenize")
        async with client.arrived:
            await client.arrived.wait_for(lambda: client.kinds.get(5) == [HEADERS, DATA, HEADERS])
        assert served.answers.served == 3


async def test_a_call_whose_answer_is_not_read_is_open_until_its_client_leaves(served: Served) -> None:
    async with UnreadingClient(served.port) as client:
        client.call(1, SERVICE + "Generate")
        await client.frame_of(1, HEADERS)
    await asyncio.wait(served.answers.streams)
    async with UnreadingClient(served.port) as client:
        client.call(1, SERVICE + "Tokenize")
        await client.frame_of(1, HEADERS)
    assert (served.answers.served, served.refused) == (2, [])
