"""Grammars accept what their formats mean, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from loraplex.contracts.grammars.build import choices_grammar, json_grammar, lark_grammar, regex_grammar
from loraplex.contracts.grammars.json_schema import JsonStyle, Whitespace
from loraplex.contracts.grammars.matching import compile_grammar, proof_vocabulary


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return proof_vocabulary(300, {})


def accepts(vocabulary: LLTokenizer, grammar: str, text: str) -> bool:
    matcher = compile_grammar(vocabulary, grammar)
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


# Texts that are of a format, and texts that are not.
FORMATS: dict[str, tuple[list[str], list[str]]] = {
    "date": (["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2024-04-31", "0000-01-01"]),
    "time": (["23:59:60Z", "12:00:00.5+23:59"], ["12:00:60Z", "24:00:00Z", "12:00:00", "12:00:00+24:00"]),
    "date-time": (["2024-02-29T01:02:03z"], ["2024-02-30T01:02:03Z", "2024-02-29 01:02:03Z"]),
    "duration": (["P1Y2M3DT4H5M6S", "PT0S", "P2W"], ["P", "PT", "P1YT", "P1Y2W", "P1D2H", "P1Y1D"]),
    "email": (["a.b+c@example.org"], [".a@example.org", "a..b@c", "a@-b.de", "a"]),
    "hostname": (["example.org", "a", "x-y.z", "a-b-c"], ["-a", "a-", "xn--a", "a..b", "a_b", "a" * 64, "a."]),
    "ipv4": (["0.0.0.0", "255.249.199.99"], ["256.0.0.1", "01.2.3.4", "1.2.3"]),
    "ipv6": (["::", "1::", "::1", "1:2:3:4:5:6:7:8", "a::b:c"], [":", "1::2::3", "12345::", "1:2:3:4:5:6:7", "1:::2"]),
    "uuid": (["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98"]),
    "uri": (["http://a.b/c?d=e#f", "urn:x:y", "mailto:a@b"], ["//a", "a b:c", "http://a b", "http://a/%zz", "no"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_accepts_its_texts_alone(vocabulary: LLTokenizer, name: str) -> None:
    grammar = json_grammar(json.dumps({"type": "string", "format": name}))
    good, bad = FORMATS[name]
    assert [text for text in good if not accepts(vocabulary, grammar, json.dumps(text))] == []
    assert [text for text in bad if accepts(vocabulary, grammar, json.dumps(text))] == []


def test_a_format_and_a_pattern_hold_both(vocabulary: LLTokenizer) -> None:
    grammar = json_grammar(json.dumps({"type": "string", "format": "date", "pattern": "^2024"}))
    assert accepts(vocabulary, grammar, '"2024-01-01"')
    assert not accepts(vocabulary, grammar, '"2023-01-01"')


def test_a_byte_order_mark_is_a_space_of_a_pattern(vocabulary: LLTokenizer) -> None:
    for pattern, spaces, others in ((r"^\\s$", "\ufeff\u00a0\t", "a"), (r"^[\\S]$", "a", "\ufeff\u00a0")):
        grammar = json_grammar(f'{{"type": "string", "pattern": "{pattern}"}}')
        for text, accepted in ((spaces, True), (others, False)):
            for letter in text:
                assert accepts(vocabulary, grammar, json.dumps(letter, ensure_ascii=letter == "\t")) is accepted


PERSON: dict[str, Any] = {
    "title": "Person",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "type": "object",
}


def test_json_is_spaced_and_in_the_schema_s_order_by_default(vocabulary: LLTokenizer) -> None:
    grammar = json_grammar(json.dumps(PERSON))
    assert accepts(vocabulary, grammar, '{"name": "Ada", "age": 36}')
    assert not accepts(vocabulary, grammar, '{"name":"Ada","age":36}')
    assert not accepts(vocabulary, grammar, '{"age": 36, "name": "Ada"}')
    assert not accepts(vocabulary, grammar, '{"name": "Ada Lovelace", "age": 36}')
    compact = json_grammar(json.dumps(PERSON), JsonStyle(Whitespace.COMPACT))
    assert accepts(vocabulary, compact, '{"name":"Ada","age":36}')
    assert not accepts(vocabulary, compact, '{"name": "Ada","age":36}')


def test_the_style_of_json_can_be_set(vocabulary: LLTokenizer) -> None:
    grammar = json_grammar(json.dumps(PERSON), JsonStyle(Whitespace.FLEXIBLE, sorted_properties=True))
    assert accepts(vocabulary, grammar, json.dumps({"age": 36, "name": "Ada"}, indent=4))
    assert accepts(vocabulary, grammar, '{"age":36,"name":"Ada"}')
    assert not accepts(vocabulary, grammar, '{"name":"Ada","age":36}')
    assert not accepts(vocabulary, grammar, '{"age":' + " " * 41 + '36,"name":"Ada"}')


def test_equal_formats_have_one_grammar() -> None:
    assert choices_grammar(["b", "a", "b"]) == choices_grammar(["a", "b"])
    spaced = json.dumps(PERSON | {"description": "Somebody."}, indent=2)
    assert json_grammar(spaced) == json_grammar(json.dumps(PERSON))


def test_choices_are_taken_by_the_letter(vocabulary: LLTokenizer) -> None:
    choices = ['say "hi"\\', "ü😀\n\t", "<x>/", "\x00\x7f", "%json {}"]
    grammar = choices_grammar(choices)
    assert all(accepts(vocabulary, grammar, choice) for choice in choices)
    assert not accepts(vocabulary, grammar, "ü")


def test_a_regex_holds_the_whole_answer(vocabulary: LLTokenizer) -> None:
    grammar = regex_grammar("a/b\\/c|\n[0-9]+")
    assert all(accepts(vocabulary, grammar, text) for text in ("a/b/c", "\n42"))
    assert not accepts(vocabulary, grammar, "xa/b/c")


def test_a_property_whose_name_is_another_s_path_is_a_part_of_its_own(vocabulary: LLTokenizer) -> None:
    inner = {"type": "object", "required": ["b"], "properties": {"b": {"type": "string"}}}
    properties = {"a": inner, "a.properties.b": {"type": "string"}}
    grammar = json_grammar(json.dumps({"type": "object", "required": ["a"], "properties": properties}))
    assert accepts(vocabulary, grammar, '{"a": {"b": ""}}')


def test_references_are_followed(vocabulary: LLTokenizer) -> None:
    schema = {
        "$id": "https://example.com/tree.json",
        "type": "object",
        "properties": {"value": {"$ref": "#number"}, "next": {"$ref": "tree.json"}, "a~/b": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"$anchor": "number", "type": "integer"}},
        "additionalProperties": False,
    }
    grammar = json_grammar(json.dumps(schema))
    assert accepts(vocabulary, grammar, '{"value": 1, "next": {"value": 2, "next": {}}, "a~/b": 3}')
    assert not accepts(vocabulary, grammar, '{"value": "1"}')


def test_a_schema_in_a_lark_text_is_checked_like_any_other(vocabulary: LLTokenizer) -> None:
    grammar = lark_grammar('start: "Answer: " object\nobject: %json {"type": "string", "format": "date"} // a date\n')
    assert accepts(vocabulary, grammar, 'Answer: "2024-02-29"')
    assert not accepts(vocabulary, grammar, 'Answer: "2023-02-29"')


@pytest.mark.parametrize(
    "text",
    [
        'start: list\nlist: "x" list | "x"',
        'start: list\nlist: ("x" list)?',
        'start: list\nlist: ["x" list]',
        'start: a\na: "(" a{0,3} ")"\n | b\nb: "y"+',
        "?start: sum\n!sum: INT | sum /[+-]/ INT -> add\n%import common.INT\n%ignore / +/",
        'start: "[" start* "]"',
    ],
)
def test_a_rule_that_can_end_is_none_that_requires_itself(vocabulary: LLTokenizer, text: str) -> None:
    compile_grammar(vocabulary, lark_grammar(text))


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\S$", ["a", "\u0085"], ["\ufeff", " ", "\n"]),
        (r"^\s$", ["\ufeff", " ", "\u3000"], ["\u0085", "a"]),
        (r"^[\s\S]$", ["a", " ", "\ufeff"], []),
        (r"^[^\s]$", ["a"], ["\ufeff"]),
        (r"^.$", ["a", "\u0085"], ["\n", "\r", "\u2028"]),
        (r"^[a&&b.]$", ["a", "&", "b", "."], ["c"]),
        (r"^[[~]$", ["[", "~"], ["a"]),
        (r"^[+--]$", ["+", ",", "-"], ["."]),
        (r"^\d\w\u{e9}\.$", ["1_é."], ["1éé.", "1_é,"]),
    ],
)
def test_a_pattern_means_what_it_means_in_ecma_262(
    vocabulary: LLTokenizer, pattern: str, good: list[str], bad: list[str]
) -> None:
    grammar = json_grammar(json.dumps({"type": "string", "pattern": pattern}))
    assert [text for text in good if not accepts(vocabulary, grammar, json.dumps(text, ensure_ascii=False))] == []
    assert [text for text in bad if accepts(vocabulary, grammar, json.dumps(text, ensure_ascii=False))] == []
