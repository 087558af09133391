"""Chat settings that an adapter carries: checked at the upload, a part of the digest, read by routers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from loraplex.adapter_store.app import Store
from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.artifacts.peft_config import ChatSettings
from loraplex.contracts.broker.messages import AdapterRef
from loraplex.router.catalog.adapters import AdapterConfigs, AdapterSettings
from loraplex.router.catalog.store_client import StoreClient
from loraplex.runtime.rpc.errors import NotFound

if TYPE_CHECKING:
    from tests.adapter_store.conftest import Client

CHAT: dict[str, Any] = {"template": "{{ messages }}", "system_prompt": "Be Acme.", "tool_calls": "hermes"}


async def test_a_router_reads_an_adapter_s_settings_once(
    store: Store, client: Client, tiny_base: BaseModel, adapter_files: Callable[..., dict[str, bytes]]
) -> None:
    await client.register(tiny_base)
    plain = (await client.upload("support", adapter_files())).revision
    own = (await client.upload("support", adapter_files(loraplex_chat=CHAT))).revision
    assert plain.digest != own.digest
    catalog = StoreClient(f"127.0.0.1:{store.port}")
    try:
        configs = AdapterConfigs(catalog)
        refs = [AdapterRef(revision.name, revision.digest, 2, revision.weight_bytes) for revision in (plain, own)]
        assert [(await configs.of("acme", ref)).chat for ref in refs] == [ChatSettings(), ChatSettings(**CHAT)]
        assert await configs.of("acme", None) == AdapterSettings()
        with pytest.raises(NotFound):
            await AdapterConfigs(catalog).of("other", refs[0])
        # Read once, and never the weights.
        await store.stop(drain_s=0)
        assert (await configs.of("acme", refs[1])).chat == ChatSettings(**CHAT)
    finally:
        await catalog.close()


async def test_end_tokens_make_another_revision_where_they_differ_from_the_bases(
    client: Client, tiny_base: BaseModel, adapter_files: Callable[..., dict[str, bytes]]
) -> None:
    added = [{"id": 2, "content": "<end>", "special": True}, {"id": 3, "content": "<turn>", "special": True}]
    files = {
        "tokenizer.json": json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": added}).encode(),
        "tokenizer_config.json": b'{"eos_token": {"content": "<end>"}}',
    }
    await client.register(dataclasses.replace(tiny_base, files=files))
    plain = await client.upload("support", adapter_files())
    same = await client.upload("support", adapter_files(loraplex_end_tokens=["<end>", 2, "<unknown>"]))
    own = await client.upload("support", adapter_files(loraplex_end_tokens=["<turn>", 2, 3]))
    assert same.revision.digest == plain.revision.digest != own.revision.digest
    assert "its answers also end with '<turn>', 3" in own.warnings
    assert list(same.warnings) == list(plain.warnings)
    _, kept = await client.download(own.revision.name)
    assert json.loads(kept["adapter_config.json"])["loraplex_end_tokens"] == ["<turn>", 3]


async def test_calls_at_the_same_time_share_a_reading() -> None:
    asked: list[str] = []

    class CountingStore:
        async def config_of(self, tenant: str, revision: str) -> bytes:
            asked.append(tenant)
            await asyncio.sleep(0)
            return json.dumps({"loraplex_chat": CHAT}).encode()

    configs = AdapterConfigs(CountingStore())  # type: ignore[arg-type]
    ref = AdapterRef("tenants/acme/adapters/a/revisions/sha256:1", "sha256:1", 2, 100)
    tenants = ("acme", "acme", "globex", "acme")
    found = await asyncio.gather(*(configs.of(tenant, ref) for tenant in tenants))
    assert [one.chat for one in found] == [ChatSettings(**CHAT)] * 4
    assert sorted(asked) == ["acme", "globex"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("hermes", "loraplex_chat: is not a JSON object"),
        (
            {"templates": "x"},
            "loraplex_chat.templates: is not one of template, tool_template, system_prompt, ",
        ),
        ({"template": 1}, "loraplex_chat.template: is not a text"),
        ({"template": "x" * 300_000}, "loraplex_chat.template: is larger than"),
        ({"tool_calls": "xml"}, "loraplex_chat.tool_calls: 'xml' is not one of"),
        ({"tool_calls": {"opens": ["<a>"], "call": ["", 1, ""]}}, "loraplex_chat.tool_calls.call[1]: Expected `str`"),
        ({"tool_calls": {"\ud800": 1}}, "loraplex_chat.tool_calls: has half of a surrogate pair"),
        ({"reasoning": "think"}, "loraplex_chat.reasoning: Expected `object`, got `str`"),
        ({"system_prompt": "\ud800"}, "loraplex_chat.system_prompt: has half of a surrogate pair"),
    ],
)
async def test_bad_settings_are_refused_at_the_upload(
    client: Client, tiny_base: BaseModel, adapter_files: Callable[..., dict[str, bytes]], value: Any, words: str
) -> None:
    await client.register(tiny_base)
    files = adapter_files()
    files["adapter_config.json"] = json.dumps({"peft_type": "LORA", "r": 2, "loraplex_chat": value}).encode()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.upload("support", files)
    assert words in str(caught.value.details())
