"""Test which adapters a base model takes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import grpc
import pytest
from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.adapter_store.adapter_changes import AdapterChanges
from loraplex.contracts.broker.messages import AdapterRef
from loraplex.router.catalog import store_client
from loraplex.router.catalog.adapters import resolve_adapters
from loraplex.router.catalog.store_client import Manifest, ResolvedAdapter, StoreClient
from loraplex.router.request import Request
from loraplex.runtime.rpc.errors import Mismatch, NotFound, Unavailable
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.rpc.shares import FairTurns
from loraplex.runtime.tenancy.guard import open_guard

ORIGINAL = Manifest("tiny", "sha256:original", "llama", context_length=64, vocab_size=32, files={})
QUANTIZED = replace(ORIGINAL, digest="sha256:quantized", original_digest=ORIGINAL.digest)
REF = AdapterRef("sha256:a", "tenants/acme/adapters/a@sha256:a", rank=2, weight_bytes=8)


class Store:
    """Resolves every name to one revision, of the base model with this digest."""

    def __init__(self, base_digest: str) -> None:
        self._base_digest = base_digest

    async def resolve(self, tenant: str, name: str) -> ResolvedAdapter:
        """See StoreClient."""
        return ResolvedAdapter(REF, self._base_digest)


async def resolve(base_digest: str, model: Manifest) -> AdapterRef | None:
    store: Any = Store(base_digest)
    request = Request("acme", "a prompt", "prompt", adapter="a")
    return (await resolve_adapters(request, [model], store))[1]


@pytest.mark.parametrize("model", [ORIGINAL, QUANTIZED])
async def test_adapters_are_valid_for_their_base_and_for_what_was_quantized_of_it(model: Manifest) -> None:
    assert await resolve(ORIGINAL.digest, model) == REF
    with pytest.raises(Mismatch, match="made for another base model than tiny"):
        await resolve("sha256:other", model)


async def test_names_that_one_tenant_asks_for_delay_no_other_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that lead nowhere are asked for each time, for as many calls as a router holds open."""
    began: list[str] = []
    answered = asyncio.Event()

    async def ask(_: StoreClient, tenant: str, name: str, *, cached: bool) -> tuple[ResolvedAdapter, str]:
        began.append(tenant)
        await answered.wait()
        return ResolvedAdapter(REF, name), ""

    monkeypatch.setattr(StoreClient, "_ask", ask)
    store = StoreClient("127.0.0.1:1")
    store._asking = FairTurns(4)
    store._looked_at = time.monotonic()
    asked = [asyncio.create_task(store.resolve("loud", f"a{number}")) for number in range(20)]
    asked.append(asyncio.create_task(store.resolve("quiet", "a")))
    for _ in range(5):
        await asyncio.sleep(0)
    assert sorted(began) == ["loud", "loud", "quiet"]
    answered.set()
    assert {found.base_digest for found in await asyncio.gather(*asked)} == {"a", *(f"a{n}" for n in range(20))}
    await store.close()


class Names:
    """A store that knows the names in `known`; `asked` is set by each call, and `answers` lets it answer."""

    def __init__(self) -> None:
        self.known = {"a", "b"}
        self.changes = AdapterChanges()
        # That of GetAdapter's answers, where it is of another store.
        self.epoch = ""
        self.calls: Counter[str] = Counter()
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def _get_adapter(self, request: pb.GetAdapterRequest, context: Any) -> pb.GetAdapterResponse:
        self.calls[request.name] += 1
        if request.name not in self.known:
            await context.abort(grpc.StatusCode.NOT_FOUND, "adapter not found: b; looked in tenant acme")
        digest = f"sha256:{request.name}{self.calls[request.name]}"
        self.asked.set()
        await self.answers.wait()
        revision = pb.Revision(name=request.name, digest=digest)
        return pb.GetAdapterResponse(revision=revision, epoch=self.epoch or self.changes.epoch)

    async def _changes(self, request: pb.ListAdapterChangesRequest, _: Any) -> pb.ListAdapterChangesResponse:
        self.calls["changes"] += 1
        epoch, latest, names = self.changes.since(request.epoch, request.after)
        return pb.ListAdapterChangesResponse(epoch=epoch, latest=latest, names=names)

    async def serve(self, port: int = 0) -> tuple[Server, int]:
        server = Server(open_guard())
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "GetAdapter": grpc.unary_unary_rpc_method_handler(
                self._get_adapter, pb.GetAdapterRequest.FromString, pb.GetAdapterResponse.SerializeToString
            ),
            "ListAdapterChanges": grpc.unary_unary_rpc_method_handler(
                self._changes, pb.ListAdapterChangesRequest.FromString, pb.ListAdapterChangesResponse.SerializeToString
            ),
        }
        service = "loraplex.adapters.v1.AdapterService"
        server.services.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
        port = server.bind("127.0.0.1", port)
        await server.start()
        return server, port


NAMES = ("a", "tenants/acme/adapters/a@canary", "b")


async def test_a_name_is_asked_for_again_only_once_its_adapter_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_client, "NAMES_LOOK_S", 0.0)
    names = Names()
    names.known |= {*NAMES}
    names.answers.set()
    server, port = await names.serve()
    store = StoreClient(f"127.0.0.1:{port}")

    async def asked() -> list[int]:
        for name in NAMES:
            await store.resolve("acme", name)
        return [names.calls[name] for name in NAMES]

    assert [await asked() for _ in range(3)] == [[1, 1, 1]] * 3
    names.changes.publish(["a"])
    assert await asked() == await asked() == [2, 2, 1]
    names.changes.begin_epoch()
    assert await asked() == await asked() == [3, 3, 2]
    names.epoch = "another store's, which may be behind"
    names.changes.publish(["b"])
    assert [await asked(), await asked()] == [[3, 3, 3], [3, 3, 4]]
    monkeypatch.setattr(store_client, "NAMES_LOOK_S", 60.0)
    looks = names.calls["changes"]
    await asked()
    assert names.calls["changes"] == looks
    await store.close()
    await server.stop(0)


async def test_an_answer_that_a_change_overtakes_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_client, "NAMES_LOOK_S", 0.0)
    names = Names()
    server, port = await names.serve()
    store = StoreClient(f"127.0.0.1:{port}")
    asking = asyncio.create_task(store.resolve("acme", "a"))
    await names.asked.wait()
    names.changes.publish(["a"])
    assert await store._look()
    names.answers.set()
    assert (await asking).ref.digest == "sha256:a1"
    assert [(await store.resolve("acme", "a")).ref.digest for _ in range(2)] == ["sha256:a2"] * 2
    await store.close()
    await server.stop(0)


async def test_names_outlive_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_client, "NAMES_LOOK_S", 0.0)
    names = Names()
    names.answers.set()
    server, port = await names.serve()
    store = StoreClient(f"127.0.0.1:{port}")
    known = [await store.resolve("acme", name) for name in "ab"]
    names.known.remove("b")
    names.changes.publish(["b"])
    with pytest.raises(NotFound, match="adapter not found: b; looked in tenant acme"):
        await store.resolve("acme", "b")
    await server.stop(0)
    assert await store.resolve("acme", "a") == known[0]
    monkeypatch.setattr(store_client, "RESTART_S", 0.2)
    for tenant, name in (("globex", "a"), ("acme", "b")):  # a deleted one is not known any more
        with pytest.raises(Unavailable):
            await store.resolve(tenant, name)
    monkeypatch.setattr(store, "_away_s", 0.0)
    with pytest.raises(Unavailable):
        await store.resolve("acme", "a")
    await store.close()


async def test_a_name_beyond_the_cached_ones_drops_only_the_one_asked_for_longest_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_client, "NAMES_LOOK_S", 0.0)
    monkeypatch.setattr(store_client, "NAMES_KEPT", 2)
    monkeypatch.setattr(store_client, "RESTART_S", 0.2)
    names = Names()
    names.known |= {"c"}
    names.answers.set()
    server, port = await names.serve()
    store = StoreClient(f"127.0.0.1:{port}")
    known = {name: await store.resolve("acme", name) for name in ("a", "b", "a", "c")}
    await server.stop(0)
    assert [await store.resolve("acme", name) for name in "ac"] == [known["a"], known["c"]]
    with pytest.raises(Unavailable):
        await store.resolve("acme", "b")
    await store.close()


async def test_a_store_that_is_killed_and_comes_back_fails_no_new_name() -> None:
    names = Names()
    server, port = await names.serve()
    store = StoreClient(f"127.0.0.1:{port}")
    asking = asyncio.create_task(store.resolve("acme", "a"))
    await names.asked.wait()
    await server.stop(0)
    names.answers.set()
    server, _ = await names.serve(port)
    assert (await asking).ref.digest == "sha256:a2"
    await store.close()
    await server.stop(0)


async def test_a_new_name_waits_for_an_unreachable_store_and_not_for_a_hanging_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = Names()
    server, port = await names.serve()
    store = StoreClient(f"127.0.0.1:{port}")
    monkeypatch.setattr(store_client, "CALL_S", 0.1)
    with pytest.raises(Unavailable, match="does not answer"):
        await store.resolve("acme", "a")
    await server.stop(0)
    asking = asyncio.create_task(store.resolve("acme", "a"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asking), 0.5)
    monkeypatch.undo()
    names.answers.set()
    server, _ = await names.serve(port)
    assert (await asking).ref.digest == "sha256:a2"
    await store.close()
    await server.stop(0)
