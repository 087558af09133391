"""Activated adapters in a cluster: their answers, what of a prompt they share with the base, faults and refusals."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from loraplex.contracts.options import StoppingParams
from loraplex_client import AsyncClient, InvalidRequestError
from tests.e2e.conftest import TENANT, Cluster, running_cluster
from tests.hash_oracle import expected_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "hash:?vocab=32000&seed=1&step_ms=5&context=4096"
# 2,000 tokens, of which the last block of the cache is not full.
CONVERSATION = "user: is the sky green? assistant: no. " * 52
CONVERSATION = CONVERSATION[:2_000] + "so?"
CACHED = 2_000
NAMES = [f"check-{number}" for number in range(5)]


def write_adapters(directory: Path) -> dict[str, Path]:
    """Write an ordinary adapter and five activated ones, each of which has an invocation of its own."""
    adapters = {"plain": directory / "plain"}
    adapters |= {name: directory / name for name in NAMES}
    for name, folder in adapters.items():
        folder.mkdir(parents=True)
        config: dict[str, Any] = {"r": 8, "peft_type": "LORA", "name": name}
        if name in NAMES:
            config["alora_invocation_tokens"] = list(f"<{name}>".encode())
        (folder / "adapter_config.json").write_text(json.dumps(config))
        (folder / "adapter_model.safetensors").write_bytes(name.encode() * 100)
    return adapters


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    directory = tmp_path_factory.mktemp("activated")
    adapters = write_adapters(directory / "adapters")
    async with running_cluster(directory / "cluster", MODEL, adapters, routers=2, http=True) as running:
        yield running


def expected(cluster: Cluster, name: str, prompt: str, tokens: int) -> tuple[int, ...]:
    """Return the ids that an activated adapter gives, or with an empty name the base."""
    digest = f"{cluster.digests[name]}@{prompt.rindex(f'<{name}>')}" if name else ""
    stopping = StoppingParams(max_tokens=tokens)
    return expected_ids(MODEL, list(prompt.encode()), adapter_digest=digest, stopping=stopping)


async def test_five_checkers_of_one_conversation_share_its_prefill(cluster: Cluster) -> None:
    """The base computes the conversation once; an ordinary adapter computes it again."""
    answer = await cluster.client.generate(CONVERSATION, max_tokens=4)
    assert (answer.usage.cached_tokens, answer.activated) == (0, None)
    prompts = {name: f"{CONVERSATION} <{name}> not here, but here: <{name}> ok?" for name in NAMES}
    checks = [cluster.client.generate(prompt, adapter_id=name, max_tokens=20) for name, prompt in prompts.items()]
    for name, check in zip(NAMES, await asyncio.gather(*checks), strict=True):
        assert check.token_ids == expected(cluster, name, prompts[name], 20)
        assert (check.usage.cached_tokens, check.activated) == (CACHED, True)
        assert cluster.digests[name] in check.adapter_revision
    again = await cluster.client.generate(prompts["check-0"], adapter_id="check-0", max_tokens=20)
    assert again.usage.cached_tokens > CACHED, "its own blocks too"
    plain = await cluster.client.generate(CONVERSATION, adapter_id="plain", max_tokens=4)
    assert (plain.usage.cached_tokens, plain.activated) == (0, None)


async def test_answers_go_on_where_workers_and_routers_die(cluster: Cluster) -> None:
    prompt, local = f"{CONVERSATION} <check-1> so?", cluster.local
    truth = expected(cluster, "check-1", prompt, 300)
    async with AsyncClient(local.routers, TENANT, resume_attempts=100) as client:
        for victims in (["worker-1"], ["router-1"]):
            streams = [client.generate_stream(prompt, adapter_id="check-1", max_tokens=300) for _ in range(4)]
            await asyncio.gather(*(anext(stream) for stream in streams))
            for victim in victims:
                local.kill(victim, signal.SIGKILL)
            await asyncio.gather(*(local.processes[victim].exited for victim in victims))
            await (local.start_worker() if "worker-1" in victims else local.restart("router-1"))
            answers = await asyncio.gather(*(stream.result() for stream in streams))
            assert [answer.token_ids for answer in answers] == [truth] * 4
            assert {answer.activated for answer in answers} == {True}
            assert any(answer.continuations for answer in answers)
    await local.wait_serving()


async def test_a_prompt_without_the_invocation_is_refused_or_the_bases_by_the_callers_word(cluster: Cluster) -> None:
    client = cluster.client
    for prompt, sentence in (
        ("hi", "prompt: does not have the adapter's invocation '<check-0>', tokens [60, 99, "),
        ("hi <check-1>", "add it, or allow_inactive has the base model answer"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            await client.generate(prompt, adapter_id="check-0")
        assert sentence in str(refused.value)
        assert refused.value.reason == "NOT_INVOKED"
    inactive = await client.generate("hi", adapter_id="check-0", allow_inactive=True, max_tokens=9)
    assert inactive.token_ids == expected(cluster, "", "hi", 9)
    assert (inactive.activated, inactive.adapter_revision) == (False, "")
    prompt = "hi <check-0>"
    active = await client.generate(prompt, adapter_id="check-0", allow_inactive=True, max_tokens=9)
    assert (active.token_ids, active.activated) == (expected(cluster, "check-0", prompt, 9), True)
    body: dict[str, Any] = {"model": "check-0", "prompt": "hi", "max_tokens": 9}
    async with httpx2.AsyncClient(
        base_url=f"http://{cluster.local.http}", headers={"x-loraplex-tenant": TENANT}
    ) as http:
        denied = await http.post("/v1/completions", json=body)
        assert (denied.status_code, "allow_inactive" in denied.text) == (400, True)
        allowed = (await http.post("/v1/completions", json=body | {"allow_inactive": True})).json()
        assert allowed["system_fingerprint"] is None


async def test_what_an_activated_adapter_does_not_do_is_refused_by_its_name(cluster: Cluster) -> None:
    client = cluster.client
    with pytest.raises(InvalidRequestError, match=r"adapters: .*/check-0/.* is an activated adapter"):
        await client.generate("hi <check-0>", adapters={"check-0": 0.5, "plain": 0.5})
    with pytest.raises(Exception, match="is an activated adapter, which generates alone; call Generate"):
        await client.embed(["hi <check-0>"], adapter_id="check-0")


async def test_a_continuation_that_is_scored_does_not_invoke_an_adapter(cluster: Cluster) -> None:
    scores = await cluster.client.score("hi <check-0>", ["yes", "<check-0>"], adapter_id="check-0")
    assert len(scores.scores) == 2
    with pytest.raises(InvalidRequestError, match="does not have the adapter's invocation"):
        await cluster.client.score("hi", ["yes", "<check-0>"], adapter_id="check-0")
