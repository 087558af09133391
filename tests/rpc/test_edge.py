"""Connections of a real server, and their calls: those beyond the limits are closed or refused, and no others."""

from __future__ import annotations

import asyncio
import resource
from typing import Any, ClassVar

import grpc
import pytest
from google.rpc import error_details_pb2 as details_pb2
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from rpc.server import Server, edge_options
from rpc.status import DETAILS_KEY
from tenancy.guard import open_guard


class Held(inference_pb2_grpc.InferenceServiceServicer):
    """Answers once it is told to."""

    def __init__(self) -> None:
        self.end = asyncio.Event()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        await self.end.wait()
        return pb.TokenizeResponse()


async def test_connections_beyond_the_limit_are_closed() -> None:
    server = Server(connections=3)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        await check(health_pb2.HealthCheckRequest())
        readers, writers = zip(*[await asyncio.open_connection("127.0.0.1", port) for _ in range(6)], strict=True)
        closed = asyncio.as_completed([asyncio.create_task(reader.read()) for reader in readers])
        for _ in range(4):  # the channel's, and two that wait for their handshake, stay
            assert await next(closed) == b""
        await check(health_pb2.HealthCheckRequest())
        for writer in writers:
            writer.close()
    await server.stop(0)


async def test_a_burst_beyond_the_calls_of_a_connection_is_refused_with_a_reason() -> None:
    limit, burst = 20, 1_050
    server, held = Server(open_guard(), calls=limit), Held()  # type: ignore[abstract]  # grpc has its own methods for those left out
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(held, server.services)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        calls = [stub.Tokenize(pb.TokenizeRequest()) for _ in range(burst)]
        refused = 0
        for call in asyncio.as_completed([call.code() for call in calls]):
            refused += await call is grpc.StatusCode.RESOURCE_EXHAUSTED
            if refused == burst - limit:
                held.end.set()
        assert refused == burst - limit
        trailers = [await call.trailing_metadata() for call in calls if await call.code() is not grpc.StatusCode.OK]
        status = Status.FromString(dict(trailers[0])[DETAILS_KEY])
        info, retry = details_pb2.ErrorInfo(), details_pb2.RetryInfo()
        assert status.details[0].Unpack(info)
        assert info.reason == "CONNECTION_FULL"
        assert status.details[2].Unpack(retry)
        await stub.Tokenize(pb.TokenizeRequest())
    await server.stop(0)


def test_a_server_leaves_files_for_other_uses() -> None:
    options = dict(edge_options())
    assert 0 < options["grpc.max_allowed_incoming_connections"] <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


async def test_a_connection_that_is_old_is_replaced_and_no_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """New connections resolve the server's name again, and so find servers that were added to it."""

    class Peers(inference_pb2_grpc.InferenceServiceServicer):
        seen: ClassVar[set[str]] = set()

        async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
            self.seen.add(context.peer())
            return pb.TokenizeResponse()

    monkeypatch.setattr("rpc.server.AGE_MS", 100)
    server = Server(open_guard())
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Peers(), server.services)  # type: ignore[abstract]
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with asyncio.timeout(20), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def call() -> None:
            while len(Peers.seen) < 4:
                await stub.Tokenize(pb.TokenizeRequest())

        await asyncio.gather(*(call() for _ in range(8)))
    await server.stop(0)
