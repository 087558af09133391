"""Each family's calls and reasoning: what its template renders is read, cut anywhere, and is what the grammar takes.

The templates are short ones of this test, in the forms that the families' own have: those come with their models.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.chat_formats import CALLS, REASONING, CallFormat
from loraplex.contracts.artifacts.peft_config import ChatSettings, parse_chat_settings
from loraplex.contracts.grammars.build import json_grammar
from loraplex.contracts.grammars.matching import compile_grammar, proof_vocabulary, read_vocabulary
from loraplex.contracts.grammars.prove import prove
from loraplex.contracts.options import FinishReason
from loraplex.router.generation.answer import ChoiceAnswer, ResumeFilter
from loraplex.router.generation.chat_format import call_grammar, chat_format
from loraplex.router.generation.chat_reader import ChatFormat, ChatReader
from loraplex.router.request import Chat, ChatMessage, Delta, Tool, ToolMode
from loraplex.router.text.chat import ChatTemplate
from loraplex.router.text.file_tokenizer import FileTokenizer
from loraplex.router.text.tokenizer import HashTokenizer
from loraplex.runtime.rpc.errors import InvalidField
from loraplex.tool_calls.values import json_of
from tests.router.generation import test_tool_grammar
from tests.router.generation.test_chat_reader import Told, read, told
from tests.router.small_tokenizers import id_of, tokenizer_of

# An assistant's turn `m` in each family's form.
TURNS = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "turns").glob("*.jinja"))}
# Answers after reasoning, with the texts that a family writes around them.
ANSWERS = {
    "ernie": "<think>\nHm.</think>\n\n<response>\nIt rains.\n</response>\n",
    "hunyuan": "<think>\nHm.</think>\n<answer>\nIt rains.\n</answer>",
    "cohere": "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>It rains.<|END_RESPONSE|>",
    "granite": "Here is my thought process: Hm.Here is my response: It rains.",
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It rains.",
    "seed_oss": "<seed:think>Hm.</seed:think>It rains.",
    "mistral": "[THINK]Hm.[/THINK]It rains.",
    "gemma4": "<|channel>thought\nHm.<channel|>It rains.",
}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "near": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "unit": {"enum": ["°C", "°F"]},
        "place": {"type": "object", "properties": {"zip": {"type": "string"}}, "additionalProperties": False},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (Tool("weather", "", json.dumps(SCHEMA)), Tool("now"))
ARGUMENTS = [
    {"city": 'Zürich "x" & \'y\'\n<b> [1], {2}', "days": 2, "exact": True, "near": "5", "unit": "°C",
     "place": {"zip": "8(0"}},
    {},
]  # fmt: skip
CALLED = [("weather", ARGUMENTS[0]), ("now", ARGUMENTS[1])]
START, END = "<|assistant|>", "<|turn_end|>"
SOURCE = "{% for m in messages %}{% if m.role == 'assistant' %}" + START + "TURN" + END
SOURCE += "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
SOURCE += "{% if add_generation_prompt %}" + START + "{% endif %}"


def source_of(family: str) -> str:
    return SOURCE.replace("TURN", TURNS[family])


def answer_of(family: str, content: str, reasoning: str = "") -> str:
    """Return the answer that transformers renders: a turn with two calls, in front of their results."""
    calls = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in CALLED]
    turn = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}
    results = [{"role": "tool", "name": name, "content": "rain"} for name, _ in CALLED]
    messages = [{"role": "user", "content": "x"}, turn, *results]
    made: Any = PreTrainedTokenizerFast
    tokenizer = made(tokenizer_object=Tokenizer(models.BPE()))
    source = source_of(family)
    text = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, add_generation_prompt=True)
    return str(text).split(START)[1].split(END)[0]


def form_of(family: str, chat: Chat) -> ChatFormat:
    form = chat_format(chat, ChatTemplate(source_of(family)), HashTokenizer(), (), "r")
    assert form is not None
    return form


def asked(mode: ToolMode = ToolMode.AUTO, **fields: Any) -> Chat:
    return Chat((ChatMessage("user", "x"),), TOOLS, mode, **fields)


def parsed(found: Told) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in found.calls]


def begins_with_calls(family: str) -> bool:
    return CALLS[family].opens[0] == "^"


def expected_text(family: str) -> str:
    return "" if begins_with_calls(family) or family == "cohere" else "Let me look."


def test_every_format_has_a_template() -> None:
    assert TURNS.keys() == CALLS.keys()
    for family in TURNS:
        found = ChatTemplate(source_of(family)).call_format(asked())
        assert found is CALLS[family]


@pytest.mark.parametrize("family", TURNS)
def test_two_calls_are_read_in_any_pieces(family: str) -> None:
    form = form_of(family, asked())
    thinks = form.reasoning is not None and not begins_with_calls(family)
    content = expected_text(family)
    text = answer_of(family, content, "Hm." if thinks else "")
    whole = read(form, [text])
    assert parsed(whole) == CALLED
    assert (whole.text.strip(), whole.reasoning) == (content, "Hm." if thinks else "")
    assert read(form, list(text)) == whole
    for at in range(1, len(text)):
        assert read(form, [text[:at], text[at:]]) == whole


@pytest.mark.parametrize("family", TURNS)
def test_a_call_that_breaks_off_is_told_as_far_as_it_came(family: str) -> None:
    """Before its name is known it is text; then it is a call whose arguments are a beginning of the whole ones."""
    form = form_of(family, asked())
    text = answer_of(family, "")
    (_, arguments), *_ = read(form, [text]).calls
    for at in range(1, len(text)):
        cut = read(form, [text[:at]])
        if cut.calls:
            assert cut.calls[0][0] == "weather"
            assert arguments.startswith(cut.calls[0][1])
        assert text[:at].strip().endswith(cut.text.strip())


class Letters(HashTokenizer):
    """A stream whose ids are characters."""

    def push(self, token_id: int) -> str:
        return chr(token_id)


@pytest.mark.parametrize("family", TURNS)
def test_a_stream_that_is_resumed_anywhere_tells_the_rest(family: str) -> None:
    form = form_of(family, asked())
    text = answer_of(family, expected_text(family))

    def deltas(received: int, text_bytes: int | None) -> list[Delta]:
        answer = ChoiceAnswer(Letters(), ("@@",), 1, 0, received, ResumeFilter(text_bytes, ChatReader(form)))
        found = [answer.push([ord(letter)], None)[0] for letter in text]
        return [delta for delta in (*found, answer.push([2], FinishReason.END)[0]) if delta is not None]

    whole = deltas(0, None)
    assert parsed(told(whole)) == CALLED
    for at in range(1, len(whole), 29):
        received = sum(len(delta.token_ids) for delta in whole[:at])
        for text_bytes in (None, len(told(whole[:at]).text.encode())):
            assert told(whole[:at] + deltas(received, text_bytes)) == told(whole)


def grammar_of(family: str, chat: Chat, answer: str = "") -> str:
    return call_grammar(chat, ChatTemplate(source_of(family)), HashTokenizer(), (), answer=answer).text


def takes(grammar: str, text: str) -> bool:
    """Tell whether a grammar takes a text as a whole answer."""
    matcher = compile_grammar(proof_vocabulary(300, {}), grammar)
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("family", TURNS)
def test_a_grammar_takes_what_is_rendered_and_no_other_calls(family: str) -> None:
    content = expected_text(family)
    required, auto = (grammar_of(family, asked(mode)) for mode in (ToolMode.REQUIRED, ToolMode.AUTO))
    assert prove(proof_vocabulary(300, {}), required) == prove(proof_vocabulary(300, {}), auto) == {}
    calls = answer_of(family, "")
    assert takes(required, calls)
    assert takes(auto, calls)
    assert takes(auto, answer_of(family, content))
    assert takes(auto, "It rains.")
    assert not takes(required, "It rains.")
    for right, wrong in (("weather", "whether"), ("°C", "°K"), ("days", "day")):
        assert right in calls
        assert not takes(required, calls.replace(right, wrong)), wrong


@pytest.mark.parametrize("family", TURNS)
def test_every_call_of_a_random_model_is_read_and_keeps_to_its_schema(family: str) -> None:
    # Random reasoning would not end.
    chat = replace(asked(ToolMode.REQUIRED, template_args='{"thinking": false}'), tools=test_tool_grammar.TOOLS)
    grammar = grammar_of(family, chat)
    form, found = form_of(family, chat), 0
    for seed in range(5):
        text, ended = test_tool_grammar.answer(grammar, random.Random(seed), [], 400)
        whole = read(form, [text])
        found += len(whole.calls)
        if ended:
            assert whole.text.strip() == "", text
            assert whole.calls, text
            if family != "gemma4":  # whose objects and lists are enforced in their form alone
                test_tool_grammar.check(whole.calls)
    assert found >= 5


# Pieces of formats and of answers.
PIECES = [
    "",
    "<a>",
    "</a>",
    *'[](),:=|"{}^/é',
    "\n",
    " ",
    '{"name": "',
    '", "arguments": ',
    "{id}",
    "call ",
    "<a",
    "weather",
]


def drawn(rng: random.Random) -> dict[str, Any]:
    """Return a format of calls that a tenant could write; most cannot be read."""
    texts = iter(lambda: "".join(rng.choices(PIECES, k=rng.randrange(3))), None)
    return {
        "opens": [next(texts)], "closes": next(texts), "calls": [next(texts) for _ in range(3)],
        "shared": rng.random() < 0.5, "call": [next(texts) for _ in range(3)],
        "arguments": rng.choice(["json", "text", "literal"]), "argument": [next(texts) for _ in range(4)],
        "quote": rng.choice(["", '<|"|>']), **({"keys": [["name"], ["arguments"]]} if rng.random() < 0.2 else {}),
    }  # fmt: skip


def test_a_format_of_anyone_s_making_reads_the_same_in_any_pieces_and_compiles() -> None:
    seed, formats = 7, 0
    print(f"seed {seed}")
    rng = random.Random(seed)
    for number in range(400):
        try:
            calls = parse_chat_settings({"tool_calls": drawn(rng)}).tool_calls
        except ArtifactError:
            continue
        assert isinstance(calls, CallFormat)
        formats += 1
        form = ChatFormat(calls, {"weather": {"city": frozenset({"string"})}}, rng.choice([None, *REASONING]))
        words = [*PIECES, *calls.opens, calls.closes, *calls.calls, *calls.call, *calls.argument]
        for _ in range(5):
            text = "".join(rng.choices(words, k=rng.randrange(1, 20)))
            assert read(form, [text]) == read(form, list(text)), (number, text)
        template = ChatTemplate("x", calls=calls)
        grammar = call_grammar(asked(ToolMode.REQUIRED), template, HashTokenizer(), ()).text
        compile_grammar(proof_vocabulary(300, {}), grammar)
    assert formats >= 30


@cache
def tokenizer_with(marks: tuple[str, ...]) -> tuple[FileTokenizer, Any]:
    tokenizer = Tokenizer.from_str(tokenizer_of("byte-level").to_str())
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    data = tokenizer.to_str().encode()
    end = id_of("byte-level", "<s>")
    return FileTokenizer({"tokenizer.json": data}), read_vocabulary(data, tokenizer.get_vocab_size(), [end]).tokens


@pytest.mark.parametrize("family", TURNS)
def test_marks_that_are_tokens_are_read_and_taken_as_tokens(family: str) -> None:
    marks = form_of(family, asked()).marks
    text, tokens = tokenizer_with(marks)
    template = ChatTemplate(source_of(family))
    content = expected_text(family)
    for mode, said in ((ToolMode.REQUIRED, ""), (ToolMode.AUTO, content), (ToolMode.AUTO, "")):
        chat = asked(mode)
        form = chat_format(chat, template, text, (), "r")
        assert form is not None
        thinks = form.reasoning is not None and not (begins_with_calls(family) and mode is ToolMode.AUTO)
        answer = answer_of(family, said, "Hm." if thinks else "")
        ids = text.tokenize(answer, special_tokens=False)
        matcher = compile_grammar(tokens, call_grammar(chat, template, text, ()).text)
        taken = matcher.try_consume_tokens(list(ids))
        assert taken == len(ids), text.decode(ids[: taken + 1], skip_special_tokens=False)
        assert matcher.is_accepting()
        stream = text.stream([], skip_special_tokens=True, marks=form.marks)
        choice = ChoiceAnswer(stream, (), 1, resume_filter=ResumeFilter(None, ChatReader(form)))
        found = [choice.push([token_id], None)[0] for token_id in ids]
        last, finished = choice.push([0], FinishReason.END)
        whole = told([delta for delta in (*found, last) if delta is not None])
        assert (parsed(whole), whole.text.strip(), whole.reasoning) == (CALLED, said, "Hm." if thinks else "")
        assert finished is not None
        assert finished.reason is FinishReason.TOOL_CALLS


@pytest.mark.parametrize("family", TURNS)
def test_an_answer_calls_tools_or_keeps_to_a_format(family: str) -> None:
    answer = json_grammar('{"type": "object", "properties": {"n": {"const": 5}}, "required": ["n"]}')
    either = grammar_of(family, asked(), answer)
    assert prove(proof_vocabulary(300, {}), either) == {}
    calls = answer_of(family, "")
    assert takes(either, calls)
    assert takes(either, '{"n": 5}')
    assert not takes(either, '{"n": 6}')
    assert not takes(either, "It rains.")
    required = grammar_of(family, asked(ToolMode.REQUIRED), answer)
    assert takes(required, calls)
    assert not takes(required, '{"n": 5}')
    found = read(form_of(family, asked()), ['{"n": 5}'])
    assert found == Told('{"n": 5}', "", [])


def test_the_fault_of_a_format_or_of_a_tool_is_told_from_the_other() -> None:
    broken = json_grammar('{"type": "string", "pattern": "("}')
    either = grammar_of("hermes", asked(), broken)
    assert prove(proof_vocabulary(300, {}), either) == {"path": "", "error": "unclosed group"}
    bad = Tool("bad", "", '{"type": "object", "properties": {"b": {"type": "string", "pattern": "("}}}')
    chat = Chat(asked().messages, (*TOOLS, bad))
    either = grammar_of("hermes", chat, json_grammar('{"type": "null"}'))
    assert prove(proof_vocabulary(300, {}), either)["path"] == "[2].parameters.properties.b"


@pytest.mark.parametrize("family", ANSWERS)
def test_reasoning_and_the_marks_around_an_answer_are_not_shown(family: str) -> None:
    text = ANSWERS[family]
    form = chat_format(Chat((ChatMessage("user", "x"),)), ChatTemplate(text), HashTokenizer(), (), "r")
    assert form is not None
    for pieces in ([text], list(text)):
        found = read(form, pieces)
        assert (found.text.strip(), found.reasoning.strip()) == ("It rains.", "Hm.")


# Schemas of one value, with values that they allow and such that they do not.
VALUES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "an enum by reference": ({"$ref": "#/$defs/unit"}, ["C", "F"], ["K", None, 1]),
    "an enum or null": ({"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]}, ["C", None], ["K", 1]),
    "a list of types": ({"type": ["integer", "null"]}, [1, None], ["K", 1.5]),
    "values of several types": ({"enum": ["C", 1, None, False]}, ["C", 1, None, False], ["K", 2, True]),
    "a bounded number": ({"type": "integer", "maximum": 5}, [5], [6]),
    "an object": ({"$ref": "#/$defs/place"}, [{"zip": "8(0"}], [{"zap": "1"}, "x"]),
    "a list": ({"type": "array", "items": {"type": "integer"}}, [[1, 2]], [["a"], 1]),
}
WRITTEN = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
    "olmo3": "<function_calls>f(a={})</function_calls>",
    "gemma4": "<|tool_call>call:f{{a:{}}}<tool_call|>",
}


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize("name", VALUES)
def test_values_keep_to_their_schema_and_are_read_with_their_type(name: str, family: str) -> None:
    part, allowed, refused = VALUES[name]
    definitions = {
        "unit": {"type": "string", "enum": ["C", "F"]},
        "place": {"type": "object", "properties": {"zip": {"type": "string"}}, "additionalProperties": False},
    }
    schema = {"type": "object", "properties": {"a": part}, "required": ["a"], "$defs": definitions}
    chat = Chat(asked().messages, (Tool("f", "", json.dumps(schema)),), ToolMode.REQUIRED)
    template = ChatTemplate(source_of(family))
    found = call_grammar(chat, template, HashTokenizer(), ())
    form = chat_format(chat, template, HashTokenizer(), (), "r")
    assert form is not None
    # Objects and lists in Gemma's notation are enforced in their form alone.
    loose = family == "gemma4" and name in ("an object", "a list")
    assert bool(found.not_enforced) is loose

    def written(value: Any) -> str:
        if isinstance(value, str):
            text = {"qwen3_coder": value, "olmo3": json.dumps(value), "gemma4": f'<|"|>{value}<|"|>'}[family]
        elif family == "gemma4" and isinstance(value, dict):
            text = "{" + ",".join(f'{key}:<|"|>{one}<|"|>' for key, one in value.items()) + "}"
        else:
            text = json.dumps(value, separators=(",", ":") if family == "gemma4" else None)
        return WRITTEN[family].format(text)

    for value in allowed:
        assert takes(found.text, written(value)), value
        assert parsed(read(form, [written(value)])) == [("f", {"a": value})]
    for value in refused if not loose else ():
        assert not takes(found.text, written(value)), value


def test_a_recipient_stands_beside_the_role_too() -> None:
    form = form_of("harmony", asked())
    call = 'to=functions.weather<|channel|>commentary json<|message|>{"city": "Bern"}'
    said = "<|channel|>commentary<|message|>Let me look.<|end|>"
    for before, text in (
        ("", ""),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", ""),
        (said, "Let me look."),
    ):
        answer = f"{before}{'<|start|>assistant' if text else ''} {call}"
        for pieces in ([answer], list(answer)):
            found = read(form, pieces)
            assert (found.text, found.calls) == (text, [("weather", '{"city": "Bern"}')])


def test_values_of_many_quotes_and_brackets_are_read_once() -> None:
    """Nothing is read from each quote again, and nesting that no parser takes is a string."""
    form = form_of("pythonic", asked())
    for value in ('"' + '\\"' * 20_000, "'" * 20_001 + '"' * 20_001, "[" * 20_000):  # nothing ends them
        assert read(form, [f"[weather(city={value})]"]).calls == [("weather", '{"city": ')]
        assert json.loads(json_of(value)) == value
    # A cut string that ends with a backslash; the lengths are such that reading from each quote again takes minutes.
    assert json_of("'\\" * 200_000) == json.dumps("'" * 199_999)
    assert json.loads(json_of('"\\' * 200_000)) == '"\\' * 200_000
    deep = '{"a": ' * 20_000 + "1" + "}" * 20_000
    assert read(form, [f"[weather(city={deep})]"]).calls == [("weather", json.dumps({"city": deep}))]


def test_references_to_references_are_followed_once() -> None:
    """Each definition offers the next one many times: there are more ways to a type than can be counted."""
    chain = {
        f"d{depth}": {"anyOf": [{"type": "null"}, *[{"$ref": f"#/$defs/d{depth + 1}"}] * 40]} for depth in range(3)
    }
    part = {"$ref": "#/$defs/d0"}
    schema = {"$defs": {**chain, "d3": {"type": "integer"}}, "type": "object", "properties": {"a": part}}
    tool = Tool("f", "", json.dumps(schema))
    form = form_of("qwen3_coder", Chat(asked().messages, (tool,)))
    assert form.tools == {"f": {"a": {"null", "integer"}}}
    for family in ("qwen3_coder", "gemma4", "pythonic"):
        found = call_grammar(
            Chat(asked().messages, (tool,), ToolMode.REQUIRED), ChatTemplate(source_of(family)), HashTokenizer(), ()
        )
        assert (found.free, found.not_enforced) == (frozenset(), ())
        assert len(found.text) < 20_000


def test_definitions_that_make_a_grammar_too_large_are_left_out() -> None:
    """Each value's rule has all of them, so that the grammar is as large as the schema's square."""
    defs = {f"d{number}": {"type": "string", "pattern": f"a{{{number}}}"} for number in range(300)}
    properties = {f"p{number}": {"type": "array", "items": {"$ref": "#/$defs/d0"}} for number in range(300)}
    schema = {"type": "object", "$defs": defs, "properties": properties}
    tool = Tool("f", "", json.dumps(schema))
    template, chat = ChatTemplate(source_of("qwen3_coder")), Chat(asked().messages, (tool,))
    found = call_grammar(chat, template, HashTokenizer(), ())
    assert found.not_enforced == ("chat.tools[0].parameters",)
    with pytest.raises(InvalidField, match="more than 524288 bytes") as caught:
        call_grammar(Chat(asked().messages, (replace(tool, strict=True),)), template, HashTokenizer(), ())
    assert caught.value.field == "chat.tools[0].parameters"


def test_what_follows_a_broken_call_is_text_to_its_last_character() -> None:
    words = "is what I would write, if only " * 5
    for family, call in (
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter="),
        ("glm", "<tool_call>weather\n<arg_key>"),
    ):
        for pieces in ([call + words + "end"], [*call, *words, "end"]):
            found = read(form_of(family, asked()), pieces)
            assert (found.text.strip(), found.calls) == (words + "end", [("weather", "{")])


@pytest.mark.parametrize(
    ("family", "call", "told", "rest"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"a": [1', '{"a": [1', "}]}"),
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": ', "", "]}"),
        ("pythonic", "[weather(city=[1", '{"city": ', ")]"),
        ("gemma4", "<|tool_call>call:weather{city:{a:[1", '{"city": ', "}}"),
    ],
)
def test_a_bracket_that_closes_another_breaks_the_call(family: str, call: str, told: str, rest: str) -> None:
    for pieces in ([call + rest], [*call, *rest]):
        found = read(form_of(family, asked()), pieces)
        assert (found.text.strip(), found.calls) == (rest, [("weather", told)])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>'),
        ("pythonic", '[weather(city={"zip": "\\ud800"})]'),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=place>\n"
         '{"zip": "\\udc00"}\n</parameter>\n</function>\n</tool_call>'),
    ],
)  # fmt: skip
def test_an_escape_of_half_a_character_is_told_as_it_can_be_sent(family: str, text: str) -> None:
    found = read(form_of(family, asked()), [text])
    json.dumps([found.text, found.calls], ensure_ascii=False).encode()
    if family == "hermes":
        assert (found.text, found.calls) == (text, [])
    else:
        ((name, arguments),) = found.calls
        assert (name, len(json.loads(arguments))) == ("weather", 1)


OWN = {"opens": ["<<call "], "closes": ">>", "call": ["", " ", ""], "arguments": "json"}


def test_an_adapter_brings_a_format_of_its_own() -> None:
    settings = parse_chat_settings({"tool_calls": OWN, "reasoning": {"opens": "(hm ", "closes": " hm)"}})
    assert isinstance(settings.tool_calls, CallFormat)
    template = ChatTemplate("{{ messages }}").with_settings(settings)
    form = chat_format(asked(), template, HashTokenizer(), (), "r")
    assert form is not None
    text = '(hm Well. hm)So: <<call weather {"city": "Bern"}>>'
    for pieces in ([text], list(text)):
        assert read(form, pieces) == Told("So:", "Well.", [("weather", '{"city": "Bern"}')])
    grammar = call_grammar(asked(ToolMode.REQUIRED), template, HashTokenizer(), ()).text
    assert takes(grammar, '<<call weather {"city": "Bern"}>>')
    assert not takes(grammar, '<<call weather {"town": "Bern"}>>')
    assert settings == parse_chat_settings({"tool_calls": OWN, "reasoning": {"opens": "(hm ", "closes": " hm)"}})
    slashed = parse_chat_settings({"tool_calls": {**OWN, "opens": ["/call\n/"], "closes": "/\n/"}})
    grammar = call_grammar(asked(), template.with_settings(slashed), HashTokenizer(), ()).text
    assert takes(grammar, '(hm / hm)So: /call\n/weather {"city": "Bern"}/\n/')
    assert template.with_settings(ChatSettings(template="x")).call_format(asked()) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"opens": []}, "loraplex_chat.tool_calls.opens: Expected `array` of length >= 1"),
        ({"opens": [""]}, "loraplex_chat.tool_calls.opens: has an empty text"),
        ({"call": ["", 1, ""]}, "loraplex_chat.tool_calls.call[1]: Expected `str`, got `int`"),
        ({"arguments": "yaml"}, "loraplex_chat.tool_calls.arguments: Invalid enum value 'yaml'"),
        ({"arguments": "text", "argument": ["", "=", "\n", ""]}, "loraplex_chat.tool_calls.argument[0]: is empty"),
        ({"arguments": "literal"}, "loraplex_chat.tool_calls.argument[1]: is empty"),
        ({"keys": [["name"], ["arguments"]]}, "loraplex_chat.tool_calls.call[0]: has no '{'"),
        ({"keys": [[], ["arguments"]]}, "loraplex_chat.tool_calls.keys[0]: Expected `array` of length >= 1"),
        ({"nested": True}, "loraplex_chat.tool_calls: Object contains unknown field `nested`"),
        ({"closes": "x" * 201}, "loraplex_chat.tool_calls.closes: Expected `str` of length <= 200"),
    ],
)
def test_a_format_that_cannot_be_read_is_refused_by_its_path(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        parse_chat_settings({"tool_calls": {**OWN, **change}})
    assert str(caught.value).startswith(message)


def test_a_schema_that_texts_cannot_keep_to_is_named_or_refused() -> None:
    loose = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a|b$"}}}
    tool = Tool("f", "", json.dumps(loose))
    template = ChatTemplate(source_of("qwen3_coder"))
    found = call_grammar(Chat(asked().messages, (tool,)), template, HashTokenizer(), ())
    assert found.not_enforced == ("chat.tools[0].parameters.properties.a.pattern",)
    with pytest.raises(InvalidField, match="writes no JSON object") as caught:
        call_grammar(Chat(asked().messages, (replace(tool, strict=True),)), template, HashTokenizer(), ())
    assert caught.value.field == "chat.tools[0].parameters.properties.a.pattern"


STRINGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "pattern": ({"pattern": "^[a-z]{2}/$"}, "ab/", "abc"),
    "pattern in the middle": ({"pattern": "b"}, "abc", "ac"),
    "length": ({"minLength": 2, "maxLength": 3}, "abc", "abcd"),
    "date": ({"format": "date"}, "2024-02-28", "2024-02-30"),
    "const": ({"const": "x"}, "x", "y"),
}


@pytest.mark.parametrize("name", STRINGS)
def test_strings_between_texts_keep_to_their_schema(name: str) -> None:
    rule, right, wrong = STRINGS[name]
    schema = {"type": "object", "properties": {"a": {"type": "string", **rule}}, "required": ["a"]}
    chat = Chat(asked().messages, (Tool("f", "", json.dumps(schema), strict=True),), ToolMode.REQUIRED)
    grammar = grammar_of("qwen3_coder", chat)
    text = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert takes(grammar, text.format(right))
    assert not takes(grammar, text.format(wrong))
