"""deploy/edge/haproxy.cfg in front of a server: calls go through it, and it ends those that a server cannot end.

The tests need the package haproxy (Debian's), and skip without it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from rpc.server import Server
from rpc.tls import TlsFiles
from tenancy.guard import open_guard
from tests.credentials_files import CA, write_tls_files
from tests.rpc.raw_http2 import UnreadingClient

HAPROXY = shutil.which("haproxy")
CONFIG = Path(__file__).parents[2] / "deploy/edge/haproxy.cfg"
GENERATE = "/loraplex.inference.v1.InferenceService/Generate"
pytestmark = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")


class Answers(inference_pb2_grpc.InferenceServiceServicer):
    """Streams that go on for ever, of which `open` are there now; `begun` counts them."""

    def __init__(self) -> None:
        self.open = self.begun = 0
        self.changed = asyncio.Condition()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.begun += 1
        await self._count(1)
        try:
            while True:
                yield pb.GenerateResponse()
        finally:
            await asyncio.shield(self._count(-1))

    async def _count(self, change: int) -> None:
        async with self.changed:
            self.open += change
            self.changed.notify_all()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=range(10))


@asynccontextmanager
async def edge(directory: Path, answers: Answers) -> AsyncIterator[int]:
    """Run a server, and the proxy with a timeout of a second for clients; yield the proxy's port."""
    cert, key, ca = write_tls_files(directory, "loraplex://router/r")
    (directory / "edge.pem").write_bytes(cert.read_bytes() + key.read_bytes())
    config = directory / "haproxy.cfg"
    config.write_text(CONFIG.read_text().replace("timeout client 60s", "timeout client 1s"))
    server = Server(open_guard())
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(answers, server.services)
    port = server.bind("127.0.0.1", 0, TlsFiles(cert, key, ca).server_credentials(client_certificates=False))
    await server.start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        edge_port = free.getsockname()[1]
    variables = {"EDGE_ADDRESS": f"127.0.0.1:{edge_port}", "EDGE_CERT": str(directory / "edge.pem"), "EDGE_CA": str(ca)}
    variables |= {"ROUTERS": f"127.0.0.1:{port}", "ROUTER_NAME": "localhost"}
    assert HAPROXY is not None
    proxy = await asyncio.create_subprocess_exec(HAPROXY, "-f", str(config), env=os.environ | variables)
    try:
        async with asyncio.timeout(30):
            yield edge_port
    finally:
        if proxy.returncode is None:
            proxy.terminate()
        await proxy.wait()
        await server.stop(0)


def trusted() -> ssl.SSLContext:
    """Return the context of a client that knows the authority."""
    context = ssl.create_default_context(cadata=CA.pem.decode())
    context.set_alpn_protocols(["h2"])
    return context


@asynccontextmanager
async def stub_at(port: int) -> AsyncIterator[Any]:
    """Yield the stub of a client of the proxy, once a call has gone through."""
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(CA.pem)) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        await stub.Tokenize(pb.TokenizeRequest(), wait_for_ready=True)
        yield stub


async def test_a_call_of_which_nothing_is_read_ends_at_the_server(tmp_path: Path) -> None:
    answers = Answers()  # type: ignore[abstract]  # grpc has its own methods for those left out
    async with edge(tmp_path, answers) as port, stub_at(port), UnreadingClient(port, trusted()) as client:
        client.call(1, GENERATE)
        async with answers.changed:
            await answers.changed.wait_for(lambda: answers.begun)
            await answers.changed.wait_for(lambda: not answers.open)


async def test_few_of_the_calls_that_are_reset_at_once_reach_the_server(tmp_path: Path) -> None:
    answers = Answers()  # type: ignore[abstract]  # grpc has its own methods for those left out
    async with edge(tmp_path, answers) as port, stub_at(port) as stub, UnreadingClient(port, trusted()) as client:
        for stream in range(1, 4_001, 2):
            client.call(stream, GENERATE)
            client.reset(stream)
        await client.drain()
        await stub.Tokenize(pb.TokenizeRequest())
        assert answers.begun < 200
