"""Tokens of an undisturbed cluster: by adapter, seed and candidates, with their log probabilities."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from loraplex.inference.v1 import inference_pb2, inference_pb2_grpc

from loraplex.contracts.options import SamplingParams
from loraplex_client import FinishReason, InvalidRequestError, NotFoundError
from tests.e2e.answers.conftest import MODEL, expected
from tests.e2e.conftest import Cluster
from tests.hash_oracle import expected_prompt_logprobs

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_every_client_gets_its_adapter_s_tokens(cluster: Cluster) -> None:

    async def ask(number: int) -> None:
        name = ("a", "b", "c", None)[number % 4]
        prompt, length = f"prompt {number} " * (1 + number % 7), 1 + number * 13 % 200
        answer = await cluster.client.generate(prompt, adapter_id=name, max_tokens=length)
        digest = cluster.digests[name] if name else ""
        assert list(answer.token_ids) == expected(prompt, digest, length)
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.usage.completion_tokens == length
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.adapter_revision.rpartition("/")[2] == digest

    await asyncio.gather(*(ask(number) for number in range(40)))


async def test_a_seed_gives_the_same_tokens_again(cluster: Cluster) -> None:
    options: dict[str, Any] = {
        "adapter_id": "a",
        "max_tokens": 20,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "seed": 9,
    }
    answers = [await cluster.client.generate("x", **options) for _ in range(2)]
    sampling = SamplingParams(temperature=0.5, top_k=7, top_p=0.25, seed=9)
    truth = expected("x", cluster.digests["a"], 20, sampling)
    assert [list(answer.token_ids) for answer in answers] == [truth, truth]
    allowed = await cluster.client.generate("x", adapter_id="a", max_tokens=20, allowed_token_ids=[9, 3, 77, 3])
    assert list(allowed.token_ids) == expected(
        "x", cluster.digests["a"], 20, SamplingParams(allowed_token_ids=(3, 9, 77))
    )
    unseeded = [await cluster.client.generate("x", max_tokens=20, temperature=1.0) for _ in range(2)]
    assert unseeded[0].token_ids != unseeded[1].token_ids


async def test_logprobs_arrive_and_tell_the_best_of_several(cluster: Cluster) -> None:
    options: dict[str, Any] = {
        "max_tokens": 12,
        "temperature": 1.0,
        "seed": 3,
        "frequency_penalty": 0.5,
        "logprobs": 2,
    }
    several = await cluster.client.generate("x", n=4, **options)
    for choice in several.choices:
        likeliest = [(token, entry.logprob) for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
        assert [entry.alternatives[0] for entry in choice.logprobs] == likeliest
        assert all(len(entry.alternatives) == 2 for entry in choice.logprobs)
    ranked = sorted(several.choices, key=lambda choice: -sum(entry.logprob for entry in choice.logprobs))
    best = await cluster.client.generate("x", n=2, best_of=4, **options)
    assert [choice.token_ids for choice in best.choices] == [choice.token_ids for choice in ranked[:2]]
    spec = inference_pb2.GenerateSpec(prompt="prompt", output=inference_pb2.Output(prompt_logprobs=3))
    async with grpc.aio.insecure_channel(cluster.local.router) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(spec=spec), metadata=[("x-loraplex-tenant", "acme")])
        events = [answer.event async for answer in call]
    kinds = [event.WhichOneof("kind") for event in events]
    assert kinds[0] == "prompt_logprobs"
    assert kinds.count("prompt_logprobs") == 1
    tokens = events[0].prompt_logprobs.tokens
    assert [token.alternatives[0].token_id for token in tokens] == list(b"prompt"[1:])
    assert all(len(token.alternatives) == 3 for token in tokens)


async def test_scores_are_the_prompt_s_log_probabilities_behind_the_prompt(cluster: Cluster) -> None:
    prompt = "evaluate " * 8
    endings: list[str | list[int]] = ["x", "a longer one", [7, 300, 31_999]]
    scores = await cluster.client.score(prompt, endings, adapter_id="a")
    assert scores.adapter_revision.rpartition("/")[2] == cluster.digests["a"]
    for ending, score in zip(endings, scores.scores, strict=True):
        ids = list(ending.encode()) if isinstance(ending, str) else ending
        truth = expected_prompt_logprobs(MODEL, [*prompt.encode(), *ids], 1)[-len(ids) :]
        assert list(score.token_ids) == ids
        assert list(score.logprobs) == [one.logprob for one in truth]
        assert score.is_greedy
        assert score.sum == sum(one.logprob for one in truth)
    assert await cluster.client.count_tokens(prompt, adapter_id="a") == len(prompt)
    for given, names in (([], "continuations: 0"), (["x"] * 65, "continuations: 65"), (["x", ""], r"\[1\].text")):
        with pytest.raises(InvalidRequestError, match=names):
            await cluster.client.score("x", given)
    with pytest.raises(InvalidRequestError, match="sampling: concerns an answer"):
        await cluster.client.score("x", ["y"], temperature=1.0)
    with pytest.raises(InvalidRequestError, match=r"continuations\[0\]: id 99999 is beyond"):
        await cluster.client.score("x", [[99_999]])
    for call in (cluster.client.score("x", ["y"], adapter_id="z"), cluster.client.count_tokens("x", adapter_id="z")):
        with pytest.raises(NotFoundError):
            await call
    # A request without new tokens gives the prompt's log probabilities, and its text.
    whole = await cluster.client.generate("abc", max_tokens=0, prompt_logprobs=0, echo=True)
    assert (whole.text, whole.token_ids, whole.usage.completion_tokens) == ("abc", (), 0)
    assert [one.logprob for one in whole.prompt_logprobs] == [
        one.logprob for one in expected_prompt_logprobs(MODEL, list(b"abc"), 0)
    ]
