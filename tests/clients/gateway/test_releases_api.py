"""Releases through a real gateway and a real store: what the page shows of them, and who may change them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from loraplex.adapters.v1 import releases_pb2 as pb
from loraplex.adapters.v1 import releases_pb2_grpc

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.admin.v1 import keys_pb2, keys_pb2_grpc
from loraplex.cli.models import registered
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.gateway.app import serving
from loraplex.gateway.endpoint import GatewayMetrics
from loraplex.gateway.settings import GatewaySettings
from loraplex_client import AsyncStoreClient, Tls
from tests.credentials_files import write_tls_files

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
PATH = "/v1/adapters/support/releases"
NAME = "tenants/acme/adapters/support/releases"
Http = httpx2.AsyncClient


@asynccontextmanager
async def gateway(router: str, store: str, **settings: Any) -> AsyncIterator[Http]:
    """Run a gateway; a client of it as tenant acme."""
    running = serving(GatewaySettings(router, store, port=0, drain_s=0, **settings), GatewayMetrics())
    async with running as (address, _), Http(base_url=f"http://{address}") as http:
        http.headers["x-loraplex-tenant"] = "acme"
        yield http


async def make_releases(store: AsyncStoreClient, channel: grpc.aio.Channel, key: str = "") -> Any:
    """Make a live revision of acme's adapter and a release of the next one, whose gates have passed; return a stub."""
    await store.push_adapter(CONFIG, b"first", "support", alias="live")
    pushed = await store.push_adapter(CONFIG, b"second", "support")
    stub: Any = releases_pb2_grpc.ReleaseServiceStub(channel)
    metadata = (("authorization", f"Bearer {key}"),) if key else (("x-loraplex-tenant", "acme"),)
    origin = pb.Origin(run_id="run 7", source="s3://models/support")
    await stub.CreateRelease(pb.CreateReleaseRequest(revision=pushed.revision.name, origin=origin), metadata=metadata)
    gates = [pb.GateResult(name="golden", passed=True, figures={"tokens": 12})]
    await stub.QualifyRelease(pb.QualifyReleaseRequest(name=f"{NAME}/1", gates=gates), metadata=metadata)
    return stub


async def changed(http: Http, action: str, **fields: Any) -> tuple[int, Any]:
    """Change the release with its current etag, unless another is given; return the status and the answer."""
    etag = (await http.get(f"{PATH}/1")).json()["release"]["etag"]
    answer = await http.post(f"{PATH}/1", json={"action": action, "etag": etag, **fields})
    return answer.status_code, answer.json()


async def test_a_release_is_watched_promoted_and_rolled_back(store: str) -> None:
    base = read_base_model("hash:?vocab=1024")
    async with (
        AsyncStoreClient(store, "acme") as client,
        grpc.aio.insecure_channel(store) as channel,
        gateway("127.0.0.1:1", store) as http,
    ):
        await client.register_model(registered(base), base.files)
        stub = await make_releases(client, channel)
        (listed,) = (await http.get(PATH)).json()["releases"]
        assert (listed["name"], listed["state"], listed["history"]) == (f"{NAME}/1", "RELEASE_STATE_QUALIFIED", [])
        assert listed["gates"] == [{"name": "golden", "passed": True, "figures": {"tokens": 12.0}, "detail": ""}]
        assert listed["origin"]["run_id"] == "run 7"

        plan = {"steps": [{"permille": 100, "requests": 50}], "rules": {"max_error_rise": 0.5}, "shadow_permille": 500}
        stale = {"action": "abort", "etag": listed["etag"]}
        status, answer = await changed(http, "promote", plan=plan)
        assert (status, answer["release"]["state"]) == (200, "RELEASE_STATE_CANARY")
        assert answer["release"]["rollout"]["plan"]["steps"] == [{"permille": 100, "requests": 50, "seconds": 0}]
        refused = await http.post(f"{PATH}/1", json=stale)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "aborted")
        assert f"has changed since etag {listed['etag']} was read" in refused.json()["error"]["message"]

        live, candidate = pb.Outcomes(requests=30, errors=3), pb.Outcomes(requests=4, ttft_buckets={20: 4})
        shadow = pb.ShadowOutcomes(requests=5, tokens=10, equal_tokens=9, candidate_seconds=1, live_seconds=0.5)
        outcomes = [pb.StepOutcomes(release=f"{NAME}/1", live=live, candidate=candidate, shadow=shadow)]
        await stub.ReportOutcomes(pb.ReportOutcomesRequest(reporter="router", outcomes=outcomes))
        release = (await http.get(f"{PATH}/1")).json()["release"]
        shown = {name: release["rollout"]["figures"][name] for name in ("live_error_rate", "candidate_ttft_ms")}
        assert shown == {"live_error_rate": 0.1, "candidate_ttft_ms": pytest.approx(10)}
        assert release["rollout"]["figures"]["agreement"] == 0.9
        assert release["rollout"]["figures"]["shadow_ms"] == 200

        status, answer = await changed(http, "rollback")
        assert (status, answer["release"]["state"]) == (200, "RELEASE_STATE_ROLLED_BACK")
        assert [event["cause"] for event in answer["release"]["history"]][-2:] == ["step 1 of 1: 10%", "rolled back"]
        status, answer = await changed(http, "promote")
        message = f"{NAME}/1: is rolled back; only a qualified release or a canary can be promoted"
        assert (status, answer["error"]["message"]) == (400, message)


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        ("nobody/releases", None, 404, "adapter", "adapter not found: "),
        ("nobody/releases/1", None, 404, "release", "release not found: "),
        ("a*b/releases", None, 400, "adapter", "adapter: "),
        ("support/releases/x", None, 400, "adapter", "adapter: "),
        ("support/releases?size=3", None, 400, None, "size: is not a parameter; page_token is"),
        ("support/releases/1", {"action": "delete", "etag": "1"}, 400, "action", "action: "),
        ("support/releases/1", {"action": "promote"}, 400, "etag", "etag: is required"),
        ("support/releases/1", {"action": "promote", "etag": ""}, 400, "etag", "etag: is empty"),
        (
            "support/releases/1", {"action": "abort", "etag": "1", "plan": {"steps": [{"permille": 5}]}}, 400, "plan",
            "plan: goes with the action promote alone",
        ),
        (
            "support/releases/1", {"action": "promote", "etag": "1", "plan": {"steps": [{"permille": -5}]}}, 400,
            "plan", "plan: has a number below 0",
        ),
        (
            "support/releases/1", {"action": "promote", "etag": "1", "plan": {"steps": [{"percent": 5}]}}, 400,
            "plan.steps[0].permille", "plan.steps[0].permille: is required",
        ),
        (
            "support/releases/1", {"action": "promote", "etag": "1", "plan": {"steps": [{"permille": 1000}]}}, 400,
            "plan.steps[0].permille", "plan.steps[0].permille: 1000; shares must rise, from 0 to 999",
        ),
    ],
)  # fmt: skip
async def test_mistakes_are_named(
    store: str, path: str, body: object, status: int, param: str | None, message: str
) -> None:
    async with gateway("127.0.0.1:1", store) as http:
        answer = await http.request("POST" if body else "GET", f"/v1/adapters/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["message"][: len(message)]) == (status, message)
    assert param is None or error["param"] == param


async def test_a_gateway_without_a_store_says_so() -> None:
    async with gateway("127.0.0.1:1", "") as http:
        answer = await http.get(PATH)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "adapters_not_served")


async def test_a_change_needs_a_key_that_may_make_it(tmp_path: Path) -> None:
    cert, key, ca = map(str, write_tls_files(tmp_path, "loraplex://store/s"))
    store = Store(StoreSettings(tmp_path / "data", port=0, operator_mtls_port=0, tls_cert=cert, tls_key=key, tls_ca=ca))
    await store.start()
    operators = dict(word.split("=") for word in store.addresses[1:])["operators-mtls"]
    cert, key, _ = map(str, write_tls_files(tmp_path, "loraplex://operator/o"))
    tls, base = Tls(ca, cert, key), read_base_model("hash:?vocab=1024")
    try:
        async with (
            AsyncStoreClient(operators, tls=tls) as operator,
            grpc.aio.secure_channel(operators, tls.channel_credentials()) as channel,
        ):
            await operator.register_model(registered(base), base.files)
            stub: Any = keys_pb2_grpc.KeyServiceStub(channel)
            roles = (("acme", "tenant-admin"), ("acme", "tenant-user"), ("globex", "tenant-admin"))
            requests = (keys_pb2.CreateKeyRequest(tenant=tenant, role=role) for tenant, role in roles)
            admin, user, stranger = [(await stub.CreateKey(request)).api_key for request in requests]
        await check_permissions(store.addresses[0], ca, admin, user, stranger)
    finally:
        await store.stop(0)


async def check_permissions(store: str, ca: str, admin: str, user: str, stranger: str) -> None:
    """Read with both of the tenant's keys, promote with one of them, and see nothing with another tenant's."""
    tls = Tls(ca)
    async with (
        AsyncStoreClient(store, api_key=admin, tls=tls) as client,
        grpc.aio.secure_channel(store, tls.channel_credentials()) as channel,
        gateway(store, store, ca=ca) as http,
    ):
        await make_releases(client, channel, admin)
        assert (await http.get(PATH)).status_code == 401
        http.headers = {"authorization": f"Bearer {stranger}"}
        assert (await http.get(PATH)).status_code == 404
        http.headers = {"authorization": f"Bearer {user}"}
        status, answer = await changed(http, "promote")
        assert (status, answer["error"]["code"]) == (403, "role_not_permitted")
        assert answer["error"]["message"] == "role tenant-user may not call this at the public port"
        http.headers = {"authorization": f"Bearer {admin}"}
        status, answer = await changed(http, "promote")
        assert (status, answer["release"]["state"]) == (200, "RELEASE_STATE_LIVE")
        assert (await client.get("support"))[1].digest == answer["release"]["digest"]
