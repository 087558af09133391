"""Answers of a random model under the grammars of tools: every call is read, and its arguments are of the schema."""

from __future__ import annotations

import json
import random

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
from llguidance import LLMatcher

from artifacts.peft_config import ToolCallFormat
from grammars.matching import compile_grammar, proof_vocabulary
from grammars.prove import prove
from router.generation.chat_format import CallSyntax, tool_grammar
from router.generation.chat_reader import ChatFormat, ChatReader
from router.request import Chat, ChatMessage, Tool, ToolCallDelta, ToolMode
from rpc.errors import InvalidField

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
    "hermes": CallSyntax(ToolCallFormat.HERMES, {}),
    "hermes, thinking": CallSyntax(ToolCallFormat.HERMES, {}, False, "<think>", "</think>"),
    "hermes, in thought": CallSyntax(ToolCallFormat.HERMES, TOKEN_IDS, False, "", "</think>"),
    "llama3": CallSyntax(ToolCallFormat.LLAMA3, TOKEN_IDS),
    "llama3 without tag": CallSyntax(ToolCallFormat.LLAMA3, {}),
    "mistral": CallSyntax(ToolCallFormat.MISTRAL, TOKEN_IDS),
    "mistral, named": CallSyntax(ToolCallFormat.MISTRAL, TOKEN_IDS, True),
    "mistral in text": CallSyntax(ToolCallFormat.MISTRAL, {}, True),
}
# Beginnings that a random model does not find.
BEGINNINGS = {
    ToolCallFormat.HERMES: "So: <tool_call>",
    ToolCallFormat.LLAMA3: "{",
    ToolCallFormat.MISTRAL: "So: [TOOL_CALLS]",
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
    reasoning = ("<think>", "</think>") if syntax.ends_reasoning else None
    in_thought = bool(syntax.ends_reasoning and not syntax.begins_reasoning)
    chat_format = ChatFormat(syntax.tool_format, NAMES, reasoning, begins_in_reasoning=in_thought)
    found = 0
    for mode in (ToolMode.REQUIRED, ToolMode.AUTO):
        grammar = tool_grammar(chat(mode, parallel_tool_calls=several), syntax)
        for _ in range(6):
            beginning = "Hm. </think>\n\n" if in_thought else ""
            beginning += BEGINNINGS[syntax.tool_format] if mode is ToolMode.AUTO else ""
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
    grammar = tool_grammar(chat(tool_name="now"), SYNTAXES["hermes"])
    text, ended = answer(grammar, random.Random(1), [], 200)
    assert ended
    assert text == '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def test_text_without_calls_stays_free() -> None:
    for syntax in SYNTAXES.values():
        grammar = tool_grammar(chat(ToolMode.AUTO), syntax)
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
def test_a_schema_that_can_t_be_enforced_is_refused_by_its_path(parameters: str, field: str) -> None:
    for mode in (ToolMode.AUTO, ToolMode.REQUIRED):
        with pytest.raises(InvalidField) as caught:
            tool_grammar(chat(mode, (Tool("f"), Tool("g", "", parameters))), SYNTAXES["hermes"])
        assert caught.value.field == field


def test_a_schema_that_does_not_compile_is_named_by_its_tool() -> None:
    bad = '{"type": "object", "properties": {"b": {"type": "string", "pattern": "("}}}'
    for name, syntax in SYNTAXES.items():
        grammar = tool_grammar(chat(tools=(*TOOLS, Tool("bad", "", bad))), syntax)
        found = prove(VOCABULARY, grammar)
        assert found == {"path": f"[{len(TOOLS)}].parameters.properties.b", "error": "unclosed group"}, name
