"""Requests of today's clients, and what they send back: served in every protocol, and nothing that is sent is a 500."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from itertools import islice
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.conftest import Cluster
from tests.shapes.recorded import recorded
from tests.trials.fuzz.bodies import TEMPLATES, changed_requests, fuzz_bodies, running, send

pytestmark = pytest.mark.asyncio(loop_scope="module")
SHAPES = recorded()
SEED, TURNS = 45, 5


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with running(tmp_path_factory.mktemp("shapes")) as cluster:
        yield cluster


@pytest.mark.parametrize("model", TEMPLATES)
@pytest.mark.parametrize("name", SHAPES)
async def test_a_client_s_request_is_served(cluster: Cluster, name: str, model: str) -> None:
    shape = SHAPES[name]
    body = json.dumps(shape.body_for(model)).encode()
    status, answer = await send(cluster.local.http, shape.path, body, shape.headers)
    assert status == 200, answer
    assert b'"error":{' not in answer
    if shape.body.get("stream"):
        assert any(end in answer for end in (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete"))


async def ask(cluster: Cluster, path: str, body: dict[str, Any]) -> Any:
    whole = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    status, answer = await send(cluster.local.http, path, json.dumps(whole).encode())
    assert status == 200, answer
    return json.loads(answer.partition(b"\r\n\r\n")[2])


FAILED = "The arguments are not valid JSON."
Say = Callable[[dict[str, Any], Any], int]


def chat_goes_on(body: dict[str, Any], answer: Any) -> int:
    """Append an answer and the results of its calls, as OpenAI's clients do; return the number of calls."""
    message = answer["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": FAILED} for call in calls]
    body["messages"] = [*body["messages"], message, *(results or [{"role": "user", "content": "Go on."}])]
    return len(calls)


def responses_go_on(body: dict[str, Any], answer: Any) -> int:
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": FAILED} for call in calls]
    body["input"] = [*body["input"], *answer["output"], *(results or [{"role": "user", "content": "Go on."}])]
    return len(calls)


def remembered_responses_go_on(body: dict[str, Any], answer: Any) -> int:
    calls = responses_go_on({"input": []}, answer)
    added: dict[str, Any] = {"input": []}
    responses_go_on(added, answer)
    body["input"] = added["input"][len(answer["output"]) :]
    body["previous_response_id"] = answer["id"]
    return calls


def messages_go_on(body: dict[str, Any], answer: Any) -> int:
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": FAILED} for call in calls]
    said = [{"role": "assistant", "content": answer["content"]}] if answer["content"] else []
    content = results or [{"type": "text", "text": "Go on."}]
    body["messages"] = [*body["messages"], *said, {"role": "user", "content": content}]
    return len(calls)


# The request that each begins with, the field of its limit, and what its client makes of an answer.
AGENTS: tuple[tuple[str, str, Any, Say], ...] = (
    ("agents_sdk 0", "max_tokens", "required", chat_goes_on),
    ("hermes_agent 0", "max_tokens", "required", chat_goes_on),
    ("spring_ai 0", "max_tokens", "auto", chat_goes_on),
    ("agents_sdk 4", "max_output_tokens", "required", responses_go_on),
    ("codex 0", "max_output_tokens", "required", remembered_responses_go_on),
    ("claude_code 0", "max_tokens", {"type": "any"}, messages_go_on),
)


@pytest.mark.parametrize("conversations", [24, pytest.param(60, marks=pytest.mark.nightly)])
async def test_agents_whose_answers_are_cut_anywhere_go_on(cluster: Cluster, conversations: int) -> None:
    draw, calls = random.Random(SEED), list[int]()

    async def converse(number: int, lengths: list[int]) -> None:
        name, limit, choice, go_on = AGENTS[number % len(AGENTS)]
        shape, model = SHAPES[name], list(TEMPLATES)[number // len(AGENTS) % 2]
        body = {**shape.body, "model": model, "tool_choice": choice, "store": True, "seed": number}
        if shape.path != "/v1/responses":
            del body["store"]
        if shape.path == "/v1/messages":
            del body["seed"]
        body["tools"] = [tool for tool in body["tools"] if tool.get("type") != "web_search"]
        for length in lengths:
            body[limit] = length
            answer = await ask(cluster, shape.path, body)
            calls.append(go_on(body, answer))

    drawn = [[draw.randint(1, 150) for _ in range(TURNS)] for _ in range(conversations)]
    await asyncio.gather(*(converse(number, lengths) for number, lengths in enumerate(drawn)))
    assert len(calls) == conversations * TURNS
    assert sum(calls) > len(calls) / 2, "most answers that are cut are cut in a call"


@pytest.mark.parametrize("bodies", [100, pytest.param(400, marks=pytest.mark.nightly)])
async def test_no_body_is_an_internal_error(cluster: Cluster, bodies: int) -> None:
    answers = await fuzz_bodies(cluster, islice(changed_requests(random.Random(SEED)), bodies))
    assert not answers.findings, "\n".join(answers.findings)
    assert answers.statuses[200] > bodies / 20
    assert answers.statuses[400] > bodies / 5
