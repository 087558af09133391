"""A router's copy of the API keys, against a real store: it follows changes and begins anew with another store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.admin.v1 import keys_pb2 as pb
from loraplex.admin.v1 import keys_pb2_grpc
from loraplex.router.catalog.store_client import KeyCopy, StoreClient
from loraplex.runtime.rpc.errors import Unavailable
from loraplex.runtime.rpc.principal import Role, Unauthenticated
from loraplex.runtime.tenancy.api_keys import ApiKeyReader, KeyDirectory


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    """A running store."""
    running = Store(StoreSettings(data=tmp_path / "data", port=0))
    await running.start()
    yield running
    await running.stop(drain_s=0)


async def create(store: Store) -> tuple[str, str]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        stub: Any = keys_pb2_grpc.KeyServiceStub(channel)
        made = await stub.CreateKey(pb.CreateKeyRequest(tenant="acme", ttl=Duration(seconds=3600)))
    return made.key.key_id, made.api_key


async def revoke(store: Store, key_id: str) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        stub: Any = keys_pb2_grpc.KeyServiceStub(channel)
        await stub.RevokeKey(pb.RevokeKeyRequest(key_id=key_id))


async def test_the_copy_follows_the_store(store: Store) -> None:
    client, directory = StoreClient(f"127.0.0.1:{store.port}"), KeyDirectory()
    copy, reader = KeyCopy(client, directory), ApiKeyReader(directory)
    with pytest.raises(Unavailable):
        directory.find("any")
    key_id, text = await create(store)
    await copy.look()
    metadata = (("authorization", f"Bearer {text}"),)
    found = reader.read(metadata, {})
    assert found is not None
    assert (found.tenant, found.expires_at is not None) == ("acme", True)
    await revoke(store, key_id)
    await copy.look()
    key = directory.find(key_id)
    assert key is not None
    assert key.revoked
    await client.close()


async def test_the_store_learns_when_keys_were_used_last_and_keeps_it(store: Store, tmp_path: Path) -> None:
    client, directory = StoreClient(f"127.0.0.1:{store.port}"), KeyDirectory()
    copy, reader = KeyCopy(client, directory), ApiKeyReader(directory)
    made = [await create(store) for _ in range(3)]
    await copy.look()
    began = time.time()
    for _, text in made[:2]:
        with pytest.raises(Unauthenticated):
            reader.read((("authorization", f"Bearer {text[:-1]}!"),), {})
        assert reader.read((("authorization", f"Bearer {text}"),), {}) is not None
    used = directory.take_used(1)
    assert used == [made[0][0]]
    directory.note_used(used)  # as where the store does not answer
    await copy.look()
    await client.close()

    async def last_uses(store: Store) -> dict[str, float]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
            stub: Any = keys_pb2_grpc.KeyServiceStub(channel)
            listed = (await stub.ListKeys(pb.ListKeysRequest())).keys
        return {key.key_id: key.last_use_time.ToNanoseconds() / 1e9 for key in listed if key.HasField("last_use_time")}

    uses = await last_uses(store)
    assert set(uses) == {key_id for key_id, _ in made[:2]}
    assert all(began - 1 < at < time.time() + 1 for at in uses.values())
    await store.stop(drain_s=0)
    await store.start()
    assert await last_uses(store) == uses


async def test_another_epoch_forgets_the_keys_of_the_one_before(store: Store, tmp_path: Path) -> None:
    directory = KeyDirectory()
    client = StoreClient(f"127.0.0.1:{store.port}")
    copy = KeyCopy(client, directory)
    key_id, _ = await create(store)
    await copy.look()
    other = Store(StoreSettings(data=tmp_path / "other", port=0))
    await other.start()
    others_id, _ = await create(other)
    others_client = StoreClient(f"127.0.0.1:{other.port}")
    copy._changes._ask = others_client.key_changes
    await copy.look()
    assert directory.find(key_id) is None
    assert directory.find(others_id) is not None
    await others_client.close()
    await client.close()
    await other.stop(drain_s=0)


async def test_a_purge_during_an_answer_leaves_the_keys_of_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, directory = StoreClient(f"127.0.0.1:{store.port}"), KeyDirectory()
    copy = KeyCopy(client, directory)
    of_globex, _ = await asyncio.to_thread(store._keys.create, "globex", Role.TENANT_USER, frozenset(), "", None)
    of_acme, _ = await create(store)
    await copy.look()
    read = store._keys.changes

    def purged_then_read(after: int, limit: int) -> Any:
        store._keys.purge("globex")
        return read(after, limit)

    with monkeypatch.context() as during:
        during.setattr(store._keys, "changes", purged_then_read)
        await copy.look()
    assert directory.find(of_acme) is not None
    await copy.look()
    assert (directory.find(of_acme) is None, directory.find(of_globex.key_id)) == (False, None)
    await client.close()


async def test_a_store_that_does_not_answer_leaves_the_copy_as_it_is(store: Store) -> None:
    directory = KeyDirectory()
    client = StoreClient(f"127.0.0.1:{store.port}")
    copy = KeyCopy(client, directory)
    key_id, _ = await create(store)
    await copy.look()
    await client.close()
    away = StoreClient("127.0.0.1:1")
    copy._changes._ask = away.key_changes
    await copy.look()
    assert directory.find(key_id) is not None
    await away.close()


class Pages:
    """A store that answers with pages, of which the second fails."""

    def __init__(self) -> None:
        self.answers = [
            pb.ListKeyChangesResponse(epoch="a", latest=1, keys=[hashed("old")]),
            pb.ListKeyChangesResponse(epoch="b", latest=1, more=True, keys=[hashed("one")]),
        ]

    async def key_changes(self, epoch: str, after: int, used: Sequence[str]) -> pb.ListKeyChangesResponse:
        """Return the next page."""
        if not self.answers:
            raise Unavailable("away")
        return self.answers.pop(0)


def hashed(key_id: str) -> pb.HashedKey:
    return pb.HashedKey(key=pb.Key(key_id=key_id, tenant="acme", role="tenant-user"))


async def test_half_of_another_epoch_is_not_taken() -> None:
    pages: Any = Pages()
    directory = KeyDirectory()
    copy = KeyCopy(pages, directory)
    await copy.look()
    await copy.look()  # breaks off after the first page
    assert directory.find("old") is not None
    pages.answers = [
        pb.ListKeyChangesResponse(epoch="b", latest=1, more=True, keys=[hashed("one")]),
        pb.ListKeyChangesResponse(epoch="b", latest=2, keys=[hashed("two")]),
    ]
    await copy.look()
    assert [directory.find(key_id) is not None for key_id in ("old", "one", "two")] == [False, True, True]
