"""The format and the grammar of an answer to a chat, from its template and the end of its prompt."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from loraplex.contracts.artifacts.chat_formats import CALLS
from loraplex.contracts.grammars.build import choices_grammar, format_alone, json_grammar, lark_grammar, regex_grammar
from loraplex.contracts.grammars.matching import compile_grammar, proof_vocabulary, read_vocabulary
from loraplex.contracts.grammars.prove import prove
from loraplex.contracts.options import FinishReason
from loraplex.router.generation.answer import ChoiceAnswer, ResumeFilter
from loraplex.router.generation.chat_format import call_grammar, chat_format, format_grammar
from loraplex.router.generation.chat_reader import ChatFormat, ChatReader
from loraplex.router.request import Chat, ChatMessage, Delta, Tool, ToolMode
from loraplex.router.text.chat import ChatTemplate
from loraplex.router.text.file_tokenizer import FileTokenizer
from loraplex.router.text.tokenizer import HashTokenizer
from loraplex.runtime.rpc.errors import InvalidField
from tests.grammars.test_formats import accepts
from tests.router.generation.test_chat_reader import THINK
from tests.router.generation.test_tool_grammar import SCHEMAS, TOOLS, calls_of
from tests.router.small_tokenizers import id_of, tokenizer_of

TEXT = HashTokenizer()
CHAT = Chat((ChatMessage("user", "x"),))
WITH_TOOLS = replace(CHAT, tools=(Tool("now"),))
REQUIRED = replace(WITH_TOOLS, tool_mode=ToolMode.REQUIRED)
THINKING = ChatTemplate("<think></think> {{ tools }} <tool_call>")


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def test_an_answer_without_tools_and_reasoning_is_text() -> None:
    assert chat_format(CHAT, ChatTemplate("{{ messages }}"), TEXT, ids("x"), "r") is None
    assert chat_format(WITH_TOOLS, ChatTemplate("{{ tools }}"), TEXT, ids("x"), "r") is None
    assert call_grammar(WITH_TOOLS, ChatTemplate("{{ tools }}"), TEXT, ids("x")).text == ""
    assert call_grammar(CHAT, THINKING, TEXT, ids("x")).text == ""


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [("assistant: ", False), ("assistant: <think>\n", True), ("assistant: <think>\n\n</think>\n\n", False)],
)
def test_an_answer_begins_in_the_reasoning_that_the_prompt_opens(prompt: str, is_open: bool) -> None:
    found = chat_format(WITH_TOOLS, THINKING, TEXT, ids(prompt), "r")
    assert found == ChatFormat(CALLS["hermes"], {"now": {}}, THINK, is_open, "r")


def test_a_continued_message_may_have_opened_its_reasoning_long_ago() -> None:
    prompt = ids("assistant: <think>" + "Hm. " * 100)
    for chat, is_open in ((CHAT, False), (replace(CHAT, continue_final_message=True), True)):
        found = chat_format(chat, THINKING, TEXT, prompt, "r")
        assert found is not None
        assert found.begins_in_reasoning is is_open


def test_a_call_that_is_asked_for_needs_a_known_format() -> None:
    with pytest.raises(InvalidField) as caught:
        call_grammar(REQUIRED, ChatTemplate("{{ tools }}"), TEXT, ids("x"))
    assert (caught.value.field, caught.value.reason) == ("chat.tool_choice", "UNKNOWN_CALL_FORMAT")
    named = ChatTemplate("{{ tools }}", calls="hermes")
    assert "<tool_call>" in call_grammar(REQUIRED, named, TEXT, ids("x")).text


def test_a_grammar_has_the_reasoning_that_may_come_before_a_call() -> None:
    grammars = {
        prompt: call_grammar(REQUIRED, THINKING, TEXT, ids(prompt)).text for prompt in ("x", "<think>", "</think>\n")
    }
    assert 'start: ("<think>" thought)? answer' in grammars["x"]
    assert "start: thought answer" in grammars["<think>"]
    assert "start: answer" in grammars["</think>\n"]


FORMATS = {
    "json_schema": (
        json_grammar('{"type": "object", "properties": {"n": {"const": 5}}, "required": ["n"]}'),
        '{"n": 5}',
    ),
    "regex": (regex_grammar("[0-9/\n]+"), "4/2"),
    "choices": (choices_grammar(["yes", "no}"]), "no}"),
    "grammar": (
        lark_grammar('start: "(" %json {"type": "null"} WORD ")" // }\n%ignore / +/\nWORD: /[a-z]+/'),
        "(null  a)",
    ),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_format_holds_behind_the_reasoning(kind: str) -> None:
    grammar, text = FORMATS[kind]
    vocabulary = proof_vocabulary(300, {})
    opened = format_grammar(CHAT, THINKING, TEXT, ids("a: <think>\n"), grammar)
    optional = format_grammar(CHAT, THINKING, TEXT, ids("a: "), grammar)
    thought = 'Hm {"n": ( no} </thin\n'
    for answer, by_opened, by_optional in (
        (f"{thought}</think>\n\n{text}", True, False),
        (f"</think>{text}", True, False),
        (f"<think>{thought}</think>{text}", True, True),
        (text, False, True),
        (f"<think>{thought}</think>x", False, False),
    ):
        assert accepts(vocabulary, opened, answer) == by_opened, answer
        assert accepts(vocabulary, optional, answer) == by_optional, answer
    assert format_alone(opened) == format_alone(optional) == format_alone(grammar) == grammar
    assert prove(vocabulary, opened) == prove(vocabulary, optional) == {}


@pytest.mark.parametrize(
    ("prompt", "chat"),
    [
        ("a: <think>\n\n</think>\n\n", CHAT),
        ("a: ", replace(CHAT, template_args='{"enable_thinking": false}')),
        ("a: ", replace(CHAT, template_args='{"thinking": false}')),
        ("a: ", replace(CHAT, template_args='{"reasoning_effort": "none"}')),
        ("a: It is", replace(CHAT, continue_final_message=True)),
    ],
)
def test_without_reasoning_a_format_holds_at_once(prompt: str, chat: Chat) -> None:
    grammar, _ = FORMATS["regex"]
    assert format_grammar(chat, THINKING, TEXT, ids(prompt), grammar) == grammar
    assert format_grammar(CHAT, ChatTemplate("{{ messages }}"), TEXT, ids("a: "), grammar) == grammar


def test_a_format_that_accepts_nothing_is_found_behind_reasoning() -> None:
    grammar = format_grammar(CHAT, THINKING, TEXT, ids("<think>"), json_grammar('{"type": "string", "pattern": "("}'))
    assert prove(proof_vocabulary(300, {}), grammar) == {"path": "", "error": "unclosed group"}


@pytest.mark.parametrize("special", [False, True])
def test_marks_that_are_tokens_end_reasoning_as_tokens(special: bool) -> None:
    """A model writes the token of a mark. Its letters would end reasoning for the reader alone: they are in none."""
    tokenizer = Tokenizer.from_str(tokenizer_of("byte-level").to_str())
    marks = [AddedToken(mark, special=special) for mark in ("<think>", "</think>")]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(marks)
    text = FileTokenizer({"tokenizer.json": tokenizer.to_str().encode()})
    begin, end = map(text.added_token, ("<think>", "</think>"))
    assert begin is not None
    assert end is not None
    vocabulary = read_vocabulary(tokenizer.to_str().encode(), tokenizer.get_vocab_size(), [])
    letters, word = ([id_of("byte-level", letter) for letter in said] for said in ("</think>", "no"))
    grammar = format_grammar(CHAT, THINKING, text, (begin,), choices_grammar(["no"]))
    assert takes(vocabulary.tokens, grammar, [*word, *letters[:-1], end, *word])
    assert not takes(vocabulary.tokens, grammar, letters)
    optional = format_grammar(CHAT, THINKING, text, (), choices_grammar(["no"]))
    assert takes(vocabulary.tokens, optional, [begin, *word, end, *word])
    assert takes(vocabulary.tokens, optional, word)
    calling = call_grammar(WITH_TOOLS, THINKING, text, ()).text
    assert takes(vocabulary.tokens, calling, [begin, *word, end, *word])
    assert takes(vocabulary.tokens, calling, word)


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_budget_ends_reasoning_after_so_many_tokens(budget: int) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_of("byte-level").to_str())
    tokenizer.add_tokens([AddedToken(mark) for mark in ("<think>", "</think>")])
    text = FileTokenizer({"tokenizer.json": tokenizer.to_str().encode()})
    begin, end = (tokenizer.get_vocab()[mark] for mark in ("<think>", "</think>"))
    vocabulary = read_vocabulary(tokenizer.to_str().encode(), tokenizer.get_vocab_size(), []).tokens
    word = [id_of("byte-level", letter) for letter in "no"]
    chat, opened = replace(CHAT, thinking_token_budget=budget), (begin,)
    thought = [id_of("byte-level", letter) for letter in "aAbB</think"[:budget]]
    formatted = format_grammar(chat, THINKING, text, opened, choices_grammar(["no"]))
    plain = call_grammar(chat, THINKING, text, opened).text
    calling = call_grammar(replace(chat, tools=TOOLS), THINKING, text, opened).text
    for grammar in (formatted, plain, calling):
        assert takes(vocabulary, grammar, [*thought, end, *word])
        assert takes(vocabulary, grammar, [*thought[:-1], end, *word])
        assert not takes(vocabulary, grammar, [*thought, word[0]])
    assert not takes(vocabulary, formatted, [*thought, end, *thought, *word[1:]])
    optional = call_grammar(chat, THINKING, text, ()).text
    assert takes(vocabulary, optional, word * 5)
    assert takes(vocabulary, optional, [begin, *thought, end, *word])
    assert not takes(vocabulary, optional, [begin, *thought, word[0]])
    unlimited = call_grammar(CHAT, THINKING, text, opened).text
    assert unlimited == ""


def test_a_budget_of_what_does_not_reason_is_refused() -> None:
    chat = replace(CHAT, thinking_token_budget=5)
    for one in (chat, replace(chat, tools=TOOLS)):
        with pytest.raises(InvalidField, match=r"^chat\.thinking_token_budget: the chat template shows no reasoning"):
            call_grammar(one, ChatTemplate("{{ messages }}{# <tool_call> #}"), TEXT, ids("x"))
    with pytest.raises(InvalidField, match="'</think>' is not a token of the model"):
        call_grammar(chat, THINKING, TEXT, ids("<think>"))
    off = replace(chat, template_args='{"enable_thinking": false}')
    assert call_grammar(off, THINKING, TEXT, ids("x")).text == ""  # which spends none


def takes(tokens: Any, grammar: str, ids: list[int]) -> bool:
    """Tell whether a grammar takes these ids, one after the other."""
    matcher = compile_grammar(tokens, grammar)
    return all(matcher.consume_token(token_id) for token_id in ids)


FAMILIES = Path(__file__).parents[1] / "text/families"
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
ASKING = Chat((ChatMessage("user", "x"),), TOOLS, ToolMode.REQUIRED, parallel_tool_calls=False)


def tokenizer_with_marks(kind: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(tokenizer_of(kind).to_str())
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in SPECIAL])
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in ADDED])
    return tokenizer


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
@pytest.mark.parametrize("family", ["hermes", "qwen3", "llama3", "mistral", "mistral_v13"])
def test_every_call_of_a_random_model_parses(kind: str, family: str) -> None:
    tokenizer = tokenizer_with_marks(kind)
    source = (FAMILIES / f"{family}.jinja").read_bytes()
    text = FileTokenizer({"tokenizer.json": tokenizer.to_str().encode(), "chat_template.jinja": source})
    prompt_ids = tuple(text.tokenize("assistant: <think>\n\n</think>\n\n", special_tokens=False))
    end = id_of(kind, "<|end|>")
    vocabulary = read_vocabulary(tokenizer.to_str().encode(), tokenizer.get_vocab_size(), [end])
    grammar = call_grammar(ASKING, text.chat, text, prompt_ids).text
    answer_format = chat_format(ASKING, text.chat, text, prompt_ids, "r")
    assert answer_format is not None
    seed = 3
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(3):
        ids, complete = random_ids(vocabulary.tokens, grammar, rng, end)
        stream = text.stream(prompt_ids, skip_special_tokens=True, marks=answer_format.marks)
        answer = ChoiceAnswer(stream, (), 1, resume_filter=ResumeFilter(None, ChatReader(answer_format)))
        found = [answer.push([token_id], None)[0] for token_id in ids[:-1]]
        last, finished = answer.push(ids[-1:], FinishReason.COMPLETE if complete else FinishReason.END)
        deltas = [delta for delta in (*found, last) if isinstance(delta, Delta)]
        assert finished is not None
        assert finished.reason is FinishReason.TOOL_CALLS
        assert "".join(delta.text for delta in deltas) == ""
        ((name, arguments),) = calls_of([part for delta in deltas for part in delta.tool_calls])
        jsonschema.validate(json.loads(arguments), SCHEMAS.get(name, {"maxProperties": 0}))


def random_ids(tokens: Any, grammar: str, rng: random.Random, end: int) -> tuple[list[int], bool]:
    """Return random ids under a grammar, and whether it ended without an end token."""
    matcher = compile_grammar(tokens, grammar)
    ids: list[int] = []
    while len(ids) < 2_000:
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        if matcher.is_stopped():
            return ids, ids[-1] != end
        ids.append(int(rng.choice(allowed)))
        matcher.consume_token(ids[-1])
    raise AssertionError("the answer does not end")


def test_a_tool_without_parameters_takes_none() -> None:
    text = FileTokenizer(
        {"tokenizer.json": tokenizer_with_marks("byte-level").to_str().encode(),
         "chat_template.jinja": (FAMILIES / "qwen2.jinja").read_bytes()}
    )  # fmt: skip
    chat = Chat(ASKING.messages, (Tool("now"),), ToolMode.REQUIRED, tool_name="now")
    assert '"additionalProperties": false' in call_grammar(chat, text.chat, text, (1,)).text
