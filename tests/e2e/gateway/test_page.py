"""The page of the cluster: its files, its state, and what a browser shows of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
import pytest_asyncio

from bench.devtools import Page, browser_page
from bench.screenshots import NoBrowserError, find_browser
from loraplex.cli.development_ca import DevelopmentCa
from loraplex.cli.usage import read_usage
from loraplex.cluster.v1 import cluster_pb2 as pb
from loraplex.cluster.v1 import cluster_pb2_grpc
from loraplex.gateway.app import serving
from loraplex.gateway.endpoint import GatewayMetrics
from loraplex.gateway.settings import GatewaySettings
from loraplex.runtime.rpc.principal import Role
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.rpc.tls import TlsFiles
from loraplex.runtime.tenancy.api_keys import ApiKeyReader, HashedKey, HashedSecret, KeyDirectory, new_api_key
from loraplex.runtime.tenancy.guard import Guard
from loraplex.runtime.tenancy.permissions import Port
from loraplex_client import AsyncStoreClient
from tests.clients.gateway.test_releases_api import make_releases
from tests.e2e.conftest import TENANT, Cluster
from tests.e2e.gateway.conftest import HEADERS, MESSAGES, PROMPT, Eventually, expected
from tests.plans_file import set_plans

pytestmark = pytest.mark.asyncio(loop_scope="package")
Http = httpx2.AsyncClient
CLUSTER_SHOWN = "!document.getElementById('cluster').hidden"


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
    assert "--metrics-port" in (await http.get("/metrics")).json()["error"]["message"]


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
        async with serving(GatewaySettings(routers, port=0), GatewayMetrics()) as (address, _), Http() as http:
            answer = await http.get(f"http://{address}/cluster/state")
        assert answer.status_code == status
        errors = [router["error"] for router in answer.json().get("routers", ()) if "error" in router]
        assert len(errors) == (status == 200)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def page() -> AsyncIterator[Page]:
    """A page of a browser."""
    try:
        browser = find_browser()
    except NoBrowserError as error:  # the one reason to skip: a browser that is there and does not start is a failure
        pytest.skip(f"{error}; no package of pip has one")
    async with browser_page(browser) as opened:
        yield opened


async def test_a_browser_that_does_not_start_is_no_reason_to_skip() -> None:
    with pytest.raises(NoBrowserError, match="the browser has ended"):
        async with browser_page("/bin/false") as opened:
            await opened.open("about:blank")


async def test_a_prompt_is_typed_and_both_answers_read(page: Page, cluster: Cluster) -> None:
    await page.open(f"http://{cluster.local.http}/", width=400)
    await page.wait_for(CLUSTER_SHOWN)
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
    # Nothing is wider than the window, wide tables scroll by themselves, and all cards are of one width.
    cards = "[...document.querySelectorAll('#cards div')].map((card) => card.offsetWidth)"
    for width in (400, 1280):
        await page.resize(width, 900)
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        widths = await page.evaluate(cards)
        assert max(widths) - min(widths) <= 1, widths
    # The names of a worker's adapters have several lines where there are many.
    await page.evaluate("document.querySelector('#tiers td:last-child').textContent = 'acme/a@live, '.repeat(9)")
    scroll = "document.querySelector('#tiers .scroll')"
    assert await page.evaluate(f"{scroll}.scrollWidth <= {scroll}.clientWidth")
    fields = "[...document.querySelectorAll('input, select, textarea')]"
    assert await page.evaluate(f"{fields}.filter((field) => !field.labels.length).length") == 0
    assert {httpx2.URL(address).netloc.decode() for address in page.requests} == {cluster.local.http}
    assert [error for error in page.errors if "400" not in error and "404" not in error] == []


async def test_a_release_is_looked_at_promoted_and_rolled_back(page: Page, cluster: Cluster) -> None:
    async with (
        AsyncStoreClient(cluster.local.store, TENANT) as store,
        grpc.aio.insecure_channel(cluster.local.store) as channel,
    ):
        await make_releases(store, channel)
        await page.open(f"http://{cluster.local.http}/", width=400)
        await page.type("#tenant", TENANT)
        await page.type("#release-adapter", "support")
        await page.press("Tab")
        await page.wait_for("document.getElementById('release-title').textContent === 'Release 1: qualified'")
        assert await page.evaluate("document.querySelector('#gates tbody').innerText.startsWith('golden')")
        assert await page.evaluate("document.getElementById('rollback').disabled")
        assert await page.evaluate("document.documentElement.scrollWidth") <= 400
        await page.type("#steps", "5,25")
        await page.type("#agreement", "0.9")
        await page.evaluate("document.getElementById('promote').click()")
        question = "document.getElementById('question').textContent"
        assert await page.evaluate(question) == "Start canary: release 1 of support?"
        await page.evaluate("document.getElementById('yes').click()")
        await page.wait_for("document.getElementById('releases-status').textContent.includes('needs shadow requests')")
        await page.type("#shadow", "10")
        for button in ("promote", "yes"):
            await page.evaluate(f"document.getElementById('{button}').click()")
        await page.wait_for("document.getElementById('release-title').textContent === 'Release 1: canary'")
        await page.wait_for("document.querySelector('#comparison tbody').innerText.includes('requests')")
        assert await page.evaluate("document.querySelector('#releases tbody').innerText.includes('5%')")
        for button in ("rollback", "no"):
            await page.evaluate(f"document.getElementById('{button}').click()")
        for button in ("rollback", "yes"):
            await page.evaluate(f"document.getElementById('{button}').click()")
        await page.wait_for("document.getElementById('release-title').textContent === 'Release 1: rolled back'")
        assert await page.evaluate("document.querySelector('#history tbody').innerText.includes('step 1 of 2: 5%')")
        assert [error for error in page.errors if "400" not in error] == []
        await store.delete("support")


async def test_bars_show_what_is_used_of_the_limits(
    page: Page, http: Http, cluster: Cluster, eventually: Eventually
) -> None:
    plans = (
        "[tenants.counted]\nrequests_per_minute = 90\ntokens_per_day = 1000\n[tenants.other]\ntokens_per_month = 9\n"
    )
    await set_plans(cluster.local.store, plans)
    asked = {"model": "hash", "messages": MESSAGES, "max_tokens": 5}

    async def usage() -> Any:
        (row,) = (await http.get("/cluster/usage", params={"tenant": "counted"})).json()["usage"]
        return row

    async def is_counted() -> bool:
        await http.post("/v1/chat/completions", json=asked, headers={"x-loraplex-tenant": "counted"})
        used = (await usage())["counts"]["tokens_per_day"]["used"]
        return isinstance(used, int) and used > 0

    await eventually(is_counted)  # once routers have read the plan and saved the account
    await page.open(f"http://{cluster.local.http}/", width=400)
    await page.wait_for("document.querySelector('#usage tbody')?.innerText.includes('counted')")
    await page.evaluate(
        "document.getElementById('usage-tenant').value = 'counted';"
        "document.getElementById('usage-tenant').dispatchEvent(new Event('change'))"
    )
    await page.wait_for("document.querySelectorAll('#usage tbody tr').length === 1")
    assert await page.evaluate("document.querySelector('#usage tbody').innerText.includes(' of 1,000')")
    assert await page.evaluate("document.querySelectorAll('#usage meter')[1].value") > 0
    counted = "document.querySelectorAll('#usage {}').length"
    assert await page.evaluate(counted.format("th")) == await page.evaluate(counted.format("td"))
    assert await page.evaluate("document.documentElement.scrollWidth") <= 400


async def test_the_usage_is_that_of_the_command(http: Http, cluster: Cluster) -> None:
    await set_plans(cluster.local.store, "[tenants.planned]\ntokens_per_day = 1000\ntokens_per_month = 7000\n")
    (shown,) = (await http.get("/cluster/usage", params={"tenant": "planned"})).json()["usage"]
    (row,) = await asyncio.to_thread(read_usage, cluster.local.store, "planned")
    assert {**row, "counts": {limit: row["counts"][limit] for limit in shown["counts"]}} == shown
    assert shown["counts"]["tokens_per_month"]["limit"] == 7_000


class OneWorker(cluster_pb2_grpc.ClusterServiceServicer):
    """An operators' port of a router whose cluster has one worker. `looks` counts the lists of workers."""

    def __init__(self) -> None:
        self.looks = 0

    async def GetTraffic(self, request: Any, context: Any) -> pb.GetTrafficResponse:
        """Answer."""
        return pb.GetTrafficResponse(uptime=5)

    async def ListWorkers(self, request: Any, context: Any) -> pb.ListWorkersResponse:
        """Answer."""
        self.looks += 1
        return pb.ListWorkersResponse(workers=[pb.Worker(worker_id="w-1", phase=pb.WORKER_PHASE_SERVING)])

    async def ListQueues(self, request: Any, context: Any) -> pb.ListQueuesResponse:
        """Answer."""
        return pb.ListQueuesResponse()

    async def ListJobs(self, request: Any, context: Any) -> pb.ListJobsResponse:
        """Answer."""
        return pb.ListJobsResponse()


@pytest_asyncio.fixture(loop_scope="package")
async def guarded(tmp_path: Path) -> AsyncIterator[tuple[str, GatewaySettings, OneWorker]]:
    """An operator's key, the settings of a gateway before routers that check credentials, and the service of both."""
    ca, directory = DevelopmentCa(), KeyDirectory()
    key_id, text, sha256 = new_api_key()
    directory.put([HashedKey(key_id, "", Role.OPERATOR, frozenset(), None, False, (HashedSecret(sha256),))])
    issued = ca.issue("loraplex://router/r", ["127.0.0.1", "localhost"])
    files = *ca.write(tmp_path, "router", issued), ca.write_ca(tmp_path)
    tls = TlsFiles(*files)
    server = Server(Guard([Port.OPERATORS], [ApiKeyReader(directory)]))
    service = OneWorker()  # type: ignore[abstract]
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(service, server.services)
    port = server.bind("127.0.0.1", 0, tls.server_credentials(client_certificates=False))
    await server.start()
    operated = f"127.0.0.1:{port},localhost:{port}"
    yield text, GatewaySettings(f"127.0.0.1:{port}", ca=str(files[2]), port=0, operator_router=operated), service
    await server.stop(0)


async def test_routers_with_credentials_show_the_cluster_to_an_operator_s_key(
    guarded: tuple[str, GatewaySettings, OneWorker],
) -> None:
    key, settings, service = guarded
    async with serving(settings, GatewayMetrics()) as (address, _), Http(base_url=f"http://{address}") as http:
        for headers, status in (({}, 401), (_bearer(key[:-1]), 401), (_bearer(key), 200)):
            answer = await http.get("/cluster/state", headers=headers)
            assert answer.status_code == status
        assert [worker["worker_id"] for worker in answer.json()["workers"]] == ["w-1"]
        assert len(answer.json()["routers"]) == 2
        assert service.looks == 1, "one router tells the workers for all"
    blind = replace(settings, operator_router="")
    async with serving(blind, GatewayMetrics()) as (address, _), Http(base_url=f"http://{address}") as http:
        answer = await http.get("/cluster/state", headers=_bearer(key))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "state_not_served")


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_the_page_asks_for_keys_and_keeps_them_to_itself(
    page: Page, guarded: tuple[str, GatewaySettings, OneWorker]
) -> None:
    key, settings, _ = guarded
    async with serving(settings, GatewayMetrics()) as (address, _):
        await page.open(f"http://{address}/")
        await page.wait_for("!document.getElementById('operator-key-field').hidden")
        assert await page.evaluate("document.getElementById('tenant-field').hidden")
        await page.type("#operator-key", key)
        await page.press("Enter")
        await page.wait_for(CLUSTER_SHOWN)
        assert await page.evaluate("document.querySelector('#workers tbody').innerText.startsWith('w-1')")
        kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        assert key not in await page.evaluate(kept)
        assert not any(key in asked for asked in page.requests)
