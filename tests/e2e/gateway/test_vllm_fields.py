"""Fields of vLLM's and other servers' clients beyond OpenAI's, and the values of OpenAI's that ask for little."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from tests.e2e.conftest import Cluster
from tests.e2e.gateway.conftest import HEADERS, MESSAGES, PROMPT

pytestmark = [pytest.mark.asyncio(loop_scope="package")]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
# With the template's words it leaves three tokens of the context.
LONG = [{"role": "user", "content": "x" * 32_747}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(loop_scope="package")
async def http(cluster: Cluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=f"http://{cluster.local.http}", headers=HEADERS, timeout=60.0) as client:
        yield client


async def asked(http: httpx2.AsyncClient, path: str = CHAT, status: int = 200, **fields: Any) -> Any:
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    answer = await http.post(path, json={"model": "a", "max_tokens": 2, **prompt, **fields})
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "guidance"},
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"guided_grammar": 'start: "{\\"city\\":\\"x\\"}"'},
    ],
)
async def test_formats(http: httpx2.AsyncClient, fields: Any) -> None:
    text = (await asked(http, max_tokens=200, **fields))["choices"][0]["message"]["content"]
    assert list(json.loads(text)) == ["city"]
    assert text.startswith('{"city":"' if fields.keys() & {"structured_outputs", "guided_grammar"} else '{"city": "')


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_regex": "yes|no"},
        {"structured_outputs": {"regex": "yes|no"}},
    ],
)
async def test_choices_and_expressions(http: httpx2.AsyncClient, fields: Any) -> None:
    assert (await asked(http, COMPLETION, max_tokens=9, **fields))["choices"][0]["text"] in ("yes", "no")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {"properties": {"a": {"not": {}}}}}, "guided_json.properties.a.not"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json.not"),
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format.schema.not"),
    ],
)
async def test_an_error_of_a_format_names_the_callers_field(http: httpx2.AsyncClient, fields: Any, param: str) -> None:
    error = (await asked(http, status=400, **fields))["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


async def test_two_formats_are_refused(http: httpx2.AsyncClient) -> None:
    two: Any = {"guided_regex": "a", "structured_outputs": {"json_object": True}}
    assert (await asked(http, status=400, **two))["error"]["param"] == "structured_outputs.json_object"
    both: Any = {"guided_regex": "a", "response_format": {"type": "json_object"}}
    assert (await asked(http, status=400, **both))["error"]["param"] == "response_format"


@pytest.mark.parametrize(
    ("path", "body", "reason", "tokens"),
    [
        (COMPLETION, {"prompt": [65] * 32_765, "max_tokens": 64_000}, ("finish_reason", "length"), "completion_tokens"),
        (CHAT, {"messages": LONG, "max_completion_tokens": 64_000}, ("finish_reason", "length"), "completion_tokens"),
        ("/v1/messages", {"messages": LONG, "max_tokens": 64_000}, ("stop_reason", "max_tokens"), "output_tokens"),
        ("/v1/responses", {"input": LONG, "max_output_tokens": 64_000}, ("status", "incomplete"), "output_tokens"),
    ],
)
async def test_an_answer_ends_with_the_context(
    http: httpx2.AsyncClient, path: str, body: Any, reason: tuple[str, str], tokens: str
) -> None:
    answer = await http.post(path, json={"model": "a", "temperature": 0, **body})
    told = answer.json()
    assert answer.status_code == 200, told
    assert {**told, **told.get("choices", [{}])[0]}[reason[0]] == reason[1]
    assert told["usage"][tokens] == 3


async def test_the_tokenizer_is_told(http: httpx2.AsyncClient) -> None:
    told = (await http.get("/tokenizer_info")).json()
    assert "{{ message.role }}: " in told["chat_template"]


async def test_log_probabilities_of_prompts(http: httpx2.AsyncClient) -> None:
    answer = await asked(http, COMPLETION, prompt=["xy", "z"], n=2, prompt_logprobs=1, temperature=0)
    told = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert [len(one) for one in told] == [2, 2, 1, 1]
    assert told[0][0] is None
    assert told[0][1][str(ord("y"))]["decoded_token"] == "y"
    assert [entry["rank"] for entry in told[0][1].values() if entry["rank"]] == [1]
    chat = await asked(http, prompt_logprobs=0, temperature=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    refused = await asked(http, status=400, prompt_logprobs=0, stream=True)
    assert refused["error"]["param"] == "prompt_logprobs"


async def test_token_ids_in_place_of_texts_and_kept_stops(http: httpx2.AsyncClient) -> None:
    answer = await asked(http, COMPLETION, logprobs=1, return_tokens_as_token_ids=True, temperature=0)
    assert all(token.startswith("token_id:") for token in answer["choices"][0]["logprobs"]["tokens"])
    text = (await asked(http, COMPLETION, max_tokens=20, temperature=0))["choices"][0]["text"]
    for keeps in (False, True):
        fields: Any = {"stop": text[3:5], "include_stop_str_in_output": keeps}
        cut = (await asked(http, COMPLETION, max_tokens=20, temperature=0, **fields))["choices"][0]["text"]
        assert cut.endswith(text[3:5]) == keeps


async def test_token_ids_are_returned(http: httpx2.AsyncClient) -> None:
    fields: Any = {"return_token_ids": True, "temperature": 1, "seed": 2**63 - 1}
    answer = await asked(http, COMPLETION, prompt=["xy", "z"], n=2, **fields)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[120, 121]] * 2 + [[122]] * 2
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [2] * 4
    of_ids = await asked(http, COMPLETION, prompt=[[120, 121], [122]], n=2, **fields)
    assert [choice["token_ids"] for choice in of_ids["choices"]] == [one["token_ids"] for one in answer["choices"]]
    chat = await asked(http, return_token_ids=True, temperature=0)
    assert bytes(chat["prompt_token_ids"]) == PROMPT.encode()
    assert len(chat["choices"][0]["token_ids"]) == 2
    refused: list[dict[str, Any]] = [{"stream": True}, {"truncate_prompt_tokens": 3}]
    for fields in refused:
        assert (await asked(http, status=400, return_token_ids=True, **fields))["error"]["param"] == "return_token_ids"


async def test_log_probabilities_of_what_was_drawn_from(http: httpx2.AsyncClient) -> None:
    def told(answer: Any) -> Any:
        return [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]

    fields: Any = {"logprobs": 1, "temperature": 0.7, "seed": 5, "max_tokens": 9, "return_token_ids": True}
    raw, same, drawn = [
        await asked(http, COMPLETION, **fields, logprobs_mode=mode)
        for mode in (None, "raw_logprobs", "processed_logprobs")
    ]
    assert raw["choices"][0]["token_ids"] == drawn["choices"][0]["token_ids"]
    assert told(raw) == told(same)
    assert told(raw) != told(drawn)
    refused = (await asked(http, COMPLETION, status=400, **fields, logprobs_mode="processed_logits"))["error"]
    assert refused["message"] == "logprobs_mode: 'processed_logits' is not one of raw_logprobs, processed_logprobs"
    refused = (await asked(http, COMPLETION, status=400, seed=2**63))["error"]
    assert (refused["param"], refused["message"]) == ("seed", f"seed: {2**63} is not between -2^63 and 2^63 - 1")


async def test_values_that_ask_for_little(http: httpx2.AsyncClient) -> None:
    nothing = await asked(http, max_tokens=None, max_completion_tokens=0)
    assert nothing["usage"]["completion_tokens"] == 0
    await asked(http, logprobs=False, top_logprobs=0)
    await asked(http, use_beam_search=False, echo=False)
    assert (await asked(http, status=400, use_beam_search=True))["error"]["param"] == "use_beam_search"
    seeded = [
        (await asked(http, seed=seed, max_tokens=20))["choices"][0]["message"]["content"] for seed in (-1, -1, 4, 4)
    ]
    assert seeded[0] != seeded[1]
    assert seeded[2] == seeded[3]
    await asked(http, logit_bias={"7": 1.5})
    for reasoning in (True, False):
        await asked(http, include_reasoning=reasoning, enable_thinking=reasoning)


async def test_a_chat_without_max_tokens_ends_with_the_context(http: httpx2.AsyncClient) -> None:
    context, left = 32_768, 300
    messages = [{"role": "user", "content": "x" * (context - left - len("user: \nassistant: "))}]
    long = await asked(http, messages=messages, max_tokens=None, logit_bias={"7": 99}, temperature=0)
    assert long["usage"]["completion_tokens"] == left
    assert long["choices"][0]["finish_reason"] == "length"
    assert (await asked(http, COMPLETION, max_tokens=None))["usage"]["completion_tokens"] <= 16


async def test_paths_and_names(http: httpx2.AsyncClient) -> None:
    for path in ("/health", "/v1/models"):
        head = await http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) > 0
    assert (await http.head(CHAT)).status_code == 405
    packed = await http.post(CHAT, content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"})
    assert (packed.status_code, packed.json()["error"]["param"]) == (415, "content-encoding")
    assert (await asked(http, model="hash:", status=404))["error"]["code"] == "model_not_found"
    chat = {"model": "a", "messages": MESSAGES}
    further: list[dict[str, Any]] = [{}, {"add_generation_prompt": False}, {"tools": []}]
    counts = [(await http.post("/tokenize", json={**chat, **fields})).json()["count"] for fields in further]
    assert counts[1] < counts[0] == counts[2]
