"""The page of the cluster: its files, its state, and what a browser shows of them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from bench.devtools import Page, browser_page
from bench.screenshots import NoBrowserError, find_browser
from clients.gateway.app import serving
from clients.gateway.metrics import GatewayMetrics
from clients.gateway.settings import Settings
from tests.e2e.conftest import TENANT, Cluster
from tests.e2e.gateway.conftest import HEADERS, MESSAGES, PROMPT, expected

pytestmark = pytest.mark.asyncio(loop_scope="package")
Http = httpx.AsyncClient


@pytest_asyncio.fixture(loop_scope="package")
async def http(cluster: Cluster) -> AsyncIterator[Http]:
    async with Http(base_url=f"http://{cluster.local.http}", headers=HEADERS) as own:
        yield own


async def test_the_files_are_served_and_let_in_nothing_else(http: Http) -> None:
    page = await http.get("/cluster")
    assert (await http.get("/")).text == page.text
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|style=|https?:", page.text)
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    scripts = [name for name in named if name.endswith(".js")]
    for name in scripts:  # with what they import
        imported = re.findall(r'from "\./([\w.]+)"', (await http.get(name)).text)
        scripts += [f"cluster/{other}" for other in imported if f"cluster/{other}" not in scripts]
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", "ter": "text/html"}
    for name in {*named, *scripts, "cluster"}:
        answer = await http.get(name)
        assert answer.status_code == 200, name
        assert answer.headers["content-type"].startswith(next(kinds[end] for end in kinds if name.endswith(end)))
        assert answer.headers["content-security-policy"].startswith("default-src 'self'; ")
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    for name in ("files.py", "..%2Fsettings.py", "nothing.js"):
        assert (await http.get(f"/cluster/{name}")).json()["error"]["code"] == "unknown_path"


async def test_the_state_has_every_router_s_part(http: Http, cluster: Cluster) -> None:
    asked = {"model": "a", "messages": MESSAGES, "max_tokens": 5}
    before = _requests((await http.get("/cluster/state")).json())
    for _ in range(4):  # of which each router gets some
        assert (await http.post("/v1/chat/completions", json=asked)).status_code == 200
    state = (await http.get("/cluster/state")).json()
    assert _requests(state) == before + 4
    assert [router["address"] for router in state["routers"]] == list(cluster.local.routers)
    assert [queue["model"] for queue in state["queues"]] == ["hash"]
    assert state["tenants"] == []
    assert len(state["workers"]) == 2
    for worker in state["workers"]:
        assert worker["phase"] == "serving"
        assert worker["blocks"]["total"] > 0
        assert not {"host", "pid", "engine_pid"} & set(worker)
    first = state["routers"][0]["traffic"]["time_to_first_token"]
    assert len(first["counts"]) == len(first["bounds"]) + 1


def _requests(state: dict[str, object]) -> int:
    routers = state["routers"]
    assert isinstance(routers, list)
    rows = [row for router in routers for row in router["traffic"]["adapters"]]
    return sum(row["requests"] for row in rows if (row["tenant"], row["adapter"]) == (TENANT, f"{TENANT}/a"))


async def test_a_silent_router_is_named_and_silent_routers_are_an_error(cluster: Cluster) -> None:
    for routers, status in ((f"{cluster.local.router},127.0.0.1:1", 200), ("127.0.0.1:1", 503)):
        async with serving(Settings(routers, port=0), GatewayMetrics()) as (address, _), Http() as http:
            answer = await http.get(f"http://{address}/cluster/state")
        assert answer.status_code == status
        errors = [router["error"] for router in answer.json().get("routers", ()) if "error" in router]
        assert len(errors) == (status == 200)


@pytest_asyncio.fixture(loop_scope="package")
async def page(cluster: Cluster) -> AsyncIterator[Page]:
    """The page in a browser, 400 pixels wide."""
    try:
        browser = find_browser()
    except NoBrowserError as error:
        pytest.skip(str(error))
    async with browser_page(browser) as opened:
        await opened.open(f"http://{cluster.local.http}/cluster", width=400)
        yield opened


async def test_a_prompt_is_typed_and_both_answers_read(page: Page, cluster: Cluster) -> None:
    await page.wait_for("!document.getElementById('cluster').hidden")
    await page.type("#tenant", TENANT)
    await page.press("Tab")
    await page.wait_for("document.getElementById('model-b').value === 'b'")
    await page.type("#tokens", "40")
    await page.type("#prompt", "Hi")
    await page.press("Enter", control=True)
    ended = "['a', 'b'].every((side) => document.getElementById(`facts-${side}`).textContent.includes('ended: length'))"
    await page.wait_for(ended)
    for side in ("a", "b"):
        answer = await page.evaluate(f"document.getElementById('answer-{side}').textContent")
        assert answer == expected(PROMPT, cluster.digests[side], 40)
    # The cluster's state follows.
    await page.wait_for("document.querySelector('#traffic tbody')?.textContent.includes('acme/b')")
    assert await page.evaluate("document.querySelectorAll('#workers tbody tr').length") == 2
    await page.wait_for("document.querySelector('#tiers tbody').textContent.includes('acme/b@live')")
    # Markup in a name is text.
    await page.type("#model-a", "<img src=x onerror=alert(1)>")
    await page.press("Enter")
    await page.wait_for("document.getElementById('facts-a').textContent.includes('img')")
    assert await page.evaluate("document.images.length") == 0
    # Nothing is wider than the window; wide tables scroll by themselves.
    for width in (400, 1280):
        await page.resize(width, 900)
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
    fields = "[...document.querySelectorAll('input, select, textarea')]"
    assert await page.evaluate(f"{fields}.filter((field) => !field.labels.length).length") == 0
    assert {httpx.URL(address).netloc.decode() for address in page.requests} == {cluster.local.http}
    assert [error for error in page.errors if "400" not in error and "404" not in error] == []
