"""Reasoning and calls of tools in an answer's text, read in every possible piece."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from loraplex.contracts.artifacts.chat_formats import CALLS
from loraplex.contracts.artifacts.chat_formats import REASONING as FORMATS
from loraplex.contracts.options import FinishReason
from loraplex.router.generation.answer import ChoiceAnswer, ResumeFilter
from loraplex.router.generation.chat_reader import ChatFormat, ChatReader
from loraplex.router.request import Delta
from loraplex.router.text.file_tokenizer import FileTokenizer
from loraplex.router.text.tokenizer import HashTokenizer

TOOLS: dict[str, dict[str, frozenset[str]]] = {"weather": {"city": frozenset({"string"})}, "now": {}}
HERMES = ChatFormat(CALLS["hermes"], TOOLS)
LLAMA3 = ChatFormat(CALLS["llama3"], TOOLS)
MISTRAL = ChatFormat(CALLS["mistral"], TOOLS)
THINK = next(form for form in FORMATS if form.name == "think")
MISTRAL_ARGS = ChatFormat(CALLS["mistral_args"], TOOLS)
REASONING = ChatFormat(reasoning=THINK)
BOTH = ChatFormat(CALLS["hermes"], TOOLS, THINK, begins_in_reasoning=True)
BERN = '{"city": "Bern \\"}{[\\\\", "days": [1, {"a": 2}]}'


@dataclass
class Told:
    """Everything that a reader told: calls as (name, arguments)."""

    text: str
    reasoning: str
    calls: list[tuple[str, str]]


def told(deltas: list[Delta]) -> Told:
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        for part in delta.tool_calls:
            if part.id:
                assert part.name
                assert part.index == len(calls)
                calls.append((part.name, part.arguments))
            else:
                assert part.index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    return Told("".join(d.text for d in deltas), "".join(d.reasoning for d in deltas), calls)


def read(chat_format: ChatFormat, pieces: list[str]) -> Told:
    resume_filter = ResumeFilter(None, ChatReader(chat_format))
    deltas = [
        resume_filter.tell(Delta(0, (), piece), "", ended=index == len(pieces) - 1, had_all=False)
        for index, piece in enumerate(pieces)
    ]
    return told(deltas)


CASES = [
    (HERMES, "Just text. <tool", Told("Just text. <tool", "", [])),
    (HERMES, 'a\n<tool_call>\n{"name": "now", "arguments": ' + BERN + "}\n</tool_call>\n",
     Told("a", "", [("now", BERN)])),
    (HERMES, '<tool_call>{"arguments":{},"x":[1,"]"],"name":"f"}</tool_call><tool_call>{"name":"now"}</tool_call> b',
     Told(" b", "", [("f", "{}"), ("now", "{}")])),
    (HERMES, "so <tool_call> is a mark", Told("so <tool_call> is a mark", "", [])),
    (HERMES, 'x <tool_call>{"nam</tool_call>', Told('x <tool_call>{"nam</tool_call>', "", [])),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "b', Told("", "", [("now", '{"a": "b')])),
    (HERMES, '<tool_call>{"name": "now"; broken', Told("; broken", "", [("now", "")])),
    (HERMES, "<<tool_call>", Told("<<tool_call>", "", [])),
    (HERMES, '{"name": "now", "arguments": {}}', Told('{"name": "now", "arguments": {}}', "", [])),
    (LLAMA3, ' {"name": "now", "parameters": {"a": 1}}', Told("", "", [("now", '{"a": 1}')])),
    (LLAMA3, '{"type": "function", "name": "now", "parameters": {}}; {"name": "weather", "parameters": ' + BERN + "}",
     Told("", "", [("now", "{}"), ("weather", BERN)])),
    (LLAMA3, '<|python_tag|>{"name": "other", "parameters": {}}', Told("", "", [("other", "{}")])),
    (LLAMA3, ' {"name": "Ann", "age": 3}', Told(' {"name": "Ann", "age": 3}', "", [])),
    (LLAMA3, '{"city": "Bern"}', Told('{"city": "Bern"}', "", [])),
    (LLAMA3, 'See {"name": "now", "parameters": {}}', Told('See {"name": "now", "parameters": {}}', "", [])),
    (LLAMA3, "<|python_tag|>print(1)", Told("<|python_tag|>print(1)", "", [])),
    (MISTRAL, '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "f", "arguments": {"a": [1]}, "id": "x"}]',
     Told("", "", [("now", "{}"), ("f", '{"a": [1]}')])),
    (MISTRAL_ARGS, 'Well.[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}',
     Told("Well.", "", [("now", "{}"), ("f", '{"a": 1}')])),
    (MISTRAL, "[TOOL_CALLS] nothing like it", Told("[TOOL_CALLS] nothing like it", "", [])),
    (MISTRAL, "[1, 2] [TOOL", Told("[1, 2] [TOOL", "", [])),
    (REASONING, "<think>\nHm <b></think>\n\nYes <think>no</think>", Told("Yes <think>no</think>", "Hm <b>", [])),
    (REASONING, " <think>never ends </thin", Told(" ", "never ends </thin", [])),
    (REASONING, "No reasoning.\n", Told("No reasoning.\n", "", [])),
    (BOTH, '\nHm <tool_call></think>\n\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
     Told("", "Hm <tool_call>", [("now", "{}")])),
]  # fmt: skip


@pytest.mark.parametrize(("chat_format", "text", "expected"), CASES)
def test_what_is_told_depends_on_the_text_and_not_on_its_pieces(
    chat_format: ChatFormat, text: str, expected: Told
) -> None:
    assert read(chat_format, [text]) == expected
    assert read(chat_format, list(text)) == expected
    for at in range(1, len(text)):
        assert read(chat_format, [text[:at], text[at:]]) == expected


@pytest.mark.parametrize(("chat_format", "text", "expected"), CASES)
def test_a_stream_that_is_resumed_anywhere_tells_the_rest(chat_format: ChatFormat, text: str, expected: Told) -> None:
    ids = [ord(character) for character in text]

    def deltas(received: int, text_bytes: int | None) -> list[Delta]:
        answer = ChoiceAnswer(
            HashTokenizer(), ("@@",), 1, 0, received, ResumeFilter(text_bytes, ChatReader(chat_format))
        )
        found = [answer.push([token_id], None)[0] for token_id in ids]
        return [delta for delta in (*found, answer.push([2], FinishReason.END)[0]) if delta is not None]

    whole = deltas(0, None)
    for at in range(1, len(whole), 4):
        received = sum(len(delta.token_ids) for delta in whole[:at])
        for text_bytes in (None, len(told(whole[:at]).text.encode())):
            assert told(whole[:at] + deltas(received, text_bytes)) == expected


def test_random_answers_are_text_or_calls_in_any_pieces() -> None:
    seed = 11
    print(f"seed {seed}")
    rng = random.Random(seed)
    words = [*"{}[]\",: \n<>a", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": ',
             '"now"', '"arguments": {', "<think>", "</think>"]  # fmt: skip
    for _ in range(400):
        text = "".join(rng.choices(words, k=rng.randrange(1, 25)))
        tools = rng.choice([HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS])
        chat_format = ChatFormat(tools.calls, TOOLS, rng.choice([None, THINK]), call_seed="r")
        pieces: list[str] = []
        while len("".join(pieces)) < len(text):
            at = len("".join(pieces))
            pieces.append(text[at : at + rng.randrange(1, 6)])
        assert read(chat_format, [text]) == read(chat_format, pieces), text


@pytest.mark.parametrize(
    ("text", "end", "reason"),
    [
        ('<tool_call>{"name": "now"}</tool_call>', FinishReason.END, FinishReason.TOOL_CALLS),
        ('<tool_call>{"name": "now"}</tool_call>', FinishReason.LENGTH, FinishReason.LENGTH),
        ('<tool_call>{"name": "now", "argu', FinishReason.END, FinishReason.END),
        ("now", FinishReason.END, FinishReason.END),
    ],
)
def test_an_answer_ends_with_calls_if_one_is_complete(text: str, end: FinishReason, reason: FinishReason) -> None:
    answer = ChoiceAnswer(HashTokenizer(), (), 1, resume_filter=ResumeFilter(None, ChatReader(HERMES)))
    _, finished = answer.push([*text.encode(), 2], end)
    assert finished is not None
    assert finished.reason is reason


OPEN = ChatFormat(reasoning=THINK, begins_in_reasoning=True)
STOPPED = [
    (OPEN, "a\nb STOP</think>\n\nYes STOP no", ("\n\n", "STOP", "</think>", "think"), "Yes ", "STOP", "a\nb STOP"),
    (REASONING, "<think>a\nb</think>\nYes\nno", ("\n", "<", "th"), "Yes", "\n", "a\nb"),
    (REASONING, "<thin STOP", ("<", "STOP"), "", "<", ""),
    (REASONING, "a<think>b", ("k>",), "a<thin", "k>", ""),
    (REASONING, "<thi", ("<th", "i"), "", "<th", ""),
    (BOTH, "STOP</think><tool_call>STOP", ("STOP",), "<tool_call>", "STOP", "STOP"),
    (REASONING, "<think>a STOP", ("STOP",), "", None, "a STOP"),
]


@pytest.mark.parametrize(("chat_format", "text", "stop", "shown", "found", "reasoning"), STOPPED)
def test_reasoning_is_not_searched_for_stop_strings(
    chat_format: ChatFormat, text: str, stop: tuple[str, ...], shown: str, found: str | None, reasoning: str
) -> None:
    for size in (1, 2, 3, 7, len(text)):
        answer = ChoiceAnswer(
            HashTokenizer(), stop, 1, resume_filter=ResumeFilter(None, ChatReader(chat_format)),
            reasoning=ChatReader(chat_format),
        )  # fmt: skip
        deltas, finished = [], None
        for at in range(0, len(text), size):
            delta, finished = answer.push(text[at : at + size].encode(), None)
            deltas += [delta] if delta is not None else []
            if finished:
                break
        if not finished:
            delta, finished = answer.push([2], FinishReason.END)
            deltas += [delta] if delta is not None else []
        assert finished is not None
        assert (told(deltas).text, told(deltas).reasoning, finished.stop_string) == (shown, reasoning, found), size


def test_ids_of_calls_are_unlike_each_other_and_the_same_again() -> None:
    text = '<tool_call>{"name": "now"}</tool_call>' * 2

    def ids(seed: str, choice: int) -> list[str]:
        reader = ChatReader(ChatFormat(CALLS["hermes"], TOOLS, call_seed=seed), choice)
        return [part.id for part in reader.feed(text).tool_calls]

    assert ids("r", 0) == ids("r", 0)
    found = [*ids("r", 0), *ids("r", 1), *ids("s", 0)]
    assert len(set(found)) == 6
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in found)


def test_marks_that_are_special_tokens_reach_the_reader() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.model = models.BPE({letter: index for index, letter in enumerate(alphabet)}, [])
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("<end>", "[TOOL_CALLS]", "[ARGS]")])
    text = FileTokenizer({"tokenizer.json": tokenizer.to_str().encode()})
    ids = text.tokenize("hé<end>[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]f[ARGS]{}", special_tokens=False)
    stream = text.stream([], skip_special_tokens=True, marks=MISTRAL_ARGS.marks)
    answer = ChoiceAnswer(stream, (), 1, resume_filter=ResumeFilter(None, ChatReader(MISTRAL_ARGS)))
    delta, _ = answer.push(ids, FinishReason.LENGTH)
    assert delta is not None
    assert delta.token_ids == tuple(ids)
    assert told([delta]) == Told("hé", "", [("now", "{}"), ("f", "{}")])
