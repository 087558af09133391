"""Bodies of HTTP requests: each wrong one is refused by the name of a field, and none costs much."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from loraplex.gateway import bodies
from loraplex.gateway.anthropic_api import MESSAGES
from loraplex.gateway.anthropic_api import options_of as messages_options
from loraplex.gateway.errors import HttpError
from loraplex.gateway.exchange import BODY_BYTES
from loraplex.gateway.openai_api import CHAT, chat_options
from loraplex.gateway.openai_messages import sdk_messages
from loraplex.gateway.openai_responses_input import RESPONSE
from loraplex.gateway.openai_responses_input import options_of as responses_options
from loraplex_client.chat import chat_of

USER = b'{"role":"user","content":"x"}'


def chat(messages: bytes = USER, more: bytes = b"") -> bytes:
    return b'{"model":"a","messages":[' + messages + b"]" + more + b"}"


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        (b"{", "invalid_json", ""),
        (b"[]", "invalid_json", ""),
        (b"\xff\xfe", "invalid_json", ""),
        (b"[" * 100_000, "invalid_json", ""),
        (b'{"model":"a"}', "missing_required_parameter", "messages"),
        (chat(more=b',"Temperature":1'), "unknown_parameter", "Temperature"),
        (chat(more=b',"temperature":"1"'), "invalid_value", "temperature"),
        (chat(more=b',"n":1.5'), "invalid_value", "n"),
        (chat(more=b',"stop":3'), "invalid_value", "stop"),
        (chat(more=b',"response_format":{"type":"yaml"}'), "invalid_value", "response_format.type"),
        (chat(b"3"), "invalid_value", "messages[0]"),
        (chat(USER + b',{"content":"x"}'), "missing_required_parameter", "messages[1].role"),
        (chat(b'{"role":"wizard"}'), "invalid_value", "messages[0].role"),
        (chat(b'{"role":"user","content":[{"type":"text","text":3}]}'), "invalid_value", "messages[0].content[0].text"),
        (
            chat(b'{"role":"assistant","tool_calls":[{"id":"x","type":"function","function":{"arguments":"{}"}}]}'),
            "missing_required_parameter",
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
def test_a_wrong_field_is_named(body: bytes, code: str, field: str) -> None:
    with pytest.raises(HttpError) as caught:
        CHAT.read(body)
    assert (caught.value.status, caught.value.code, caught.value.field) == (400, code, field)
    assert caught.value.message.startswith(field)
    assert len(caught.value.message) < 300


CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}, "type": "function"}
SENT_BACK: dict[str, dict[str, Any]] = {
    "openai's text": ChatCompletionMessage(role="assistant", content="hi").model_dump(),
    "openai's call": ChatCompletionMessage.model_validate({"role": "assistant", "tool_calls": [CALL]}).model_dump(),
    "a call of a stream": {"role": "assistant", "tool_calls": [{**CALL, "index": 0}], "function_call": None},
    "LiteLLM's": {"role": "assistant", "content": "hi", "provider_specific_fields": {"refusal": None}, "images": []},
    "ours": {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "hm", "tool_calls": []},
    "a refusal": {"role": "assistant", "content": None, "refusal": "I cannot."},
    "a first call": {"role": "assistant", "content": None, "function_call": CALL["function"]},
    "a call without type and id": {"role": "assistant", "content": "", "tool_calls": [{"function": CALL["function"]}]},
    "arguments as an object": {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    "no arguments": {"role": "assistant", "tool_calls": [{"id": None, "function": {"name": "f", "arguments": None}}]},
    "vLLM's": {"role": "assistant", "content": "hi", "reasoning": "hm", "stop_reason": 3},
}


@pytest.mark.parametrize("name", SENT_BACK)
def test_what_programs_send_back_is_taken(name: str) -> None:
    given = SENT_BACK[name]
    (_, message) = CHAT.read(chat(USER + b"," + json.dumps(given).encode()))["messages"]
    sent = chat_of(sdk_messages([message])).messages[0]
    assert sent.content == (given.get("content") or given.get("refusal") or "")
    assert len(sent.tool_calls) == (1 if given.get("function_call") else len(given.get("tool_calls") or ()))
    assert all((call.name, call.arguments) == ("f", "{}") for call in sent.tool_calls)
    assert (sent.reasoning == "hm") == (name in ("ours", "vLLM's"))


def test_what_cannot_change_an_answer_is_ignored() -> None:
    """Fields that say where an answer is computed, for what price, and whether it is stored have no effect."""
    user = USER.decode()
    chat_options(CHAT.read(chat(more=b',"service_tier":"priority","store":true')))
    given = '{"model":"a","input":"x","service_tier":"flex","truncation":"auto","client_metadata":{"a":1}}'
    responses_options(RESPONSE.read(given.encode()))
    given = f'{{"model":"a","max_tokens":1,"messages":[{user}],"speed":"fast","service_tier":"auto"}}'
    messages_options(MESSAGES.read(given.encode()))


ROLES: dict[str, dict[str, Any]] = {
    "user": {"content": "x", "id": "m1", "timestamp": 1, "cache_control": {"type": "ephemeral"}},
    "system": {"content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "scope": "global"}}]},
    "developer": {"content": [{"type": "text", "text": "x"}], "tools": [1]},
    "assistant": {"content": "x", "audio": {"id": "a"}, "annotations": [{"type": "url_citation"}], "name": "bot"},
    "tool": {"tool_call_id": "c", "content": "x", "name": "f", "is_error": False},
    "function": {"content": "x", "name": "f"},
}


@pytest.mark.parametrize("role", ROLES)
def test_further_fields_of_a_message_of_any_role_are_ignored(role: str) -> None:
    (message,) = CHAT.read(chat(json.dumps({"role": role, **ROLES[role]}).encode()))["messages"]
    sent = chat_of(sdk_messages([message])).messages[0]
    assert (sent.role, sent.content or sent.parts[0].text) == ("tool" if role == "function" else role, "x")
    assert (sent.name, sent.tool_call_id) == (ROLES[role].get("name", ""), ROLES[role].get("tool_call_id", ""))


@pytest.mark.parametrize(
    ("message", "code", "field"),
    [
        ({"role": "user"}, "missing_required_parameter", "content"),
        ({"role": "user", "content": None}, "missing_required_parameter", "content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
         "unsupported_parameter", "content[0].type"),
        ({"role": "tool", "content": [{"type": "text", "text": "x"}, {"type": "file"}]},
         "unsupported_parameter", "content[1].type"),
        ({"role": "user", "content": "x", "images": ["iVBOR"]}, "unsupported_parameter", "images"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]},
         "unsupported_parameter", "tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "missing_required_parameter", "tool_calls[0].function"),
    ],
)  # fmt: skip
def test_what_would_be_lost_of_a_message_is_refused_by_name(message: dict[str, Any], code: str, field: str) -> None:
    with pytest.raises(HttpError) as caught:
        sdk_messages(CHAT.read(chat(json.dumps(message).encode()))["messages"])
    assert (caught.value.code, caught.value.field) == (code, f"messages[0].{field}")
    assert caught.value.message.startswith(f"messages[0].{field}: ")


@pytest.mark.parametrize("value", [b"null", b'""', b"[]", b"{}"])
def test_an_unknown_field_that_asks_for_nothing_is_ignored(value: bytes) -> None:
    whole = b'{"model":"a","foo":%s,"messages":[{"role":"user","content":"x","foo":%s}]}' % (value, value)
    assert CHAT.read(whole) == {"model": "a", "messages": [{"role": "user", "content": "x"}]}
    for name, other in (("tempperature", b"0"), ("uses_magic", b"false")):
        with pytest.raises(HttpError, match=f"{name}: unknown parameter"):
            CHAT.read(chat(more=b',"%s":%s' % (name.encode(), other)))
    assert CHAT.read(chat(more=b',"timings_per_token":false')).keys() == {"model", "messages"}


def test_a_byte_order_mark_is_no_part_of_a_body() -> None:
    assert CHAT.read(b"\xef\xbb\xbf" + chat()).keys() == {"model", "messages"}


def test_unknown_kinds_are_told_by_the_names_of_the_protocol() -> None:
    with pytest.raises(
        HttpError, match=r"response_format\.type: 'yaml' is not one of text, json_schema, json_object, json"
    ):
        CHAT.read(chat(more=b',"response_format":{"type":"yaml"}'))


def test_an_optional_field_that_is_null_is_unset() -> None:
    assert CHAT.read(chat(more=b',"tools":null,"stop":null,"user":null')).keys() == {"model", "messages"}
    with pytest.raises(HttpError, match="model: "):
        CHAT.read(b'{"model":null,"messages":[]}')


KEYS = b",".join(b'"%d":1' % number for number in range(250_000))
HOSTILE = {
    "many fields": b"{" + KEYS + b"}",
    "many fields of a message": chat(b'{"role":"user",' + KEYS + b"}"),
    "many biases": chat(more=b',"logit_bias":{' + KEYS.replace(b":1", b':"x"') + b"}"),
    "many bad messages": chat(b",".join([b"{}"] * 1_000_000)),
    "a bad part at the end": chat(
        b'{"role":"user","content":[' + b'{"type":"text","text":""},' * 140_000 + b'{"type":"text","text":3}]}'
    ),
    "a long name": chat(more=b',"' + b"x" * 3_000_000 + b'":1'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_makes_few_errors(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each took seconds, up to half a minute, and gigabytes while there was an error for every item and branch."""
    counts: list[int] = []
    first_error = bodies._first_error

    def counted(errors: Sequence[Any]) -> HttpError:
        counts.append(len(errors))
        return first_error(errors)

    monkeypatch.setattr(bodies, "_first_error", counted)
    monkeypatch.setattr(bodies, "check_json_size", lambda body: None)
    assert len(HOSTILE[name]) <= BODY_BYTES
    with pytest.raises(HttpError) as caught:
        CHAT.read(HOSTILE[name])
    assert len(caught.value.message) < 300
    assert counts[0] < 10


# Each took a second or more of a gateway's loop, before anybody was authenticated.
LARGE = {
    "lists of one number": (b'{"model":"a","messages":[' + b"[1]," * 1_000_000 + b"1]}", "objects and lists"),
    "objects": (chat(b",".join([b"{}"] * 20_001)), "objects and lists"),
    "fields": (b"{" + KEYS + b"}", "strings"),
    "numbers": (b'{"model":"a","messages":[' + b"1," * 2_000_000 + b"1]}", "values"),
    "lists among quotes": (
        chat(b'{"role":"user","content":"\\\\\\""},' + b"[]," * 20_001 + b"[]"),
        "objects and lists",
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_body_of_very_many_values_is_not_parsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHAT, "_validator", None)
    with pytest.raises(HttpError, match=f"the body has more than [0-9]+ {LARGE[name][1]}"):
        CHAT.read(LARGE[name][0])


@pytest.mark.parametrize("character", [b"[", b"{", b",", b'\\"', b"\\\\", b'[\\",'])
def test_a_text_may_have_any_characters(character: bytes) -> None:
    text = character * (3_000_000 // len(character))
    (message,) = CHAT.read(chat(b'{"role":"user","content":"' + text + b'"}'))["messages"]
    assert len(message["content"]) > 1_000_000
