"""Connections of a real server, and their calls: those beyond the limits are closed or refused, and no others."""

from __future__ import annotations

import asyncio
import resource
from typing import Any, ClassVar

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex.runtime.rpc.server import Server, edge_options
from loraplex.runtime.tenancy.guard import open_guard


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

    monkeypatch.setattr("loraplex.runtime.rpc.server.AGE_MS", 100)
    server = Server(open_guard())
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Peers(), server.services)  # type: ignore[abstract]
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with asyncio.timeout(60), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def call() -> None:
            while len(Peers.seen) < 4:
                await stub.Tokenize(pb.TokenizeRequest())

        await asyncio.gather(*(call() for _ in range(8)))
    await server.stop(0)
