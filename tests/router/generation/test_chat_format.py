"""The format and the grammar of an answer to a chat, from its template and the end of its prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from artifacts.peft_config import ToolCallFormat
from router.generation.chat_format import call_grammar, chat_format
from router.generation.chat_reader import ChatFormat
from router.request import Chat, ChatMessage, Tool, ToolMode
from router.text.chat import ChatTemplate
from router.text.text import HashText
from rpc.errors import InvalidField

TEXT = HashText()
CHAT = Chat((ChatMessage("user", "x"),))
WITH_TOOLS = replace(CHAT, tools=(Tool("now"),))
REQUIRED = replace(WITH_TOOLS, tool_mode=ToolMode.REQUIRED)
THINKING = ChatTemplate("<think></think> {{ tools }} <tool_call>")


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def test_an_answer_without_tools_and_reasoning_is_text() -> None:
    assert chat_format(CHAT, ChatTemplate("{{ messages }}"), TEXT, ids("x"), "r") is None
    assert chat_format(WITH_TOOLS, ChatTemplate("{{ tools }}"), TEXT, ids("x"), "r") is None
    assert call_grammar(WITH_TOOLS, ChatTemplate("{{ tools }}"), TEXT, ids("x")) == ""
    assert call_grammar(CHAT, THINKING, TEXT, ids("x")) == ""


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [("assistant: ", False), ("assistant: <think>\n", True), ("assistant: <think>\n\n</think>\n\n", False)],
)
def test_an_answer_begins_in_the_reasoning_that_the_prompt_opens(prompt: str, is_open: bool) -> None:
    found = chat_format(WITH_TOOLS, THINKING, TEXT, ids(prompt), "r")
    assert found == ChatFormat(ToolCallFormat.HERMES, frozenset({"now"}), ("<think>", "</think>"), is_open, "r")


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
    named = ChatTemplate("{{ tools }}", named_format="hermes")
    assert "<tool_call>" in call_grammar(REQUIRED, named, TEXT, ids("x"))


def test_a_grammar_has_the_reasoning_that_may_come_before_a_call() -> None:
    grammars = {
        prompt: call_grammar(REQUIRED, THINKING, TEXT, ids(prompt)) for prompt in ("x", "<think>", "</think>\n")
    }
    assert 'start: ("<think>" thought)? answer' in grammars["x"]
    assert "start: thought answer" in grammars["<think>"]
    assert "start: answer" in grammars["</think>\n"]
