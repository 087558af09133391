"""Addresses of servers of another kind: the error says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from socketserver import StreamRequestHandler, TCPServer
from typing import Any

import grpc
import pytest

from loraplex.cli.cluster import ClusterReader
from loraplex.cli.service import explain, store_client
from loraplex.cli.terminal import CommandError
from loraplex.loadtest.arrivals import Closed, Extent
from loraplex.loadtest.decoding import PlanError
from loraplex.loadtest.http_sender import find_target
from loraplex.loadtest.plan import LoadPlan, Tenant
from loraplex_client import UnavailableError


@pytest.fixture
def other() -> Iterator[str]:
    """Run a gRPC server without any of our services."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


class BadRequest(StreamRequestHandler):
    """Answers as HTTP servers do that meet a gRPC client."""

    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")


@pytest.fixture
def website() -> Iterator[str]:
    """Run an HTTP server."""
    with TCPServer(("127.0.0.1", 0), BadRequest) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_router_given_as_a_store(server: Any) -> None:
    with pytest.raises(CommandError) as error, store_client(server.address, "acme") as client:
        client.models()
    assert str(error.value) == (
        f"{server.address} is not a store's address: a server of another kind answers there, such as a router or a "
        "gateway; give the store's address with --store or LORAPLEX_STORE_ADDRESS"
    )
    assert error.value.exit_code == 2


def test_a_router_given_as_an_http_server(server: Any) -> None:
    plan = LoadPlan("test", Closed(1), Extent(requests=1), (Tenant("acme"),))
    with pytest.raises(PlanError, match=r"is not an HTTP server's address .*--router"):
        find_target(plan, f"http://{server.address}")


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "127.0.0.1:1,localhost"])
def test_an_address_that_is_not_host_and_port(address: str) -> None:
    error = explain(UnavailableError("failed to connect to all addresses; last error: refused"), "router", address)
    assert "--router or LORAPLEX_ADDRESS takes HOST:PORT, such as 127.0.0.1:50051" in str(error)


def test_a_store_given_as_a_router(other: str) -> None:
    with pytest.raises(CommandError, match=r"is not a router's address: .*, such as a store or a gateway; .*--router"):
        ClusterReader(other, "acme").workers()


def test_a_gateway_given_as_a_router(website: str) -> None:
    with pytest.raises(CommandError, match="is not a router's address"):
        ClusterReader(website, "acme").workers()
