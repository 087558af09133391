"""Tests the contract of catalogs and blobs, in a directory and in buckets, and several stores on one PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import obstore
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from obstore.store import AzureStore, MemoryStore

from loraplex.adapter_store.accounts import AccountService, Row, StoredAccounts
from loraplex.adapter_store.app import OLD_S, Store, StoreSettings
from loraplex.adapter_store.bases import BaseModels
from loraplex.adapter_store.bucket import BucketDirectory
from loraplex.adapter_store.catalog import Catalog
from loraplex.adapter_store.database import Database
from loraplex.adapter_store.deleted import DeletedRevisions
from loraplex.adapter_store.embedded import open_database
from loraplex.adapter_store.metrics import StoreMetrics
from loraplex.adapter_store.plans import StoredPlans, StoreQuotas
from loraplex.adapter_store.records import NewBase, NewRevision, Revision
from loraplex.adapter_store.storage import CorruptBlob, DataDirectory, DataDirectoryError
from loraplex.admin.v1.accounts_pb2 import Account
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.names import AdapterName, RevisionName, parse_reference
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE, revision_digest
from loraplex.contracts.plans import Plan, windows_at
from loraplex.releases.releases import Releases
from loraplex.router.catalog.store_client import KeyCopy, StoreClient
from loraplex.runtime.rpc.errors import Aborted, NotFound, Unavailable
from loraplex.runtime.rpc.principal import Role
from loraplex.runtime.tenancy.api_keys import KeyDirectory
from tests.adapter_store.sources.places import AZURE_ACCOUNT, AZURE_KEY, azurite, bucket_of
from tests.postgres_server import PostgresServer

# Alias moves of the test of several stores; `make buckets` makes 1,000.
MOVES = int(os.environ.get("STORE_MOVES", "30"))
NAME = AdapterName("acme", "support")
BASE = read_base_model("hash:?vocab=600")


@dataclass
class Parts:
    """The parts of one store."""

    data: DataDirectory
    database: Database
    catalog: Catalog
    deleted: DeletedRevisions

    def publish(self, weights: bytes, name: AdapterName = NAME, etag: str = "", alias: str | None = "live") -> Revision:
        """Keep a revision with these weights."""
        upload = self.data.new_upload()
        try:
            for file, content in ((CONFIG_FILE, b"{}"), (WEIGHTS_FILE, weights)):
                upload.append(file, content)
            files = upload.finish()
            digest = revision_digest(b"{}", files[WEIGHTS_FILE].digest)
            revision_name = RevisionName(name.tenant, name.adapter, digest)
            revision = Revision(revision_name, BASE.name, BASE.digest, 1, files[CONFIG_FILE], files[WEIGHTS_FILE])
            return self.catalog.publish(NewRevision(revision, alias, etag, ""), upload)[1]
        finally:
            upload.discard()

    def read(self, name: RevisionName) -> bytes:
        """Return a revision's weights."""
        _, readers = self.catalog.open_revision(name)
        with ExitStack() as opened:
            for reader in readers.values():
                opened.callback(reader.close)
            weights, content = readers[WEIGHTS_FILE], b""
            while weights.remaining:
                content += weights.read()
            return content

    def etag(self, name: AdapterName = NAME) -> str:
        """Return an adapter's etag."""
        return self.catalog.resolve(parse_reference(str(name), name.tenant), str(name))[0].etag


def parts(root: Path, bucket: Any = None, url: str = "") -> Parts:
    """Open a store's parts in a directory, or with files in a bucket and a catalog at a URL; a base model is there."""
    data = DataDirectory(root) if bucket is None else BucketDirectory(root, bucket)
    database = open_database(url, data.catalog_path, data.count_blobs())
    if isinstance(data, BucketDirectory):
        data.database = database
    deleted = DeletedRevisions(database, data, 0.0)
    catalog = Catalog(database, data, deleted, StoreQuotas(StoredPlans(database), StoreMetrics()), Releases(database))
    BaseModels(database, data).register(NewBase(BASE, {}, False, False), data.new_upload())
    return Parts(data, database, catalog, deleted)


@pytest.fixture(scope="module")
def moto_url() -> Iterator[str]:
    """The server of moto, once for the file."""
    moto = pytest.importorskip("moto.server", reason="moto's server is not installed: pip install 'moto[server]'")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture(scope="module")
def azurite_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Azurite, once for the file."""
    with azurite(tmp_path_factory.mktemp("azurite")) as (url, _):
        yield url


_names = iter(f"bucket-{number}" for number in range(10_000))


def place_of(kind: str, request: pytest.FixtureRequest) -> Any:
    """Return an empty place of a kind; None for a directory."""
    if kind == "directory":
        return None
    if kind == "memory":
        return MemoryStore()
    url = request.getfixturevalue(f"{kind}_url")
    if kind == "azurite":
        options: Any = {"client_options": {"allow_http": True}, "endpoint": url, "prefix": next(_names)}
        return AzureStore("acme", account_name=AZURE_ACCOUNT, account_key=AZURE_KEY, **options)
    return bucket_of(url, next(_names))


@pytest.fixture(params=["directory", "memory", "seaweed", "moto", "azurite"])
def place(request: pytest.FixtureRequest) -> Any:
    """A place that keeps a store's things."""
    return place_of(request.param, request)


@pytest.fixture(params=["memory", "seaweed", "moto", "azurite"])
def bucket(request: pytest.FixtureRequest) -> Any:
    """A bucket for several stores."""
    return place_of(request.param, request)


@pytest.fixture
def catalog_url(postgres: PostgresServer) -> str:
    """The URL of a catalog for several stores."""
    return postgres.new_database()


@pytest.fixture
def open_parts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Parts]]:
    """Opens stores' parts, and closes them; those with a bucket share a catalog."""
    with ExitStack() as opened:

        def open_(place: Any, at: str = "a") -> Parts:
            store = parts(tmp_path / at, place, "" if place is None else request.getfixturevalue("catalog_url"))
            opened.enter_context(closing(store.data))
            opened.enter_context(closing(store.database))
            return store

        yield open_


def test_what_is_kept_is_read_until_it_is_deleted(place: Any, open_parts: Callable[..., Parts]) -> None:
    store = open_parts(place)
    big = random.Random(1).randbytes(3_000_000)
    revision = store.publish(big)
    assert store.read(revision.name) == big
    other = store.publish(big, AdapterName("globex", "same"))
    store.catalog.delete(NAME, "", purge=True)
    with pytest.raises(NotFound):
        store.catalog.open_revision(revision.name)
    assert store.read(other.name) == big  # the same bytes are another tenant's too
    store.catalog.delete(other.name.adapter_name, "", purge=True)
    assert not store.data.has(revision.weights.digest)
    if place is not None:
        assert not [each for page in obstore.list(place, "blobs/") for each in page]


def test_a_change_that_fails_leaves_nothing(place: Any, open_parts: Callable[..., Parts]) -> None:
    store = open_parts(place)
    kept = store.publish(b"first")
    with pytest.raises(Aborted):
        store.publish(b"second", etag="0-0")

    def fail() -> None:
        with store.database.transaction() as rows:
            rows.execute("UPDATE adapters SET base_model = 'other'")
            rows.execute("INSERT INTO nothing VALUES (1)")

    with pytest.raises(Exception, match="nothing"):
        fail()
    assert store.catalog.resolve(parse_reference("support", "acme"), "")[1] == kept
    if place is not None:
        assert len([each for page in obstore.list(place, "blobs/") for each in page]) == 2


def test_a_store_that_starts_again_has_everything(place: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = "" if place is None else request.getfixturevalue("catalog_url")
    for number in range(3):
        store = parts(tmp_path / "a", place, url)
        assert store.data.clean(store.database.referenced_blobs()) == 0
        store.publish(b"%d" % number)
        upload = store.data.new_upload()
        upload.append("left", b"by a crash")
        store.database.close()
        store.data.close()
        store = parts(tmp_path / "a", place, url)
        assert store.data.clean(store.database.referenced_blobs()) == 1
        revisions = list(store.catalog.revisions(NAME, 2**62, 10))
        assert [store.read(revision.name) for revision in revisions] == [b"%d" % n for n in range(number, -1, -1)]
        store.database.close()
        store.data.close()


def test_nothing_is_lost_among_stores_that_change_the_same(bucket: Any, open_parts: Callable[..., Parts]) -> None:
    """The moves are conditional, so that each success is one change; every read is a whole revision."""
    moves = MOVES if not isinstance(bucket, MemoryStore) else 2 * MOVES
    stores = [open_parts(bucket, at) for at in "ab"]
    contents = {stores[0].publish(b"%d" % n * 10_000).name.digest: b"%d" % n * 10_000 for n in range(4)}
    begun = int(stores[0].etag().partition("-")[2])

    def move(number: int) -> int:
        store, rng = stores[number % 2], random.Random(number)
        while True:
            etag = store.etag()
            digest = rng.choice(list(contents))
            with suppress(Aborted):
                return int(store.catalog.set_alias(NAME, f"a{number % 7}", digest, etag).etag != etag)

    def make_and_delete(number: int) -> int:
        store, name = stores[number % 2], AdapterName("acme", f"other{number}")
        revision = store.publish(b"%d" % (number % 3) * 5000, name)
        assert store.read(revision.name) == b"%d" % (number % 3) * 5000
        store.catalog.delete(name, "", purge=True)
        return 0

    def read(number: int) -> int:
        store = stores[number % 2]
        _, revision, _ = store.catalog.resolve(parse_reference(f"support@{random.choice(list(contents))}", "acme"), "")
        assert store.read(revision.name) == contents[revision.name.digest]
        return 0

    kinds = [move] * moves + [make_and_delete] * (moves // 5) + [read] * moves
    with ThreadPoolExecutor(8) as threads:
        changed = sum(threads.map(lambda job: job[1](job[0]), enumerate(random.Random(5).sample(kinds, len(kinds)))))
    for store in stores:
        assert int(store.etag().partition("-")[2]) == begun + changed
        assert [adapter.name for adapter in store.catalog.adapters(["acme"], ("", ""), 1000)] == [NAME]
    assert len([each for page in obstore.list(bucket, "blobs/") for each in page]) == len(contents) + 1


def test_a_catalog_that_is_missing_or_of_a_later_version_is_refused(
    open_parts: Callable[..., Parts], catalog_url: str, postgres: PostgresServer, tmp_path: Path
) -> None:
    bucket = MemoryStore()
    open_parts(bucket).publish(b"weights")
    with pytest.raises(DataDirectoryError, match="catalog is missing or empty"):
        parts(tmp_path / "b", bucket, postgres.new_database())
    with closing(open_database(catalog_url, tmp_path)) as database, database.transaction() as rows:
        rows.execute("UPDATE catalog_version SET version = version + 1")
    with pytest.raises(DataDirectoryError, match="later version"):
        parts(tmp_path / "c", bucket, catalog_url)


def test_a_missing_blob_is_named(open_parts: Callable[..., Parts]) -> None:
    bucket = MemoryStore()
    store = open_parts(bucket)
    revision = store.publish(b"weights")
    for page in obstore.list(bucket, "blobs/"):
        obstore.delete(bucket, [each["path"] for each in page])
    with pytest.raises(CorruptBlob, match=revision.weights.digest), suppress(NotFound):
        store.read(revision.name)


@pytest.fixture
async def two_stores(tmp_path: Path, catalog_url: str) -> AsyncIterator[list[Store]]:
    """Two stores on one catalog."""
    stores = [Store(StoreSettings(data=tmp_path / at, port=0, database=catalog_url)) for at in "ab"]
    for store in stores:
        await store.start()
    yield stores
    for store in stores:
        await store.stop(drain_s=0)


async def within(limit_s: float, condition: Callable[[], bool]) -> None:
    """Wait until another store has heard of a change. Raises TimeoutError."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 — nobody tells
            await asyncio.sleep(0.01)


async def test_what_a_store_changes_is_known_at_the_other_one_within_a_second(two_stores: list[Store]) -> None:
    first, second = two_stores
    key, _ = await asyncio.to_thread(first._keys.create, "acme", Role.TENANT_USER, frozenset[str](), "", None)
    await within(1, lambda: second._directory.is_valid(key.key_id))
    epoch = second._keys.epoch
    await asyncio.to_thread(second._keys.revoke, key.key_id)
    await within(1, lambda: not first._directory.is_valid(key.key_id))
    assert second._keys.epoch == epoch
    await asyncio.to_thread(first._keys.purge, "acme")
    await within(1, lambda: second._directory.find(key.key_id) is None and second._keys.epoch != epoch)
    await asyncio.to_thread(first._plans.set, "tenants/acme", Plan(weight=2.0), "")
    await within(1, lambda: second._plans.of("acme").weight == 2.0)
    news = [store._database.adapter_changes.since("", 0)[:2] for store in two_stores]
    with first._database.transaction() as rows:
        rows.execute("INSERT INTO adapters VALUES (1, 'acme', 'support', 'tiny', 0, 0, 0)")
    for store, seen in zip(two_stores, news, strict=True):
        await within(1, partial(has_heard, store, seen))


async def test_stores_outlive_a_restart_of_the_database_and_each_other(
    two_stores: list[Store], postgres: PostgresServer
) -> None:
    """While it is away calls end with DATABASE_DOWN; keys that were revoked meanwhile are at no store."""
    first, second = two_stores
    keys = [await asyncio.to_thread(make_key, store) for store in two_stores]
    await within(1, lambda: all(store._directory.is_valid(key) for store in two_stores for key in keys))
    await asyncio.to_thread(postgres.stop)
    with pytest.raises(Unavailable) as caught:
        await asyncio.to_thread(first._keys.revoke, keys[0])
    assert caught.value.reason == "DATABASE_DOWN"
    client, directory = StoreClient(f"127.0.0.1:{second.port}"), KeyDirectory()
    with pytest.raises(Unavailable):
        await client.key_changes("", 0)
    await within(10, lambda: second._database.age_s() > 2)
    await asyncio.to_thread(postgres.start)
    await asyncio.to_thread(first._keys.revoke, keys[0])
    assert not any(store._following.done() for store in two_stores), "what a store does by the clock goes on"
    await within(1.5, lambda: not second._directory.is_valid(keys[0]))
    await KeyCopy(client, directory).look()
    assert not directory.is_valid(keys[0])
    assert directory.is_valid(keys[1])
    await first.stop(drain_s=0)
    await asyncio.to_thread(second._keys.revoke, keys[1])
    await first.start()
    assert not first._directory.is_valid(keys[1])
    await client.close()


async def test_a_database_that_hangs_holds_up_no_call_for_ever_nor_the_end_of_a_store(
    two_stores: list[Store], postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.adapter_store.postgres._HUNG_S", 1.0)
    first, second = two_stores
    key = await asyncio.to_thread(make_key, first)
    await asyncio.to_thread(postgres.hang)
    try:
        async with asyncio.timeout(60):
            for done in await asyncio.gather(
                asyncio.to_thread(make_key, first),
                asyncio.to_thread(first._keys.revoke, key),
                asyncio.to_thread(StoredAccounts(first._database).page, "", 10),
                return_exceptions=True,
            ):
                assert isinstance(done, Unavailable), done
                assert done.reason == "DATABASE_DOWN"
            await second.stop(drain_s=0)
    finally:
        await asyncio.to_thread(postgres.wake)

    def revoke() -> bool:
        with suppress(Unavailable):  # for a moment after the last failure
            first._keys.revoke(key)
            return True
        return False

    async with asyncio.timeout(30):
        while not await asyncio.to_thread(revoke):  # noqa: ASYNC110 — nobody tells
            await asyncio.sleep(0.01)
    assert not first._directory.is_valid(key)
    await second.start()


def has_heard(store: Store, seen: tuple[str, int]) -> bool:
    """Tell whether a store has heard of the adapter."""
    return store._database.adapter_changes.since(*seen)[2] == ["support"]


@pytest.mark.nightly
def test_a_standby_that_was_promoted_takes_over(tmp_path: Path) -> None:
    with closing(PostgresServer()) as primary, closing(PostgresServer(primary)) as standby:
        name = primary.new_database().rpartition("/")[2]
        url = f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/{name}"
        with closing(open_database(url, tmp_path)) as database:
            plans, heard = StoredPlans(database), SimpleQueue[Any]()
            database.follow(heard.put)
            assert heard.get(timeout=10) is None
            plans.set("tenants/acme", Plan(weight=2.0), "")
            primary.stop()
            with pytest.raises(Unavailable):
                plans.set("tenants/acme", Plan(weight=3.0), "")
            standby.promote()
            assert heard.get(timeout=10) is None, "everything may have changed"
            plans.set("tenants/globex", Plan(weight=4.0), "")
            assert [StoredPlans(database).of(tenant).weight for tenant in ("acme", "globex")] == [2.0, 4.0]


def make_key(store: Store) -> str:
    """Return the id of a new key."""
    return store._keys.create("acme", Role.TENANT_USER, frozenset[str](), "", None)[0].key_id


async def test_a_store_that_hears_of_no_changes_says_how_old_its_keys_are_and_is_not_ready(
    two_stores: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = two_stores[0]
    client, directory = StoreClient(f"127.0.0.1:{store.port}"), KeyDirectory()
    copy = KeyCopy(client, directory)
    await copy.look()
    assert directory.age_s() < OLD_S / 2
    assert not store.metrics.health.why_not("/readyz")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel, asyncio.timeout(60):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        with monkeypatch.context() as patched:
            patched.setattr(store._database, "age_s", lambda: OLD_S + 1)
            await copy.look()
            assert directory.age_s() >= OLD_S
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert "database" in store.metrics.health.why_not("/readyz")
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
    await client.close()


async def test_accounts_of_many_routers_are_saved_beside_other_changes(
    two_stores: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred routers save the same tenants: a store saves those that wait at once, and a key is made meanwhile."""
    services, saves, release = set[AccountService](), list[int](), threading.Event()
    save, save_rows = AccountService._save, StoredAccounts.save

    async def watched(service: AccountService) -> None:
        services.add(service)
        await save(service)

    def counted(stored: StoredAccounts, rows: list[Row]) -> None:
        saves.append(len(rows))
        save_rows(stored, rows)

    @contextmanager
    def held(merging: Callable[[], AbstractContextManager[Any]]) -> Iterator[Any]:
        with merging() as rows:
            yield rows
            assert release.wait(60)

    monkeypatch.setattr(AccountService, "_save", watched)
    monkeypatch.setattr(StoredAccounts, "save", counted)
    for store in two_stores:
        monkeypatch.setattr(store._database, "merging", partial(held, store._database.merging))
    clients = [StoreClient(f"127.0.0.1:{store.port}") for store in two_stores]
    now: Any = windows_at(time.time_ns() // 1_000_000)
    tenants = [random.Random(router).sample(range(100), 20) for router in range(100)]
    saving = [
        asyncio.create_task(
            clients[router % 2].save_accounts(
                [Account(name=f"tenant{number:03}", day_tokens=100 + router, **now) for number in numbers]
            )
        )
        for router, numbers in enumerate(tenants)
    ]
    try:
        await within(60, lambda: sum(saves) + sum(len(one._batch) for one in services) == 20 * len(saving))
        async with asyncio.timeout(60):
            await asyncio.gather(*(asyncio.to_thread(make_key, store) for store in two_stores))
        assert not any(task.done() for task in saving)
    finally:
        release.set()
    await asyncio.gather(*saving)
    assert len(saves) <= 4, "those that a store began with, and those that waited for these"
    highest = {f"tenant{number:03}": 100 + router for router, numbers in enumerate(tenants) for number in numbers}
    for client in clients:
        assert {row.name: row.day_tokens async for page in client.account_pages() for row in page} == highest
        await client.close()
