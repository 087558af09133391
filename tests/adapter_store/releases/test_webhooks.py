"""Webhooks: signed as the specification says, in order, again after a failure and after a restart of the store."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from loraplex.adapters.v1 import releases_pb2

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.admin.v1 import accounts_pb2, accounts_pb2_grpc, keys_pb2, keys_pb2_grpc, plans_pb2, plans_pb2_grpc
from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.plans import windows_at
from loraplex.releases import webhooks
from loraplex.releases.webhooks import WebhooksError, read_webhooks, signed_headers
from tests.adapter_store.conftest import Client, files_of
from tests.adapter_store.releases.test_releases import ADAPTER, Releasing
from tests.adapter_store.test_batches import Caller as Batching

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


class Receiver:
    """An HTTP server that keeps what it is sent, and answers with `statuses` first."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.calls.append(({name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(receiver.statuses.pop(0) if receiver.statuses else 204)
                self.send_header("location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,)).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/hook"

    def events(self) -> list[tuple[str, str]]:
        """Return id and type of each call."""
        return [(headers["webhook-id"], json.loads(body)["type"]) for headers, body in self.calls]

    async def wait(self, count: int) -> None:
        """Wait for so many calls."""
        async with asyncio.timeout(30):
            while len(self.calls) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.server.shutdown()
    running.server.server_close()


@pytest.fixture
def dripping() -> Iterator[str]:
    """The URL of a receiver that answers its first call one byte after the other, without an end."""
    listening, ended = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def answer() -> None:
        client, _ = listening.accept()
        with client, suppress(OSError):
            client.recv(1 << 16)
            client.sendall(b"HTTP/1.1 204 No Content\r\nx: ")
            while not ended.wait(0.02):
                client.sendall(b"a")

    thread = threading.Thread(target=answer)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    ended.set()
    thread.join()
    listening.close()


@pytest.fixture
def store_settings(data: Path, tmp_path: Path, receiver: Receiver, dripping: str) -> StoreSettings:
    (tmp_path / "ci.secret").write_text(SECRET)
    table = '[{}]\nurl = "{}"\nsecret_file = "ci.secret"\ntenants = ["{}"]\n'
    text = table.format("ci", receiver.url, "acme") + table.format("others", receiver.url + "/others", "globex")
    text += table.format("slow", dripping, "acme")
    (tmp_path / "webhooks.toml").write_text(text)
    return StoreSettings(data=data, port=0, webhooks=str(tmp_path / "webhooks.toml"))


def test_the_signature_is_that_of_the_specification() -> None:
    # The example of https://www.standardwebhooks.com and of its libraries' tests.
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    headers = signed_headers(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_call_ends_in_its_time(dripping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "_CALL_S", 0.3)
    assert webhooks.call(dripping, b"{}", {}) == "no whole answer within 0.3 s"


async def test_the_end_of_a_batch_is_told(store: Store, receiver: Receiver) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        call = Batching(channel)
        batch = await call.batch()
        lease = await call("LeaseBatch")
        await call.report(lease, errors=[{"code": "c", "message": "m"}])
    await receiver.wait(1)
    (headers, body), told = receiver.calls[0], json.loads(receiver.calls[0][1])
    assert (headers["webhook-id"], told["type"]) == ("batch-event-1", "batch.failed")
    assert told["data"] == {"id": batch.name.rpartition("/")[2], "tenant": "acme"}
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    assert signed_headers(key, "batch-event-1", int(headers["webhook-timestamp"]), body).items() <= headers.items()


async def test_events_arrive_in_order_and_again_after_failures_though_another_receiver_drips(
    store: Store,
    client: Client,
    tiny_base: BaseModel,
    receiver: Receiver,
    store_settings: StoreSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhooks, "_CALL_S", 100.0)
    await client.register(tiny_base)
    digest = (await client.upload("support", files_of(1), alias="-")).revision.digest
    receiver.statuses = [503, 302]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        releasing = Releasing(channel)
        release = await releasing.qualified(digest)
        await receiver.wait(5)
        assert [kind for _, kind in receiver.events()] == ["release.imported"] * 3 + [
            "release.verified",
            "release.qualified",
        ]
        assert len({message_id for message_id, _ in receiver.events()[:3]}) == 1, "a repeated event has its id"
        headers, body = receiver.calls[4]
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        key = base64.b64decode(SECRET.removeprefix("whsec_"))
        mac = base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
        assert headers["webhook-signature"] == f"v1,{mac}"
        data = json.loads(body)["data"]
        assert (data["release"], data["digest"]) == (f"{ADAPTER}/releases/1", digest)
        assert data["figures"] == {"golden.passed": 3}
        await store.stop(drain_s=0)
    # Events that the receiver refuses are sent again after a restart of the store, once.
    receiver.statuses = [500] * 50
    again = Store(store_settings)
    await again.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{again.port}") as channel:
        await Releasing(channel).ask("PromoteRelease", name=release.name)
        await receiver.wait(6)
    await again.stop(drain_s=0)
    receiver.statuses.clear()
    await store.start()
    await receiver.wait(7)
    assert receiver.events()[-1][1] == "release.live"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        release = await Releasing(channel).ask("GetRelease", name=release.name)
    assert release.state == releases_pb2.RELEASE_STATE_LIVE
    sent = dict.fromkeys(receiver.events())
    assert [kind for _, kind in sent] == ["release.imported", "release.verified", "release.qualified", "release.live"]


async def test_a_budget_warns_and_is_spent_once_a_month(store: Store, receiver: Receiver) -> None:
    """Accounts that are saved again send nothing; a receiver that failed gets the event again, other tenants' none."""
    month = windows_at(time.time_ns() // 1_000_000)["month"] + 1  # which does not end while the test runs
    prices = plans_pb2.Prices(currency="EUR", of={"tiny": plans_pb2.Price(input=150)})
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        plans: Any = plans_pb2_grpc.PlanServiceStub(channel)
        accounts: Any = accounts_pb2_grpc.AccountServiceStub(channel)
        keys: Any = keys_pb2_grpc.KeyServiceStub(channel)
        key = (await keys.CreateKey(keys_pb2.CreateKeyRequest(tenant="acme"))).key.key_id
        budgets: Any = {"budget_per_month": 100.0, "budget_warning": 80.5}
        for plan in (
            plans_pb2.Plan(name="prices", prices=prices),
            plans_pb2.Plan(name="tenants/acme", **budgets),
            plans_pb2.Plan(name=f"keys/{key}", budget_warning=10.0),
            plans_pb2.Plan(name="default", tokens_per_day=1),
        ):
            await plans.SetPlan(plans_pb2.SetPlanRequest(plan=plan))

        async def save(*saved: accounts_pb2.Account) -> None:
            await accounts.SaveAccounts(accounts_pb2.SaveAccountsRequest(accounts=saved))

        def spent(name: str, nanos: int) -> accounts_pb2.Account:
            return accounts_pb2.Account(name=name, month=month, month_cost=nanos)

        receiver.statuses = [503]
        await save(spent("acme", 80_499_999_999), spent("globex", 10**12))
        await save(spent("acme", 80_500_000_000), spent(f"keys/{key}", 9_999_999_999))
        await save(spent("acme", 90_000_000_000), accounts_pb2.Account(name="acme", budget_spent=True))
        await save(spent(f"keys/{key}", 10_000_000_000), accounts_pb2.Account(name="acme", budget_spent=True))
        await receiver.wait(4)
        saved = (await accounts.ListAccounts(accounts_pb2.ListAccountsRequest())).accounts
    assert {one.name: one.month_cost for one in saved}["acme"] == 90_000_000_000
    failed, warned, *rest = (json.loads(body) for _, body in receiver.calls)
    assert failed == warned
    assert [(one["type"], one["data"]["key"]) for one in (warned, *rest)] == [
        ("budget.warned", ""),
        ("budget.spent", ""),
        ("budget.warned", key),
    ]
    assert warned["data"] == {
        "tenant": "acme",
        "key": "",
        "month": f"{month // 12}-{month % 12 + 1:02}",
        "budget_warning": "80.500000000",
        "currency": "EUR",
    }
    assert rest[0]["data"]["budget_per_month"] == "100.000000000"
    assert [one["data"]["tenant"] for one in rest] == ["acme", "acme"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[ci", "Expected"),
        ('[ci]\nurl = "ftp://a"\nsecret_file = "s"\n', "ci.url: give an address"),
        ('[ci]\nurl = "http://a"\n', "ci.secret_file: give the name of a file"),
        ('[ci]\nurl = "http://a"\nsecret_file = "none"\n', "none: No such file"),
        ('[ci]\nurl = "http://a"\nsecret_file = "short"\n', "is not whsec_ and base64 of 24 to 64 bytes"),
        ('[ci]\nurl = "http://a"\nsecret_file = "s"\ntenant = "a"\n', "ci.tenant is not one of"),
        ("ci = 1\n", "ci is not a table"),
    ],
)
def test_a_fault_of_the_file_is_named(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "s").write_text(SECRET)
    (tmp_path / "short").write_text("whsec_MfKQ")
    path = tmp_path / "webhooks.toml"
    path.write_text(text)
    with pytest.raises(WebhooksError) as error:
        read_webhooks(path)
    assert fault in str(error.value)
    assert "\n" not in str(error.value)
