"""Health of a server: what the probe says of it, and the stream of its changes."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.probe import main
from rpc.server import Server


async def test_the_probe_tells_whether_a_process_serves(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server()
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start()
    assert await asyncio.to_thread(main, [address]) == 1
    assert capsys.readouterr().err == f"error: {address} is not serving\n"
    await server.set_serving(True)
    assert await asyncio.to_thread(main, [address]) == 0
    await server.stop(0)
    assert await asyncio.to_thread(main, [address]) == 1
    assert f"error: {address} does not answer" in capsys.readouterr().err


async def test_watch_streams_the_changes() -> None:
    server = Server()
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        seen = []
        for serving in (True, False):
            seen.append((await watch.read()).status)
            await server.set_serving(serving)
        seen.append((await watch.read()).status)
        watch.cancel()
    await server.stop(0)
    status = health_pb2.HealthCheckResponse
    assert seen == [status.NOT_SERVING, status.SERVING, status.NOT_SERVING]
