"""LoRAX's and TGI's protocol, with the client of huggingface_hub: answers, streams, errors, cancels, tokens."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from huggingface_hub import AsyncInferenceClient
from huggingface_hub.errors import ValidationError

from tests.e2e.conftest import Cluster
from tests.e2e.gateway.conftest import HEADERS, Eventually, expected

pytestmark = pytest.mark.asyncio(loop_scope="package")
PROMPT = "What is Deep Learning?"


@pytest_asyncio.fixture(loop_scope="package")
async def client(cluster: Cluster) -> AsyncIterator[AsyncInferenceClient]:
    async with AsyncInferenceClient(f"http://{cluster.local.http}", headers=HEADERS) as own:
        yield own


@pytest_asyncio.fixture(loop_scope="package")
async def http(cluster: Cluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=f"http://{cluster.local.http}", headers=HEADERS) as own:
        yield own


async def test_answers_and_streams(client: AsyncInferenceClient, cluster: Cluster) -> None:
    text = expected(PROMPT, cluster.digests["a"], 17)
    asked: dict[str, Any] = {"adapter_id": "a", "max_new_tokens": 17}
    assert await client.text_generation(PROMPT, **asked) == text
    assert await client.text_generation(PROMPT, return_full_text=True) == PROMPT + expected(PROMPT, "", 20)
    whole = await client.text_generation(PROMPT, **asked, details=True, top_n_tokens=2)
    assert whole.details is not None
    assert (whole.details.finish_reason, whole.details.generated_tokens) == ("length", 17)
    assert "".join(token.text for token in whole.details.tokens) == text
    tops: Any = whole.details.top_tokens
    assert [len(tokens) for tokens in tops] == [2] * 17
    assert tops[0][0]["text"] == whole.details.tokens[0].text
    stop = text[20:30]
    last: Any = None
    streamed = ""
    async for last in await client.text_generation(PROMPT, **asked, stop=[stop], stream=True, details=True):
        streamed += last.token.text
    assert last.generated_text == streamed == text[:30]
    assert (last.details.finish_reason, last.details.input_length) == ("stop_sequence", len(PROMPT))
    regex: Any = {"type": "regex", "value": "[ab]{3}c"}
    shaped = await client.text_generation(PROMPT, grammar=regex, max_new_tokens=9)
    assert set(shaped) == {*"abc"} or set(shaped) < {*"abc"}


async def test_errors(client: AsyncInferenceClient, http: httpx2.AsyncClient) -> None:
    with pytest.raises(ValidationError, match="top_p"):
        await client.text_generation(PROMPT, top_p=7.0)
    for path in ("/generate", "/generate_stream", "/"):
        for parameters, status, message in (
            ({"adapter_id": "nobody"}, 404, "adapter not found: nobody; looked in tenant acme and tenant shared"),
            ({"watermark": True}, 422, "watermark: not served"),
            ({"adapter_source": "moon"}, 422, "adapter_source: 'moon' is not one of hub, local, s3, pbase"),
            ({"tempperature": 1}, 422, "parameters.tempperature: unknown parameter"),
        ):
            answer = await http.post(path, json={"inputs": "x", "parameters": parameters})
            assert (answer.status_code, answer.json()["error"]) == (status, message)
    for path, body, begin in (
        (
            "/generate",
            {"inputs": "x", "parameters": {"max_new_tokens": 10**9}},
            "max_new_tokens: This model's maximum context length is ",
        ),
        ("/generate", {"inputs": "x", "parameters": {"stop": [""]}}, "stop"),
        ("/generate", {"inputs": "x", "parameters": {"best_of": 1000}}, "best_of: "),
        ("/generate", {"inputs": "x", "parameters": {"top_n_tokens": 1000}}, "top_n_tokens: "),
        ("/generate", {"inputs": ""}, "inputs: "),
        ("/generate", {"inputs": "x", "parameters": {"grammar": {"type": "json", "value": "a"}}}, "grammar.value: "),
        ("/detokenize", {"tokens": [-1]}, "tokens: "),
        ("/detokenize", {"tokens": [2**32 - 1]}, "tokens: "),
    ):
        answer = await http.post(path, json=body)
        assert answer.status_code == 422
        assert answer.json()["error"].startswith(begin), "named as this protocol does"


async def test_what_is_served(http: httpx2.AsyncClient, cluster: Cluster) -> None:
    info = (await http.get("/info")).json()
    assert (info["model_id"], info["max_total_tokens"]) == ("hash", 32768)
    tokens = (await http.post("/tokenize", json={"inputs": "hé"})).json()
    assert [token["id"] for token in tokens] == [*"hé".encode()]
    assert (tokens[0]["text"], tokens[0]["start"], tokens[0]["stop"]) == ("h", 0, 1)
    counted = (await http.post("/tokenize", json={"model": "hash", "prompt": "hé", "return_token_strs": True})).json()
    ids = [*"hé".encode()]
    assert counted == {"count": 3, "max_model_len": 32768, "tokens": ids, "token_strs": [*"hÃ©"]}
    chat = {"model": "a", "messages": [{"role": "user", "content": "Hi"}]}
    assert (await http.post("/tokenize", json=chat)).json()["tokens"] == [*b"user: Hi\nassistant: "]
    assert (await http.post("/tokenize", json={"add_special_tokens": True})).status_code == 422
    assert (await http.post("/detokenize", json={"model": "a", "tokens": [104, 105]})).json() == {"prompt": "hi"}
    assert (await http.get("/version")).json() == {"version": importlib.metadata.version("loraplex")}
    assert (await http.get("/ping")).status_code == (await http.post("/ping")).status_code == 200
    described = (await http.get("/openapi.json")).json()
    body = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in described["components"]["schemas"][body["$ref"].rpartition("/")[2]]["required"]
    refs = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(described)))
    assert refs <= described["components"]["schemas"].keys()
    assert not [path for path in described["paths"] if ":" in path]
    for sent in ("mine-1", "", "x" * 200):
        answered = (await http.get("/health", headers={"x-request-id": sent})).headers["x-request-id"]
        assert (answered == "mine-1") == (sent == "mine-1")
        assert answered
    assert (await http.get("/health")).status_code == 200
    page = (await http.post("/generate", json={"inputs": "x", "parameters": {"adapter_id": "a"}})).json()
    assert page == {"generated_text": expected("x", cluster.digests["a"], 20)}


async def test_a_client_that_leaves_cancels_its_work(
    http: httpx2.AsyncClient, cluster: Cluster, eventually: Eventually
) -> None:
    asked = {"inputs": PROMPT, "parameters": {"max_new_tokens": 20_000}}
    async with http.stream("POST", "/generate_stream", json=asked) as answer:
        assert await anext(answer.aiter_bytes())
    await eventually(cluster.idle)
