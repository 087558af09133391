"""Test which adapters a base model takes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from broker.messages import AdapterRef
from router.catalog.adapters import resolve_adapters
from router.catalog.manifest import Manifest
from router.catalog.store_client import ResolvedAdapter, StoreClient
from router.request import Request
from rpc.errors import Mismatch
from rpc.shares import FairTurns

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
    return await resolve_adapters(request, model, store)


@pytest.mark.parametrize("model", [ORIGINAL, QUANTIZED])
async def test_adapters_are_valid_for_their_base_and_for_what_was_quantized_of_it(model: Manifest) -> None:
    assert await resolve(ORIGINAL.digest, model) == REF
    with pytest.raises(Mismatch, match="made for another base model than tiny"):
        await resolve("sha256:other", model)


async def test_names_that_one_tenant_asks_for_delay_no_other_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that lead nowhere are asked for each time, for as many calls as a router holds open."""
    began: list[str] = []
    answered = asyncio.Event()

    async def ask(_: StoreClient, tenant: str, name: str) -> ResolvedAdapter:
        began.append(tenant)
        await answered.wait()
        return ResolvedAdapter(REF, name)

    monkeypatch.setattr(StoreClient, "_ask", ask)
    store = StoreClient("127.0.0.1:1")
    store._asking = FairTurns(4)
    asked = [asyncio.create_task(store.resolve("loud", f"a{number}")) for number in range(20)]
    asked.append(asyncio.create_task(store.resolve("quiet", "a")))
    for _ in range(5):
        await asyncio.sleep(0)
    assert sorted(began) == ["loud", "loud", "quiet"]
    answered.set()
    assert {found.base_digest for found in await asyncio.gather(*asked)} == {"a", *(f"a{n}" for n in range(20))}
    await store.close()
