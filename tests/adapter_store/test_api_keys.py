"""API keys in a real store: made, listed, rotated, revoked, kept over restarts, and read as changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from loraplex.adapter_store import api_keys
from loraplex.adapter_store.api_keys import ApiKey, ApiKeys
from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.adapter_store.embedded import EmbeddedDatabase
from loraplex.admin.v1 import keys_pb2 as pb
from loraplex.admin.v1 import keys_pb2_grpc
from loraplex.runtime.rpc.principal import Role
from loraplex.runtime.rpc.server import channel_options
from loraplex.runtime.tenancy.api_keys import hash_of, new_api_key, split_api_key


@pytest.fixture
async def keys(store: Store) -> AsyncIterator[Any]:
    """A stub of the store's KeyService."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}", options=channel_options()) as channel:
        yield keys_pb2_grpc.KeyServiceStub(channel)


def catalog_bytes(data: Path) -> bytes:
    return b"".join(file.read_bytes() for file in data.glob("catalog*"))


async def refusal(call: Awaitable[Any]) -> tuple[str, str]:
    """Return the code and the message with which a call ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, str(caught.value.details())


async def changes(keys: Any, epoch: str = "", after: int = 0) -> Any:
    return await keys.ListKeyChanges(pb.ListKeyChangesRequest(epoch=epoch, after=after))


async def test_a_key_is_made_once_and_kept_hashed(keys: Any, data: Path) -> None:
    made = await keys.CreateKey(pb.CreateKeyRequest(tenant="acme", label="ci", scopes=["generate"]))
    assert made.key.role == "tenant-user"
    assert not made.key.HasField("expire_time")
    parts = split_api_key(made.api_key)
    assert parts is not None
    assert parts[0] == made.key.key_id
    listed = await keys.ListKeys(pb.ListKeysRequest())
    assert list(listed.keys) == [made.key]
    read = await changes(keys)
    assert read.keys[0].secrets[0].sha256 == hash_of(parts[1])
    assert parts[1].encode() not in catalog_bytes(data)


async def test_keys_of_operators_have_no_tenant_and_others_need_one(keys: Any) -> None:
    made = await keys.CreateKey(pb.CreateKeyRequest(role="operator"))
    assert made.key.tenant == ""
    for request, field in (
        (pb.CreateKeyRequest(), "tenant"),
        (pb.CreateKeyRequest(tenant="shared"), "tenant"),
        (pb.CreateKeyRequest(tenant="A/B"), "tenant"),
        (pb.CreateKeyRequest(tenant="acme", role="operator"), "tenant"),
        (pb.CreateKeyRequest(tenant="acme", role="worker"), "role"),
        (pb.CreateKeyRequest(tenant="acme", scopes=["everything"]), "scopes"),
        (pb.CreateKeyRequest(tenant="acme", label="a\nb"), "label"),
        (pb.CreateKeyRequest(tenant="acme", ttl=Duration(seconds=-1)), "ttl"),
        (pb.CreateKeyRequest(tenant="acme", ttl=Duration(seconds=0)), "ttl"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await keys.CreateKey(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(caught.value.details()).startswith(f"{field}:")


async def test_lists_come_in_pages_and_by_tenant(keys: Any) -> None:
    made = [await keys.CreateKey(pb.CreateKeyRequest(tenant=tenant)) for tenant in ("acme", "globex", "acme")]
    first = await keys.ListKeys(pb.ListKeysRequest(page_size=2))
    rest = await keys.ListKeys(pb.ListKeysRequest(page_size=2, page_token=first.next_page_token))
    assert rest.next_page_token == ""
    found = [key.key_id for key in (*first.keys, *rest.keys)]
    assert found == sorted(one.key.key_id for one in made)
    ours = await keys.ListKeys(pb.ListKeysRequest(tenant="acme"))
    assert {key.tenant for key in ours.keys} == {"acme"}
    assert len(ours.keys) == 2


async def test_a_rotation_leaves_two_secrets_at_most(keys: Any) -> None:
    made = await keys.CreateKey(pb.CreateKeyRequest(tenant="acme"))
    hashes = [hash_of(made.api_key.split("_", 2)[2])]
    for _ in range(2):
        rotated = await keys.RotateKey(pb.RotateKeyRequest(key_id=made.key.key_id))
        hashes.append(hash_of(rotated.api_key.split("_", 2)[2]))
    assert rotated.key.HasField("former_expire_time")
    secrets = (await changes(keys)).keys[0].secrets
    assert [secret.sha256 for secret in secrets] == [hashes[2], hashes[1]]
    assert not secrets[0].HasField("expire_time")
    assert secrets[1].HasField("expire_time")


async def test_changes_are_read_from_where_the_last_answer_ended(keys: Any) -> None:
    made = [await keys.CreateKey(pb.CreateKeyRequest(tenant="acme")) for _ in range(3)]
    first = await changes(keys)
    assert len(first.keys) == 3
    nothing = await changes(keys, first.epoch, first.latest)
    assert (len(nothing.keys), nothing.latest) == (0, first.latest)
    await keys.RevokeKey(pb.RevokeKeyRequest(key_id=made[0].key.key_id))
    await keys.RevokeKey(pb.RevokeKeyRequest(key_id=made[0].key.key_id))
    news = await changes(keys, first.epoch, first.latest)
    assert [key.key.key_id for key in news.keys] == [made[0].key.key_id]
    assert news.keys[0].key.HasField("revoke_time")
    assert len((await changes(keys, "another", first.latest)).keys) == 3


def test_two_stores_that_start_together_take_over_one_operators_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, text, _ = new_api_key()
    first, second = (ApiKeys(EmbeddedDatabase(tmp_path / "catalog"), lambda _: None) for _ in range(2))
    made = first.bootstrap(text)
    find, looks = api_keys._find, list[str]()

    def early(rows: Any, key_id: str) -> ApiKey | None:
        looks.append(key_id)
        return None if len(looks) == 1 else find(rows, key_id)

    monkeypatch.setattr(api_keys, "_find", early)  # the second looks before the first has written
    assert second.bootstrap(text) == made


def test_a_change_is_told_before_another_thread_can_make_the_next(tmp_path: Path) -> None:
    """Else a rotation that is told after the revocation would bring the key back."""
    database, others_could = EmbeddedDatabase(tmp_path / "catalog"), list[bool]()

    def told(_: ApiKey) -> None:
        with ThreadPoolExecutor(1) as another:
            others_could.append(another.submit(database.lock.acquire, blocking=False).result())

    keys = ApiKeys(database, told)
    key, _ = keys.create("acme", Role.TENANT_USER, frozenset(), "", None)
    keys.rotate(key.key_id, 60)
    keys.revoke(key.key_id)
    assert others_could == [False] * 3
    database.close()


async def test_a_request_that_is_repeated_makes_one_key(keys: Any) -> None:
    sha256, ttl = hash_of("a secret"), Duration(seconds=60)
    request = pb.CreateKeyRequest(tenant="acme", scopes=["generate"], ttl=ttl, request_id="1", secret_sha256=sha256)
    made, again = [await keys.CreateKey(request) for _ in range(2)]
    assert (made, made.api_key) == (again, "")
    others = pb.CreateKeyRequest(tenant="globex", request_id="1", secret_sha256=sha256)
    assert (await keys.CreateKey(others)).key.key_id != made.key.key_id, "request ids are a tenant's own"
    assert len((await keys.ListKeys(pb.ListKeysRequest(tenant="acme"))).keys) == 1
    [*_, hashed] = [key for key in (await changes(keys)).keys if key.key.key_id == made.key.key_id]
    assert [secret.sha256 for secret in hashed.secrets] == [sha256]

    taken = f"request_id: key {made.key.key_id} is of another request, or has changed; draw another id"
    for change in ({"label": "other"}, {"role": "tenant-admin"}, {"secret_sha256": hash_of("another")}):
        for field, value in change.items():
            other = pb.CreateKeyRequest()
            other.CopyFrom(request)
            setattr(other, field, value)
            assert await refusal(keys.CreateKey(other)) == ("ALREADY_EXISTS", taken)
    await keys.RevokeKey(pb.RevokeKeyRequest(key_id=made.key.key_id))
    assert await refusal(keys.CreateKey(request)) == ("ALREADY_EXISTS", taken)


async def test_a_rotation_that_is_repeated_keeps_the_former_secret(keys: Any) -> None:
    made = await keys.CreateKey(pb.CreateKeyRequest(tenant="acme"))
    request = pb.RotateKeyRequest(key_id=made.key.key_id, secret_sha256=hash_of("a secret"))
    rotated, again = [await keys.RotateKey(request) for _ in range(2)]
    assert (rotated, rotated.api_key) == (again, "")
    secrets = [secret.sha256 for secret in (await changes(keys)).keys[0].secrets]
    assert secrets == [hash_of("a secret"), hash_of(made.api_key.split("_", 2)[2])]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"request_id": "1"}, "request_id"),
        ({"secret_sha256": bytes(32)}, "request_id"),
        ({"request_id": "1" * 101, "secret_sha256": bytes(32)}, "request_id"),
        ({"request_id": "1", "secret_sha256": b"1"}, "secret_sha256"),
    ],
)
async def test_a_request_s_id_comes_with_a_secret_s_digest(keys: Any, given: dict[str, Any], field: str) -> None:
    code, message = await refusal(keys.CreateKey(pb.CreateKeyRequest(tenant="acme", **given)))
    assert (code, message.partition(":")[0]) == ("INVALID_ARGUMENT", field)


async def test_unknown_and_revoked_keys_are_not_rotated(keys: Any) -> None:
    made = await keys.CreateKey(pb.CreateKeyRequest(tenant="acme"))
    await keys.RevokeKey(pb.RevokeKeyRequest(key_id=made.key.key_id))
    for key_id, code in ((made.key.key_id, "FAILED_PRECONDITION"), ("nobody", "NOT_FOUND")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await keys.RotateKey(pb.RotateKeyRequest(key_id=key_id))
        assert caught.value.code().name == code


async def test_a_key_is_known_after_a_restart(store_settings: StoreSettings) -> None:
    store = Store(store_settings)
    await store.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        stub: Any = keys_pb2_grpc.KeyServiceStub(channel)
        made = await stub.CreateKey(pb.CreateKeyRequest(tenant="acme"))
    await store.stop(drain_s=0)
    again = Store(store_settings)
    await again.start()
    assert again._directory.find(made.key.key_id) is not None
    await again.stop(drain_s=0)
