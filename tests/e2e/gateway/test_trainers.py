"""What trainers call: adapters loaded by name, pauses of one caller, and what the server is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from loraplex.contracts.options import SamplingParams, StoppingParams
from tests.e2e.conftest import Cluster
from tests.e2e.gateway.conftest import HEADERS, MODEL
from tests.hash_oracle import expected_ids

pytestmark = pytest.mark.asyncio(loop_scope="package")
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SEED = 2**63 - 1


@pytest_asyncio.fixture(loop_scope="package")
async def http(cluster: Cluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=f"http://{cluster.local.http}", headers=HEADERS, timeout=60.0) as client:
        yield client


@pytest.fixture
def folder(cluster: Cluster) -> Path:
    """Where a trainer saves its steps: below the prefix that the store's sources allow."""
    return cluster.local.data_dir.parent / "adapters"


def save(folder: Path, name: str, weights: str) -> str:
    """Save a step as peft does; return the folder."""
    step = folder / name
    step.mkdir(exist_ok=True)
    (step / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    (step / "adapter_model.safetensors").write_bytes(weights.encode())
    return str(step)


async def post(http: httpx2.AsyncClient, path: str, status: int = 200, **body: Any) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def rollout(http: httpx2.AsyncClient, model: str, prompt: list[int]) -> tuple[Any, str]:
    """Sample as TRL's rollout workers do; return the choice and its revision."""
    fields: Any = {"max_tokens": 5, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": SEED, "n": 1, "logprobs": 0}
    answer = await post(http, "/v1/completions", model=model, prompt=prompt, return_token_ids=True, **fields)
    return answer["choices"][0], answer["system_fingerprint"].rpartition("/")[2]


def truth(digest: str, prompt: list[int]) -> list[int]:
    sampling, stopping = SamplingParams(temperature=1.0, seed=SEED), StoppingParams(max_tokens=5)
    return list(expected_ids(MODEL, prompt, adapter_digest=digest, sampling=sampling, stopping=stopping))


async def test_each_step_is_loaded_under_its_name_and_old_ones_stay(http: httpx2.AsyncClient, folder: Path) -> None:
    steps = {}
    for step in range(3):
        name = f"policy-v{step}"
        loaded = await post(
            http, LOAD, lora_name=name, lora_path=save(folder, name, f"step {step}"), load_inplace=False
        )
        assert (loaded["status"], loaded["created"]) == ("ok", True)
        steps[name] = loaded["revision"]
        for known, digest in steps.items():
            choice, revision = await rollout(http, known, [1, 2, 3])
            assert (revision, choice["token_ids"]) == (digest, truth(digest, [1, 2, 3]))
            assert len(choice["logprobs"]["token_logprobs"]) == 5
    listed = {model["id"]: model["max_model_len"] for model in (await http.get("/v1/models")).json()["data"]}
    assert {listed[name] for name in steps} == {32_768}
    for name in steps:
        assert (await post(http, UNLOAD, lora_name=name))["name"] == name
        error = (await post(http, UNLOAD, 404, lora_name=name))["error"]
        assert (error["code"], error["param"]) == ("not_found", "lora_name")


async def test_a_name_has_other_weights_only_in_place(http: httpx2.AsyncClient, folder: Path) -> None:
    one, two = save(folder, "one", "one"), save(folder, "two", "two")
    first = await post(http, LOAD, lora_name="again", lora_path=one)
    assert not (await post(http, LOAD, lora_name="again", lora_path=f"file://{one}"))["created"]
    error = (await post(http, LOAD, 409, lora_name="again", lora_path=two))["error"]
    assert (error["code"], error["param"]) == ("name_taken", "lora_name")
    assert error["message"] == ("lora_name: again has other weights already; choose another name, or set load_inplace")
    assert (await rollout(http, "again", [7]))[1] == first["revision"]
    # Calls by name that come after it find it, whatever the routers remember.
    second = await post(http, LOAD, lora_name="again", lora_path=two, load_inplace=True)
    choice, revision = await rollout(http, "again", [7])
    assert (revision, choice["token_ids"]) == (second["revision"], truth(second["revision"], [7]))
    assert (await rollout(http, f"again@{first['revision']}", [7]))[1] == first["revision"]
    await post(http, UNLOAD, lora_name="again")


async def test_no_block_of_the_prefix_cache_crosses_revisions(
    cluster: Cluster, http: httpx2.AsyncClient, folder: Path
) -> None:
    prompt, cached = list(range(100, 200)), []
    for weights in ("a", "a", "b", "a"):
        path = save(folder, f"cached-{weights}", weights)
        await post(http, LOAD, lora_name="cached", lora_path=path, load_inplace=True, ttl_s=60)
        body: Any = {"model": "cached", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        usage = (await post(http, "/v1/completions", **body))["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    # The jobs of a revision go to one worker, whose blocks begin with the hash of its digest.
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 0
    await post(http, UNLOAD, lora_name="cached")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"lora_path": "file:///etc"}, "", "may not import"),
        ({"lora_path": "../etc"}, "lora_path", "lora_path: "),
        ({"lora_path": "s3://elsewhere/x"}, "", "may not import"),
        ({"ttl_s": 0}, "ttl_s", "ttl_s: 0 is not a number of seconds between 1 and 315360000"),
        ({"lora_name": "a b"}, "lora_name", "lora_name: "),
        ({"lora_name": "hash"}, "lora_name", "lora_name: "),
        ({"lora_int_id": 3}, "lora_int_id", "lora_int_id: unknown parameter"),
        ({"base_model_name": "other"}, "", "base model not found: other"),
    ],
)
async def test_what_is_refused_leaves_nothing(
    cluster: Cluster, http: httpx2.AsyncClient, folder: Path, body: dict[str, Any], param: str, message: str
) -> None:
    given = {"lora_name": "bad", "lora_path": save(folder, "bad", "bad"), **body}
    answer = await http.post(LOAD, json=given)
    error = answer.json()["error"]
    assert 400 <= answer.status_code < 500, error
    assert message in error["message"]
    assert error["param"] == (param or None) or not param
    assert (await http.get("/v1/adapters/bad")).status_code == 404
    assert not list((cluster.local.data_dir / "store" / "uploads").iterdir())


async def test_a_pause_holds_the_callers_new_sampling_calls_alone(http: httpx2.AsyncClient) -> None:
    other = {"x-loraplex-tenant": "globex"}
    body = {"model": "hash", "prompt": [5, 6], "max_tokens": 3, "temperature": 0}
    assert (await http.post("/pause", params={"mode": "wait", "clear_cache": "false"})).json() == {"status": "paused"}
    assert (await http.get("/is_paused")).json() == {"is_paused": True}
    waiting = asyncio.create_task(http.post("/v1/completions", json=body))
    elsewhere = await http.post("/v1/completions", json=body, headers=other)
    assert (await http.get("/is_paused", headers=other)).json() == {"is_paused": False}
    assert (await http.get("/v1/models")).status_code == 200
    assert not waiting.done()
    assert (await http.post("/resume")).json() == {"status": "resumed"}
    assert (await waiting).json()["choices"] == elsewhere.json()["choices"]
    refused = (await http.post("/pause", params={"mode": "abort"})).json()["error"]
    assert refused["message"] == (
        "mode: 'abort' is not served: answers end on the revision that they began with; give keep or wait"
    )
    assert (await http.get("/is_paused")).json() == {"is_paused": False}


async def test_a_pause_that_waits_ends_with_the_last_call(http: httpx2.AsyncClient) -> None:
    body = {"model": "hash", "prompt": [5, 6], "max_tokens": 100, "temperature": 0, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as running:
        lines = running.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        pausing = asyncio.create_task(http.post("/pause", params={"mode": "wait"}))
        rest = [line async for line in lines]
    assert rest[-1] or rest[-2] == "data: [DONE]"
    assert (await pausing).status_code == 200
    await http.post("/resume")


async def test_what_the_server_is(http: httpx2.AsyncClient) -> None:
    config = (await http.get("/server_info", params={"config_format": "json"})).json()["vllm_config"]
    assert config["model_config"]["max_model_len"] == 32_768
    assert config["lora_config"]["max_lora_rank"] >= 8
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["weight_transfer_config"] is None
    assert (await http.post("/reset_prefix_cache")).json() == {"success": True}


async def test_a_push_over_http_may_have_an_end(http: httpx2.AsyncClient) -> None:
    files = [("file", (name, b"{}")) for name in ("adapter_config.json", "adapter_model.safetensors")]
    pushed = (await http.put("/v1/adapters/over-http", params={"alias": "-", "ttl_s": "60"}, files=files)).json()
    assert (await rollout(http, f"over-http@{pushed['revision']}", [9]))[1] == pushed["revision"]
    refused = await http.put("/v1/adapters/over-http", params={"ttl_s": "0"}, files=files)
    assert refused.json()["error"]["message"] == "ttl_s: 0 is not a number of seconds between 1 and 315360000"
    await http.delete("/v1/adapters/over-http")
