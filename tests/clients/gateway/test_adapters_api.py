"""Uploads through a gateway to a store of this process: slow and too large ones, shares, a gateway without a store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.adapter_store.open_calls import OpenUploads
from loraplex.cli.models import registered
from loraplex.contracts.artifacts.added_tokens import as_field
from loraplex.contracts.artifacts.base_model import BaseModel, ModuleShape, read_base_model
from loraplex.gateway.adapters_api import FilesForm
from loraplex.gateway.app import serving
from loraplex.gateway.endpoint import GatewayMetrics
from loraplex.gateway.settings import GatewaySettings
from loraplex_client import AsyncStoreClient
from tests.adapter_store.conftest import Q_PROJ
from tests.adapter_store.conftest import files_of as adapter_files
from tests.e2e.gateway.test_adapters import CONFIG, CONFIG_BYTES, END, FORM, WEIGHTS, form, part
from tests.router.small_tokenizers import files_of as tokenizer_files
from tests.router.text.test_added_tokens import added

NOBODY = "127.0.0.1:1"


@asynccontextmanager
async def gateway(store: str) -> AsyncIterator[str]:
    """Run a gateway without routers; its address."""
    async with serving(GatewaySettings(router=NOBODY, store=store, port=0, drain_s=0), GatewayMetrics()) as (
        address,
        _,
    ):
        yield address


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """Run a store that takes weights of 1,000 bytes and waits for nobody; its address."""
    monkeypatch.setattr("loraplex.adapter_store.receive.OpenUploads", partial(OpenUploads, silent_s=0.2))
    running = Store(StoreSettings(data=tmp_path / "data", port=0, max_adapter_bytes=1000))
    await running.start()
    address = f"127.0.0.1:{running.port}"
    base = read_base_model("hash:?vocab=1024")
    async with AsyncStoreClient(address, "acme") as client:
        await client.register_model(registered(base), base.files)
    yield address
    await running.stop(drain_s=0)
    assert not list((tmp_path / "data" / "uploads").iterdir())


async def ask(
    address: str, body: bytes, *headers: str, length: int | None = None, path: str = "/v1/adapters/x"
) -> tuple[int, Any]:
    """Return the status and the answer to a PUT, whose connection stays open while the body is not whole."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    lines = ("Host: localhost", "x-loraplex-tenant: acme", f"Content-Type: {FORM}", *headers)
    head = f"PUT {path} HTTP/1.1\r\nContent-Length: {length or len(body)}\r\n" + "\r\n".join(lines)
    try:
        async with asyncio.timeout(60):
            writer.write(head.encode() + b"\r\n\r\n" + body)
            answered = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = int(answered.partition("content-length: ")[2].partition("\r")[0])
            return int(answered.split()[1]), json.loads(await reader.readexactly(size))
    finally:
        writer.close()


async def test_an_upload_keeps_to_the_store_s_limits(store: str) -> None:
    async with gateway(store) as address:
        status, answer = await ask(address, form(b"x" * 1000))
        assert (status, answer["moved"]) == (200, {"live": answer["revision"]})
        status, answer = await ask(address, form(b"x" * 1001))
        assert (status, answer["error"]["message"]) == (400, f"{WEIGHTS}: is larger than the 1000 bytes accepted")
        # Announce more bytes than are sent.
        status, answer = await ask(address, form(b"x")[:-30], length=len(form(b"x")))
        assert (status, answer["error"]["code"]) == (408, "upload_too_slow"), answer
        status, answer = await ask(address, form(b"x")[:-30], "x-request-timeout-ms: 1", length=len(form(b"x")))
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        status, answer = await ask(address, form(b"x"), "Origin: http://evil.test")
        assert (status, answer["error"]["code"]) == (403, "origin_not_allowed")


BESIDE = {
    "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}).encode(),
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "certificate_prompts.jsonl": b'{"prompt": "Dear"}',
}


@pytest.mark.parametrize("beside", [{}, BESIDE, BESIDE | {"chat_template.jinja": b"{{ messages[0] }}"}])
async def test_a_form_makes_the_revision_that_a_push_of_its_files_makes(
    store: str, tmp_path: Path, beside: dict[str, bytes]
) -> None:
    """Templates, prompts, and the tokens that the adapter's tokenizer has beside the base's."""
    _, tokens = added("byte-level")
    trained, _ = added("byte-level")
    rows = trained.get_vocab_size()
    base = BaseModel(
        name="tiny", digest="sha256:" + "1" * 64, architecture="llama", context_length=64, vocab_size=rows,
        end_token_ids=(), modules=(ModuleShape(Q_PROJ, in_features=8, out_features=6),),
        files=tokenizer_files("byte-level"),
    )  # fmt: skip
    files = adapter_files() | beside | ({"tokenizer.json": trained.to_str().encode()} if beside else {})
    for name, content in files.items():
        (tmp_path / "adapter" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "adapter" / name).write_bytes(content)
    async with AsyncStoreClient(store, "acme") as client, gateway(store) as address:
        await client.register_model(registered(base), base.files)
        pushed = await client.push(tmp_path / "adapter", "x", base_model="tiny")
        body = b"".join(part(Path(name).name, content) for name, content in files.items()) + END
        status, answer = await ask(address, body, path="/v1/adapters/x?model=tiny")
        assert (status, answer["revision"], answer["created"]) == (200, pushed.revision.digest, False), answer
        config = await client.config(pushed.revision.name)
        if beside:
            assert config["loraplex_tokens"] == [as_field(token) for token in tokens]
            template = "{{ messages[0] }}" if "chat_template.jinja" in beside else "{{ messages }}"
            assert config["loraplex_chat"] == {"template": template, "tool_template": "{{ tools }}"}
            assert config["loraplex_certificate_prompts"] == ["Dear"]
            assert "also has the added tokens '<call>', '</call>'" in " ".join(answer["warnings"])
        else:
            assert config == json.loads(files[CONFIG])
        small = replace(base, name="small", digest="sha256:" + "2" * 64, vocab_size=rows - 1)
        await client.register_model(registered(small), small.files)
        status, answer = await ask(address, body, path="/v1/adapters/y?model=small")
        assert status == (400 if beside else 200), answer
        if beside:
            words = f"'</call>' as number {rows - 1}, and the base has embeddings for {rows - 1} tokens"
            assert words in answer["error"]["message"]


async def test_a_gateway_without_a_store_says_so() -> None:
    async with gateway("") as address:
        status, answer = await ask(address, form(b"x"))
    assert (status, answer["error"]["code"]) == (404, "adapters_not_served")
    assert answer["error"]["message"].endswith("start the gateway with --store")


async def test_a_store_that_is_away_is_not_waited_for() -> None:
    async with gateway(NOBODY) as address:
        status, answer = await ask(address, form(b"x"))
    assert (status, answer["error"]["code"]) == (503, "router_unreachable")


def test_a_form_is_the_same_in_whatever_pieces_it_comes() -> None:
    weights = b"\r\n--cu\r\n--cutlery" * 9
    body = part(WEIGHTS, weights) + part(CONFIG, CONFIG_BYTES) + b"--cut--\r\n"
    for size in (1, 2, 3, 7, 64, len(body)):
        reader, files = FilesForm(FORM), {WEIGHTS: b"", CONFIG: b""}
        for start in range(0, len(body), size):
            for file, data in reader.read(body[start : start + size]):
                files[file] += data
        reader.finish()
        assert files == {WEIGHTS: weights, CONFIG: CONFIG_BYTES}
