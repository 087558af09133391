"""deploy/edge/haproxy.cfg in front of a server: calls go through it, and it ends those that a server cannot end.

The tests run Debian's haproxy, and skip where it cannot be had.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loraplex.adapters.v1 import adapters_pb2 as store_pb
from loraplex.adapters.v1 import adapters_pb2_grpc
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex.cli.development_ca import DevelopmentCa
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.rpc.tls import TlsFiles
from loraplex.runtime.tenancy.guard import open_guard
from tests.credentials_files import CA, write_tls_files
from tests.edge_proxy import EDGE, edge_proxy, write_edge_files
from tests.free_ports import free_ports
from tests.rpc.half_sent import HalfSent
from tests.rpc.raw_http2 import HEADERS, UnreadingClient

GENERATE = "/loraplex.inference.v1.InferenceService/Generate"


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


class Adapters(adapters_pb2_grpc.AdapterServiceServicer):
    """A store that has none."""

    async def ListAdapters(self, request: store_pb.ListAdaptersRequest, context: Any) -> store_pb.ListAdaptersResponse:
        return store_pb.ListAdaptersResponse()


class Page(BaseHTTPRequestHandler):
    """A gateway that answers with the path."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(self.path)))
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def page(tls: tuple[Path, Path] | None) -> Iterator[int]:
    """Serve pages, with TLS of a certificate and its key; yields the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    if tls is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    serving = Thread(target=server.serve_forever, args=(0.02,))
    serving.start()
    yield server.server_port
    server.shutdown()
    serving.join()
    server.server_close()


def is_served(open_: ExitStack, port: int) -> bool:
    """Connect from another address, until `open_` closes; return whether the proxy speaks."""
    try:
        one = open_.enter_context(socket.create_connection(("127.0.0.1", port), 30, source_address=("127.0.0.2", 0)))
        open_.enter_context(trusted().wrap_socket(one, server_hostname="localhost"))
    except OSError:  # it resets or closes the connection, also within the handshake
        return False
    return True


@dataclass(frozen=True)
class Ports:
    """The proxy's port, and the one for certificates."""

    tenants: int
    certificates: int


@asynccontextmanager
async def edge(
    directory: Path, answers: Answers, client_s: int = 1, *, secured: bool = True, **settings: str
) -> AsyncIterator[Ports]:
    """Run a server, a gateway and the proxy, with a timeout for clients that do not read and variables of the proxy."""
    cert, key, ca = write_tls_files(directory, "loraplex://router/r")
    write_edge_files(directory, CA)
    config = directory / "haproxy.cfg"
    text = (EDGE / "haproxy.cfg").read_text().replace("timeout client 60s", f"timeout client {client_s}s")
    # Fewer calls are a flood, and slow machines open all connections before the first one's time ends.
    for shipped, here in (("gt 10000", "gt 1000"), ("gt 5000", "gt 500"), ("http-request 10s", "http-request 60s")):
        assert shipped in text
        text = text.replace(shipped, here)
    config.write_text(text)
    server, files = Server(open_guard()), TlsFiles(cert, key, ca)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(answers, server.services)
    adapters_pb2_grpc.add_AdapterServiceServicer_to_server(Adapters(), server.services)  # type: ignore[abstract]
    port = server.bind("127.0.0.1", 0, files.server_credentials(client_certificates=False) if secured else None)
    mtls = server.bind("127.0.0.1", 0, files.server_credentials(client_certificates=True))
    await server.start()
    tenants, certificates = free_ports(2)
    with page((cert, key) if secured else None) as gateway:
        variables = {
            "EDGE_ADDRESS": f"127.0.0.1:{tenants}",
            "ROUTERS": f"127.0.0.1:{port}",
            "STORES": f"127.0.0.1:{port}",
            "GATEWAYS": f"127.0.0.1:{gateway}",
        }
        if secured:
            variables |= {
                "EDGE_CERT": str(directory / "edge.pem"),
                "EDGE_CA": str(ca),
                "ROUTER_NAME": "localhost",
                "STORE_NAME": "localhost",
                "GATEWAY_NAME": "localhost",
                "MTLS_ADDRESS": f"127.0.0.1:{certificates}",
                "MTLS_ROUTERS": f"127.0.0.1:{mtls}",
            }
        try:
            async with edge_proxy(config, **variables, **settings), asyncio.timeout(60):
                yield Ports(tenants, certificates)
        finally:
            await server.stop(0)


def trusted(ca: DevelopmentCa = CA) -> ssl.SSLContext:
    """Return the context of a client that knows the authority."""
    context = ssl.create_default_context(cadata=ca.pem.decode())
    context.set_alpn_protocols(["h2"])
    return context


@asynccontextmanager
async def stub_at(port: int, host: str = "127.0.0.1", credentials: Any = None) -> AsyncIterator[Any]:
    """Yield the stub of a client of the proxy, once a call has gone through."""
    credentials = credentials or grpc.ssl_channel_credentials(CA.pem)
    async with grpc.aio.secure_channel(f"{host}:{port}", credentials) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        await stub.Tokenize(pb.TokenizeRequest(), wait_for_ready=True)
        yield stub


async def test_a_call_of_which_nothing_is_read_ends_at_the_server(tmp_path: Path) -> None:
    answers = Answers()  # type: ignore[abstract]  # grpc has its own methods for those left out
    async with edge(tmp_path, answers) as at, stub_at(at.tenants), UnreadingClient(at.tenants, trusted()) as client:
        client.call(1, GENERATE)
        async with answers.changed:
            await answers.changed.wait_for(lambda: answers.begun)
            await answers.changed.wait_for(lambda: not answers.open)


async def test_calls_that_are_reset_at_once_hardly_reach_the_server_and_others_are_answered(tmp_path: Path) -> None:
    answers = Answers()  # type: ignore[abstract]
    async with (
        edge(tmp_path, answers) as at,
        stub_at(at.tenants) as stub,
        UnreadingClient(at.tenants, trusted(), "127.0.0.2") as client,
    ):
        for stream in range(1, 6_001, 2):
            client.call(stream, GENERATE)
            client.reset(stream)
        await client.drain()
        await stub.Tokenize(pb.TokenizeRequest())
        # The flood's address has used up its calls and connections; others' are served.
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await UnreadingClient(at.tenants, trusted(), "127.0.0.2").__aenter__()
        await stub.Tokenize(pb.TokenizeRequest())
        assert answers.begun <= 600


async def test_an_address_has_a_hundred_connections_and_large_headers_go_nowhere(tmp_path: Path) -> None:
    answers = Answers()  # type: ignore[abstract]
    async with edge(tmp_path, answers, client_s=60) as at, stub_at(at.tenants) as stub:
        with ExitStack() as open_:
            for _ in range(120):  # those that are served stay open
                last = await asyncio.to_thread(is_served, open_, at.tenants)
            assert not last
            await stub.Tokenize(pb.TokenizeRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Tokenize(pb.TokenizeRequest(), metadata=[(f"x-{at}", "x" * 7_000) for at in range(3)])
        await stub.Tokenize(pb.TokenizeRequest())


async def test_calls_of_an_address_are_bounded_while_they_are_open(tmp_path: Path) -> None:
    answers = Answers()  # type: ignore[abstract]
    async with edge(tmp_path, answers, client_s=60, EDGE_CALLS="10") as at, stub_at(at.tenants) as stub:
        async with UnreadingClient(at.tenants, trusted(), "127.0.0.2") as client:
            for stream in range(1, 41, 2):
                client.call(stream, GENERATE)
            for stream in range(21, 41, 2):
                await client.frame_of(stream, HEADERS)  # the refusals
            async with answers.changed:
                await answers.changed.wait_for(lambda: answers.begun == 10)
            await stub.Tokenize(pb.TokenizeRequest())
        async with UnreadingClient(at.tenants, trusted(), "127.0.0.2") as client:
            async with answers.changed:
                await answers.changed.wait_for(lambda: not answers.open)
            client.call(1, GENERATE)
            async with answers.changed:
                await answers.changed.wait_for(lambda: answers.begun == 11)


async def test_a_cluster_without_credentials_is_served_at_one_port(tmp_path: Path) -> None:
    answers = Answers()  # type: ignore[abstract]
    async with edge(tmp_path, answers, secured=False) as at:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{at.tenants}") as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            assert len((await stub.Tokenize(pb.TokenizeRequest(), wait_for_ready=True)).token_ids) == 10
            adapters: Any = adapters_pb2_grpc.AdapterServiceStub(channel)
            await adapters.ListAdapters(store_pb.ListAdaptersRequest())
            check = health_pb2_grpc.HealthStub(channel).Check
            await check(health_pb2.HealthCheckRequest())
        async with HalfSent(at.tenants, "/grpc.health.v1.Health/Check", 1 << 20) as stranger:
            stranger.call()
            await stranger.until(lambda: bool(stranger.answered))  # long before its message has come
        async with httpx2.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{at.tenants}/v1/models")).text == "/v1/models"


async def test_a_new_certificate_is_served_and_no_call_breaks(tmp_path: Path) -> None:
    answers, new = Answers(), DevelopmentCa()  # type: ignore[abstract]
    async with edge(tmp_path, answers, client_s=60) as at, stub_at(at.tenants) as stub:
        call = stub.Generate(pb.GenerateRequest())
        await call.read()
        write_edge_files(tmp_path, new)
        while True:
            try:
                _, writer = await asyncio.open_connection(
                    "127.0.0.1", at.tenants, ssl=trusted(new), server_hostname="localhost"
                )
                break
            except ssl.SSLCertVerificationError:
                await asyncio.sleep(0.05)
        writer.close()
        for _ in range(100):
            assert await call.read() is not grpc.aio.EOF


async def test_http_goes_to_the_gateways_and_certificates_reach_the_routers(tmp_path: Path) -> None:
    async with edge(tmp_path, Answers()) as at, stub_at(at.tenants):  # type: ignore[abstract]
        context = ssl.create_default_context(cadata=CA.pem.decode())
        async with httpx2.AsyncClient(verify=context) as client:
            assert (await client.get(f"https://localhost:{at.tenants}/v1/models")).text == "/v1/models"
        cert, key, _ = write_tls_files(tmp_path, "loraplex://tenant/acme")
        own = grpc.ssl_channel_credentials(CA.pem, key.read_bytes(), cert.read_bytes())
        async with stub_at(at.certificates, credentials=own):
            pass
        async with grpc.aio.secure_channel(
            f"127.0.0.1:{at.certificates}", grpc.ssl_channel_credentials(CA.pem)
        ) as without:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(without)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Tokenize(pb.TokenizeRequest())
