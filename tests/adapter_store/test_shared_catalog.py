"""Tests the contract of catalogs and blobs, in a directory and in buckets, and several stores on one bucket."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import obstore
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from obstore.store import AzureStore, MemoryStore

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.adapter_store.bases import BaseModels
from loraplex.adapter_store.bucket import BucketDirectory
from loraplex.adapter_store.catalog import Catalog
from loraplex.adapter_store.database import MIGRATIONS, OLD_S, Database
from loraplex.adapter_store.deleted import DeletedRevisions
from loraplex.adapter_store.metrics import StoreMetrics
from loraplex.adapter_store.plans import StoredPlans, StoreQuotas
from loraplex.adapter_store.records import NewBase, NewRevision, Revision
from loraplex.adapter_store.replica import Replica
from loraplex.adapter_store.signers import Signers
from loraplex.adapter_store.storage import CorruptBlob, DataDirectory, DataDirectoryError
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.names import AdapterName, RevisionName, parse_reference
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE, revision_digest
from loraplex.router.catalog.store_client import KeyCopy, StoreClient
from loraplex.runtime.rpc.errors import Aborted, NotFound, Unavailable
from loraplex.runtime.rpc.principal import Role
from loraplex.runtime.tenancy.api_keys import KeyDirectory
from tests.adapter_store.sources.places import AZURE_ACCOUNT, AZURE_KEY, azurite, bucket_of

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


def parts(root: Path, bucket: Any = None) -> Parts:
    """Open a store's parts in a directory, or with what they keep in a bucket; a base model is there."""
    if bucket is None:
        data: DataDirectory = DataDirectory(root)
        database = Database(data.catalog_path, data.count_blobs())
    else:
        data = BucketDirectory(root, bucket)
        database = data.database = Replica(data.catalog_path, bucket)
    deleted = DeletedRevisions(database, data, 0.0)
    catalog = Catalog(database, data, deleted, StoreQuotas(StoredPlans(database), StoreMetrics()), Signers({}))
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
def open_parts(tmp_path: Path) -> Iterator[Callable[..., Parts]]:
    """Opens stores' parts, and closes them."""
    with ExitStack() as opened:

        def open_(place: Any, at: str = "a") -> Parts:
            store = parts(tmp_path / at, place)
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

    with pytest.raises(sqlite3.Error):
        fail()
    assert store.catalog.resolve(parse_reference("support", "acme"), "")[1] == kept
    if place is not None:
        assert len([each for page in obstore.list(place, "blobs/") for each in page]) == 2


def test_a_store_that_starts_again_has_everything(place: Any, tmp_path: Path) -> None:
    for number in range(3):
        store = parts(tmp_path / "a", place)
        assert store.data.clean(store.database.referenced_blobs()) == 0
        store.publish(b"%d" % number)
        upload = store.data.new_upload()
        upload.append("left", b"by a crash")
        store.database.close()
        store.data.close()
        store = parts(tmp_path / "a", place)
        assert store.data.clean(store.database.referenced_blobs()) == 1
        revisions = list(store.catalog.revisions(NAME, 2**62, 10))
        assert [store.read(revision.name) for revision in revisions] == [b"%d" % n for n in range(number, -1, -1)]
        store.database.close()
        store.data.close()


def test_a_store_sees_what_another_has_changed(bucket: Any, open_parts: Callable[..., Parts]) -> None:
    first, second = open_parts(bucket, "a"), open_parts(bucket, "b")
    revision = first.publish(b"weights")
    assert second.database.refresh()
    assert not second.database.refresh()
    assert second.read(revision.name) == b"weights"
    statements: list[Any] = []
    first.database.changed = lambda changes: statements.extend(changes or [])
    second.catalog.set_alias(NAME, "canary", revision.name.digest, "")
    first.database.refresh()
    assert any("INSERT OR REPLACE INTO aliases" in sql for sql, _ in statements)
    assert first.etag() == second.etag()


def test_nothing_is_lost_among_stores_that_change_the_same(bucket: Any, open_parts: Callable[..., Parts]) -> None:
    """The moves are conditional, so that each success is one change; every read is a whole revision."""
    moves = MOVES if not isinstance(bucket, MemoryStore) else 2 * MOVES
    stores = [open_parts(bucket, at) for at in "ab"]
    contents = {stores[0].publish(b"%d" % n * 10_000).name.digest: b"%d" % n * 10_000 for n in range(4)}
    stores[1].database.refresh()
    begun = int(stores[0].etag().partition("-")[2])

    def move(number: int) -> int:
        store, rng = stores[number % 2], random.Random(number)
        while True:
            etag = store.etag()
            digest = rng.choice(list(contents))
            try:
                set_alias = partial(store.catalog.set_alias, NAME, f"a{number % 7}", digest, etag)
                adapter = store.database.repeated(set_alias)
                return 0 if adapter.etag == etag else 1
            except Aborted:
                store.database.refresh()

    def make_and_delete(number: int) -> int:
        store, name = stores[number % 2], AdapterName("acme", f"other{number}")
        revision = store.publish(b"%d" % (number % 3) * 5000, name)
        assert store.read(revision.name) == b"%d" % (number % 3) * 5000
        store.database.repeated(lambda: store.catalog.delete(name, "", purge=True))
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
        store.database.refresh()
        assert int(store.etag().partition("-")[2]) == begun + changed
        assert [adapter.name for adapter in store.catalog.adapters(["acme"], ("", ""), 1000)] == [NAME]
    dumps = [list(store.database._connection.iterdump()) for store in stores]
    assert dumps[0] == dumps[1]
    assert len([each for page in obstore.list(bucket, "blobs/") for each in page]) == len(contents) + 1


def test_a_store_that_was_away_reads_the_snapshot(open_parts: Callable[..., Parts]) -> None:
    bucket = MemoryStore()
    first, second = open_parts(bucket, "a"), open_parts(bucket, "b")
    for number in range(50):
        first.publish(b"%d" % number * 100, AdapterName("acme", f"n{number}"))
    first.database.forget_removed()
    kinds = {each["path"].partition("/")[0] for page in obstore.list(bucket) for each in page}
    assert kinds == {"head", "snapshots", "blobs"}
    assert second.database.refresh()
    assert len(list(second.catalog.adapters(["acme"], ("", ""), 1000))) == 50
    second.publish(b"later")
    first.database.refresh()
    assert [list(store.database._connection.iterdump()) for store in (first,)] == [
        list(second.database._connection.iterdump())
    ]


def test_a_write_whose_answer_is_lost_is_not_made_twice(
    open_parts: Callable[..., Parts], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_parts(MemoryStore())
    revision = store.publish(b"weights")
    real = obstore.put

    def lost(bucket: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        real(bucket, path, *args, **kwargs)
        if path == "head":
            raise obstore.exceptions.GenericError("the answer is lost")

    monkeypatch.setattr(obstore, "put", lost)
    before = store.etag()
    adapter = store.catalog.set_alias(NAME, "canary", revision.name.digest, before)
    assert adapter.etag == store.etag() != before
    monkeypatch.undo()
    assert not store.database.refresh()
    store.catalog.set_alias(NAME, "canary", "", adapter.etag)


def test_a_bucket_without_conditions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = obstore.put

    def regardless(bucket: Any, path: str, data: Any, **kwargs: Any) -> Any:
        return real(bucket, path, data, **{**kwargs, "mode": "overwrite"})

    monkeypatch.setattr(obstore, "put", regardless)
    with pytest.raises(DataDirectoryError, match="conditional writes"):
        Replica(tmp_path / "catalog.db", MemoryStore())


def test_a_later_versions_catalog_is_refused(open_parts: Callable[..., Parts], monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = MemoryStore()
    first = open_parts(bucket, "a")
    with monkeypatch.context() as patched:
        steps = (*MIGRATIONS, "CREATE TABLE later (a TEXT)")
        for module in ("database", "replica"):
            patched.setattr(f"loraplex.adapter_store.{module}.MIGRATIONS", steps)
        open_parts(bucket, "b")
    with pytest.raises(Exception, match="later version"):
        first.database.refresh()
    with pytest.raises(DataDirectoryError, match="later version"):
        parts(Path(first.data._root.parent) / "c", bucket)


def test_a_missing_blob_is_named(open_parts: Callable[..., Parts]) -> None:
    bucket = MemoryStore()
    store = open_parts(bucket)
    revision = store.publish(b"weights")
    for page in obstore.list(bucket, "blobs/"):
        obstore.delete(bucket, [each["path"] for each in page])
    with pytest.raises(CorruptBlob, match=revision.weights.digest), suppress(NotFound):
        store.read(revision.name)


async def test_api_keys_of_another_store_are_known_until_they_are_purged(
    tmp_path: Path, seaweed_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": seaweed_url}.items():
        monkeypatch.setenv(name, value)
    stores = [Store(StoreSettings(data=tmp_path / at, port=0, bucket="s3://acme/keys")) for at in "ab"]
    for store in stores:
        await store.start()
    first, second = stores
    epoch = second._keys.epoch
    key, _ = await asyncio.to_thread(first._keys.create, "acme", Role.TENANT_USER, frozenset[str](), "", None)
    await asyncio.to_thread(second._database.refresh)
    assert second._directory.is_valid(key.key_id)
    await asyncio.to_thread(second._keys.revoke, key.key_id)
    await asyncio.to_thread(first._database.refresh)
    assert not first._directory.is_valid(key.key_id)
    assert second._keys.epoch == epoch
    await asyncio.to_thread(first._keys.purge, "acme")
    await asyncio.to_thread(second._database.refresh)
    assert second._directory.find(key.key_id) is None
    assert second._keys.epoch != epoch
    for store in stores:
        await store.stop(drain_s=0)


async def test_a_store_that_cannot_reach_its_bucket_says_how_old_its_keys_are_and_then_refuses(
    tmp_path: Path, seaweed_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": seaweed_url}.items():
        monkeypatch.setenv(name, value)
    store = Store(StoreSettings(data=tmp_path / "data", port=0, bucket="s3://acme/cut-off"))
    await store.start()
    replica, client, directory = store._database, StoreClient(f"127.0.0.1:{store.port}"), KeyDirectory()
    copy = KeyCopy(client, directory)
    assert isinstance(replica, Replica)
    await copy.look()
    assert directory.age_s() < OLD_S
    assert not store.metrics.health.why_not("/readyz")
    # No object answers any more, neither to the look that runs meanwhile.
    monkeypatch.setattr(replica, "_read_head", Mock(side_effect=obstore.exceptions.GenericError("cut off")))
    replica._current_at = time.monotonic() - OLD_S / 2
    await copy.look()
    assert directory.age_s() >= OLD_S / 2
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel, asyncio.timeout(60):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        replica._current_at = time.monotonic() - OLD_S - 1
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert "bucket" in store.metrics.health.why_not("/readyz")
        with pytest.raises(Unavailable):
            await client.key_changes("", 0)
        monkeypatch.undo()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
    await client.close()
    await store.stop(drain_s=0)


def test_a_bucket_that_has_lost_the_catalog_is_not_taken_for_unchanged(open_parts: Callable[..., Parts]) -> None:
    bucket = MemoryStore()
    store = open_parts(bucket)
    obstore.delete(bucket, "head")
    with pytest.raises(Unavailable, match="lost the catalog"):
        store.database.refresh()
