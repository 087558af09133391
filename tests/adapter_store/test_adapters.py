"""Names, aliases, lists, deletion, and who may see and change what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE

if TYPE_CHECKING:
    from tests.adapter_store.conftest import Client

Refusal = Callable[[grpc.aio.AioRpcError], tuple[str, str, bytes]]


def files(weights: str) -> dict[str, bytes]:
    return {CONFIG_FILE: b"{}", WEIGHTS_FILE: weights.encode()}


@pytest.fixture
async def ready(client: Client, hash_base: BaseModel) -> Client:
    """A client of a store that takes any adapter."""
    await client.register(hash_base)
    return client


async def test_short_names_mean_the_tenants_own_then_the_shared(ready: Client) -> None:
    shared = (await ready.upload("support", files("shared"), tenant="shared")).revision
    assert (await ready.get("support")).revision == shared
    own = (await ready.upload("support", files("own"))).revision
    assert (await ready.get("support")).revision == own
    assert (await ready.get("support", tenant="globex")).revision == shared
    assert (await ready.get("tenants/shared/adapters/support")).revision == shared
    assert (await ready.download(shared.name))[1] == files("shared")


async def test_an_adapter_has_a_name_as_hubs_have_them(ready: Client) -> None:
    own = (await ready.upload("Org/Support-LoRA.1", files("own"))).revision
    assert own.name == f"tenants/acme/adapters/Org/Support-LoRA.1/revisions/{own.digest}"
    for name in ("Org/Support-LoRA.1@live", f"tenants/acme/adapters/Org/Support-LoRA.1@{own.digest}"):
        assert (await ready.get(name)).revision == own
    assert (await ready.download(own.name))[1] == files("own")


async def test_an_own_adapter_without_the_alias_is_not_passed_over(ready: Client, refusal: Refusal) -> None:
    shared = (await ready.upload("support", files("shared"), tenant="shared", alias="canary")).revision
    await ready.upload("support", files("own"))
    for name in ("support@canary", f"support@{shared.digest}"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ready.get(name)
        assert refusal(caught.value)[:2] == ("NOT_FOUND", "ErrorInfo,ResourceInfo")


@pytest.mark.parametrize(
    ("name", "tenant", "message"),
    [
        ("shout", "globex", "adapter not found: shout; looked in tenant globex and tenant shared"),
        ("tenants/acme/adapters/shot", "acme", "adapter not found: tenants/acme/adapters/shot; looked in tenant acme"),
        ("shout@nope", "acme", "alias not found: tenants/acme/adapters/shout@nope; its aliases: beta, live"),
        ("tenants/acme/adapters/shout@nope", "globex", "adapter not found: tenants/acme/adapters/shout@nope"),
    ],
)
async def test_what_is_wrong_with_a_name_is_said(ready: Client, name: str, tenant: str, message: str) -> None:
    await ready.upload("shout", files("1"), alias="beta")
    await ready.upload("shout", files("2"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ready.get(name, tenant=tenant)
    assert caught.value.details() == message


async def test_aliases_move_roll_back_and_go(ready: Client, refusal: Refusal) -> None:
    one = (await ready.upload("support", files("1"))).revision
    two = await ready.upload("support", files("2"))

    async def set_alias(alias: str, digest: str, etag: str = "") -> Any:
        request = pb.SetAliasRequest(adapter="support", alias=alias, digest=digest, etag=etag)
        return (await ready.call("SetAlias", request)).adapter

    assert (await ready.get("support")).revision == two.revision
    rolled_back = await set_alias("live", one.digest, two.adapter.etag)
    assert dict(rolled_back.aliases) == {"live": one.digest}
    assert (await ready.get("support")).revision == one
    assert (await set_alias("live", one.digest)).etag == rolled_back.etag
    await set_alias("canary", two.revision.digest)
    assert (await ready.get("support@canary")).revision == two.revision
    assert dict((await set_alias("canary", "")).aliases) == {"live": one.digest}
    for alias, digest, etag, code in [
        ("live", two.revision.digest, two.adapter.etag, "ABORTED"),
        ("live", "sha256:" + "0" * 64, "", "NOT_FOUND"),
        ("canary", "", "", "NOT_FOUND"),
        ("live", "latest", "", "INVALID_ARGUMENT"),
        ("", one.digest, "", "INVALID_ARGUMENT"),
    ]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await set_alias(alias, digest, etag)
        assert refusal(caught.value)[0] == code


async def test_an_adapter_has_so_many_aliases_and_no_more(ready: Client) -> None:
    digest = (await ready.upload("support", files("1"), alias="-")).revision.digest
    for number in range(100):
        await ready.call("SetAlias", pb.SetAliasRequest(adapter="support", alias=f"a{number}", digest=digest))
    await ready.call("SetAlias", pb.SetAliasRequest(adapter="support", alias="a7", digest=digest))
    with pytest.raises(grpc.aio.AioRpcError, match="alias: the adapter has 100 aliases already"):
        await ready.call("SetAlias", pb.SetAliasRequest(adapter="support", alias="b", digest=digest))


async def list_all(client: Client, page_size: int, **fields: Any) -> list[list[str]]:
    """Names by page."""
    pages, token = list[list[str]](), ""
    while True:
        request = pb.ListAdaptersRequest(page_size=page_size, page_token=token, **fields)
        page = await client.call("ListAdapters", request)
        pages.append([adapter.name for adapter in page.adapters])
        token = page.next_page_token
        if not token:
            return pages


async def test_lists_come_in_pages_of_what_the_tenant_may_use(ready: Client) -> None:
    for tenant in ("acme", "shared", "globex"):
        for number in range(3):
            await ready.upload(f"a{number}", files(f"{tenant}{number}"), tenant=tenant)
    own, shared = ([f"tenants/{tenant}/adapters/a{number}" for number in range(3)] for tenant in ("acme", "shared"))
    assert await list_all(ready, 100) == [own + shared]
    assert await list_all(ready, 2) == [own[:2], [own[2], shared[0]], shared[1:]]
    assert await list_all(ready, 3) == [own, shared]
    assert await list_all(ready, 2, parent="tenants/shared") == [shared[:2], shared[2:]]
    assert await list_all(ready, 2, parent="tenants/acme") == [own[:2], own[2:]]


async def test_an_adapter_made_or_gone_between_pages_moves_no_other(ready: Client) -> None:
    for name in "bdf":
        await ready.upload(name, files(name))
    first = await ready.call("ListAdapters", pb.ListAdaptersRequest(page_size=2))
    await ready.upload("a", files("a"))
    await ready.call("DeleteAdapter", pb.DeleteAdapterRequest(name="d"))
    request = pb.ListAdaptersRequest(page_size=2, page_token=first.next_page_token)
    rest = await ready.call("ListAdapters", request)
    names = [adapter.name.rpartition("/")[2] for adapter in (*first.adapters, *rest.adapters)]
    assert names == ["b", "d", "f"]


async def test_revisions_are_listed_newest_first(ready: Client) -> None:
    digests = [(await ready.upload("support", files(str(number)))).revision.digest for number in range(5)]
    first = await ready.call("ListRevisions", pb.ListRevisionsRequest(parent="support", page_size=3))
    request = pb.ListRevisionsRequest(parent="support", page_size=3, page_token=first.next_page_token)
    rest = await ready.call("ListRevisions", request)
    assert [revision.digest for revision in (*first.revisions, *rest.revisions)] == digests[::-1]
    assert rest.next_page_token == ""


@pytest.mark.parametrize("token", ["x", "!", "é", "e30=", "WyJhIl0=", "WzEsMl0=", "WyJcdWQ4MDAiLCJhIl0="])
async def test_tokens_that_are_not_ours_are_refused(ready: Client, token: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="page_token: is not one that this list gave"):
        await ready.call("ListAdapters", pb.ListAdaptersRequest(page_token=token))


async def test_page_sizes_have_bounds(ready: Client) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="page_size: -1 is negative"):
        await ready.call("ListAdapters", pb.ListAdaptersRequest(page_size=-1))
    await ready.call("ListAdapters", pb.ListAdaptersRequest(page_size=10**6))


async def test_a_deleted_adapter_is_gone_and_its_revisions_stay_for_a_while(ready: Client, refusal: Refusal) -> None:
    kept = (await ready.upload("kept", files("both"))).revision
    first = await ready.upload("support", files("both"))
    uploaded = await ready.upload("support", files("one"))
    stale = pb.DeleteAdapterRequest(name="support", etag="1-0")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ready.call("DeleteAdapter", stale)
    assert refusal(caught.value)[0] == "ABORTED"
    await ready.call("DeleteAdapter", pb.DeleteAdapterRequest(name="support", etag=uploaded.adapter.etag))
    revisions = pb.ListRevisionsRequest(parent="support")
    for request in (
        ready.get("support"),
        ready.get(f"support@{uploaded.revision.digest}"),
        ready.call("ListRevisions", revisions),
        ready.download(uploaded.revision.name, "globex"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await request
        assert refusal(caught.value)[0] == "NOT_FOUND"
    # An answer that runs on it may have to go on at a worker that has yet to fetch it.
    assert (await ready.download(uploaded.revision.name))[1] == files("one")
    assert (await ready.download(first.revision.name)) == (first.revision, files("both"))
    assert (await ready.download(kept.name))[1] == files("both")
    again = await ready.upload("support", files("both"))
    assert again.created
    assert again.adapter.etag != uploaded.adapter.etag
    await ready.call("DeleteAdapter", pb.DeleteAdapterRequest(name="support"))
    assert (await ready.download(first.revision.name))[1] == files("both")


async def test_deleted_revisions_go_when_their_time_has_passed(
    store_settings: StoreSettings, connect: Callable[[str], Client], hash_base: BaseModel, data: Path, refusal: Refusal
) -> None:
    store = Store(store_settings)
    await store.start()
    client = connect(f"127.0.0.1:{store.port}")
    await client.register(hash_base)
    await client.upload("kept", files("both"))
    names = [(await client.upload("support", files(weights))).revision.name for weights in ("both", "one")]
    await client.call("DeleteAdapter", pb.DeleteAdapterRequest(name="support"))
    await client.close()
    await store.stop(drain_s=0)
    assert len(list((data / "blobs").iterdir())) == 3
    store = Store(replace(store_settings, keep_deleted_s=0.0))
    await store.start()
    client = connect(f"127.0.0.1:{store.port}")
    for name in names:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.download(name)
        assert refusal(caught.value)[0] == "NOT_FOUND"
    await client.upload("support", files("two"))
    await client.call("DeleteAdapter", pb.DeleteAdapterRequest(name="support"))
    assert len(list((data / "blobs").iterdir())) == 2
    await client.close()
    await store.stop(drain_s=0)


async def test_a_download_under_way_survives_deletion(ready: Client) -> None:
    weights = bytes(3 * 1024 * 1024)
    name = (await ready.upload("support", {CONFIG_FILE: b"{}", WEIGHTS_FILE: weights})).revision.name
    call = ready.stub.DownloadRevision(pb.DownloadRevisionRequest(name=name), metadata=(("x-loraplex-tenant", "acme"),))
    parts = aiter(call)
    await anext(parts)
    await ready.call("DeleteAdapter", pb.DeleteAdapterRequest(name="support"))
    received = b"".join([part.chunk.data async for part in parts if part.chunk.name == WEIGHTS_FILE])
    assert received == weights


DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("method", "request_of"),
    [
        ("GetAdapter", lambda name, digest: pb.GetAdapterRequest(name=name)),
        ("GetAdapter", lambda name, digest: pb.GetAdapterRequest(name=f"{name}@{digest}")),
        ("GetAdapter", lambda name, digest: pb.GetAdapterRequest(name=f"{name}@canary")),
        ("ListRevisions", lambda name, digest: pb.ListRevisionsRequest(parent=name)),
        ("DeleteAdapter", lambda name, digest: pb.DeleteAdapterRequest(name=name)),
        ("DeleteAdapter", lambda name, digest: pb.DeleteAdapterRequest(name=name, etag="1-1")),
        ("SetAlias", lambda name, digest: pb.SetAliasRequest(adapter=name, alias="live", digest=digest)),
        ("ListAdapters", lambda name, digest: pb.ListAdaptersRequest(parent=name.rpartition("/adapters/")[0])),
    ],
)
async def test_another_tenants_adapter_looks_like_none(
    ready: Client, refusal: Refusal, method: str, request_of: Callable[[str, str], Any]
) -> None:
    """The answer is the same bytes before the adapter exists and after."""

    async def answer() -> tuple[str, str, bytes]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ready.call(method, request_of("tenants/globex/adapters/secret", DIGEST))
        return refusal(caught.value)

    before = await answer()
    assert before[:2] == ("NOT_FOUND", "ErrorInfo,ResourceInfo")
    await ready.upload("secret", files("secret"), tenant="globex")
    assert await answer() == before


async def test_another_tenants_bytes_look_like_none(ready: Client, refusal: Refusal) -> None:
    name = (await ready.upload("secret", files("secret"), tenant="globex")).revision.name

    async def answer(name: str, tenant: str) -> tuple[str, str, bytes]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ready.download(name, tenant)
        return refusal(caught.value)

    foreign = await answer(name, "acme")
    await ready.call("DeleteAdapter", pb.DeleteAdapterRequest(name="secret"), tenant="globex")
    assert await answer(name, "acme") == foreign
    never = name.replace("secret", "never")
    assert await answer(never, "acme") == await answer(never, "globex")


async def test_only_its_tenant_writes(ready: Client, refusal: Refusal) -> None:
    await ready.upload("support", files("shared"), tenant="shared")
    for adapter, code in (
        ("tenants/globex/adapters/new", "NOT_FOUND"),
        ("tenants/shared/adapters/support", "FAILED_PRECONDITION"),
        ("tenants/shared/adapters/new", "FAILED_PRECONDITION"),
    ):
        for call in (
            ready.upload(adapter, files("mine")),
            ready.call("DeleteAdapter", pb.DeleteAdapterRequest(name=adapter)),
            ready.call("SetAlias", pb.SetAliasRequest(adapter=adapter, alias="live", digest=DIGEST)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert refusal(caught.value)[0] == code
    assert (await ready.download((await ready.get("support")).revision.name))[1] == files("shared")


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("GetAdapter", pb.GetAdapterRequest(name="support")),
        ("ListAdapters", pb.ListAdaptersRequest()),
        ("ListRevisions", pb.ListRevisionsRequest(parent="support")),
        ("DeleteAdapter", pb.DeleteAdapterRequest(name="support")),
        ("SetAlias", pb.SetAliasRequest(adapter="support", alias="live")),
        ("UploadRevision", iter([])),
        ("ValidateAdapter", iter([])),
    ],
)
async def test_callers_must_name_their_tenant(client: Client, refusal: Refusal, method: str, request_: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.call(method, request_, tenant=None)
    assert refusal(caught.value)[:2] == ("UNAUTHENTICATED", "ErrorInfo")


async def test_a_tenant_that_is_no_name_is_refused(client: Client, refusal: Refusal) -> None:
    for metadata in (
        (("x-loraplex-tenant", "A/B"),),
        (("x-loraplex-tenant", "acme"), ("x-loraplex-tenant", "globex")),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stub.ListAdapters(pb.ListAdaptersRequest(), metadata=metadata)
        assert refusal(caught.value)[0] == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("GetAdapter", pb.GetAdapterRequest(name="Support!"), "name"),
        ("GetAdapter", pb.GetAdapterRequest(name="tenants/x"), "name"),
        ("ListAdapters", pb.ListAdaptersRequest(parent="acme"), "parent"),
        ("ListAdapters", pb.ListAdaptersRequest(parent="tenants/A"), "parent"),
        ("ListRevisions", pb.ListRevisionsRequest(parent="a b"), "parent"),
        ("DeleteAdapter", pb.DeleteAdapterRequest(name="support@live"), "name"),
        ("SetAlias", pb.SetAliasRequest(adapter="", alias="live"), "adapter"),
    ],
)
async def test_bad_names_are_refused(client: Client, method: str, request_: Any, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.call(method, request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(caught.value.details()).startswith(f"{field}: ")
