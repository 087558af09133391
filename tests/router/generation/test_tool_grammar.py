"""Answers of a random model under the grammars of tools: every call is read, and its arguments are of the schema."""

from __future__ import annotations

import json
import random

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
from llguidance import LLMatcher

from loraplex.contracts.artifacts.chat_formats import CALLS
from loraplex.contracts.grammars.matching import compile_grammar, proof_vocabulary
from loraplex.contracts.grammars.prove import prove
from loraplex.router.generation.chat_format import CallGrammar, CallSyntax
from loraplex.router.generation.chat_reader import ChatFormat, ChatReader
from loraplex.router.request import Chat, ChatMessage, Tool, ToolCallDelta, ToolMode
from loraplex.runtime.rpc.errors import InvalidField
from loraplex.tool_calls import free_parts, tool_grammar
from tests.router.generation.test_chat_reader import THINK

SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "days": {"type": "integer", "minimum": 1, "maximum": 30},
            "units": {"enum": ["°C", "<tool_call>"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "order": {
        "type": "object",
        "properties": {
            "lines": {
                "type": "array",
                "items": {"$ref": "#/$defs/line"},
                "minItems": 1,
                "maxItems": 2,
            }
        },
        "required": ["lines"],
        "additionalProperties": False,
        "$defs": {"line": {"type": "object", "properties": {"sku": {"type": "string", "pattern": "^[A-Z]{2}$"}},
                           "required": ["sku"], "additionalProperties": False}},
    },
}  # fmt: skip
TOOLS = (*(Tool(name, "", json.dumps(schema)) for name, schema in SCHEMAS.items()), Tool("now"))
SPECIAL = {260: "<think>", 261: "</think>", 262: "[TOOL_CALLS]", 263: "[ARGS]", 264: "<|python_tag|>"}
TOKEN_IDS = {text: token_id for token_id, text in SPECIAL.items()}
VOCABULARY = proof_vocabulary(300, SPECIAL)
NAMES = frozenset(tool.name for tool in TOOLS)
SYNTAXES = {
    "hermes": CallSyntax(CALLS["hermes"], {}),
    "hermes, thinking": CallSyntax(CALLS["hermes"], {}, "<think>", "</think>"),
    "hermes, in thought": CallSyntax(CALLS["hermes"], TOKEN_IDS, "", "</think>"),
    "llama3": CallSyntax(CALLS["llama3"], TOKEN_IDS),
    "llama3 without tag": CallSyntax(CALLS["llama3"], {}),
    "mistral": CallSyntax(CALLS["mistral"], TOKEN_IDS),
    "mistral, named": CallSyntax(CALLS["mistral_args"], TOKEN_IDS),
    "mistral in text": CallSyntax(CALLS["mistral_args"], {}),
}
# Beginnings that a random model does not find.
BEGINNINGS = {
    "hermes": "So: <tool_call>",
    "llama3": "{",
    "mistral": "So: [TOOL_CALLS]",
    "mistral_args": "So: [TOOL_CALLS]",
}


def chat(mode: ToolMode = ToolMode.REQUIRED, tools: tuple[Tool, ...] = TOOLS, **fields: object) -> Chat:
    return Chat((ChatMessage("user", "x"),), tools, mode, **fields)  # type: ignore[arg-type]


def ids_of(text: str, syntax: CallSyntax) -> list[int]:
    """Return the tokens of a text: its special tokens, and bytes."""
    for mark, token_id in syntax.token_ids.items():
        before, found, after = text.partition(mark)
        if found:
            return [*ids_of(before, syntax), token_id, *ids_of(after, syntax)]
    return list(text.encode())


def answer(grammar: str, rng: random.Random, beginning: list[int], steps: int) -> tuple[str, bool]:
    """Return the text that random tokens make under a grammar, and whether it has ended."""
    matcher: LLMatcher = compile_grammar(VOCABULARY, grammar)
    data = bytearray()
    for step in range(steps):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if matcher.is_stopped() or (matcher.is_accepting() and step >= 40):
            return data.decode(errors="replace"), True
        token_id = beginning[step] if step < len(beginning) else int(rng.choice(allowed))
        assert token_id in allowed
        matcher.consume_token(token_id)
        data += SPECIAL.get(token_id, "").encode() if token_id >= 256 else bytes([token_id])
    return data.decode(errors="replace"), False


def calls_of(parts: list[ToolCallDelta]) -> list[tuple[str, str]]:
    calls: dict[int, tuple[str, str]] = {}
    for part in parts:
        name, arguments = calls.get(part.index, (part.name, ""))
        calls[part.index] = (name, arguments + part.arguments)
    return list(calls.values())


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        assert name in NAMES
        jsonschema.validate(json.loads(arguments), SCHEMAS.get(name, {"type": "object", "maxProperties": 0}))


@pytest.mark.parametrize("name", SYNTAXES)
@pytest.mark.parametrize("several", [False, True])
def test_every_call_of_a_random_model_parses(name: str, several: bool) -> None:
    syntax = SYNTAXES[name]
    seed = 5
    print(f"seed {seed}")
    rng = random.Random(seed)
    assert syntax.calls is not None
    reasoning = THINK if syntax.ends_reasoning else None
    in_thought = bool(syntax.ends_reasoning and not syntax.begins_reasoning)
    chat_format = ChatFormat(syntax.calls, {name: {} for name in NAMES}, reasoning, begins_in_reasoning=in_thought)
    found = 0
    for mode in (ToolMode.REQUIRED, ToolMode.AUTO):
        grammar = tool_grammar(chat(mode, parallel_tool_calls=several), syntax).text
        for _ in range(6):
            beginning = "Hm. </think>\n\n" if in_thought else ""
            beginning += BEGINNINGS[syntax.calls.name] if mode is ToolMode.AUTO else ""
            text, ended = answer(grammar, rng, ids_of(beginning, syntax), 600)
            reader = ChatReader(chat_format)
            parts = reader.feed(text)
            rest = reader.finish()
            calls = calls_of([*parts.tool_calls, *rest.tool_calls])
            if not ended:  # in a thought, or in calls and texts without an end
                calls = calls[:-1]
            elif mode is ToolMode.REQUIRED:
                assert calls
                assert parts.text + rest.text == ""
            assert several or len(calls) <= 1
            check(calls)
            found += len(calls)
    assert found >= 4


def test_a_named_tool_is_called_once() -> None:
    grammar = tool_grammar(chat(tool_name="now"), SYNTAXES["hermes"]).text
    text, ended = answer(grammar, random.Random(1), [], 200)
    assert ended
    assert text == '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def test_text_without_calls_stays_free() -> None:
    for syntax in SYNTAXES.values():
        grammar = tool_grammar(chat(ToolMode.AUTO), syntax).text
        beginning = "Hm. </think>" if syntax.ends_reasoning and not syntax.begins_reasoning else ""
        text = f'{beginning}See [TOOL {{"name": "now"}} or <tool'
        found, _ = answer(grammar, random.Random(1), ids_of(text, syntax), len(text) + 20)
        assert found.startswith(text)


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ("{", "chat.tools[1].parameters"),
        ('{"type": "array"}', "chat.tools[1].parameters.type"),
        (
            '{"properties": {"a": {"type": "string", "format": "no-such"}}}',
            "chat.tools[1].parameters.properties.a.format",
        ),
    ],
)
def test_a_strict_schema_that_can_t_be_enforced_is_refused_by_its_path(parameters: str, field: str) -> None:
    for mode in (ToolMode.AUTO, ToolMode.REQUIRED):
        with pytest.raises(InvalidField) as caught:
            tool_grammar(chat(mode, (Tool("f"), Tool("g", "", parameters, strict=True))), SYNTAXES["hermes"])
        assert caught.value.field == field


def schema_of(**properties: object) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": list(properties)}


TEXT = {"type": "string"}
# Schemas of servers with keywords that are not enforced, and a value of `a` that the rest of the schema forbids.
LOOSE = {
    "uniqueItems": (schema_of(a={"type": "array", "items": TEXT, "uniqueItems": True}), [1]),
    "format": (schema_of(a={**TEXT, "format": "uri-reference"}), 1),
    "not": (schema_of(a={**TEXT, "not": {"const": ""}}), 1),
    "if": (schema_of(a=TEXT) | {"if": {"required": ["b"]}, "then": {"required": ["c"]}}, 1),
    "look-around": (schema_of(a={**TEXT, "pattern": "^(?!x)"}), 1),
    "int64": (schema_of(a={"type": "integer", "maximum": 2**63 - 1}), "1"),
    "oneOf": (schema_of(a={"oneOf": [{"type": "integer"}, {"type": "number"}]}), "1"),
    "oneOf of required": (schema_of(a=TEXT) | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, 1),
    "propertyNames": (schema_of(a={"type": "object", "propertyNames": {"enum": ["x"]}}), 1),
    "required of draft 3": (schema_of(a={**TEXT, "required": True}), 1),
    "empty enum": (schema_of(a={**TEXT, "enum": []}), 1),
    "$ref": (schema_of(a=TEXT, b={"$ref": "https://example.com/b.json"}), 1),
    "$id": (schema_of(a=TEXT) | {"$id": "http://[bad"}, 1),
    "bad pattern": (schema_of(a=TEXT, b={**TEXT, "pattern": "("}), 1),
    "contradiction": (schema_of(a=TEXT, b={"type": "integer", "minimum": 5, "maximum": 3}), 1),
    "no schema": (schema_of(a=TEXT, b="text"), 1),
}
# Those that have nothing that must not be.
ENFORCED = {
    "nullable": schema_of(a={**TEXT, "enum": ["x"], "nullable": True}),
    "uniqueItems": schema_of(a={"type": "array", "items": TEXT, "uniqueItems": False}),
    "null": schema_of(a={**TEXT, "enum": None, "pattern": None, "minLength": None}),
    "x-": schema_of(a={**TEXT, "x-order": 1, "example": "x"}),
    "enum without type": schema_of(a={"enum": ["x", 1, None]}),
    "definitions": schema_of(a={"$ref": "#/definitions/a"}) | {"definitions": {"a": TEXT}},
    "discriminator": schema_of(
        a={
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": n}}, "required": ["k"], "additionalProperties": False}
                for n in "bc"
            ],
            "discriminator": {"propertyName": "k"},
        }
    ),
}


def proven(tools: tuple[Tool, ...]) -> CallGrammar:
    """Return the grammar of chats that must call one of these tools, as admission makes it."""
    asked, free = chat(tools=tools), frozenset[str]()
    for _ in range(40):
        calls = tool_grammar(asked, SYNTAXES["hermes"], free=free)
        found = prove(VOCABULARY, calls.text)
        if not found:
            return calls
        free = free_parts(asked, calls.free, InvalidField(f"chat.tools{found['path']}", found["error"]))
    raise AssertionError("every try frees a part more")


def takes(grammar: str, text: str) -> bool:
    matcher = compile_grammar(VOCABULARY, grammar)
    return bool(matcher.consume_tokens(list(text.encode())) and not matcher.is_error())


def call_of(name: str, arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.parametrize("name", LOOSE)
def test_what_cannot_be_enforced_of_a_schema_is_left_out(name: str) -> None:
    schema, wrong = LOOSE[name]
    calls = proven((Tool("f", "", json.dumps(schema)), *TOOLS))
    assert calls.not_enforced
    assert all(path.startswith("chat.tools[0].parameters.") for path in calls.not_enforced)
    assert not takes(calls.text, call_of("f", {"a": wrong}))
    with pytest.raises(InvalidField, match=r"chat.tools\[0\].parameters"):
        proven((Tool("f", "", json.dumps(schema), strict=True), *TOOLS))


@pytest.mark.parametrize("name", ENFORCED)
def test_keywords_without_effect_are_none_that_is_left_out(name: str) -> None:
    for strict in (False, True):
        assert not proven((Tool("f", "", json.dumps(ENFORCED[name]), strict),)).not_enforced


def test_arguments_are_any_object_where_nothing_of_a_schema_can_be_enforced() -> None:
    endless = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    large = {"type": "object", "properties": {f"p{i}": {"enum": [f"{i} {j}" for j in range(101)]} for i in range(101)}}
    for schema in ({"type": "array"}, {"type": "any"}, endless, large):
        calls = proven((Tool("f", "", json.dumps(schema)), *TOOLS))
        assert takes(calls.text, call_of("f", {"a": [1, {"b": None}]}))
        assert calls.not_enforced[0].startswith("chat.tools[0].parameters")
        assert not takes(calls.text, call_of("weather", {"a": 1}))


def test_null_is_allowed_where_openapi_says_so() -> None:
    calls = proven((Tool("f", "", json.dumps(ENFORCED["nullable"])),))
    assert [takes(calls.text, call_of("f", {"a": value})) for value in ("x", None, "y")] == [True, True, False]


def test_the_largest_schemas_are_left_out_where_all_of_them_are_too_much() -> None:
    schema = json.dumps(schema_of(**{f"p{i}": {"type": "string", "format": "uri"} for i in range(20)}))
    tools = tuple(Tool(f"f{i}", "", schema) for i in range(60))
    calls = proven((*TOOLS, *tools))
    assert not takes(calls.text, call_of("weather", {"a": 1}))
    assert takes(calls.text, call_of("f0", {"a": 1}))


def test_a_schema_that_does_not_compile_is_named_by_its_tool() -> None:
    bad = '{"type": "object", "properties": {"b": {"type": "string", "pattern": "("}}}'
    for name, syntax in SYNTAXES.items():
        grammar = tool_grammar(chat(tools=(*TOOLS, Tool("bad", "", bad))), syntax).text
        found = prove(VOCABULARY, grammar)
        assert found == {"path": f"[{len(TOOLS)}].parameters.properties.b", "error": "unclosed group"}, name
