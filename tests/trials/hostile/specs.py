"""Hostile requests of the inference service: values out of range, formats, chats, resume tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from loraplex.inference.v1 import inference_pb2 as pb

from tests.trials.hostile.cases import INFERENCE, Case

_SURROGATE = '"\\ud800"'
_DEEP = "[" * 5_000 + "]" * 5_000
NAN, INFINITY = float("nan"), float("inf")

# Chat templates of adapters, by the adapters' names.
TEMPLATES = {
    "power": "{{ (9**(9**9)) % 10 }}",
    "loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "text": "{{ 'x' * 99999999999 }}",
    "nesting": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "syntax": "{% for",
    "surrogate": "{{ '\\ud800' }}",
    "raise": "{{ raise_exception('a\nb') }}",
}
_USER = pb.ChatMessage(role="user", content="x")


def _tool(parameters: str = "", name: str = "f") -> pb.Tool:
    return pb.Tool(name=name, parameters=parameters)


def _specs() -> dict[str, dict[str, Any]]:
    """Return the fields of bad specs by their names; they take a second to make, too long for an import."""
    return {
        "no input": {"prompt": ""},
        "a prompt of 3 MB": {"prompt": "x" * 3_000_000},
        "ids beyond the vocabulary": {"token_ids": pb.TokenIds(ids=[2**32 - 1])},
        "a million ids": {"token_ids": pb.TokenIds(ids=[1] * 1_000_000)},
        "an unknown model": {"model": "../hash"},
        "temperature NaN": {"sampling": pb.Sampling(temperature=NAN)},
        "temperature infinite": {"sampling": pb.Sampling(temperature=INFINITY)},
        "top_p below 0": {"sampling": pb.Sampling(top_p=-1)},
        "penalty NaN": {"sampling": pb.Sampling(repetition_penalty=NAN)},
        "penalty 0": {"sampling": pb.Sampling(repetition_penalty=0)},
        "a thousand biases": {"sampling": pb.Sampling(logit_bias=dict.fromkeys(range(1_000), 1.0))},
        "a bias of NaN": {"sampling": pb.Sampling(logit_bias={1: NAN})},
        "a bias beyond the vocabulary": {"sampling": pb.Sampling(logit_bias={2**32 - 1: 1.0})},
        "four billion tokens": {"stopping": pb.Stopping(max_tokens=2**32 - 1)},
        "more tokens at least than at most": {"stopping": pb.Stopping(max_tokens=1, min_tokens=2)},
        "a hundred thousand stops": {"stopping": pb.Stopping(stop=["x"] * 100_000)},
        "an empty stop": {"stopping": pb.Stopping(stop=[""])},
        "a thousand answers": {"output": pb.Output(n=1_000)},
        "four billion candidates": {"output": pb.Output(best_of=2**32 - 1)},
        "four billion logprobs": {"output": pb.Output(logprobs=2**32 - 1)},
        "messages of four billion tokens": {"output": pb.Output(stream_interval=2**32 - 1)},
        "priority": {"priority": 2**31 - 1},
        "a request id of lines": {"request_id": "a\nb\x1b[2J"},
        "a long request id": {"request_id": "a" * 100_000},
        "a set of a thousand": {"adapters": [pb.WeightedAdapter(adapter=f"a{i}", weight=1) for i in range(1_000)]},
        "a weight of NaN": {"adapters": [pb.WeightedAdapter(adapter="a", weight=NAN)]},
        "a weight of infinity": {"adapters": [pb.WeightedAdapter(adapter="a", weight=INFINITY)]},
        "the same adapter twice": {"adapters": [pb.WeightedAdapter(adapter="a", weight=1)] * 2},
        "a truncation of four billion": {"prompt_options": pb.PromptOptions(truncate_to=2**32 - 1), "served": True},
        "no schema": {"json_schema": "x"},
        "a schema of lists": {"json_schema": "[]"},
        "a schema that is a surrogate": {"json_schema": f'{{"const": {_SURROGATE}}}'},
        "a key that is a surrogate": {"json_schema": f'{{"properties": {{{_SURROGATE}: {{}}}}}}'},
        "a title that is a surrogate": {"json_schema": f'{{"title": {_SURROGATE}, "type": "null"}}', "served": True},
        "a pattern that is a surrogate": {"json_schema": f'{{"type": "string", "pattern": {_SURROGATE}}}'},
        "a deep schema": {"json_schema": f'{{"enum": {_DEEP}}}'},
        "schemas in schemas": {"json_schema": '{"items":' * 2_000 + "{}" + "}" * 2_000},
        "a schema that refers to itself": {"json_schema": '{"$ref": "#"}'},
        "references in a circle": {
            "json_schema": '{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}'
        },
        "a reference elsewhere": {"json_schema": '{"$ref": "file:///etc/passwd"}'},
        "all of everything": {
            "json_schema": json.dumps({"allOf": [{"anyOf": [{"minLength": i} for i in range(100)]}] * 100})
        },
        "fifty thousand values": {
            "json_schema": json.dumps({"enum": [f"{i:x}" * 8 for i in range(50_000)]}),
            "served": True,
        },
        "a billion letters": {"json_schema": '{"type": "string", "minLength": 1000000000}', "served": True},
        "a number of a million digits": {"json_schema": '{"const": ' + "9" * 1_000_000 + "}"},
        "NaN": {"json_schema": '{"const": NaN}'},
        "a pattern of quantifiers": {
            "json_schema": '{"type": "string", "pattern": "((a{1,99}){1,99}){1,99}"}',
            "served": True,
        },
        "a pattern that looks behind": {"json_schema": '{"type": "string", "pattern": "(?<=a)b"}'},
        "no regex": {"regex": "("},
        "a regex that explodes": {"regex": "(((a{0,99}){0,99}){0,99}){0,99}", "served": True},
        "a regex of alternatives": {"regex": "(a|b|ab)*" * 5_000},
        "a regex of groups": {"regex": "(" * 30_000 + ")" * 30_000},
        "a regex of classes": {"regex": r"[\p{L}--a]" * 5_000, "served": True},
        "no grammar": {"grammar": "start"},
        "a grammar of itself": {"grammar": "start: start"},
        "an ambiguous grammar": {"grammar": 'start: start start | "a" | ""', "served": True},
        "a grammar of rules": {"grammar": "start: " + " | ".join(f'"{i}" start' for i in range(4_000)), "served": True},
        "no choices": {"choices": pb.Choices()},
        "an empty choice": {"choices": pb.Choices(values=[""])},
        "a hundred thousand choices": {"choices": pb.Choices(values=[str(i) for i in range(100_000)])},
    }


def _chats() -> dict[str, dict[str, Any]]:
    """Return the fields of bad chats by their names."""
    return {
        "no messages": {"messages": []},
        "a hundred thousand messages": {"messages": [_USER] * 100_000},
        "two million parts": {"messages": [pb.ChatMessage(role="user", parts=[pb.ContentPart()] * 2_000_000)]},
        "a role of lines": {"messages": [pb.ChatMessage(role="user\n{{", content="x")]},
        "content twice": {"messages": [pb.ChatMessage(role="user", content="x", parts=[pb.ContentPart(text="y")])]},
        "a part of another type": {"messages": [pb.ChatMessage(role="user", parts=[pb.ContentPart(type="image_url")])]},
        "arguments that are no JSON": {"messages": [_USER], "template_args": "{"},
        "arguments that are a surrogate": {
            "messages": [_USER],
            "template_args": f'{{"a": {_SURROGATE}}}',
            "served": True,
        },
        "deep arguments": {"messages": [_USER], "template_args": f'{{"a": {_DEEP}}}'},
        "arguments that are messages": {"messages": [_USER], "template_args": '{"messages": []}'},
        "arguments of a megabyte": {"messages": [_USER], "template_args": f'{{"a": "{"x" * 1_000_000}"}}'},
        "a tool without a name": {"messages": [_USER], "tools": [_tool(name="")]},
        "a tool with a bad name": {"messages": [_USER], "tools": [_tool(name="a b")]},
        "a thousand tools": {"messages": [_USER], "tools": [_tool(name=f"f{i}") for i in range(1_000)]},
        "the same tool twice": {"messages": [_USER], "tools": [_tool(), _tool()]},
        "parameters that are no JSON": {"messages": [_USER], "tools": [_tool("{")]},
        "parameters that are a list": {"messages": [_USER], "tools": [_tool("[]")]},
        "parameters with a surrogate": {
            "messages": [_USER],
            "tools": [_tool(f'{{"title": {_SURROGATE}}}')],
            "served": True,
        },
        "deep parameters": {"messages": [_USER], "tools": [_tool(f'{{"enum": {_DEEP}}}')]},
        "a tool that is not there": {"messages": [_USER], "tools": [_tool()], "tool_choice": pb.ToolChoice(name="g")},
        "calls without tools": {"messages": [_USER], "tool_choice": pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)},
        "a call that is no JSON": {
            "messages": [_USER, pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f", arguments="{")])],
            "served": True,  # the template of the hash model shows no calls
        },
        "a user that is continued": {"messages": [_USER], "continue_final_message": True},
    }


def _request(spec: pb.GenerateSpec) -> bytes:
    return pb.GenerateRequest(spec=spec).SerializeToString()


def bad_specs() -> Iterator[Case]:
    """Yield requests of Generate, and tokens and ids of other methods."""
    for name, values in _specs().items():
        fields: dict[str, Any] = {"prompt": "x", "stopping": pb.Stopping(max_tokens=4)} | values
        served = bool(fields.pop("served", False))
        if "token_ids" in fields:
            del fields["prompt"]
        yield Case(name, f"{INFERENCE}Generate", (_request(pb.GenerateSpec(**fields)),), served)
    for name, values in _chats().items():
        fields = dict(values)
        served = bool(fields.pop("served", False))
        spec = pb.GenerateSpec(chat=pb.Chat(**fields), stopping=pb.Stopping(max_tokens=4))
        yield Case(f"chat: {name}", f"{INFERENCE}Generate", (_request(spec),), served)
    for name in TEMPLATES:
        spec = pb.GenerateSpec(chat=pb.Chat(messages=[_USER]), adapter=name, stopping=pb.Stopping(max_tokens=4))
        yield Case(
            f"template: {name}", f"{INFERENCE}Generate", (_request(spec),), served=name in {"surrogate", "escape"}
        )
    yield Case("no spec", f"{INFERENCE}Generate", (b"",))
    yield Case("no message", f"{INFERENCE}Generate", ())
    for token in ("", "x", "A" * 100_000, "é", "AAAA.AAAA", "a" * 500 + "." + "b" * 43):
        spec = pb.GenerateSpec(prompt="x")
        resumed = pb.ResumeRequest(spec=spec, resume_token=token, received=[pb.ReceivedTokens(token_ids=[1] * 9)])
        yield Case(f"resume token {token[:6]!r}", f"{INFERENCE}Resume", (resumed.SerializeToString(),))
    received = [pb.ReceivedTokens(choice=choice, token_ids=[1] * 200_000) for choice in range(16)]
    resumed = pb.ResumeRequest(spec=pb.GenerateSpec(prompt="x"), resume_token="x", received=received)
    yield Case("3 million received ids", f"{INFERENCE}Resume", (resumed.SerializeToString(),))
    ids = pb.DetokenizeRequest(token_ids=[2**32 - 1])
    yield Case("ids of no text", f"{INFERENCE}Detokenize", (ids.SerializeToString(),))
    ids = pb.DetokenizeRequest(token_ids=[1] * 1_000_000)
    yield Case("a million ids of a text", f"{INFERENCE}Detokenize", (ids.SerializeToString(),))
