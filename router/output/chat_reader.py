"""Tells an answer's reasoning and calls of tools from its text, character by character.

    <think>The user ...</think>Let me look.<tool_call>{"name": "weather", "arguments": {"city": ...}}</tool_call>
           ╰─ reasoning        ╰─ text                          ╰─ name         ╰─ arguments, as they come

A coroutine gets the characters one by one, so that what is told depends on the whole text alone, and not on the pieces
that it came in: a stream that is resumed elsewhere tells the same. A text that may be the beginning of a mark waits for
its next character. Space around calls, and line breaks behind the marks of reasoning, are not told.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from artifacts.chat_settings import ToolCallFormat
from router.output.call_reader import CallReader, NotACallError
from router.output.marks import MarkFinder
from router.request import ToolCallDelta

# Texts that begin a call, by format; and the text that ends one of Hermes'.
_BEGINNINGS = {
    ToolCallFormat.HERMES: "<tool_call>",
    ToolCallFormat.LLAMA3: "<|python_tag|>",
    ToolCallFormat.MISTRAL: "[TOOL_CALLS]",
}
_HERMES_END = "</tool_call>"
# Further texts of a format that may be tokens which are not shown otherwise.
_INNER = {ToolCallFormat.HERMES: (_HERMES_END,), ToolCallFormat.MISTRAL: ("[ARGS]", "[CALL_ID]")}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The marks of an answer: around reasoning, and of calls. `call_seed` makes the ids of calls unlike others'."""

    tool_calls: ToolCallFormat = ToolCallFormat.NONE
    tool_names: frozenset[str] = frozenset()
    reasoning: tuple[str, str] | None = None
    # True: the prompt ends inside of a reasoning block.
    begins_in_reasoning: bool = False
    call_seed: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts that must reach the reader, even where they are special tokens."""
        beginning = _BEGINNINGS.get(self.tool_calls)
        return (*(self.reasoning or ()), *([beginning] if beginning else ()), *_INNER.get(self.tool_calls, ()))


@dataclass(slots=True)
class Parts:
    """The text, reasoning and calls that a piece of an answer adds."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


class ChatReader:
    """Reads the answer of one choice."""

    def __init__(self, chat_format: ChatFormat, choice: int = 0) -> None:
        self._format = chat_format
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls = CallReader(f"{chat_format.call_seed}/{choice}")
        # The finder that holds text back, and the list that it belongs to.
        self._finder = MarkFinder(())
        self._sink = self._text
        # True if text was sent since the beginning, or since the last call.
        self._has_text = False
        self._machine = self._read_all()
        next(self._machine)

    @property
    def has_calls(self) -> bool:
        """Return whether a call has been read to its end."""
        return self._calls.completed > 0

    def feed(self, text: str) -> Parts:
        """Return what the next text adds."""
        for character in text:
            self._machine.send(character)
        return self._take()

    def finish(self) -> Parts:
        """Return what is left at the end of the answer: a beginning of a mark or of a call is text after all."""
        if self._calls.unannounced:
            self._text.extend(self._calls.unannounced)
        else:
            held = self._finder.rest()
            self._sink.append(held if self._has_text or not self._calls.completed else held.strip())
        return self._take()

    def _take(self) -> Parts:
        parts = Parts("".join(self._text), "".join(self._reasoning), self._calls.take())
        self._text.clear()
        self._reasoning.clear()
        return parts

    def _read_all(self) -> Generator[None, str, None]:
        left = ""
        if self._format.begins_in_reasoning:
            yield from self._read_reasoning()
        while True:
            mark = yield from self._read_text(left)
            left = ""
            if self._format.reasoning is not None and mark == self._format.reasoning[0]:
                yield from self._read_reasoning()
            else:
                left = yield from self._read_calls(mark)

    def _read_reasoning(self) -> Generator[None, str, None]:
        assert self._format.reasoning is not None
        self._finder, self._sink = MarkFinder((self._format.reasoning[1],), skip_breaks=True), self._reasoning
        while not self._finder.found:
            self._reasoning.append(self._finder.push((yield)))

    def _read_text(self, left: str) -> Generator[None, str, str]:
        """Read text, beginning with a character that is left; return the mark that ends it."""
        after_reasoning = self._sink is self._reasoning
        tools = self._format.tool_calls
        marks = [_BEGINNINGS[tools]] if tools in _BEGINNINGS else []
        if tools is ToolCallFormat.HERMES and self._calls.completed and not self._has_text:
            marks.append(_HERMES_END)
        if self._format.reasoning is not None:
            marks.append(self._format.reasoning[0])
        self._finder = MarkFinder(marks, hold_spaces=bool(tools in _BEGINNINGS), skip_breaks=after_reasoning)
        self._sink = self._text
        while True:
            character = left or (yield)
            left = ""
            if character == "{" and tools is ToolCallFormat.LLAMA3 and not (self._has_text or self._finder.partial):
                return character
            self._tell(self._finder.push(character))
            mark = self._finder.found
            if mark == _HERMES_END and not self._has_text:
                self._finder.clear()
            elif mark == _HERMES_END:
                self._tell(self._finder.give_up())
            elif self._format.reasoning is not None and mark == self._format.reasoning[0] and self._has_text:
                self._tell(self._finder.give_up())  # a block stands at the beginning alone
            elif mark:
                return mark

    def _tell(self, text: str) -> None:
        self._text.append(text)
        self._has_text = self._has_text or bool(text.strip())

    def _read_calls(self, mark: str) -> Generator[None, str, str]:
        """Read one or more calls behind a mark; return the character that belongs to them no more."""
        spaces = self._finder.spaces
        self._finder.clear()
        try:
            left = yield from self._calls.read(self._format.tool_calls, mark, self._format.tool_names, spaces)
        except NotACallError as error:
            self._text.append(error.text)
            self._has_text = True
            return error.left
        self._has_text = False
        return left
