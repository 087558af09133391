"""Answers with a shape: formats, calls of tools, and chats with the template of an adapter."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex_client import AsyncStoreClient, FinishReason, Generation, InvalidRequestError, NotFoundError
from tests.e2e.answers.conftest import MODEL, expected
from tests.e2e.conftest import TENANT, Cluster
from tests.hash_formats import FORMATS, GRAMMARS
from tests.hash_oracle import expected_ids, matching_after

pytestmark = pytest.mark.asyncio(loop_scope="package")


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
            adapter_id=("a", "b", None)[number % 3], seed=number, temperature=1.0, max_tokens=120,
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
        ({"tools": [{"name": "f", "parameters": {"not": {}}, "strict": True}]}, "chat.tools[0].parameters.not"),
        ({"template_args": {"messages": []}}, "chat.template_args"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            await cluster.client.chat(messages, **options)
        assert caught.value.field == field


@pytest.mark.parametrize("kind", FORMATS)
async def test_an_answer_keeps_to_its_format(cluster: Cluster, kind: str) -> None:
    stopping, sampling = StoppingParams(max_tokens=100), SamplingParams(temperature=0.9, seed=3)
    answer = await cluster.client.generate("x", max_tokens=100, n=2, temperature=0.9, seed=3, **{kind: FORMATS[kind]})
    for number, choice in enumerate(answer.choices):
        made = expected_ids(
            MODEL, list(b"x"), sampling=sampling, stopping=stopping, choice=number, grammar=GRAMMARS[kind]
        )
        assert tuple(choice.token_ids) == made
        complete = matching_after(MODEL, GRAMMARS[kind], made).complete
        assert choice.finish_reason is (FinishReason.END if complete else FinishReason.LENGTH)


async def test_an_adapter_brings_its_own_template(cluster: Cluster, tmp_path: Path) -> None:
    chat = {"template": "{% for m in messages %}[{{ m.content }}]{% endfor %}", "system_prompt": "Be Acme."}
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8, "loraplex_chat": chat}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"own")
    async with AsyncStoreClient(cluster.local.store, TENANT) as store:
        digest = (await store.push(tmp_path, "own")).revision.digest
    messages = [{"role": "user", "content": "Hi"}]
    answer = await cluster.client.chat(messages, adapter_id="own", max_tokens=9)
    assert list(answer.token_ids) == expected("[Be Acme.][Hi]", digest, 9)
    assert bytes(await cluster.client.tokenize(messages=messages, adapter_id="own")) == b"[Be Acme.][Hi]"
    assert bytes(await cluster.client.tokenize(messages=messages)) == b"user: Hi\nassistant: "
    with pytest.raises(NotFoundError):
        await cluster.client.tokenize("x", adapter_id="nobody")
