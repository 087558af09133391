"""Arguments of generate to the message on the wire."""

from __future__ import annotations

import json
import re
from typing import Any, get_args, get_type_hints

import pytest
from loraplex.inference.v1 import inference_pb2

from loraplex.runtime.rpc import server
from loraplex_client import Client, GenerateOptions, InvalidRequestError
from loraplex_client.chat import CHAT_OPTIONS, chat_of
from loraplex_client.endpoint import CHANNEL_OPTIONS
from loraplex_client.options import generate_request

EVERYTHING: GenerateOptions = {
    "messages": [{"role": "user", "content": "hi"}],
    "adapter_id": "support@canary",
    "adapters": {"a": 0.5, "b": 0.25},
    "model": "tiny",
    "request_id": "r-1",
    "priority": -3,
    "temperature": 0.0,
    "top_k": 4,
    "top_p": 0.5,
    "min_p": 0.25,
    "typical_p": 0.125,
    "top_n_sigma": 1.5,
    "allowed_token_ids": [3, 7],
    "bad_words": ["one", "two"],
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "logit_bias": {7: -1.0},
    "seed": 2**63,
    "max_tokens": 8,
    "min_tokens": 2,
    "stop": ["a", "b"],
    "stop_token_ids": [1, 2],
    "ignore_eos": False,
    "n": 2,
    "best_of": 3,
    "prompt_logprobs": 4,
    "logprobs": 0,
    "logprob_token_ids": [9, 4],
    "logprobs_mode": "processed_logprobs",
    "speculation": "off",
    "echo": True,
    "skip_special_tokens": False,
    "stream_interval": 4,
    "json_style": ("flexible", "sorted"),
    "regex": "a+",
}

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
MESSAGES: Any = [
    {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "image", "text": ""}]},
    {"role": "user", "content": "hi", "name": "Ann"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"city": "Zürich"}}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
]
CHAT: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}, {"name": "g"}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
    "continue_final_message": True,
    "add_generation_prompt": False,
    "template_args": {"enable_thinking": False},
    "thinking_token_budget": 7,
}


def test_everything_finds_its_field() -> None:
    spec = generate_request(None, EVERYTHING).spec
    assert spec == inference_pb2.GenerateSpec(
        request_id="r-1",
        model="tiny",
        adapter="support@canary",
        adapters=[
            inference_pb2.WeightedAdapter(adapter="a", weight=0.5),
            inference_pb2.WeightedAdapter(adapter="b", weight=0.25),
        ],
        chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")]),
        sampling=inference_pb2.Sampling(
            temperature=0.0,
            top_k=4,
            top_p=0.5,
            min_p=0.25,
            typical_p=0.125,
            top_n_sigma=1.5,
            allowed_token_ids=[3, 7],
            bad_words=["one", "two"],
            repetition_penalty=1.5,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            logit_bias={7: -1.0},
            seed=2**63,
        ),
        stopping=inference_pb2.Stopping(
            max_tokens=8, min_tokens=2, stop=["a", "b"], stop_token_ids=[1, 2], ignore_eos=False
        ),
        output=inference_pb2.Output(
            n=2,
            best_of=3,
            logprobs=0,
            logprob_token_ids=[9, 4],
            logprobs_mode=inference_pb2.LOGPROBS_MODE_PROCESSED,
            prompt_logprobs=4,
            echo=True,
            skip_special_tokens=False,
            stream_interval=4,
        ),
        json_style=inference_pb2.JsonStyle(
            whitespace=inference_pb2.JSON_WHITESPACE_FLEXIBLE, property_order=inference_pb2.PROPERTY_ORDER_SORTED
        ),
        regex="a+",
        priority=-3,
        speculation=inference_pb2.SPECULATION_OFF,
    )


def test_every_option_reaches_the_wire() -> None:
    of_type = {bool: True, int: 3, float: 0.5, str: "x"}
    for name, hint in get_type_hints(GenerateOptions).items():
        if name in {"token_ids", "messages"}:
            continue
        if name in CHAT_OPTIONS:
            chat: Any = {"messages": MESSAGES, name: CHAT[name]}
            assert generate_request(None, chat).spec != generate_request(None, {"messages": MESSAGES}).spec, name
            continue
        example = next((of_type[kind] for kind in get_args(hint) if kind in of_type), ["x"])
        value: Any = EVERYTHING.get(name, example)
        options: Any = {name: value}
        assert generate_request("p", options).spec != generate_request("p", {}).spec, name


def test_a_chat_as_other_clients_write_it() -> None:
    assert chat_of(MESSAGES, CHAT) == inference_pb2.Chat(
        messages=[
            inference_pb2.ChatMessage(
                role="system",
                parts=[
                    inference_pb2.ContentPart(type="text", text="Be"),
                    inference_pb2.ContentPart(type="image"),
                ],
            ),
            inference_pb2.ChatMessage(role="user", content="hi", name="Ann"),
            inference_pb2.ChatMessage(
                role="assistant",
                reasoning="Hm.",
                tool_calls=[inference_pb2.ToolCall(id="1", name="f", arguments='{"city": "Zürich"}')],
            ),
            inference_pb2.ChatMessage(role="tool", tool_call_id="1", content="rain"),
        ],
        tools=[
            inference_pb2.Tool(name="f", description="d", parameters=json.dumps(SCHEMA)),
            inference_pb2.Tool(name="g"),
        ],
        tool_choice=inference_pb2.ToolChoice(name="f"),
        parallel_tool_calls=False,
        continue_final_message=True,
        add_generation_prompt=False,
        template_args='{"enable_thinking": false}',
        thinking_token_budget=7,
    )
    assert chat_of(MESSAGES, {"tool_choice": "required"}).tool_choice.mode == inference_pb2.TOOL_MODE_REQUIRED


def test_unset_is_not_zero() -> None:
    spec = generate_request("hi", {"temperature": None, "adapter_id": None}).spec
    assert spec == inference_pb2.GenerateSpec(prompt="hi")
    assert not spec.HasField("sampling")
    assert generate_request("hi", {"temperature": 0}).spec.sampling.HasField("temperature")


def test_a_lone_stop_string_is_not_its_letters() -> None:
    assert list(generate_request("hi", {"stop": "END"}).spec.stopping.stop) == ["END"]


def test_adapters_as_pairs_keep_their_order() -> None:
    spec = generate_request("hi", {"adapters": [("b", -0.5), ("a", 2)]}).spec
    assert [(one.adapter, one.weight) for one in spec.adapters] == [("b", -0.5), ("a", 2.0)]


def test_ids_instead_of_text() -> None:
    assert list(generate_request(None, {"token_ids": (1, 2)}).spec.token_ids.ids) == [1, 2]
    assert generate_request(None, {"token_ids": ()}).spec.WhichOneof("input") == "token_ids"
    assert generate_request("", {}).spec.WhichOneof("input") == "prompt"


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        (None, {}, "prompt"),
        ("a", {"token_ids": [1]}, "prompt"),
        ("a", {"temperature": "hot"}, "sampling.temperature"),
        ("a", {"top_k": -1}, "sampling.top_k"),
        ("a", {"max_tokens": 2**32}, "stopping.max_tokens"),
        ("a", {"stop_token_ids": ["x"]}, "stopping.stop_token_ids"),
        ("a", {"logit_bias": {"x": 1.0}}, "sampling.logit_bias"),
        ("\ud800", {}, "prompt"),
        ("a", {"adapters": {"x": "much"}}, "adapters"),
        ("a", {"adapters": ["x", "y"]}, "adapters"),
        (None, {"messages": [{"role": "user", "text": "hi"}]}, "messages[0]"),
        (None, {"messages": [{"content": "hi"}]}, "messages[0]"),
        (None, {"messages": ["hi"]}, "messages[0]"),
        (None, {"messages": MESSAGES, "tools": [{"parameters": {}}]}, "tools[0]"),
        (None, {"messages": MESSAGES, "tool_choice": "always"}, "tool_choice"),
        (None, {"messages": MESSAGES, "tool_choice": {"type": "function"}}, "tool_choice"),
        (None, {"messages": MESSAGES, "thinking_token_budget": 2**31}, "thinking_token_budget"),
        (None, {"messages": MESSAGES, "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ("a", {"tools": []}, "tools"),
        ("a", {"json_style": "pretty"}, "json_style"),
        ("a", {"speculation": False}, "speculation"),
        ("a", {"json_style": ["schema", "sorted"]}, "json_style"),
    ],
)
def test_what_can_not_be_sent_names_its_field(prompt: str | None, options: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{re.escape(field)}: ") as caught:
        generate_request(prompt, options)
    assert caught.value.field == field


def test_what_can_not_be_detokenized_names_its_field() -> None:
    client: Any = Client("127.0.0.1:1")
    for call in (client.detokenize, client.token_bytes):
        with pytest.raises(InvalidRequestError, match=r"^token_ids: "):
            call([-1])


def test_a_schema_that_is_a_text_is_sent_as_it_is() -> None:
    for text in ('{"type": "integer"}', "no JSON"):
        spec = generate_request("a", {}, {"type": "json_object", "schema": text}).spec
        assert spec.json_schema == text


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temprature", "did you mean temperature?"),
        ("max_token", "did you mean max_tokens?"),
        ("max_new_tokens", "did you mean max_tokens?"),
        ("adapter", "did you mean adapter_id?"),
        ("timeout", "did you mean timeout_s?"),
        ("whatever", "the method's help lists the known ones"),
    ],
)
def test_an_unknown_keyword_is_told_the_one_that_is_meant(name: str, hint: str) -> None:
    client: Any = Client("127.0.0.1:1")
    with pytest.raises(TypeError) as caught:
        generate_request("p", {name: 1})  # type: ignore[misc]  # what is to be refused
    assert str(caught.value) == f"unknown keyword {name!r}; {hint}"
    for call in (client.generate, client.generate_stream, client.chat, client.chat_stream):
        with pytest.raises(TypeError, match=re.escape(str(caught.value))):
            call("p", **{name: 1})


def test_methods_with_few_keywords_know_what_is_meant() -> None:
    client: Any = Client("127.0.0.1:1")
    for call in (client.tokenize, client.count_tokens, client.embed, client.classify):
        with pytest.raises(TypeError, match=r"unknown keyword 'adapter'; did you mean adapter_id\?"):
            call(["p"], adapter="a")


def test_options_are_those_between_our_processes_but_for_how_soon_a_dead_link_is_noticed() -> None:
    """See test_cut_link.py for these."""
    sooner = {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"}
    ours, theirs = dict(CHANNEL_OPTIONS), dict(server.channel_options())
    assert {name for name in ours | theirs if ours.get(name) != theirs.get(name)} == sooner


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        (5, {}, "prompt: give a str; 5 is of type int"),
        (
            "a",
            {"max_tokens": "many"},
            "stopping.max_tokens: give a whole number from 0 to 4294967295; 'many' is of type str",
        ),
        ("a", {"top_k": -5}, "sampling.top_k: give a whole number from 0 to 4294967295; -5 is of type int"),
        ("a", {"temperature": "hot"}, "sampling.temperature: give a number; 'hot' is of type str"),
        ("a", {"stop": ["a", 5]}, "stopping.stop: give a list; each item is a str; ['a', 5] is of type list"),
        ("a", {"logit_bias": [1]}, "sampling.logit_bias: give a dict; each key is a whole number from 0"),
        ("a", {"json_schema": {"a": 1}}, "json_schema: give a str; {'a': 1} is of type dict"),
        ("a", {"adapter_id": "x" * 80 + "\ud800"}, "adapter: has half of a surrogate pair"),
        ("a", {"regex": ["x" * 80]}, f"regex: give a str; ['{'x' * 58}... is of type list"),
    ],
)
def test_a_value_of_another_type_is_told_what_to_give(prompt: Any, options: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        generate_request(prompt, options)
    assert str(caught.value).startswith(words)
