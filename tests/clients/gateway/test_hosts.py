"""Requests that a page of another site may have made: a gateway without credentials refuses them."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest.mock import AsyncMock

import pytest
from starlette.types import Message

from loraplex.gateway.app import application
from loraplex.gateway.endpoint import Gateway, GatewayMetrics, own_names
from loraplex.gateway.settings import GatewaySettings

ON_LOOPBACK = GatewaySettings(port=0, host_names="loraplex.test, Gateway")
IN_A_CONTAINER = GatewaySettings(host="0.0.0.0", insecure_tenants=True, host_names="gateway")
ANYWHERE = GatewaySettings(host="0.0.0.0", insecure_tenants=True)
WITH_CREDENTIALS = GatewaySettings(ca="ca.pem")
MESSAGE = "host: 'evil.test' is not a name of this gateway; if it should be, add it to --host-names"


async def answer(
    settings: GatewaySettings, *hosts: str, origin: str = "", path: str = "/v1/nothing"
) -> tuple[int, Any]:
    """Return status and body of the answer to a request with these headers."""
    cluster: Any = AsyncMock()
    app = application(Gateway(cluster, GatewayMetrics(), own_names(settings)), 8)
    headers = [(b"host", host.encode()) for host in hosts] + [(b"origin", origin.encode())] * bool(origin)
    sent: list[Message] = []

    unread: list[Message] = [{"type": "http.request", "body": b"{", "more_body": False}]

    async def receive() -> Message:
        return unread.pop() if unread else await asyncio.Future()

    async def send(message: Message) -> None:
        sent.append(message)

    await app({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost:8000", "LOCALHOST.", "[::1]:8000", "a.localhost", "10.1.2.3:80", "gateway:80"]
)
async def test_own_names_and_addresses_are_served(host: str) -> None:
    for settings in (ON_LOOPBACK, IN_A_CONTAINER, ANYWHERE, WITH_CREDENTIALS):
        assert (await answer(settings, host))[0] == 404
        assert (await answer(settings, host, origin=f"http://{host}"))[0] == 404


@pytest.mark.parametrize(
    "host", ["evil.test", "evil.test:8000", "127.0.0.1.evil.test", "localhost.evil.test", "", "[::1", "a:b:c", "é"]
)
async def test_other_names_are_refused(host: str) -> None:
    for settings in (ON_LOOPBACK, IN_A_CONTAINER):
        for hosts in ((host,), ("localhost", host)):
            status, body = await answer(settings, *hosts)
            assert (status, body["error"]["code"]) == (403, "host_not_allowed")
    for settings in (ANYWHERE, WITH_CREDENTIALS):
        assert (await answer(settings, host))[0] == 404


async def test_programs_without_the_header_are_served() -> None:
    assert (await answer(ON_LOOPBACK))[0] == 404


@pytest.mark.parametrize(
    "origin", ["https://evil.test", "http://203.0.113.7", "null", "http://localhost.test", "http://["]
)
async def test_pages_of_other_sites_are_refused(origin: str) -> None:
    status, body = await answer(ON_LOOPBACK, "127.0.0.1:8000", origin=origin)
    assert (status, body["error"]["code"]) == (403, "origin_not_allowed")
    assert body["error"]["message"].endswith("may not call this gateway; if it should, start it with --host-names")
    assert (await answer(WITH_CREDENTIALS, "127.0.0.1:8000", origin=origin))[0] == 404


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://[::1]", "http://loraplex.test", "http://10.1.2.3", "vscode-webview://x"]
)
async def test_pages_of_this_machine_and_programs_are_served(origin: str) -> None:
    assert (await answer(ON_LOOPBACK, "10.1.2.3", origin=origin))[0] == 404


async def preflight(settings: GatewaySettings, origin: str) -> dict[bytes, bytes]:
    """Return the headers of the answer to a browser's question whether a page may send a request with a key."""
    app = application(Gateway(AsyncMock(), GatewayMetrics(), own_names(settings), bool(settings.ca)), 8)
    asked = {"host": "10.1.2.3", "origin": origin, "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization,content-type"
    headers = [(name.encode(), value.encode()) for name, value in asked.items()]
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await app({"type": "http", "method": "OPTIONS", "path": "/v1/models", "headers": headers}, AsyncMock(), send)
    return dict(sent[0]["headers"])


@pytest.mark.parametrize(
    ("settings", "origin", "reader"),
    [
        (ON_LOOPBACK, "http://localhost:3000", b"http://localhost:3000"),
        (ON_LOOPBACK, "https://evil.test", None),
        (WITH_CREDENTIALS, "https://app.test", b"*"),
        (ANYWHERE, "https://app.test", None),
    ],
)
async def test_pages_of_served_sites_read_answers(settings: GatewaySettings, origin: str, reader: bytes | None) -> None:
    headers = await preflight(settings, origin)
    assert headers.get(b"access-control-allow-origin") == reader
    if reader:
        assert headers[b"access-control-allow-headers"] == b"authorization,content-type"


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (
            "/v1/chat/completions",
            {"error": {"message": MESSAGE, "type": "permission_error", "param": "host", "code": "host_not_allowed"}},
        ),
        ("/v1/messages", {"type": "error", "error": {"type": "permission_error", "message": MESSAGE}}),
        ("/generate", {"error": MESSAGE, "error_type": "host_not_allowed"}),
    ],
)
async def test_each_protocol_has_its_shape(path: str, error: Any) -> None:
    assert await answer(ON_LOOPBACK, "evil.test", path=path) == (403, error)
