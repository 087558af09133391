"""Health of a server: what the probe says of it, and the stream of its changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex.cli.development_ca import DevelopmentCa
from loraplex.runtime.rpc.probe import main
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.rpc.tls import TlsFiles
from loraplex.runtime.telemetry.metrics import Meters, serve_metrics
from loraplex.runtime.tenancy.guard import open_guard
from tests.rpc.raw_http2 import HEADERS, UnreadingClient


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


async def test_the_probe_says_how_its_tls_differs_from_the_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ca, other = DevelopmentCa(), DevelopmentCa()
    authority = ca.write_ca(tmp_path)
    (tmp_path / "other.pem").write_bytes(other.pem)
    files = ca.write(tmp_path, "router", ca.issue("loraplex://router/router", ["localhost"]))
    strange = other.write(tmp_path, "strange", other.issue("loraplex://operator/ann"))
    tls = TlsFiles(*files, authority)
    server = Server()
    plain, public, operators = [
        f"localhost:{server.bind('localhost', 0, credentials)}"
        for credentials in (None, *(tls.server_credentials(client_certificates=one) for one in (False, True)))
    ]
    await server.start()
    await server.set_serving(True)
    ours, with_strange = ["--ca", str(authority)], ["--cert", str(strange[0]), "--key", str(strange[1])]
    for arguments, fault in (
        ([public], "it speaks TLS: give --ca FILE"),
        ([plain, *ours], "it speaks no TLS: leave out --ca"),
        ([operators, *ours], "it asks for a client certificate: give --cert FILE --key FILE"),
        ([operators, *ours, *with_strange], f"it does not take the client certificate {strange[0]}"),
        ([public, "--ca", str(tmp_path / "other.pem")], "its certificate is not trusted: "),
    ):
        assert await asyncio.to_thread(main, arguments) == 1
        assert capsys.readouterr().err.startswith(f"error: {arguments[0]} does not answer: {fault}")
    assert await asyncio.to_thread(main, [public, *ours]) == 0
    await server.stop(0)


async def test_the_probe_asks_a_url_too(capsys: pytest.CaptureFixture[str]) -> None:
    meters = Meters()
    server = serve_metrics(meters, "127.0.0.1", 0)
    assert server is not None
    url = f"http://{meters.ready_word.removeprefix(' metrics=')}/readyz"
    assert await asyncio.to_thread(main, [url]) == 1
    assert capsys.readouterr().err == f"error: {url}: 503: starts\n"
    meters.health.set()
    assert await asyncio.to_thread(main, [url]) == 0
    server.close()
    assert await asyncio.to_thread(main, [url]) == 1
    assert f"error: {url} does not answer: " in capsys.readouterr().err


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


async def test_a_client_that_reads_nothing_holds_up_no_change() -> None:
    server = Server()
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with UnreadingClient(port) as client:
        client.call(1, "/grpc.health.v1.Health/Watch")
        await client.frame_of(1, HEADERS)
        async with asyncio.timeout(3):  # before the server gives up the call
            await server.set_serving(True)
            await server.stop(0)


async def test_each_service_has_the_health_of_its_process() -> None:
    server = Server(open_guard())
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Nothing(), server.services)  # type: ignore[abstract]  # as grpc makes them
    port = server.bind("127.0.0.1", 0)
    await server.start()
    await server.set_serving(True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        found = await check(health_pb2.HealthCheckRequest(service="loraplex.inference.v1.InferenceService"))
        assert found.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await check(health_pb2.HealthCheckRequest(service="loraplex.adapters.v1.AdapterService"))
        assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
    await server.stop(0)


class Nothing(inference_pb2_grpc.InferenceServiceServicer):
    """Answers every call UNIMPLEMENTED."""
