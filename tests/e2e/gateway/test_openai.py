"""OpenAI's own client: answers, streams, tools, schemas, embeddings, errors, cancels."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from loraplex.contracts.options import Encode, SamplingParams
from tests.e2e.conftest import Cluster
from tests.e2e.gateway.conftest import HEADERS, MESSAGES, MODEL, PROMPT, Eventually, expected
from tests.hash_oracle import expected_vector
from tests.plans_file import set_plans

pytestmark = pytest.mark.asyncio(loop_scope="package")
Client = openai.AsyncOpenAI
CHAT: dict[str, Any] = {"messages": MESSAGES, "model": "a"}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


async def test_a_base_url_without_its_version_is_named(client: Client) -> None:
    with pytest.raises(openai.NotFoundError, match="/v1/models: a client's base URL ends with /v1"):
        await client.with_options(base_url=str(client.base_url).removesuffix("v1/")).models.list()


async def test_whole_answers(client: Client, cluster: Cluster) -> None:
    sampling = SamplingParams(temperature=0.7, top_p=0.9, seed=5)
    whole = await client.chat.completions.create(**CHAT, max_tokens=9, temperature=0.7, top_p=0.9, seed=5, n=2)
    ChatCompletion.model_validate(whole.model_dump(), strict=True)
    texts = [choice.message.content for choice in whole.choices]
    assert texts == [expected(PROMPT, cluster.digests["a"], 9, sampling, choice) for choice in range(2)]
    assert {choice.finish_reason for choice in whole.choices} == {"length"}
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), 18)
    a = cluster.digests["a"]
    for name, digest in (("hash", ""), ("a", a), (f"a@{a}", a), ("hash:a", a), ("tenants/acme/adapters/a", a)):
        completion = await client.completions.create(model=name, prompt="x", temperature=0)
        assert completion.choices[0].text == expected("x", digest, 16)
    for name in ("tgi", "dummy"):
        completion = await client.completions.create(
            model=name, prompt="x", temperature=0, extra_body={"top_k": -1}, extra_headers={"x-request-id": "mine"}
        )
        assert (completion.choices[0].text, completion._request_id) == (expected("x", "", 16), "mine")
    several = await client.completions.create(
        model="a", prompt=["x", "y"], temperature=0, max_tokens=7, stop=expected("y", cluster.digests["a"], 4)[-6:]
    )
    first, second = several.choices
    assert (first.text, first.finish_reason) == (expected("x", cluster.digests["a"], 7), "length")
    assert second.finish_reason == "stop"
    assert expected("y", cluster.digests["a"], 4).startswith(second.text)
    assert (second.index, several.usage and several.usage.prompt_tokens) == (1, 2)


async def test_streams_and_logprobs(client: Client, cluster: Cluster) -> None:
    stream = await client.chat.completions.create(
        **CHAT, max_completion_tokens=30, temperature=0, n=2, logprobs=True, top_logprobs=2, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    text, tokens, reasons, chunks = ["", ""], ["", ""], dict[int, str](), list[ChatCompletionChunk]()
    async for chunk in stream:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        chunks.append(chunk)
        for choice in chunk.choices:
            assert choice.index not in reasons, "nothing comes after a choice's end"
            text[choice.index] += choice.delta.content or ""
            if choice.logprobs and choice.logprobs.content:
                tokens[choice.index] += "".join(entry.token for entry in choice.logprobs.content)
                assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert text == tokens == [expected(PROMPT, cluster.digests["a"], 30, choice=choice) for choice in range(2)]
    assert reasons == {0: "length", 1: "length"}
    # A chunk has one choice; the last one has the usage instead, which is null in all others.
    assert [len(chunk.choices) for chunk in chunks] == [1] * (len(chunks) - 1) + [0]
    assert all("usage" in chunk.model_fields_set for chunk in chunks)
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [60]
    assert chunks[-1].usage
    stop = [text[0][40:60], text[1][60:80]]
    kinds: list[tuple[int, str | None]] = []
    async with client.chat.completions.stream(**CHAT, temperature=0, n=2, stop=stop) as events:
        async for told in events:
            if told.type == "chunk":
                kinds += [(choice.index, choice.finish_reason) for choice in told.chunk.choices]
        whole = await events.get_final_completion()
    # A choice's end is told at once, while the other one goes on.
    assert kinds.index((0, "stop")) < kinds.index((1, "stop")) - 1
    assert [(choice.index, choice.finish_reason) for choice in whole.choices] == [(0, "stop"), (1, "stop")]
    assert [choice.message.content for choice in whole.choices] == [text[0][:40], text[1][:60]]
    merged = await client.completions.create(
        model="a", prompt=[[120], [121]], temperature=0, max_tokens=20, stream=True, logprobs=1,
        stream_options={"include_usage": True},
    )  # fmt: skip
    text = ["", ""]
    async for completion in merged:
        assert "usage" in completion.model_fields_set
        for one in completion.choices:
            at = len(text[one.index])
            text[one.index] += one.text
            if one.logprobs:
                assert one.logprobs.text_offset is not None
                assert one.logprobs.text_offset[0] == at
                assert one.logprobs.tokens is not None
                assert "".join(one.logprobs.tokens) == one.text
    assert text == [expected("x", cluster.digests["a"], 20), expected("y", cluster.digests["a"], 20)]


async def test_every_chunk_has_the_token_counts_so_far(client: Client) -> None:
    """The load tester guidellm asks for them, by vLLM's name."""
    create: Any
    asked: dict[str, Any] = {"model": "a", "temperature": 0, "max_tokens": 9, "stream": True}
    every = {"include_usage": True, "continuous_usage_stats": True}
    for prompts, tokens, create in (
        ({"prompt": ["x", "yz"]}, 3, client.completions.create),
        ({"messages": MESSAGES, "n": 2}, len(PROMPT), client.chat.completions.create),
    ):
        chunks = [chunk async for chunk in await create(**asked, **prompts, stream_options=every)]
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        ends = [not chunk.choices or chunk.choices[0].finish_reason is not None for chunk in chunks]
        assert counts[-1] == 18
        # Each chunk with text counts its tokens; a choice's end adds none.
        grown = [count - before for count, before in zip(counts, [0, *counts], strict=False)]
        assert [count == 0 for count in grown] == ends
        assert [chunk.usage.total_tokens for chunk in chunks] == [tokens + count for count in counts]
    # Without include_usage it has no effect, as in vLLM.
    options: Any = {"continuous_usage_stats": True}
    alone = await client.completions.create(**asked, prompt="x", stream_options=options)
    assert {chunk.usage async for chunk in alone} == {None}


async def test_tools_and_schemas(client: Client, cluster: Cluster) -> None:
    forced: Any = {"type": "function", "function": {"name": "weather"}}
    asked: Any = {**CHAT, "tools": [WEATHER], "tool_choice": forced, "max_tokens": 200, "seed": 3}
    whole = await client.chat.completions.create(**asked)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls
    call: Any = choice.message.tool_calls[0]
    assert list(json.loads(call.function.arguments)) == ["city"]
    name, arguments = "", ""
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.function is not None
            name, arguments = name + (delta.function.name or ""), arguments + (delta.function.arguments or "")
    assert (name, arguments) == (call.function.name, call.function.arguments)
    # The answer and a result go back as they came.
    messages = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    await client.chat.completions.create(model="a", messages=messages, tools=[WEATHER], max_tokens=2)
    shape: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": WEATHER["function"]["parameters"]}}
    shaped = await client.chat.completions.create(**CHAT, response_format=shape, max_tokens=200, seed=3)
    assert list(json.loads(shaped.choices[0].message.content or "")) == ["city"]


async def test_the_whitespace_of_json_is_asked_for_in_each_protocol(client: Client, cluster: Cluster) -> None:
    import anthropic

    schema = {
        "type": "object",
        "properties": {"n": {"const": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    named = {"name": "n", "schema": schema}
    for style, text in ((None, '{"n": [1, 2]}'), ("compact", '{"n":[1,2]}'), (["spaced", "sorted"], '{"n": [1, 2]}')):
        extra: Any = {"extra_body": {} if style is None else {"json_style": style}}
        shape: Any = {"type": "json_schema", "json_schema": named}
        chat = await client.chat.completions.create(**CHAT, response_format=shape, max_tokens=60, **extra)
        assert chat.choices[0].message.content == text
        form: Any = {"format": {"type": "json_schema", **named}}
        response = await client.responses.create(model="a", input="Hi", text=form, max_output_tokens=60, **extra)
        assert response.output_text == text
        config: Any = {"format": {"type": "json_schema", "schema": schema}}
        url = f"http://{cluster.local.http}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", default_headers=HEADERS) as of_anthropic:
            message: Any = await of_anthropic.messages.create(
                model="a", messages=MESSAGES, max_tokens=60, output_config=config, **extra
            )
        assert message.content[0].text == text
    with pytest.raises(openai.BadRequestError, match="json_style: 'nice' is not one of spaced, compact, flexible"):
        await client.chat.completions.create(**CHAT, extra_body={"json_style": "nice"})


async def test_schemas_that_cannot_be_enforced_leave_the_rest_enforced(client: Client) -> None:
    when = {"type": "string", "maxLength": 3, "format": "of dates"}
    schema = {"required": ["when"], "properties": {"when": when}, "additionalProperties": False}
    loose: Any = [{"type": "function", "function": {"name": "later", "parameters": {**schema, "not": {}}}}, WEATHER]
    asked: Any = {**CHAT, "tools": loose, "tool_choice": {"type": "function", "function": {"name": "later"}}}
    told = {"tools[0].parameters.not", "tools[0].parameters.properties.when.format"}
    raw = await client.chat.completions.with_raw_response.create(**asked, max_tokens=400, seed=3)
    message: Any = raw.parse().choices[0].message
    (call,) = message.tool_calls
    assert len(json.loads(call.function.arguments)["when"]) <= 3
    streamed = await client.chat.completions.with_raw_response.create(**asked, max_tokens=2, stream=True)
    for one in (raw, streamed):
        assert {*one.headers["x-loraplex-not-enforced"].split(", ")} == told
    _ = [chunk async for chunk in streamed.parse()]
    # A call of one that is enforced in full has no such header.
    asked |= {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 2}
    whole = await client.chat.completions.with_raw_response.create(**asked)
    assert "x-loraplex-not-enforced" not in whole.headers


async def test_headers_say_what_the_plan_leaves(cluster: Cluster, client: Client, eventually: Eventually) -> None:
    """As OpenAI's do, with the first byte of a stream too."""
    await set_plans(cluster.local.store, "[tenants.limited]\nrequests_per_minute = 60\ntokens_per_day = 100000\n")
    asked: Any = {"messages": MESSAGES, "model": "hash", "max_tokens": 2}
    limited = client.with_options(default_headers={"x-loraplex-tenant": "limited"})
    found: list[dict[str, str]] = []

    async def is_limited() -> bool:
        raw = await limited.chat.completions.with_raw_response.create(**asked)
        streamed = await limited.chat.completions.with_raw_response.create(**asked, stream=True)
        _ = [chunk async for chunk in streamed.parse()]
        vector = await limited.embeddings.with_raw_response.create(model="hash", input="one")
        found[:] = [rates_in(one.headers) for one in (raw, streamed, vector)]
        return all(found)

    await eventually(is_limited)  # both routers have read the plan
    for headers in found:
        assert headers["x-ratelimit-limit-requests"] == "60"
        assert headers["x-ratelimit-limit-tokens"] == "100000"
        assert 0 <= int(headers["x-ratelimit-remaining-requests"]) < 60
        assert 0 < int(headers["x-ratelimit-remaining-tokens"]) < 100_000
        assert re.fullmatch(r"1m0s|\d+s", headers["x-ratelimit-reset-requests"])
        assert re.fullmatch(r"(\d+h)?(\d+m)?\d+s", headers["x-ratelimit-reset-tokens"])
    without = await client.chat.completions.with_raw_response.create(**{**asked, "model": "a"})
    assert not rates_in(without.headers)


def rates_in(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("x-ratelimit-")}


async def test_a_refusal_says_which_limit_is_reached_and_until_when(
    cluster: Cluster, client: Client, eventually: Eventually
) -> None:
    """As OpenAI's do: whole answers, streams, embeddings, and those of Anthropic's protocol alike."""
    await set_plans(cluster.local.store, "[tenants.spent]\nrequests_per_minute = 1\ntokens_per_day = 900\n")
    spent = client.with_options(default_headers={"x-loraplex-tenant": "spent"})
    asked: Any = {"messages": MESSAGES, "model": "hash", "max_tokens": 2}
    refusals: list[openai.RateLimitError] = []

    async def refuses_all() -> bool:
        refusals.clear()
        for ask in (
            partial(spent.chat.completions.create, **asked),
            partial(spent.chat.completions.create, **asked, stream=True),
            partial(spent.embeddings.create, model="hash", input="one"),
        ):
            try:
                await ask()
            except openai.RateLimitError as error:
                refusals.append(error)
        return len(refusals) == 3

    await eventually(refuses_all)  # both routers have read the plan, and no minute began meanwhile
    for refusal in refusals:
        headers = refusal.response.headers
        assert headers["x-ratelimit-limit-requests"] == "1"
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert re.fullmatch(r"1m0s|\d+s", headers["x-ratelimit-reset-requests"])
        assert 0 < int(headers["x-ratelimit-remaining-tokens"]) < 900
        assert 1 <= int(headers["retry-after"]) <= 61


async def test_fifty_calls_at_once_at_a_budget_of_one_pass_as_one_with_its_warning(
    cluster: Cluster, client: Client, eventually: Eventually
) -> None:
    """At two routers: the budget is reserved as tokens are, and what is left of it and the warning stand in headers."""
    store, asked = cluster.local.store, {"messages": MESSAGES, "model": "hash", "max_tokens": 2}
    await set_plans(store, "[prices]\nhash = [1000, 1000, 0]\n[tenants.spender]\nbudget_per_month = 9\n")
    spender = client.with_options(default_headers={"x-loraplex-tenant": "spender"}, max_retries=0)
    thrifty = client.with_options(default_headers={"x-loraplex-tenant": "thrifty"}, max_retries=0)
    left = [Decimal(9), Decimal(9)]

    async def has_prices() -> bool:
        for _ in range(2):
            answer = await spender.chat.completions.with_raw_response.create(**asked)
            left.append(Decimal(answer.headers.get("x-ratelimit-remaining-budget", "9")))
        return left[-3] > left[-2] > left[-1]

    await eventually(has_prices)
    cost = left[-2] - left[-1]  # of a call
    budgets = f"budget_per_month = {cost}\nbudget_warning = {cost / 2}"
    await set_plans(store, f"[tenants.thrifty]\n{budgets}\n[tenants.spender]\nbudget_per_month = 8.5\n")

    async def have_read() -> bool:
        calls = [spender.chat.completions.with_raw_response.create(**asked) for _ in range(3)]
        return {one.headers["x-ratelimit-limit-budget"] for one in await asyncio.gather(*calls)} == {"8.5"}

    await eventually(have_read)  # both routers
    calls = (thrifty.chat.completions.with_raw_response.create(**asked) for _ in range(50))
    ends = await asyncio.gather(*calls, return_exceptions=True)
    refusals = [one for one in ends if isinstance(one, openai.RateLimitError)]
    assert len(refusals) == 49
    assert all(one.response.headers["x-ratelimit-limit-budget"] == f"{cost:f}" for one in refusals)
    assert all("budget_per_month" in one.message for one in refusals)
    (passed,) = (one for one in ends if not isinstance(one, BaseException))
    assert passed.headers["x-ratelimit-remaining-budget"] == "0"
    assert passed.headers["x-ratelimit-limit-budget-warning"] == f"{cost / 2:f}"


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.nightly)])
async def test_a_chat_with_the_tools_of_any_mcp_server_is_answered(client: Client, every: int) -> None:
    for number, path in enumerate(sorted((Path(__file__).parents[2] / "mcp_tools").glob("*.json"))):
        tools: Any = [
            {"type": "function", "function": {"name": one["name"], "parameters": one["inputSchema"]}}
            for one in json.loads(path.read_text())
        ]
        choices: Any = ("auto", "required")[number % every :: every]
        for choice in choices:
            await client.chat.completions.create(**CHAT, tools=tools, tool_choice=choice, max_tokens=9)


async def test_tool_choices_and_formats_of_tgi(client: Client) -> None:
    """The client of huggingface_hub has these shapes."""
    choice: Any = {"function": {"name": "weather"}}
    asked: Any = {**CHAT, "max_tokens": 200, "seed": 3}
    whole = await client.chat.completions.create(**asked, tools=[WEATHER], tool_choice=choice)
    assert whole.choices[0].finish_reason == "tool_calls"
    for kind in ("json_object", "json"):
        form: Any = {"type": kind, "value": WEATHER["function"]["parameters"]}
        shaped = await client.chat.completions.create(**asked, response_format=form)
        assert list(json.loads(shaped.choices[0].message.content or "")) == ["city"]


async def test_embeddings_and_models(client: Client, cluster: Cluster) -> None:
    truth = expected_vector(MODEL, [*b"one"], Encode(task="embed"), adapter_digest=cluster.digests["a"])
    length = math.hypot(*truth)
    for form in ("float", "base64"):
        found = await client.embeddings.create(model="a", input=["two", "one"], encoding_format=form)
        if form == "float":
            assert found.data[1].embedding == pytest.approx([value / length for value in truth], rel=1e-6)
    assert (await client.embeddings.create(model="a", input="one")).data[0].embedding == pytest.approx(
        [value / length for value in truth], rel=1e-6
    )
    names = [model.id async for model in client.models.list()]
    assert names == ["hash", "a", "b", "c"]
    assert (await client.models.retrieve("a")).owned_by == "acme"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody")


async def test_bad_words_do_not_come(client: Client) -> None:
    bad = expected(PROMPT, "", 121)[-1]
    truth = expected(PROMPT, "", 125, SamplingParams(bad_word_ids=((ord(bad),), (32, ord(bad)))))
    assert truth != expected(PROMPT, "", 125)
    extra: Any = {"temperature": 0, "extra_body": {"bad_words": [bad]}}
    chat = await client.chat.completions.create(model="hash", messages=MESSAGES, max_tokens=125, **extra)
    response = await client.responses.create(model="hash", input="Hi", max_output_tokens=125, **extra)
    assert [chat.choices[0].message.content, response.output_text] == [truth, truth]


@pytest.mark.parametrize(
    ("given", "kind", "field", "code"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model", "model_not_found"),
        ({"model": "Not a name"}, openai.NotFoundError, "model", "model_not_found"),
        ({"model": "Qwen/Qwen3-0.6B"}, openai.NotFoundError, "model", "model_not_found"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
         openai.BadRequestError, "response_format.json_schema.schema.not", "invalid_format"),
        ({"extra_body": {"chat_template_kwargs": {"x": "x" * 20_000}}},
         openai.BadRequestError, "chat_template_kwargs", "invalid_field"),
        ({"messages": [{"role": "user", "content": "x" * 40_000}]},
         openai.BadRequestError, "messages", "context_length_exceeded"),
        ({"extra_body": {"tempperature": 1}}, openai.BadRequestError, "tempperature", "unknown_parameter"),
        ({"top_p": 7}, openai.BadRequestError, "top_p", "invalid_field"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"top_logprobs": 3}, openai.BadRequestError, "top_logprobs", "invalid_value"),
        ({"web_search_options": {}}, openai.BadRequestError, "web_search_options", "unsupported_parameter"),
        ({"messages": [{"role": "wizard"}]}, openai.BadRequestError, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
         openai.BadRequestError, "messages[0].content[0].text", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
         openai.BadRequestError, "tools[0].function.parameters.not", "invalid_format"),
        ({"extra_headers": {"x-request-timeout-ms": "1"}}, openai.APIError, None, "deadline_exceeded"),
    ],
)  # fmt: skip
async def test_errors(client: Client, given: Any, kind: type[openai.APIError], field: str, code: str) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as caught:  # noqa: PT012  # a deadline may pass before the stream begins or in it
            answer = await client.chat.completions.create(**{**CHAT, "max_tokens": 500, "stream": stream, **given})
            _ = [chunk async for chunk in answer]
        assert (caught.value.param, caught.value.code) == (field, code)
        if code == "context_length_exceeded":
            assert "This model's maximum context length is 32768 tokens; " in caught.value.message
            # LangChain looks for the code in the error's text, where newer versions of openai have the message alone.
            assert caught.value.message.endswith(" (context_length_exceeded)")


async def test_a_client_that_leaves_cancels_its_work(client: Client, cluster: Cluster, eventually: Eventually) -> None:
    stream = await client.chat.completions.create(**CHAT, max_tokens=20_000, stream=True)
    assert await anext(aiter(stream))
    await stream.close()
    waiting = asyncio.create_task(client.chat.completions.create(**CHAT, max_tokens=20_000))
    await eventually(lambda: _rows(cluster, 1))
    waiting.cancel()
    await eventually(cluster.idle)


async def test_a_stream_that_waits_has_its_status_at_once(
    client: Client, cluster: Cluster, eventually: Eventually
) -> None:
    """The answer to a request that waited for a worker had no byte until its first token: proxies cut it."""
    async with asyncio.TaskGroup() as group:
        busy = [
            group.create_task(client.chat.completions.create(**CHAT, max_tokens=20_000, n=16)) for _ in range(4)
        ]  # all rows of two workers
        await eventually(lambda: _rows(cluster, 64))
        async with asyncio.timeout(60):
            chat = await client.chat.completions.create(**CHAT, max_tokens=3, stream=True)
            prompts = await client.completions.create(model="a", prompt=["x", "y"], max_tokens=3, stream=True)
        assert (chat.response.status_code, prompts.response.status_code) == (200, 200)
        assert await _rows(cluster, 64)
        await chat.close()
        await prompts.close()
        for task in busy:
            task.cancel()
    await eventually(cluster.idle)


async def test_the_log_probabilities_of_an_echoed_prompt(client: Client, cluster: Cluster) -> None:
    """Evaluations of models ask for these."""
    asked: dict[str, Any] = {"model": "a", "temperature": 0, "max_tokens": 2, "echo": True, "logprobs": 2}
    own = await cluster.client.generate("xyz", adapter_id="a", max_tokens=2, logprobs=2, prompt_logprobs=2)
    logprobs = [None, *(token.logprob for token in own.prompt_logprobs), *(t.logprob for t in own.choices[0].logprobs)]
    texts = await client.completions.create(prompt=["xyz", "xyz"], **asked)
    ids = await client.completions.create(prompt=[120, 121, 122], **asked)
    for choice in (*texts.choices, *ids.choices):
        assert choice.text == "xyz" + own.text
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.token_logprobs == logprobs
        assert choice.logprobs.top_logprobs is not None
        assert [top and len(top) for top in choice.logprobs.top_logprobs] == [None, 2, 2, 2, 2]
    with pytest.raises(openai.BadRequestError, match="logprobs: is not served together with echo in a stream"):
        await client.completions.create(prompt="x", stream=True, **asked)


async def _rows(cluster: Cluster, count: int) -> bool:
    return sum(worker.rows_running for worker in await cluster.workers()) == count
