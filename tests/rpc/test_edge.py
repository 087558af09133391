"""Connections of a real server: those beyond the limit are closed, and no others."""

from __future__ import annotations

import asyncio
import resource

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.edge import edge_options
from rpc.server import Server


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
