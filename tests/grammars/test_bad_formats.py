"""Formats that are refused: each with the path of what is at fault, and without harm to the next one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loraplex.contracts.grammars import GrammarError
from loraplex.contracts.grammars.build import choices_grammar, json_grammar, lark_grammar, regex_grammar
from loraplex.contracts.grammars.prover import Prover


@pytest.fixture(scope="module")
def prover() -> Iterator[Prover]:
    prover = Prover(500, {300: "<|tool|>"})
    yield prover
    prover.close()


def properties(**schemas: Any) -> dict[str, Any]:
    return {"type": "object", "properties": schemas, "required": list(schemas)}


def nested(levels: int) -> Any:
    return properties(a=nested(levels - 1)) if levels else {"type": "null"}


TREE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
BAD = {"type": "array", "items": {"type": "string", "pattern": "("}}
BAD_SCHEMAS: list[tuple[Any, str]] = [
    (properties(email={"format": "idn-email"}), "properties.email.format: 'idn-email' is not enforced here"),
    (properties(a={"not": {"type": "null"}}), "properties.a.not: is not enforced here"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems: is not enforced here"),
    ({"x-guidance": {"lenient": True}}, "x-guidance: is not enforced here"),
    ({"type": "object", "minProperties": 2}, "minProperties: 2 is enforced only up to"),
    ({"type": "integer", "minimum": 2**53 + 1}, "minimum: 9007199254740993 is beyond 2.53"),
    ({"enum": [2**60]}, "enum: .* is beyond 2.53"),
    ({"type": "integer", "minimum": "3"}, "minimum: is not a number"),
    ({"type": "string", "maxLength": -1}, "maxLength: -1 is not a whole number"),
    ({"type": "strings"}, "type: 'strings' is not one of"),
    ({"anyOf": []}, "anyOf: is not a list of schemas"),
    (properties(a=3), "properties.a: is not a schema"),
    # References that lead nowhere, out of the schema, or to what is not checked.
    (properties(a={"$ref": "#/$defs/a"}), r"properties.a.\$ref: '#/\$defs/a' is no part"),
    ({"$ref": "https://example.com/a.json"}, r"\$ref: 'https://example.com/a.json' is no part"),
    ({"default": {"format": "idn-email"}, "$ref": "#/default"}, r"\$ref: '#/default' is no part"),
    # Recursive without end.
    (TREE, "json_schema: has no value that comes to an end"),
    ({"$ref": "#"}, "json_schema: has no value that comes to an end"),
    ({"$defs": {"t": TREE | {"required": []}, "u": {"allOf": [{"$ref": "#/$defs/u"}]}}}, r"\$defs.u: has no value"),
    # Contradictory.
    (properties(n={"type": "integer", "minimum": 5, "maximum": 3}), "properties.n: Unsatisfiable .* greater than"),
    (
        properties(s={"type": "string", "pattern": "^a$", "minLength": 5}),
        "properties.s: Unsatisfiable schema: no text has its pattern, format and length at once",
    ),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "json_schema: Unsatisfiable schema: incompatible types"),
    # Regexes that need more than a finite automaton.
    (properties(s={"type": "string", "pattern": "(?=a)b"}), r"properties.s.pattern: \(\?= is not enforced here"),
    (properties(s={"type": "string", "pattern": r"\bword"}), r"properties.s.pattern: \\b is not enforced here"),
    # A fault among hundreds of parts, of which compiling each alone would take too long.
    (
        properties(
            **{f"p{i}": {"type": "array", "items": {"type": "string", "maxLength": i}} for i in range(600)}, z=BAD
        ),
        "properties.z.items: unclosed group",
    ),
    # Its parts are read as the older draft says.
    ({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{}, {"pattern": "("}]}, r"items\[1\]: unclosed"),
    (
        properties(a={"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        "properties.a: oneOf: its schemas are not seen",
    ),
    # Huge.
    (nested(40), "json_schema: is nested too deeply"),
    ({"enum": [1] * 12_000}, "json_schema: has more than 10000 parts"),
    (properties(a={"type": "object", "properties": {f"p{i}": {} for i in range(600)}}), "allows too much at one place"),
    ({"description": "x" * 70_000}, "json_schema: 70019 bytes; at most 65536"),
    (
        {"allOf": [{"anyOf": [properties(**{f"a{i}{j}": {}}) for j in range(8)]} for i in range(6)]},
        "json_schema: .*(too large|takes more than)",
    ),
]
BAD_OTHERS: list[tuple[Callable[[Any], str], Any, str]] = [
    (json_grammar, '{"type": "object", "type": "array"}', "json_schema: .*'type' is given twice"),
    (json_grammar, '{"minimum": NaN}', "json_schema: .*NaN"),
    (json_grammar, '{"properties": {"\\ud800": {"not": {}}}}', "json_schema: holds half of a surrogate pair"),
    (json_grammar, "[1]", "json_schema: is not a JSON object"),
    (regex_grammar, "", "regex: is empty"),
    (regex_grammar, r"[^\s\S]", "regex: accepts nothing"),
    (regex_grammar, "(a", "regex: unclosed group"),
    (regex_grammar, r"(a)\1", "regex: backreferences are not supported"),
    (regex_grammar, "(" * 9_000 + "a" + ")" * 9_000, "regex: exceed"),
    (choices_grammar, [], "choices.values: 0 choices"),
    (choices_grammar, ["a", ""], r"choices.values\[1\]: is empty"),
    (choices_grammar, ["a"] * 1_001, "choices.values: 1001 choices"),
    (lark_grammar, 'start: "a" start', "grammar: rule 'start' has no text that comes to an end"),
    (lark_grammar, 'start: "b" | other\nother: "(" other ")"', "grammar: rule 'other' has no text"),
    (lark_grammar, "start: undefined", 'grammar: unknown name: "undefined"'),
    (lark_grammar, "start: <|unknown|>", "grammar: unknown special token"),
    (lark_grammar, 'begin: "a"', "grammar: no start rule"),
    (lark_grammar, 'start: x\nx[temperature=0.3]: "a"', "grammar: the attribute temperature is not obeyed"),
    (lark_grammar, '%llguidance {"no_forcing": false}\nstart: "a"', "grammar: %llguidance is not obeyed"),
    (lark_grammar, 'start: %json {"format": "idn-email"}', r"grammar.json\[0\].format: 'idn-email'"),
    (
        lark_grammar,
        'start: a b\na: %json {"type": "string"}\nb: %json {"items": {"pattern": "("}}',
        r"grammar.json\[1\].items: unclosed group",
    ),
    (lark_grammar, "start: %json [1]", "grammar: holds no JSON object"),
]


@pytest.mark.parametrize(("schema", "refusal"), BAD_SCHEMAS)
def test_a_bad_schema_is_refused_by_its_path(prover: Prover, schema: Any, refusal: str) -> None:
    with pytest.raises(GrammarError, match=refusal):
        prover.prove(json_grammar(json.dumps(schema)), "json_schema")


@pytest.mark.parametrize(("build", "value", "refusal"), BAD_OTHERS)
def test_a_bad_format_is_refused(prover: Prover, build: Callable[[Any], str], value: Any, refusal: str) -> None:
    with pytest.raises(GrammarError, match=refusal) as refused:
        prover.prove(build(value), refused_field(build))
    assert refused.value.path


def refused_field(build: Callable[[Any], str]) -> str:
    return {json_grammar: "json_schema", regex_grammar: "regex", lark_grammar: "grammar"}.get(build, "choices.values")


@pytest.mark.parametrize(
    "grammar",
    [
        regex_grammar(r"(a{1000}){1000}"),
        regex_grammar(r"(a|aa)+$"),
        regex_grammar(r"(.{0,1000}){0,1000}a"),
        regex_grammar(r"(a|b)*a(a|b){20}"),
        json_grammar('{"type": "array", "items": {"type": "string", "maxLength": 10000}, "minItems": 1000}'),
    ],
)
def test_what_other_engines_choke_on_is_proven(prover: Prover, grammar: str) -> None:
    prover.prove(grammar)


def test_a_grammar_that_kills_the_child_is_refused_and_the_next_one_is_proven() -> None:
    prover = Prover(500, {}, cpu_s=0.3)
    try:
        prover.prove(regex_grammar("a"))
        assert prover._child is not None
        first = prover._child.pid
        prover._cpu_s = 0.001
        prover._end()
        with pytest.raises(GrammarError, match=r"regex: takes more than 0\.001 s"):
            prover.prove(regex_grammar("|".join(f"word{number}" for number in range(6_000))), "regex")
        prover._cpu_s = 1.0
        prover.prove(regex_grammar("b"))
        assert prover._child.pid != first
    finally:
        prover.close()
    assert prover._child is None


def test_a_refusal_is_short_whatever_it_repeats() -> None:
    long = "x" * 30_000
    for schema in (properties(**{long: {"not": {}}}), {"$ref": f"#/{long}"}, {"type": long}, {"format": long}):
        with pytest.raises(GrammarError) as refused:
            json_grammar(json.dumps(schema))
        assert len(str(refused.value)) < 1_000


def test_a_known_grammar_does_not_wait_for_the_proof_of_another(prover: Prover) -> None:
    grammar = regex_grammar("known")
    prover.prove(grammar)
    with prover._lock:
        prover.prove(grammar)
