"""A gateway that is told secrets and logs everything: prompts, answers and keys are in no line and in no metric."""

from __future__ import annotations

import logging
from contextlib import suppress

import httpx2
import pytest
from prometheus_client import generate_latest

from loraplex.gateway.app import serving
from loraplex.gateway.endpoint import GatewayMetrics
from loraplex.gateway.settings import GatewaySettings
from tests.e2e.conftest import TENANT, Cluster

PROMPT, ANSWER, KEY = "Zq7promptVx3kW9pJ", "Zq7answerLm4tR8sH", "lpx_0123456789abcdef_Zq7keyDn2cK6vB"
HEADERS = {"x-loraplex-tenant": TENANT, "authorization": f"Bearer {KEY}"}
CHAT = {"model": "a", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
TOLD = (
    ("/v1/chat/completions", CHAT, 200),
    ("/v1/messages", CHAT, 200),
    ("/v1/completions", {"model": "a", "prompt": PROMPT, "max_tokens": 4, "echo": True}, 200),
    ("/v1/completions", {"model": "a", "prompt": PROMPT, "stop": ANSWER, "max_tokens": 4, "stream": True}, 200),
    ("/v1/completions", {"model": "a", "prompt": PROMPT, "max_tokens": ANSWER}, 400),
    ("/v1/chat/completions", {**CHAT, "messages": PROMPT}, 400),
    ("/v1/chat/completions", {**CHAT, "model": ANSWER}, 404),
    (f"/v1/{PROMPT}?{KEY}", CHAT, 404),
)


async def test_no_secret_is_logged_or_counted(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for own in ("httpx2", "httpcore2"):  # the test's client
        caplog.set_level(logging.WARNING, own)
    metrics = GatewayMetrics()
    async with (
        serving(GatewaySettings(cluster.local.router, port=0), metrics) as (address, _),
        httpx2.AsyncClient(base_url=f"http://{address}", headers=HEADERS, timeout=30.0) as client,
    ):
        for path, body, status in TOLD:
            found = await client.post(path, json=body)
            assert found.status_code == status, found.text
        assert (await client.post("/v1/completions", content=PROMPT)).status_code == 400
        with suppress(httpx2.TimeoutException):  # a client that leaves
            await client.post("/v1/completions", json={"model": "a", "prompt": PROMPT}, timeout=0.05)
    written = caplog.text + generate_latest(metrics.registry).decode()
    assert "loraplex_http_requests_total" in written
    assert [secret for secret in (PROMPT, ANSWER, KEY) if secret in written] == []
