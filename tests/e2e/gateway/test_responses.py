"""/v1/responses, by OpenAI's own client: answers, events, tools, schemas, second turns, errors."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.e2e.conftest import Cluster
from tests.e2e.gateway.conftest import PROMPT, expected

pytestmark = pytest.mark.asyncio(loop_scope="package")
Client = openai.AsyncOpenAI
ASKED: dict[str, Any] = {"model": "a", "input": "Hi", "temperature": 0}
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "strict": None,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 6}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def _strict(answer: Response) -> Response:
    """Return an answer whose fields have the declared types."""
    Response.model_validate(answer.model_dump(by_alias=True), strict=True)
    return answer


async def test_whole_answers_and_events(client: Client, cluster: Cluster) -> None:
    whole = _strict(await client.responses.create(**ASKED, max_output_tokens=9))
    text = expected(PROMPT, cluster.digests["a"], 9)
    assert (whole.output_text, whole.status) == (text, "incomplete")
    assert whole.incomplete_details
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (len(PROMPT), 9)
    stopped = await client.responses.create(**ASKED, max_output_tokens=9, extra_body={"stop_token_ids": [0]})
    assert stopped.output_text == text
    kinds, numbers, parts = [], [], ""
    async for told in await client.responses.create(**ASKED, max_output_tokens=9, stream=True):
        kinds.append(told.type)
        numbers.append(told.sequence_number)
        if told.type == "response.output_text.delta":
            parts += told.delta
        if told.type == "response.incomplete":
            assert _strict(told.response).output_text == text
    assert parts == text
    assert numbers == list(range(len(numbers)))
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    async with client.responses.stream(**ASKED, max_output_tokens=9) as events:
        assert [told.snapshot async for told in events if told.type == "response.output_text.delta"][-1] == text


async def test_log_probabilities(client: Client) -> None:
    own: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 5}
    whole = _strict(await client.responses.create(**ASKED, **own))
    message: Any = whole.output[0]
    logprobs = message.content[0].logprobs
    assert "".join(entry.token for entry in logprobs) == whole.output_text
    assert [len(entry.top_logprobs) for entry in logprobs] == [2] * 5
    told = [
        entry.token
        async for part in await client.responses.create(**ASKED, **own, stream=True)
        if part.type == "response.output_text.delta"
        for entry in part.logprobs
    ]
    assert told == [entry.token for entry in logprobs]


async def test_a_second_turn_and_calls_of_functions(client: Client, cluster: Cluster) -> None:
    first = await client.responses.create(**ASKED, max_output_tokens=6, instructions="Be brief")
    second = await client.responses.create(
        model="a", input="More", previous_response_id=first.id, max_output_tokens=6, temperature=0
    )
    # Instructions are those of each request alone.
    turns = f"{PROMPT}{first.output_text}\nuser: More\nassistant: "
    assert second.output_text == expected(turns, cluster.digests["a"], 6)
    assert second.previous_response_id == first.id
    # Send all items again, as the client has them, in place of the id.
    again = await client.responses.create(
        model="a", max_output_tokens=6, temperature=0,
        input=[{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "More"}],
    )  # fmt: skip
    assert again.output_text == second.output_text
    tools: Any = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}, "extra_body": {"seed": 3}}
    asked = _strict(await client.responses.create(model="a", input="Hi", max_output_tokens=200, **tools))
    (call,) = (item for item in asked.output if item.type == "function_call")
    assert (call.name, list(json.loads(call.arguments))) == ("weather", ["city"])
    arguments = ""
    async for told in await client.responses.create(model="a", input="Hi", max_output_tokens=200, **tools, stream=True):
        if told.type == "response.function_call_arguments.delta":
            arguments += told.delta
        if told.type == "response.function_call_arguments.done":
            assert (told.name, told.arguments) == ("weather", arguments)
    assert arguments == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    by_id = await client.responses.create(
        model="a", input=[result], previous_response_id=asked.id, max_output_tokens=4, temperature=0, tools=[WEATHER]
    )
    by_items = await client.responses.create(
        model="a", input=[{"role": "user", "content": "Hi"}, *asked.output, result], max_output_tokens=4,  # type: ignore[list-item]
        temperature=0, tools=[WEATHER],
    )  # fmt: skip
    assert by_id.output_text == by_items.output_text
    assert by_id.usage
    assert by_items.usage
    assert by_id.usage.input_tokens == by_items.usage.input_tokens


async def test_functions_in_a_namespace_are_called_beside_a_web_search_that_is_left_out(client: Client) -> None:
    own: Any = {"type": "namespace", "name": "outside", "description": "", "tools": [WEATHER]}
    search = {"type": "web_search"}
    other = {**WEATHER, "name": "other"}
    options: Any = {"tools": [search, other, own], "max_output_tokens": 200, "extra_body": {"seed": 3}}
    for choice in ("auto", "none"):
        answer = await client.responses.create(model="a", input="Hi", tool_choice=choice, **options)
        assert [tool.type for tool in answer.tools] == ["function", "namespace"]
    only: Any = {**options, "tools": [own], "tool_choice": {"type": "function", "name": "weather"}}
    (call,) = (await client.responses.create(model="a", input="Hi", **only)).output
    assert call.type == "function_call"
    assert (call.name, call.namespace) == ("weather", "outside")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="a", input="Hi", tool_choice="required", **options)
    assert caught.value.param == "tools[0].type"
    bad: Any = {**options, "tools": [search, {**own, "tools": [WEATHER, {**WEATHER, "name": "a b"}]}]}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="a", input="Hi", **bad)
    assert caught.value.param == "tools[1].tools[1].name"


async def test_schemas(client: Client) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": WEATHER["parameters"]}}
    shaped = _strict(
        await client.responses.create(model="a", input="Hi", max_output_tokens=200, text=form, extra_body={"seed": 3})
    )
    assert shaped.status == "completed"
    assert list(json.loads(shaped.output_text)) == ["city"]


async def test_only_the_caller_s_remembered_answers_are_continued(client: Client) -> None:
    kept = await client.responses.create(**ASKED, max_output_tokens=2)
    dropped = await client.responses.create(**ASKED, max_output_tokens=2, store=False)
    other = client.with_options(default_headers={"x-loraplex-tenant": "globex"})
    for caller, model, name in ((other, "hash", kept.id), (client, "a", dropped.id), (client, "a", "resp_none")):
        with pytest.raises(openai.BadRequestError, match="only the gateway that answered has it") as caught:
            await caller.responses.create(model=model, input="x", previous_response_id=name)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize(
    ("given", "kind", "field", "code"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model", "model_not_found"),
        ({"input": "x" * 40_000}, openai.BadRequestError, "input", "context_length_exceeded"),
        ({"input": [{"role": "wizard", "content": "x"}]}, openai.BadRequestError, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         openai.BadRequestError, "input[0].content[0].type", "unsupported_parameter"),
        ({"input": [{"type": "web_search_call", "id": "x"}]},
         openai.BadRequestError, "input[0].type", "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "tools[0].type", "unsupported_parameter"),
        ({"tools": [{"type": "function", "name": "f", "strict": True, "parameters": {"not": {}}}]},
         openai.BadRequestError, "tools[0].parameters.not", "invalid_format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
         openai.BadRequestError, "text.format.schema.not", "invalid_format"),
        ({"background": True}, openai.BadRequestError, "background", "unsupported_parameter"),
        ({"include": ["file_search_call.results"]}, openai.BadRequestError, "include[0]", "unsupported_parameter"),
        ({"top_logprobs": 3}, openai.BadRequestError, "top_logprobs", "invalid_value"),
        ({"top_p": 7}, openai.BadRequestError, "top_p", "invalid_field"),
        ({"input": []}, openai.BadRequestError, "input", "invalid_field"),
    ],
)  # fmt: skip
async def test_errors(client: Client, given: Any, kind: type[openai.APIError], field: str, code: str) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            await client.responses.create(**{**ASKED, "stream": stream, **given})
        assert (caught.value.param, caught.value.code) == (field, code)


async def test_an_error_in_a_stream_is_raised(client: Client) -> None:
    with pytest.raises(openai.APIError) as caught:  # noqa: PT012  # a deadline may pass before the stream begins
        stream = await client.responses.create(
            **ASKED, max_output_tokens=20_000, stream=True, extra_headers={"x-request-timeout-ms": "400"}
        )
        _ = [told async for told in stream]
    assert caught.value.code == "deadline_exceeded"
