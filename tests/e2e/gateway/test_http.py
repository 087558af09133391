"""HTTP that is broken, too large, too slow or unread: answered or closed, and nothing else notices."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from loraplex.gateway.app import serving
from loraplex.gateway.endpoint import GatewayMetrics
from loraplex.gateway.settings import GatewaySettings
from tests.e2e.conftest import Cluster
from tests.e2e.gateway.conftest import Eventually

pytestmark = pytest.mark.asyncio(loop_scope="package")
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nx-loraplex-tenant: acme\r\n"
LONG = b'{"model":"a","messages":[{"role":"user","content":"x"}],"max_tokens":20000,"n":16,"stream":true}'

# Another request, behind one whose end proxies and servers may see at different places.
BEHIND = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNK = b"40000\r\n" + b" " * 2**18 + b"\r\n"


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    bare = socket.socket()
    bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # little is taken that is not read
    bare.setblocking(False)
    await asyncio.get_running_loop().sock_connect(bare, (host, int(port)))
    return await asyncio.open_connection(sock=bare, limit=1024)


async def exchange(address: str, *parts: bytes) -> tuple[int, dict[str, str], dict[str, object]]:
    """Send bytes; return status, headers and error of the answer, after which the connection must be closed or idle."""
    reader, writer = await connect(address)
    try:
        async with asyncio.timeout(60):
            # In a single piece: what comes after the server has closed would reset the connection.
            writer.write(b"".join(parts))
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            error = json.loads(await reader.readexactly(int(headers["content-length"])))["error"]
            if error["code"] == "invalid_http":
                assert not await reader.read(-1), "what comes behind such a request is answered"
            return int(head[0].split()[1]), headers, error
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("parts", "status", "code"),
    [
        ((b"nonsense\r\n\r\n",), 400, "invalid_http"),
        ((POST, b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x"), 400, "invalid_http"),
        ((POST, b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}"), 400, "invalid_http"),
        ((POST, b"Content-Length: -1\r\n\r\n"), 400, "invalid_http"),
        ((POST, b"Transfer-Encoding: gzip, chunked, identity\r\nContent-Length: 2\r\n\r\n{}"), 400, "invalid_http"),
        ((POST, b"Transfer-Encoding : chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", BEHIND), 400, "invalid_http"),
        ((POST, b"Transfer-Encoding:\r\n chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", BEHIND), 400, "invalid_http"),
        ((POST, b"Transfer-Encoding: xchunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", BEHIND), 400, "invalid_http"),
        ((POST, b"Content-Length: +2\r\n\r\n{}", BEHIND), 400, "invalid_http"),
        ((POST, b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", BEHIND), 400, "invalid_http"),
        ((POST, b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}XX\r\n0\r\n\r\n", BEHIND), 400, "invalid_http"),
        ((POST, b"Transfer-Encoding: chunked\r\n\r\n2\n{}\n0\n\n", BEHIND), 400, "invalid_http"),
        ((POST, b"Content-Length: 9999999\r\n\r\n{"), 413, "body_too_large"),
        ((POST, b"Transfer-Encoding: chunked\r\n\r\n", CHUNK * 17), 413, "body_too_large"),
        ((POST, b"Content-Length: 2\r\n\r\n{]"), 400, "invalid_json"),
        ((b"GET /v1/nothing HTTP/1.1\r\nHost: localhost\r\n\r\n",), 404, "unknown_path"),
        ((b"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",), 405, "method_not_allowed"),
        ((b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.test\r\n\r\n",), 403, "host_not_allowed"),
        ((POST, b"x-loraplex-tenant: b\r\nContent-Length: 2\r\n\r\n{}"), 400, "invalid_value"),
        ((b"GET /v1/models HTTP/1.1\r\nx-loraplex-tenant: A B\r\n\r\n",), 401, "unauthenticated"),
        ((b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", BEHIND), 405, "method_not_allowed"),
    ],
)  # fmt: skip
async def test_requests_that_are_none(cluster: Cluster, parts: tuple[bytes, ...], status: int, code: str) -> None:
    found, headers, error = await exchange(cluster.local.http, *parts)
    assert (found, error["code"]) == (status, code)
    assert code != "invalid_http" or headers["connection"] == "close"


async def test_a_client_that_sends_far_too_much_gets_its_answer(cluster: Cluster) -> None:
    """Such an answer was lost: a connection that is closed before all was read is reset."""
    reader, writer = await connect(cluster.local.http)
    writer.write(POST + b"Content-Length: 30000000\r\n\r\n")
    for _ in range(30):
        writer.write(b"a" * 1_000_000)
        await writer.drain()
    async with asyncio.timeout(60):
        assert (await reader.readline()).split()[1] == b"413"
    writer.close()


SHORT = b'{"model":"a","messages":[{"role":"user","content":"x"}],"max_tokens":1}'
CHUNKED = b"5\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (SHORT[:5], len(SHORT) - 5, SHORT[5:])
OFFERS = {
    "java": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
    "curl": b"Connection: Upgrade\r\nUpgrade: h2c\r\nUpgrade: TLS/1.3\r\n",
    "websocket": b"connection: keep-alive, upgrade\r\nupgrade: websocket\r\nSec-WebSocket-Key: AAAA\r\n",
}


@pytest.mark.parametrize("cut", [1, 150, 10_000], ids=str)
@pytest.mark.parametrize(
    "body",
    [b"Content-Length: %d\r\n\r\n%s" % (len(SHORT), SHORT), b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED],
    ids=["length", "chunks"],
)
@pytest.mark.parametrize("offer", OFFERS)
async def test_an_upgrade_that_is_offered_is_ignored(cluster: Cluster, offer: str, body: bytes, cut: int) -> None:
    """The body was lost, and what of it came later was read as a request of its own."""
    reader, writer = await connect(cluster.local.http)
    try:
        last = POST + OFFERS[offer].replace(b"onnection: ", b"onnection: close, ") + body
        request = POST + OFFERS[offer] + body + BEHIND + last
        for start in range(0, len(request), cut):
            writer.write(request[start : start + cut])
            await writer.drain()
        async with asyncio.timeout(60):
            answer = await reader.read(-1)
        assert answer.count(b"HTTP/1.1 200 OK\r\n") == answer.count(b"HTTP/1.1") == 3
        assert answer.count(b'"chat.completion"') == 2
    finally:
        writer.close()


async def test_a_gateway_that_stops_tells_the_answers_that_it_cuts(cluster: Cluster, eventually: Eventually) -> None:
    settings = GatewaySettings(cluster.local.router, port=0, drain_s=1.0)
    async with serving(settings, GatewayMetrics()) as (address, _):
        reader, writer = await connect(address)
        body = LONG.replace(b'"n":16', b'"n":1')
        writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b"data: ")
        reading = asyncio.create_task(reader.read(-1))
    assert b'"code":"gateway_stopping"' in (await reading).split(b"data: ")[-1]
    writer.close()
    await eventually(cluster.idle)
