"""Answers, ends and errors of a cluster that nothing disturbs, with the hash model: any wrong token would show.

The tests share the cluster and leave it idle.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import jsonschema  # type: ignore[import-untyped]
import pytest
import pytest_asyncio
from loraplex.cluster.v1 import cluster_pb2, cluster_pb2_grpc
from loraplex.inference.v1 import inference_pb2, inference_pb2_grpc
from loraplex_client import (
    AlreadyExistsError,
    AsyncClient,
    AsyncStoreClient,
    DeadlineExceededError,
    FinishReason,
    Generation,
    InvalidRequestError,
    NotFoundError,
)

from tests.e2e.conftest import TENANT, Cluster, running_cluster, write_hash_adapters
from tests.hash_formats import FORMATS, GRAMMARS
from worker.engine.hash_tokens import expected_ids, expected_prompt_logprobs, matching_after
from worker.engine_api import Sampling, Stopping

pytestmark = pytest.mark.asyncio(loop_scope="module")
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
MODEL = "hash:?vocab=32000&seed=1&step_ms=5"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two workers and the adapters a, b and c."""
    directory = tmp_path_factory.mktemp("answers")
    adapters = write_hash_adapters(directory / "adapters")
    async with running_cluster(directory / "cluster", MODEL, adapters, workers=2) as running:
        yield running


def expected(prompt: str, digest: str, max_tokens: int, sampling: Sampling | None = None) -> list[int]:
    """Return the ids that the engine computes."""
    ids = expected_ids(
        MODEL, list(prompt.encode()), adapter_digest=digest, sampling=sampling, stopping=Stopping(max_tokens=max_tokens)
    )
    return list(ids)


async def test_every_client_gets_its_adapter_s_tokens(cluster: Cluster) -> None:

    async def ask(number: int) -> None:
        name = ("a", "b", "c", None)[number % 4]
        prompt, length = f"prompt {number} " * (1 + number % 7), 1 + number * 13 % 200
        answer = await cluster.client.generate(prompt, adapter_id=name, max_new_tokens=length)
        digest = cluster.digests[name] if name else ""
        assert list(answer.token_ids) == expected(prompt, digest, length)
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.usage.completion_tokens == length
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.adapter_revision.rpartition("/")[2] == digest

    await asyncio.gather(*(ask(number) for number in range(100)))


async def test_a_seed_gives_the_same_tokens_again(cluster: Cluster) -> None:
    options: dict[str, Any] = {
        "adapter_id": "a",
        "max_new_tokens": 20,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "seed": 9,
    }
    answers = [await cluster.client.generate("x", **options) for _ in range(2)]
    sampling = Sampling(temperature=0.5, top_k=7, top_p=0.25, seed=9)
    truth = expected("x", cluster.digests["a"], 20, sampling)
    assert [list(answer.token_ids) for answer in answers] == [truth, truth]
    unseeded = [await cluster.client.generate("x", max_new_tokens=20, temperature=1.0) for _ in range(2)]
    assert unseeded[0].token_ids != unseeded[1].token_ids


async def test_stop_strings_end_the_answer_and_free_the_worker(cluster: Cluster, eventually: Eventually) -> None:
    whole = await cluster.client.generate("stop", max_new_tokens=40)
    stop = f"<{whole.token_ids[20]}>"
    answer = await cluster.client.generate("stop", max_new_tokens=4000, stop=[stop])
    assert answer.token_ids == whole.token_ids[:20]
    assert (answer.finish_reason, answer.stop) == (FinishReason.STOP, stop)
    assert answer.usage.completion_tokens == 20
    await eventually(cluster.idle)


async def test_cancelling_half_of_200_leaves_nothing_behind(cluster: Cluster, eventually: Eventually) -> None:
    seed = 5
    print(f"seed {seed}")
    rng = random.Random(seed)
    leaves_after = {number: rng.randrange(1, 60) for number in rng.sample(range(200), 100)}

    async def ask(number: int) -> None:
        name, prompt = "abc"[number % 3], f"prompt {number}"
        # Several tokens may come at once: who leaves asks for many more than it takes.
        length = 600 if number in leaves_after else 60
        got: list[int] = []
        async with cluster.client.generate_stream(prompt, adapter_id=name, max_new_tokens=length) as stream:
            async for piece in stream:
                got += piece.token_ids
                if len(got) >= leaves_after.get(number, length):
                    break
        assert (len(got) < length) == (number in leaves_after)
        assert got == expected(prompt, cluster.digests[name], length)[: len(got)]

    await asyncio.gather(*(ask(number) for number in range(200)))
    await eventually(cluster.idle)


async def test_a_deadline_ends_the_work(cluster: Cluster, eventually: Eventually) -> None:
    got: list[int] = []

    async def read() -> None:
        async for piece in cluster.client.generate_stream("x", max_new_tokens=20_000, timeout_s=1.0):
            got.extend(piece.token_ids)

    with pytest.raises(DeadlineExceededError):
        await read()
    assert got
    assert got == expected("x", "", len(got))
    await eventually(cluster.idle)


async def test_bad_requests_get_the_status_of_the_table(cluster: Cluster) -> None:
    client = cluster.client
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"adapter_id": "nobody"}, NotFoundError, "nobody"),
        ({"adapter_id": "tenants/globex/adapters/a"}, NotFoundError, "tenants/globex/adapters/a"),
        ({"adapter_id": "Not A Name"}, InvalidRequestError, "adapter"),
        ({"model": "other"}, NotFoundError, "other"),
        ({"top_p": 1.5}, InvalidRequestError, "sampling.top_p"),
        ({"temperature": -1.0}, InvalidRequestError, "sampling.temperature"),
        ({"max_new_tokens": 10**6}, InvalidRequestError, "context"),
        ({"stop": [""]}, InvalidRequestError, "stopping.stop"),
        ({"stop_token_ids": [40_000]}, InvalidRequestError, "stopping.stop_token_ids"),
        ({"repetition_penalty": 0.0}, InvalidRequestError, "sampling.repetition_penalty"),
        ({"frequency_penalty": 3.0}, InvalidRequestError, "sampling.frequency_penalty"),
        ({"presence_penalty": -2.5}, InvalidRequestError, "sampling.presence_penalty"),
        ({"min_p": 2.0}, InvalidRequestError, "sampling.min_p"),
        ({"typical_p": 0.0}, InvalidRequestError, "sampling.typical_p"),
        ({"logit_bias": {40_000: 1.0}}, InvalidRequestError, "sampling.logit_bias"),
        ({"logit_bias": {1: 101.0}}, InvalidRequestError, "sampling.logit_bias"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, InvalidRequestError, "sampling.logit_bias"),
        ({"n": 17}, InvalidRequestError, "output.n"),
        ({"n": 3, "best_of": 2}, InvalidRequestError, "output.best_of"),
        ({"logprobs": 21}, InvalidRequestError, "output.logprobs"),
        ({"regex": "(?=a)"}, InvalidRequestError, "regex: look-around"),
        (
            {"json_schema": '{"properties": {"a": {"not": {}}}}'},
            InvalidRequestError,
            "properties.a.not",
        ),
    ]
    for options, error, names in cases:
        with pytest.raises(error, match=names):
            await client.generate("x", **options)
    with pytest.raises(InvalidRequestError, match="prompt"):
        await client.generate("")
    with pytest.raises(InvalidRequestError, match="beyond the vocabulary"):
        await client.generate(token_ids=[99_999])
    async with AsyncClient(cluster.local.router, "globex") as stranger:
        with pytest.raises(NotFoundError) as theirs:
            await stranger.generate("x", adapter_id="tenants/acme/adapters/a")
        with pytest.raises(NotFoundError) as nobodys:
            await stranger.generate("x", adapter_id="tenants/acme/adapters/z")
    assert str(theirs.value).replace("adapters/a", "adapters/z") == str(nobodys.value)
    answer = await client.generate("x", adapter_id="a", max_new_tokens=5)
    assert list(answer.token_ids) == expected("x", cluster.digests["a"], 5)


TOOLS: list[Any] = [
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "maximum": 30}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    {"name": "now"},
]


async def test_every_call_of_a_tool_parses(cluster: Cluster) -> None:
    messages = [{"role": "user", "content": "Weather?"}]

    async def ask(number: int, choice: Any) -> Generation:
        return await cluster.client.chat(
            messages, tools=TOOLS, tool_choice=choice, parallel_tool_calls=number % 4 == 3, n=2,
            adapter_id=("a", "b", None)[number % 3], seed=number, temperature=1.0, max_new_tokens=120,
        )  # fmt: skip

    choices = ["required", {"name": "weather"}, "auto"]
    answers = await asyncio.gather(*(ask(number, choices[number % 3]) for number in range(6)))
    calls = [call for answer in answers for choice in answer.choices for call in choice.tool_calls]
    for number, answer in enumerate(answers):
        for choice in answer.choices:
            if choices[number % 3] == "auto":
                continue
            ended = choice.finish_reason == "tool_calls"
            complete = choice.tool_calls if ended else choice.tool_calls[:-1]
            assert choice.text == "" or not ended  # a mark that is cut is text
            for call in complete:
                jsonschema.validate(
                    call.parsed, {tool["name"]: tool.get("parameters", {}) for tool in TOOLS}[call.name]
                )
            assert complete or choice.finish_reason == "length"
    assert len([call for call in calls if call.name == "weather"]) >= 2
    stream = cluster.client.chat_stream(messages, tools=TOOLS, tool_choice={"name": "now"})
    parts = [part async for piece in stream for part in piece.tool_calls]
    assert (parts[0].name, "".join(part.arguments for part in parts)) == ("now", "{}")
    assert parts[0].id
    for options, field in (
        ({"tools": TOOLS, "regex": "a"}, "chat.tools"),
        ({"tools": [{"name": "f", "parameters": {"not": {}}}]}, "chat.tools[0].parameters.not"),
        ({"template_args": {"messages": []}}, "chat.template_args"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            await cluster.client.chat(messages, **options)
        assert caught.value.field == field


async def test_an_adapter_brings_its_own_template(cluster: Cluster, tmp_path: Path) -> None:
    chat = {"template": "{% for m in messages %}[{{ m.content }}]{% endfor %}", "system_prompt": "Be Acme."}
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8, "loraplex_chat": chat}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"own")
    async with AsyncStoreClient(cluster.local.store, TENANT) as store:
        digest = (await store.push(tmp_path, "own")).revision.digest
    messages = [{"role": "user", "content": "Hi"}]
    answer = await cluster.client.chat(messages, adapter_id="own", max_new_tokens=9)
    assert list(answer.token_ids) == expected("[Be Acme.][Hi]", digest, 9)
    assert bytes(await cluster.client.tokenize(messages=messages, adapter_id="own")) == b"[Be Acme.][Hi]"
    assert bytes(await cluster.client.tokenize(messages=messages)) == b"user: Hi\nassistant: "
    with pytest.raises(NotFoundError):
        await cluster.client.tokenize("x", adapter_id="nobody")


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
    whole = await cluster.client.generate("abc", max_new_tokens=0, prompt_logprobs=0, echo=True)
    assert (whole.text, whole.token_ids, whole.usage.completion_tokens) == ("abc", (), 0)
    assert [one.logprob for one in whole.prompt_logprobs] == [
        one.logprob for one in expected_prompt_logprobs(MODEL, list(b"abc"), 0)
    ]


async def test_a_call_without_a_tenant_is_refused(cluster: Cluster) -> None:
    async with grpc.aio.insecure_channel(cluster.local.router) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        spec = inference_pb2.GenerateSpec(prompt="x")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(inference_pb2.GenerateRequest(spec=spec)):
                pass
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_stop_string_ends_its_own_choice_alone(cluster: Cluster, eventually: Eventually) -> None:
    truth = [expected_ids(MODEL, [ord("x")], stopping=Stopping(max_tokens=40), choice=c) for c in range(3)]
    answer = await cluster.client.generate("x", n=3, max_new_tokens=40, stop=[f"<{truth[1][10]}>"])
    assert [choice.token_ids for choice in answer.choices] == [truth[0], truth[1][:10], truth[2]]
    await eventually(cluster.idle)


async def test_logprobs_arrive_and_tell_the_best_of_several(cluster: Cluster) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 12,
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


async def test_operators_see_the_jobs_and_queues(cluster: Cluster) -> None:
    async with grpc.aio.insecure_channel(cluster.local.router) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        async with cluster.client.generate_stream("x", max_new_tokens=20_000) as stream:
            await anext(stream)
            (job,) = (await stub.ListJobs(cluster_pb2.ListJobsRequest())).jobs
            assert (job.tenant, job.attempt, job.prompt_tokens) == ("acme", 1, 1)
            assert job.worker_id in {worker.worker_id for worker in await cluster.workers()}
            assert job.completion_tokens >= 1
            (queue,) = (await stub.ListQueues(cluster_pb2.ListQueuesRequest())).queues
            assert (queue.model, queue.waiting) == ("hash", 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.DrainWorker(cluster_pb2.DrainWorkerRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("kind", FORMATS)
async def test_an_answer_keeps_to_its_format(cluster: Cluster, kind: str) -> None:
    stopping, sampling = Stopping(max_tokens=100), Sampling(temperature=0.9, seed=3)
    answer = await cluster.client.generate(
        "x", max_new_tokens=100, n=2, temperature=0.9, seed=3, **{kind: FORMATS[kind]}
    )
    for number, choice in enumerate(answer.choices):
        made = expected_ids(
            MODEL, list(b"x"), sampling=sampling, stopping=stopping, choice=number, grammar=GRAMMARS[kind]
        )
        assert tuple(choice.token_ids) == made
        complete = matching_after(MODEL, GRAMMARS[kind], made).complete
        assert choice.finish_reason is (FinishReason.END if complete else FinishReason.LENGTH)


async def test_an_id_that_is_used_again_at_once_gets_its_own_tokens(cluster: Cluster, eventually: Eventually) -> None:
    async def ask_and_leave_and_ask(number: int) -> None:
        for turn in range(5):
            prompt = f"prompt {number} {turn}"
            options: dict[str, Any] = {"request_id": f"same {number}", "max_new_tokens": 30}
            while True:
                try:
                    async with cluster.client.generate_stream(prompt, **options) as stream:
                        first = await anext(stream)
                        if turn % 2 == 0:
                            break  # leaves in mid-stream, and the next turn comes at once
                        whole = await stream.result()
                        assert list(whole.token_ids) == expected(prompt, "", 30)
                        break
                except AlreadyExistsError:  # the router has not yet seen that the last one left
                    await asyncio.sleep(0.01)
            assert first.token_ids[0] == expected(prompt, "", 1)[0]

    async with asyncio.timeout(60):
        await asyncio.gather(*(ask_and_leave_and_ask(number) for number in range(8)))
    await eventually(cluster.idle)
