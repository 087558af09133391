"""Connections that end in the middle of a request or an answer."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import closing
from typing import Any, cast

import pytest
import uvloop
from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.types import Receive, Scope, Send

from loraplex.gateway.app import serving
from loraplex.gateway.endpoint import Gateway, GatewayMetrics, HttpCall, HttpEndpoint, OpenRequests
from loraplex.gateway.errors import HttpError
from loraplex.gateway.http_server import HttpConnection, http_server, listen
from loraplex.gateway.openai_api import PROTOCOL
from loraplex.gateway.settings import GatewaySettings

BODY_BYTES = 5 << 20


@pytest.fixture
def event_loop_policy() -> Any:
    """Run on the loop of the gateway's own process: asyncio's takes writes to a connection that was cut."""
    return uvloop.EventLoopPolicy()


async def test_the_answer_to_a_body_that_is_too_large_comes_through_a_connection_that_closes() -> None:
    def lost(address: str) -> bool:
        host, _, port = address.rpartition(":")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x.localhost\r\nContent-Length: {BODY_BYTES}\r\n"
        with closing(socket.create_connection((host, int(port)), timeout=10)) as connection:
            try:
                connection.sendall(head.encode() + b"Connection: close\r\n\r\n" + bytes(BODY_BYTES))
                return b" 413 " not in connection.recv(100)
            except OSError:
                return True

    async with serving(GatewaySettings("127.0.0.1:1", port=0), GatewayMetrics()) as (address, _):
        assert not [number for number in range(5) if await asyncio.to_thread(lost, address)]


async def test_an_answer_to_a_connection_that_was_cut_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def stream(call: HttpCall) -> None:
        await call.begin(b"x")
        (connection,) = server.server_state.connections
        cast(HttpConnection, connection)._give_up("request_size")
        for _ in range(3):  # uvicorn tells the newest request alone that the connection is lost
            await asyncio.sleep(0)
            await call.exchange.write(b"x")
        raise HttpError(499, "client_left", "the client has left")

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await endpoint(scope, receive, send)
        finally:
            ended.set()

    settings, ended, cluster = GatewaySettings("127.0.0.1:1", port=0), asyncio.Event(), cast(Any, Caller())
    endpoint = HttpEndpoint("/x", PROTOCOL, {"POST": stream}, Gateway(cluster, GatewayMetrics()), OpenRequests(8))
    gauge, closed = (
        Gauge("g", "g", registry=CollectorRegistry()),
        Counter("c", "c", ("why",), registry=CollectorRegistry()),
    )
    with listen("127.0.0.1", 0) as bound, caplog.at_level(logging.ERROR):
        server = http_server(application, settings, PROTOCOL.error, gauge, closed)
        running = asyncio.create_task(server.serve([bound]))
        await server.start_tried.wait()
        _, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n" * 2)
        await asyncio.wait_for(ended.wait(), 60)
        writer.close()
        server.should_exit = True
        await running
    assert closed.labels("request_size")._value.get() == 1
    assert not caplog.records


class Caller:
    """Stands for a cluster with one caller."""

    async def counted_as(self, headers: object) -> str:
        return ""
