"""Test which adapters a base model takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from broker.messages import AdapterRef
from router.catalog.adapters import resolve_adapters
from router.catalog.manifest import Manifest
from router.catalog.store_client import ResolvedAdapter
from router.request import Request
from rpc.errors import Mismatch

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
