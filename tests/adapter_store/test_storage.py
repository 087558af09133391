"""The data directory and the catalog as a crash, a damaged disk or a second store may leave or find them."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.adapter_store.database import MIGRATIONS
from loraplex.adapter_store.embedded import EmbeddedDatabase
from loraplex.adapter_store.storage import DataDirectory, DataDirectoryError
from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.artifacts.names import sha256_bytes
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.runtime.rpc.errors import Exhausted
from loraplex.runtime.rpc.server import PortInUse

if TYPE_CHECKING:
    from tests.adapter_store.conftest import Client

Refusal = Callable[[grpc.aio.AioRpcError], tuple[str, str, bytes]]
WEIGHTS = bytes(range(256)) * 10_000  # more than two pieces
FILES = {CONFIG_FILE: b"{}", WEIGHTS_FILE: WEIGHTS}


def blob_of(data: Path, content: bytes) -> Path:
    return data / "blobs" / sha256_bytes(content).removeprefix("sha256:")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [flip, Path.unlink, lambda path: os.truncate(path, 5), lambda path: path.write_bytes(WEIGHTS + b"x")]
)
async def test_damaged_files_are_never_served_whole(
    client: Client, hash_base: BaseModel, data: Path, refusal: Refusal, damage: Callable[[Path], Any]
) -> None:
    await client.register(hash_base)
    name = (await client.upload("support", FILES)).revision.name
    damage(blob_of(data, WEIGHTS))
    received = b""
    call = client.stub.DownloadRevision(
        pb.DownloadRevisionRequest(name=name), metadata=(("x-loraplex-tenant", "acme"),)
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # noqa: PT012  # what comes before the error counts
        async for part in call:
            received += part.chunk.data
    assert refusal(caught.value)[:2] == ("DATA_LOSS", "ErrorInfo,ResourceInfo")
    assert len(received) < len(WEIGHTS)
    # Another upload of these bytes mends it.
    assert not (await client.upload("support", FILES)).created
    assert (await client.download(name))[1] == FILES


async def test_a_damaged_file_of_a_base_model_is_not_served(
    client: Client, tiny_base: BaseModel, data: Path, refusal: Refusal
) -> None:
    await client.register(tiny_base)
    flip(blob_of(data, tiny_base.files["tokenizer.json"]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in client.stub.DownloadBaseModel(pb.DownloadBaseModelRequest(name="tiny")):
            pass
    assert refusal(caught.value)[:2] == ("DATA_LOSS", "ErrorInfo,ResourceInfo")


async def test_everything_is_there_after_a_restart(
    store_settings: StoreSettings, connect: Callable[[str], Client], hash_base: BaseModel, tiny_base: BaseModel
) -> None:
    async def with_store(use: Callable[[Client], Any]) -> Any:
        store = Store(store_settings)
        await store.start()
        client = connect(f"127.0.0.1:{store.port}")
        try:
            return await use(client)
        finally:
            await client.close()
            await store.stop(drain_s=0)

    async def fill(client: Client) -> Any:
        await client.register(hash_base)
        await client.register(tiny_base)
        return await client.upload("support", FILES, base_model="hash")

    async def look(client: Client) -> Any:
        got = await client.get("support")
        return got.adapter, got.revision, await client.download(got.revision.name), await client.register(tiny_base)

    uploaded = await with_store(fill)
    adapter, revision, downloaded, base = await with_store(look)
    assert (adapter, revision) == (uploaded.adapter, uploaded.revision)
    assert downloaded == (revision, FILES)
    assert base.files[0].name == "config.json"


async def test_what_a_crash_left_is_removed_at_start_up(
    store_settings: StoreSettings, connect: Callable[[str], Client], hash_base: BaseModel, data: Path
) -> None:
    """A crash between any two steps of an upload leaves a file in uploads/ or a blob that no row names."""
    store = Store(store_settings)
    await store.start()
    client = connect(f"127.0.0.1:{store.port}")
    await client.register(hash_base)
    await client.upload("support", FILES)
    await client.close()
    await store.stop(drain_s=0)
    (data / "uploads" / "abc").mkdir()
    (data / "uploads" / "abc" / WEIGHTS_FILE).write_bytes(b"half")
    blob_of(data, b"orphan").write_bytes(b"orphan")
    again = Store(store_settings)
    await again.start()
    await again.stop(drain_s=0)
    assert not list((data / "uploads").iterdir())
    assert set((data / "blobs").iterdir()) == {blob_of(data, content) for content in FILES.values()}


async def test_a_revision_whose_commit_fails_is_not_there(
    client: Client, store: Any, hash_base: BaseModel, data: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.register(hash_base)

    def full(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("loraplex.adapter_store.storage.sync_directory", full)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.upload("support", FILES)
    assert refusal(caught.value)[0] == "INTERNAL"
    with pytest.raises(grpc.aio.AioRpcError, match="adapter not found"):
        await client.get("support")
    assert (await client.upload("support", FILES)).created


def test_a_full_disk_has_a_status_of_its_own(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = DataDirectory(data)
    upload = directory.new_upload()
    upload.append(WEIGHTS_FILE, b"x")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(Exhausted, match="disk is full"):
            upload.finish()
    upload.discard()
    assert not list((data / "uploads").iterdir())
    with pytest.raises(RuntimeError, match="discarded"):
        upload.append(WEIGHTS_FILE, b"late")
    directory.close()


async def test_a_directory_belongs_to_one_store(store: Store, store_settings: StoreSettings) -> None:
    with pytest.raises(DataDirectoryError, match="is in use by another store"):
        await Store(store_settings).start()


async def test_a_port_in_use_frees_the_directory(store: Store, tmp_path: Path) -> None:
    taken = StoreSettings(data=tmp_path / "other", port=store.port)
    with pytest.raises(PortInUse):
        await Store(taken).start()
    free = Store(StoreSettings(data=tmp_path / "other", port=0))
    await free.start()
    await free.stop(drain_s=0)


@pytest.mark.parametrize(
    "lose",
    [Path.unlink, lambda path: os.truncate(path, 0), sqlite3.connect],
    ids=["deleted", "emptied", "opened again"],
)
async def test_a_store_that_has_lost_its_catalog_keeps_its_files(
    store_settings: StoreSettings,
    connect: Callable[[str], Client],
    hash_base: BaseModel,
    data: Path,
    lose: Callable[[Path], Any],
) -> None:
    store = Store(store_settings)
    await store.start()
    client = connect(f"127.0.0.1:{store.port}")
    await client.register(hash_base)
    name = (await client.upload("support", FILES)).revision.name
    await client.close()
    await store.stop(drain_s=0)
    saved = (data / "catalog.db").rename(data / "saved.db")
    if lose is not Path.unlink:
        (data / "catalog.db").touch()
        connection = lose(data / "catalog.db")
        if connection is not None:
            connection.executescript("PRAGMA journal_mode = WAL; CREATE TABLE other (id INTEGER)")
            connection.close()
    for _ in range(2):  # the first start must not make an empty catalog that the second one believes
        with pytest.raises(
            DataDirectoryError, match=r"--data: .*catalog\.db .*2 files in .*restore the catalog"
        ) as refused:
            await Store(store_settings).start()
        assert "\n" not in str(refused.value)
    (data / "catalog.db").unlink(missing_ok=True)
    saved.rename(data / "catalog.db")
    again = Store(store_settings)
    await again.start()
    client = connect(f"127.0.0.1:{again.port}")
    assert (await client.download(name))[1] == FILES
    await client.close()
    await again.stop(drain_s=0)


async def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataDirectoryError, match=r"--data: .*file cannot be used"):
        await Store(StoreSettings(data=tmp_path / "file", port=0)).start()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "catalog.db").write_bytes(b"not a database" * 100)
    with pytest.raises(DataDirectoryError, match="cannot be opened as the catalog"):
        await Store(StoreSettings(data=tmp_path / "broken", port=0)).start()
    (tmp_path / "newer").mkdir()
    connection = sqlite3.connect(tmp_path / "newer" / "catalog.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(DataDirectoryError, match="was written by a later version"):
        await Store(StoreSettings(data=tmp_path / "newer", port=0)).start()
    (tmp_path / "older").mkdir()
    connection = sqlite3.connect(tmp_path / "older" / "catalog.db")
    connection.execute("PRAGMA user_version = 5")
    connection.close()
    with pytest.raises(DataDirectoryError, match=r"older/catalog\.db is of a version before 1\.0"):
        await Store(StoreSettings(data=tmp_path / "older", port=0)).start()


def test_a_catalog_gets_the_steps_that_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "catalog.db"
    EmbeddedDatabase(path).close()
    later = (*MIGRATIONS, "ALTER TABLE plans ADD COLUMN note TEXT; UPDATE plans SET note = 'none'")
    monkeypatch.setattr("loraplex.adapter_store.database.MIGRATIONS", (*later, "CREATE TABLE notes (a); SELECT broken"))
    with pytest.raises(DataDirectoryError, match="cannot be opened as the catalog: no such column"):
        EmbeddedDatabase(path)
    monkeypatch.setattr("loraplex.adapter_store.database.MIGRATIONS", (*later, "CREATE TABLE notes (a);"))
    for _ in range(2):
        database = EmbeddedDatabase(path)
        with database.reading() as rows:
            assert rows.execute("PRAGMA user_version").fetchone()[0] == 13 + 2
            assert rows.execute("SELECT note FROM plans").fetchall() == []
        database.close()


@pytest.mark.parametrize(
    ("former", "lacking"),
    [
        ("DROP TABLE accounts; DROP TABLE grants", "accounts, grants"),
        ("ALTER TABLE api_keys DROP COLUMN label", "api_keys"),
    ],
)
def test_a_catalog_of_a_former_shape_is_refused_at_the_start(tmp_path: Path, former: str, lacking: str) -> None:
    path = tmp_path / "catalog.db"
    EmbeddedDatabase(path).close()
    connection = sqlite3.connect(path)
    connection.executescript(former)
    connection.close()
    with pytest.raises(DataDirectoryError, match=f"^--data: {path} is of a version before 1.0: it lacks {lacking}, "):
        EmbeddedDatabase(path)
