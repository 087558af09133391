"""Anthropic's own client: answers, streams, tools, schemas, counts of tokens, errors, cancels."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from pydantic import TypeAdapter

from tests.e2e.conftest import Cluster
from tests.e2e.gateway.conftest import HEADERS, MESSAGES, PROMPT, Eventually, expected

if TYPE_CHECKING:  # imported by the tests that need it: it takes seconds
    from anthropic import AsyncAnthropic as Client

pytestmark = pytest.mark.asyncio(loop_scope="package")
ASKED: dict[str, Any] = {"messages": MESSAGES, "model": "a", "max_tokens": 12}
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
WEATHER: Any = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 6}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
FORCED: dict[str, Any] = {
    **ASKED,
    "tools": [WEATHER],
    "tool_choice": {"type": "tool", "name": "weather"},
    "max_tokens": 200,
}


@pytest_asyncio.fixture(loop_scope="package")
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(
        base_url=f"http://{cluster.local.http}", api_key="none", default_headers=HEADERS, max_retries=0
    ) as own:
        yield own


async def test_whole_answers_and_streams(client: Client, cluster: Cluster) -> None:
    from anthropic.types import Message, RawMessageStreamEvent

    checked: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    text = expected(PROMPT, cluster.digests["a"], 12)
    whole = await client.messages.create(**ASKED, **GREEDY)
    Message.model_validate(whole.model_dump(), strict=True)
    assert [block.text for block in whole.content if block.type == "text"] == [text]
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) == len(PROMPT)
    drawn = await client.messages.create(**ASKED, system="Be brief.", extra_body={"temperature": 0.5, "top_k": 5})
    assert drawn.stop_reason == "max_tokens"
    stopped = await client.messages.create(**ASKED, **GREEDY, stop_sequences=["never", text[20:30]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[20:30])

    kinds, streamed = [], ""
    async for event in await client.messages.create(**ASKED, **GREEDY, stream=True):
        checked.validate_python(event.model_dump())
        kinds.append(event.type)
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            streamed += event.delta.text
    assert streamed == text
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


async def test_tools_and_conversations(client: Client, cluster: Cluster) -> None:
    async with client.messages.stream(**FORCED) as stream:
        whole: Any = await stream.get_final_message()
    (call,) = whole.content
    assert (call.type, whole.stop_reason) == ("tool_use", "tool_use")
    assert list(call.input) == ["city"]
    unstreamed = await client.messages.create(**FORCED)
    assert [block.type for block in unstreamed.content] == ["tool_use"]
    # The answer and a result go back as they came; so does the beginning of an answer.
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    turn = {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]}
    chat: Any = [*MESSAGES, {"role": "assistant", "content": whole.content}, turn]
    prefilled: Any = [*MESSAGES, {"role": "assistant", "content": "Well"}]
    system: Any = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    rendered = (
        f"system: Be brief.\n{PROMPT.removesuffix('assistant: ')}assistant: \ntool: rain\nuser: And now?\nassistant: "
    )
    for messages, prompt in ((chat, rendered), (prefilled, f"system: Be brief.\n{PROMPT}Well")):
        count = await client.messages.count_tokens(model="a", messages=messages, system=system)
        assert count.input_tokens == len(prompt)
        answer: Any = await client.messages.create(model="a", messages=messages, system=system, max_tokens=9, **GREEDY)
        assert answer.content[0].type == "text"
        assert answer.content[0].text == expected(prompt, cluster.digests["a"], 9)
    schema: Any = {"format": {"type": "json_schema", "schema": WEATHER["input_schema"]}}
    answer = await client.messages.create(**{**ASKED, "max_tokens": 200}, output_config=schema)
    assert answer.content[0].type == "text"
    assert list(json.loads(answer.content[0].text)) == ["city"]
    # A format is not in the prompt.
    asked: list[Any] = [{}, schema]
    counts = [await client.messages.count_tokens(model="a", messages=MESSAGES, output_config=of) for of in asked]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"model": "nobody"}, "NotFoundError", "model not found: nobody"),
        ({"messages": [{"role": "user", "content": "x" * 40_000}]}, "BadRequestError", "prompt is too long: "),
        ({"extra_body": {"tempperature": 1}}, "BadRequestError", "tempperature: unknown parameter"),
        ({"extra_body": {"temperature": -1}}, "BadRequestError", "temperature: -1"),
        (
            {"tools": [{"name": "f", "strict": True, "input_schema": {"type": "object", "not": {}}}]},
            "BadRequestError",
            "tools[0].input_schema.not",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]},
            "BadRequestError",
            "tools[0].type: web_search_20250305 is run by Anthropic's servers; tools with an input_schema are served",
        ),
        ({"tools": [{"name": "f"}]}, "BadRequestError", "tools[0].input_schema: is required"),
        (
            {"tools": [{"name": "f", "type": "custom", "input_schema": {"type": "object"}, "x": 1}]},
            "BadRequestError",
            "tools[0].x: unknown parameter",
        ),
        ({"tools": [3]}, "BadRequestError", "tools[0]: "),
        (
            {"system": "x", "messages": [{"role": "wizard", "content": "x"}]},
            "BadRequestError",
            "messages[0].role",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            "BadRequestError",
            "messages[0].content[0].type: image is not served",
        ),
        ({"extra_headers": {"x-request-timeout-ms": "1"}}, "APIStatusError", "the answer was not complete"),
    ],
)
async def test_errors(client: Client, given: Any, kind: str, message: str) -> None:
    import anthropic

    with pytest.raises(getattr(anthropic, kind)) as caught:
        await client.messages.create(**{**ASKED, "max_tokens": 500, **given})
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["message"].startswith(message)


async def test_a_client_that_leaves_cancels_its_work(client: Client, cluster: Cluster, eventually: Eventually) -> None:
    stream = await client.messages.create(**{**ASKED, "max_tokens": 20_000}, stream=True)
    assert await anext(aiter(stream))
    await stream.close()
    await asyncio.wait_for(eventually(cluster.idle), 60)
