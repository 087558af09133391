"""/v1/adapters: uploads of forms, small and large, broken and hostile, of which nothing stays at the store."""

from __future__ import annotations

import asyncio
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from loraplex_client import AsyncStoreClient
from tests.e2e.conftest import TENANT, Cluster
from tests.e2e.gateway.conftest import MESSAGES, PROMPT, Eventually, expected

pytestmark = pytest.mark.asyncio(loop_scope="package")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CONFIG_BYTES = b'{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}'
FORM = "multipart/form-data; boundary=cut"
END = b"--cut--\r\n"


def part(file: str, data: bytes, name: str = "file") -> bytes:
    return (
        b"--cut\r\n"
        + f'Content-Disposition: form-data; name="{name}"; filename="{file}"'.encode()
        + (b"\r\nContent-Type: application/octet-stream\r\n\r\n" + data + b"\r\n")
    )


def form(weights: bytes) -> bytes:
    return part(WEIGHTS, weights) + part(CONFIG, CONFIG_BYTES) + END


async def ask(
    cluster: Cluster, method: str, path: str, body: bytes = b"", kind: str = FORM, *, length: int | None = None
) -> tuple[int, Any]:
    """Send a request, whose body may be shorter than its length says; returns the status and the JSON of the answer."""
    host, _, port = cluster.local.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nx-loraplex-tenant: {TENANT}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    try:
        async with asyncio.timeout(60):
            writer.write(head.encode())
            for start in range(0, len(body), 1 << 20):
                writer.write(body[start : start + (1 << 20)])
                await writer.drain()
            if length is not None:
                writer.write_eof()
            answered = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = int(answered.partition("content-length: ")[2].partition("\r")[0])
            return int(answered.split()[1]), json.loads(await reader.readexactly(size))
    except asyncio.IncompleteReadError:  # the connection ends without an answer
        return 0, {}
    finally:
        writer.close()


async def names(cluster: Cluster) -> set[str]:
    async with AsyncStoreClient(cluster.local.store, TENANT) as store:
        return {adapter.name.rpartition("/")[2] for adapter in await store.list()}


def kept(cluster: Cluster) -> list[Path]:
    """The files of the store that belong to uploads under way."""
    return list((cluster.local.data_dir / "store" / "uploads").iterdir())


async def nothing_is_kept(cluster: Cluster) -> bool:
    return not kept(cluster)


async def test_an_upload_is_served_listed_and_deleted(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    status, first = await ask(cluster, "PUT", "/v1/adapters/over-http", form(b"first"))
    assert status == 200, first
    digest = first["revision"]
    assert first == {
        "name": f"tenants/{TENANT}/adapters/over-http", "base_model": "hash", "aliases": {"live": digest},
        "revision": digest, "rank": 4, "created": True, "moved": {"live": digest}, "warnings": [],
    }  # fmt: skip
    answer = await client.chat.completions.create(model="over-http", messages=MESSAGES, temperature=0, max_tokens=9)
    assert answer.choices[0].message.content == expected(PROMPT, digest, 9)
    _, again = await ask(cluster, "PUT", "/v1/adapters/over-http?alias=-", form(b"first"))
    assert (again["created"], again["moved"]) == (False, {})
    _, other = await ask(cluster, "PUT", "/v1/adapters/over-http?alias=canary&model=hash", form(b"other"))
    assert other["aliases"] == {"live": digest, "canary": other["revision"]}
    _, shown = await ask(cluster, "GET", "/v1/adapters/over-http@canary")
    assert shown["revision"] == other["revision"]
    _, listed = await ask(cluster, "GET", "/v1/adapters")
    assert f"tenants/{TENANT}/adapters/over-http" in [one["name"] for one in listed["adapters"]]
    large = part(CONFIG, b'{"peft_type": "LORA", "r": 100}') + part(WEIGHTS, b"x") + END
    _, high = await ask(cluster, "PUT", "/v1/adapters/over-http?alias=-", large)
    assert high["warnings"] == ["its rank 100 is above the 64 that workers of hash take (--max-rank)"]
    assert await ask(cluster, "DELETE", "/v1/adapters/over-http") == (200, {"name": "over-http", "deleted": True})
    status, gone = await ask(cluster, "GET", "/v1/adapters/over-http")
    assert (status, gone["error"]["code"]) == (404, "not_found")
    described = (await ask(cluster, "GET", "/openapi.json"))[1]["paths"]["/v1/adapters/{adapter}"]["put"]
    assert "multipart/form-data" in described["requestBody"]["content"]


async def test_an_adapter_says_how_long_answers_are_whose_requests_do_not(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    beside = part("generation_config.json", b'{"max_new_tokens": 3}')
    status, uploaded = await ask(cluster, "PUT", "/v1/adapters/brief", beside + form(b"brief"))
    assert status == 200, uploaded
    for asked, tokens in ((None, 3), (5, 5)):
        answer = await client.chat.completions.create(model="brief", messages=MESSAGES, max_tokens=asked)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == tokens
    await ask(cluster, "DELETE", "/v1/adapters/brief")


async def test_a_large_upload_passes_without_being_kept_in_memory(cluster: Cluster) -> None:
    weights = random.Random(1).randbytes(40 << 20)
    peak = Path(f"/proc/{cluster.local.processes['gateway'].pid}/status")

    def high_water() -> int:
        return next(int(line.split()[1]) << 10 for line in peak.read_text().splitlines() if line.startswith("VmHWM"))

    before = high_water()
    status, answer = await ask(cluster, "PUT", "/v1/adapters/large", form(weights))
    assert status == 200, answer
    assert high_water() - before < 20 << 20
    await ask(cluster, "DELETE", "/v1/adapters/large")


@pytest.mark.parametrize(
    ("body", "kind", "status", "error"),
    [
        (b"{}", "application/json", 415, "content-type: send multipart/form-data, as curl does with -F file=@adapter_"),
        (b"", "multipart/form-data", 415, "content-type"),
        (b"x", f"multipart/form-data; boundary={'x' * 300}", 400, "the body is not a whole multipart/form-data form"),
        (b"nonsense", FORM, 400, "the body is not a whole multipart/form-data form: "),
        (b"", FORM, 400, "the body is not a whole multipart/form-data form: it ends before its last boundary"),
        (form(b"x")[:-9], FORM, 400, "the body is not a whole multipart/form-data form: it ends before its last"),
        (part(CONFIG, CONFIG_BYTES) + END, FORM, 400, f"{WEIGHTS}: is missing"),
        (part(WEIGHTS, b"x") + END, FORM, 400, f"{CONFIG}: is missing"),
        (part(CONFIG, b"{}") + part(CONFIG, b"{}") + END, FORM, 400, f"{CONFIG}: is there twice"),
        (part(CONFIG, b"{}") + part(WEIGHTS, b"x") + part(CONFIG, b"{}") + END, FORM, 400, f"{CONFIG}: is there twice"),
        (part("../../adapter_config.json", b"{}") + END, FORM, 400, "filename: '../../adapter_config.json' is not"),
        (part("", b"{}") + END, FORM, 400, "filename: '' is not"),
        (part("adapter_model.bin", b"x") + END, FORM, 400, "filename: 'adapter_model.bin' is not"),
        (b'--cut\r\nContent-Disposition: form-data; name="lora_path"\r\n\r\n/etc\r\n' + END, FORM, 400,
         "lora_path: is not a file"),
        (b"--cut\r\nX: " + b"y" * 9000 + b"\r\n\r\n", FORM, 400, "the body is not a whole multipart/form-data form"),
        (part(CONFIG, b" " * (2 << 20)) + part(WEIGHTS, b"x") + END, FORM, 400, f"{CONFIG}: is larger than the"),
    ],
)  # fmt: skip
async def test_a_broken_upload_gets_one_clear_error_and_leaves_nothing(
    cluster: Cluster, eventually: Eventually, body: bytes, kind: str, status: int, error: str
) -> None:
    answered, answer = await ask(cluster, "PUT", "/v1/adapters/broken", body, kind)
    assert (answered, answer["error"]["message"][: len(error)]) == (status, error)
    assert "broken" not in await names(cluster)
    await eventually(partial(nothing_is_kept, cluster))  # the store learns of the refusal after the client


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("/v1/adapters/tenants/globex/adapters/x", 404, "adapter not found"),
        ("/v1/adapters/UP@x", 400, "adapter: "),
        ("/v1/adapters/x?alias=a/b", 400, "alias: "),
        ("/v1/adapters/x?model=nobody", 404, "base model not found: nobody"),
        ("/v1/adapters/x?path=/etc", 400, "path: is not a parameter; model, alias, ttl_s are"),
    ],
)
async def test_names_are_checked_before_the_files(cluster: Cluster, path: str, status: int, error: str) -> None:
    answered, answer = await ask(cluster, "PUT", path, form(b"x" * (8 << 20)))
    assert (answered, answer["error"]["message"][: len(error)]) == (status, error)


async def test_a_client_that_leaves_ends_its_upload(cluster: Cluster, eventually: Eventually) -> None:
    body = form(b"x" * (3 << 20))
    status, _ = await ask(cluster, "PUT", "/v1/adapters/left", body[: 2 << 20], length=len(body))
    assert status in (0, 499)

    await eventually(partial(nothing_is_kept, cluster))
    assert "left" not in await names(cluster)


async def test_paths_of_vllm_say_what_to_do(cluster: Cluster) -> None:
    status, answer = await ask(cluster, "POST", "/update_weights", b"{}", "application/json")
    assert status == 404
    assert answer["error"]["message"].endswith(
        "the base's weights are not replaced: train an adapter, and load it with POST /v1/load_lora_adapter"
    )
